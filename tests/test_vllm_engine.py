"""The trainer's side of vLLM, which a stand-in answers in its place: the in-process engine on a copy of the weights.

The real one is in test_vllm_smoke.py.
"""

import os
import subprocess
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from test_engine import prompts_for
from test_vllm_smoke import move

from rlreason.config.groups import RolloutConfig
from rlreason.engines import vllm_process
from rlreason.engines.base import Demand, Prompt, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import VLLMEngine
from rlreason.engines.vllm_process import Place
from rlreason.engines.vllm_server import Server, digest, serve
from rlreason.errors import ConfigError, EngineError

PLACES = (Place("the first"), Place("the second"))
STOPS = Sampling(1.0, 2, 12, stop=("1",))


class StandIn(Server):
    """What vLLM would answer: its responses come in an order of their own."""

    def __init__(self, connection: Connection, policy) -> None:
        super().__init__(connection)
        self.policy = policy.copy()

    def version(self) -> str:
        return "0.32.0"

    def start(self, *arguments: Any) -> None:
        """Nothing to start."""

    def sample(self, prompts, n: int, rows: int, arguments: dict[str, Any]) -> None:
        sampling = Sampling(*(arguments[name] for name in ("temperature", "min_tokens", "max_tokens", "stop")))
        asked = [Prompt(str(number), ids, seed) for number, ids, seed in prompts]
        responses = list(enumerate(HFEngine(self.policy).generate(asked, sampling, n)))
        for place, r in reversed(responses):
            last = r.token_ids[-1]  # vLLM says which token or stop string has ended a response
            stop = None if r.finish_reason != "stop" else last if last in self.policy.end_ids else sampling.stop[0]
            of_vllm = prompts[place // n][0] * n + place % n
            self.connection.send(("step", 1, [(of_vllm, r.token_ids, r.log_probs, r.finish_reason, stop)]))

    def load_file(self, path: str) -> None:
        weights, mine = load_file(path), dict(self.policy.named_weights())
        with torch.no_grad():
            for name, weight in weights.items():
                mine[name].copy_(weight)

    def ask(self, method: str, *arguments: Any) -> Any:
        return method == "reset_prefix_cache"

    def digests(self):
        return {name: digest(weight) for name, weight in self.policy.engine_weights()}, {}


@pytest.fixture
def start(policy, tmp_path, monkeypatch):
    """A function that starts an engine at two places."""
    engines = []

    def popen(command: list[str], **_: Any) -> SimpleNamespace:
        theirs = Connection(os.dup(int(command[-2])))
        threading.Thread(target=serve, args=(StandIn(theirs, policy),), daemon=True).start()
        return SimpleNamespace(kill=lambda: None, wait=lambda _: 1)

    def started(**settings: Any) -> VLLMEngine:
        rollout = RolloutConfig("vllm", placement="cpu", **settings)
        engines.append(VLLMEngine(policy, rollout, PLACES, tmp_path, Demand(512, 32), said.append))
        return engines[-1]

    said: list[str] = []
    started.said = said
    monkeypatch.setattr(vllm_process, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    yield started
    for engine in engines:
        engine.close()
        for process in engine.processes:
            process.connection.close()


def test_responses_of_several_engines_are_those_of_one_in_its_order(start, policy, problems):
    """Bug: responses of two engines are mixed up, a stop string stays in a text, or one is told of as another."""
    engine, prompts, told = start(), prompts_for(policy, problems, 5), {}
    found = engine.generate(prompts, STOPS, 3, told.__setitem__)
    own = HFEngine(policy).generate(prompts, STOPS, 3)
    assert [replace(r, log_probs=[]) for r in found] == [replace(r, log_probs=[]) for r in own]
    for theirs, ours in zip(found, own, strict=True):
        assert theirs.log_probs == pytest.approx(ours.log_probs, abs=1e-4)
    assert (told, engine.drawn) == (dict(enumerate(found)), 15)
    assert any(r.finish_reason == "stop" for r in found)
    with pytest.raises(ConfigError, match="over the 512 tokens"):
        engine.generate(prompts, Sampling(1.0, 0, 510))


def test_weights_reach_every_engine_and_those_that_do_not_are_refused_or_said(start, policy, problems, monkeypatch):
    """Bug: one of several engines samples from the weights of an earlier step."""
    engine, prompts = start(), prompts_for(policy, problems, 4)
    move(policy, seed=2, scale=0.5)
    metrics = engine.load_weights(policy)
    own = HFEngine(policy).generate(prompts, STOPS)
    assert [r.token_ids for r in engine.generate(prompts, STOPS)] == [r.token_ids for r in own]
    assert engine.generate(prompts, STOPS)[0].weight_version == 1
    assert metrics["rollout/weight_check_mismatch"] < 1e-4
    assert metrics["rollout/weight_check_tensors"] == 2 * len(dict(policy.engine_weights()))
    warns = start(attest="warn")
    monkeypatch.setattr(StandIn, "load_file", lambda *_: None)
    move(policy, seed=3, scale=0.5)
    assert warns.load_weights(policy)["rollout/weight_check_mismatch"] > 0.01
    assert len([line for line in start.said if line.startswith("! vLLM on the ")]) == 2
    with pytest.raises(EngineError, match="vLLM on the first does not hold the trainer's weights after weight sync 2"):
        engine.load_weights(policy)


def test_an_engine_that_fails_says_why_and_is_not_asked_again(start, policy, problems, monkeypatch):
    """Bug: the next step takes what an engine still sent of a step that was broken off."""

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    engine, prompts = start(), prompts_for(policy, problems, 2)
    with monkeypatch.context() as patched:
        patched.setattr(StandIn, "sample", fails)
        with pytest.raises(EngineError, match="failed: RuntimeError: out of memory"):
            engine.generate(prompts, STOPS)
    with pytest.raises(EngineError, match="is dead since"):
        engine.generate(prompts, STOPS)
    stopped = start()
    with pytest.raises(KeyboardInterrupt):
        stopped.generate(prompts, STOPS, 3, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(EngineError, match="is dead since: its sampling was broken off"):
        stopped.generate(prompts, STOPS)
    monkeypatch.setattr(StandIn, "version", lambda _: "0.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.1 is not among the tested"):
        start()
