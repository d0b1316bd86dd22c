"""Two real vLLM processes as one engine, on the processor: dealt prompts, weights for both, and failures by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from conftest import PROMPT

from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Prompt, Sampling, seed_for
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm import engine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.process import Place, load_by_file
from rlreason.errors import ConfigError, EngineError
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]
PLACES = (Place("GPU 1"), Place("GPU 2"))  # where they would run
#: As torchrun tells the second of two ranks. No process listens at that port.
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


@dataclass
class Started:
    """Two engines as one, and what was seen of their start."""

    many: VLLMEngine
    said: list[str]

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(process.process.pid) for process in self.many.processes]


@pytest.fixture(scope="module")
def started(tokenizer, tmp_path_factory):
    policy = Policy(build_model(len(tokenizer), width=128, init_scale=0.3, seed=1), tokenizer)
    folder, said = tmp_path_factory.mktemp("logs"), list[str]()
    rollout = RolloutConfig("vllm", placement="second_gpu", gpus=2, timeout_s=300, kv_cache_gb=0.1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TORCHRUN.items():
            patch.setenv(name, value)
        many = VLLMEngine(policy, rollout, PLACES, folder, Demand(256, 16), said.append)
    yield Started(many, said)
    many.close()


def prompts_for(policy, problems, count):
    texts = [(p.id, PROMPT.format(question=p.question)) for p in problems[:count]]
    return [Prompt(name, policy.encode_prompt(text), seed_for(0, name)) for name, text in texts]


@contextmanager
def only(many: VLLMEngine, k: int) -> Iterator[VLLMEngine]:
    """Leave all to one of the engines."""
    whole, many.processes = many.processes, [many.processes[k]]
    try:
        yield many
    finally:
        many.processes = whole


def tokens(responses):
    return [(r.problem_id, r.token_ids) for r in responses]


def test_the_engines_know_nothing_of_the_trainers_ranks(started):
    variables = [process.environ() for process in started.processes]
    # vLLM sets some of them anew.
    assert [name for seen in variables for name in TORCHRUN if seen.get(name) == TORCHRUN[name]] == []
    assert sum("starting vLLM" in line for line in started.said) == 2


@pytest.mark.parametrize("count", [5, 1])
def test_two_engines_draw_the_tokens_of_one(started, problems, count):
    """Dealt unevenly, and with one engine that gets none."""
    many, places = started.many, list[int]()
    prompts, sampling = prompts_for(many.policy, problems, count), Sampling(1.0, 0, 24)
    two = many.generate(prompts, sampling, 3, lambda place, response: places.append(place))
    drawn = many.drawn
    with only(many, 1) as one:
        assert tokens(two) == tokens(one.generate(prompts, sampling, 3))
    assert [r.problem_id for r in two] == [p.problem_id for p in prompts for _ in range(3)]
    assert sorted(places) == list(range(3 * count))
    assert drawn >= sum(len(r.token_ids) for r in two)  # from both, and nothing of an earlier call
    assert drawn < 4 * sum(len(r.token_ids) for r in two)


def test_new_weights_reach_both_and_are_checked_in_both(started, problems):
    many, policy = started.many, started.many.policy
    prompts, sampling = prompts_for(policy, problems, 4), Sampling(0.0, 0, 16)
    before = many.generate(prompts, sampling, 1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5 * parameter.flip(0))
    metrics = many.load_weights(policy)
    after = many.generate(prompts, sampling, 1)
    assert tokens(after) != tokens(before)
    assert tokens(after) == tokens(HFEngine(policy).generate(prompts, sampling, 1))
    assert {r.weight_version for r in after} == {before[0].weight_version + 1} == {many.weight_version}
    assert metrics["rollout/weight_check_mismatch"] < 1e-3
    one, other = (check.compared for check in many.check_weights().values())
    assert metrics["rollout/weight_check_tensors"] == one + other == 2 * one > 10
    many.weight_version = 7  # as a run that goes on sets it
    assert {r.weight_version for r in many.generate(prompts, sampling, 1)} == {7}


def test_an_engine_that_lost_its_weights_is_named(started, monkeypatch):
    many = started.many
    monkeypatch.setattr(engine, "load_by_file", lambda processes, policy: load_by_file(processes[:1], policy))
    with torch.no_grad():
        many.policy.model.model.norm.weight.mul_(1.01)
    with pytest.raises(EngineError, match=r"^vLLM on GPU 2 "):
        many.load_weights(many.policy)
    monkeypatch.undo()
    many.load_weights(many.policy)


def test_a_call_that_is_broken_off_ends_the_engines(started, problems):
    """What they still sample must not come with the next call; closing leaves no process."""
    many, family = started.many, started.processes
    prompts = prompts_for(many.policy, problems, 4)

    def interrupt(place: int, response: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ConfigError, match=r"the prompt of long .* do not fit"):  # a user's mistake is none of it
        many.generate([*prompts, Prompt("long", [5] * 250, 0)], Sampling(1.0, 0, 24), 2)
    with pytest.raises(KeyboardInterrupt):
        many.generate(prompts, Sampling(1.0, 0, 200), 500, interrupt)
    with pytest.raises(EngineError, match=r"^vLLM on GPU 1 is dead since: .*broken off"):
        many.load_weights(many.policy)
    many.close()
    assert psutil.wait_procs(family, timeout=600)[1] == []
