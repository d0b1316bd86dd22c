"""The real vLLM on the processor: it samples what the trainer would, holds its weights, and fails in words."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from recording import Recording
from test_engine import (  # these run here too
    prompts_for,
    test_a_special_token_that_is_a_stop_string_ends_the_response,  # noqa: F401
    test_a_stop_string_that_min_tokens_switched_off_neither_ends_nor_cuts,  # noqa: F401
    test_min_tokens_bans_the_end_and_max_tokens_cuts,  # noqa: F401
)
from test_unread_settings import VLLM_SETTINGS, compare, settings
from test_vllm_smoke import (
    check,
    move,
    shipped_model,
    test_new_weights_reach_it,  # noqa: F401  # these two run here too, on tied and untied heads
    test_weights_that_were_not_sent_are_seen,  # noqa: F401
)

from rlreason.config.groups import RolloutConfig
from rlreason.engines import vllm as vllm_engine
from rlreason.engines.base import Demand, Prompt, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import VLLMEngine
from rlreason.engines.vllm_process import Place, call_all, load_by_file
from rlreason.errors import ConfigError, EngineError
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy, load_policy

psutil = pytest.importorskip("psutil")
without = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")  # slow to import
pytestmark = [without, pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]
PROMPT = [Prompt("p", [5, 6], 0)]


def tokens(responses):
    return [(r.problem_id, r.token_ids) for r in responses]


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tokenizer, tmp_path_factory) -> Path:
    return shipped_model(tmp_path_factory.mktemp("shipped") / "model", tokenizer, request.param == "tied")


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    """One engine for the file, on a policy of its own; the tests that move the policy sync it again."""
    policy, said = load_policy(str(folder)), []
    run = settings("rollout=vllm", "rollout.placement=cpu")
    recording, logs = Recording(run), tmp_path_factory.mktemp("log")
    made = VLLMEngine(policy, run.rollout, [Place("the processor")], logs, Demand(512, 32), said.append)
    compare(run, recording.read, VLLM_SETTINGS)
    assert [line.split()[0] for line in said] == ["starting"]
    yield made
    made.close()


def test_a_stale_prefix_cache_is_seen(engine):
    """Bug: the weights are all new, but the check misses what was computed with the old ones."""
    assert check(engine).holds  # leaves the probe in the cache
    move(engine.policy, seed=4)
    engine.send_weights()
    found = check(engine)
    assert not found.differing
    assert found.mismatch > 10 * found.bound
    assert call_all(engine.processes, "ask", "reset_prefix_cache") == [True]


def test_what_to_do_about_a_failed_weight_check_is_a_setting(engine, monkeypatch):
    """Bug: a run goes on with weights that did not arrive."""
    whole, said = engine.policy, []
    move(whole, seed=6, scale=1.0)
    forgetful = Policy(whole.model, whole.tokenizer)
    sent = list(whole.named_weights())[:-1]  # all but one, as of a new architecture or a renamed layer
    monkeypatch.setattr(forgetful, "named_weights", lambda: iter(sent))
    engine.say, engine.rollout.attest = said.append, "warn"
    engine.load_weights(forgetful)
    assert "weights" in said[0]
    engine.rollout.attest = "off"
    assert list(engine.load_weights(forgetful)) == ["time/weight_sync"]
    engine.rollout.attest = "stop"
    with pytest.raises(EngineError, match=r"rollout.attest=warn"):
        engine.load_weights(forgetful)
    engine.load_weights(whole)


def test_an_engine_that_sleeps_is_filled_anew_before_it_samples(engine, problems):
    """Bug: it samples from freed memory. The processor's vLLM gives none back, so the order of calls is tested."""
    prompts, sampling = prompts_for(engine.policy, problems, 2), Sampling(1.0, 0, 16)
    awake = tokens(engine.generate(prompts, sampling, 2))
    (process,) = engine.processes
    process.place = replace(process.place, sleeps=True)
    for _ in range(3):
        assert tokens(engine.generate(prompts, sampling, 2)) == awake
        assert engine.asleep
    move(engine.policy, seed=7, scale=1.0)
    engine.load_weights(engine.policy)
    assert not engine.asleep
    assert tokens(engine.generate(prompts, sampling, 2)) != awake
    engine.load_weights(engine.policy)
    process.place = replace(process.place, sleeps=False)


def start(tokenizer, folder: Path, places=None, **options) -> VLLMEngine:
    """An engine that a test may end."""
    policy = Policy(build_model(len(tokenizer), width=128, init_scale=0.3, seed=1), tokenizer)
    rollout = RolloutConfig("vllm", kv_cache_gb=0.1, **options)
    return VLLMEngine(policy, rollout, places or [Place("the processor")], folder, Demand(256, 16), lambda line: None)


@pytest.fixture(scope="module")
def many(tokenizer, tmp_path_factory):
    """Two engines as one."""
    places = Place("GPU 1"), Place("GPU 2")
    made = start(tokenizer, tmp_path_factory.mktemp("logs"), places, placement="second_gpu", gpus=2, timeout_s=300)
    yield made
    made.close()


@pytest.mark.parametrize("count", [5, 1])
def test_two_engines_draw_the_tokens_of_one(many, problems, count, monkeypatch):
    """Bug: responses of uneven shares, or of an engine that gets none, are put in the wrong places."""
    places = list[int]()
    prompts, sampling = prompts_for(many.policy, problems, count), Sampling(1.0, 0, 24)
    two = many.generate(prompts, sampling, 3, lambda place, response: places.append(place))
    monkeypatch.setattr(many, "processes", many.processes[1:])
    assert tokens(two) == tokens(many.generate(prompts, sampling, 3))
    assert [r.problem_id for r in two] == [p.problem_id for p in prompts for _ in range(3)]
    assert sorted(places) == list(range(3 * count))


def test_new_weights_reach_both_and_the_one_that_lost_them_is_named(many, problems, monkeypatch):
    """Bug: the second engine keeps the old weights unseen."""
    policy = many.policy
    prompts, sampling = prompts_for(policy, problems, 4), Sampling(0.0, 0, 16)
    before = many.generate(prompts, sampling, 1)
    move(policy, seed=8, scale=1.0)
    many.load_weights(policy)
    after = many.generate(prompts, sampling, 1)
    assert tokens(before) != tokens(after) == tokens(HFEngine(policy).generate(prompts, sampling, 1))
    assert {r.weight_version for r in after} == {before[0].weight_version + 1} == {many.weight_version}
    monkeypatch.setattr(vllm_engine, "load_by_file", lambda processes, policy: load_by_file(processes[:1], policy))
    move(policy, seed=9)
    with pytest.raises(EngineError, match=r"^vLLM on GPU 2 "):
        many.load_weights(policy)
    monkeypatch.undo()
    many.load_weights(policy)


def test_a_call_that_is_broken_off_ends_the_engines(many, problems):
    """Bug: what they still sample comes with the next call, or a process or a file stays."""
    family = [psutil.Process(process.process.pid) for process in many.processes]
    prompts, interrupt = prompts_for(many.policy, problems, 4), Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(ConfigError, match=r"max_tokens=24 .*250 tokens"):  # a user's mistake is none of it
        many.generate([*prompts, Prompt("long", [5] * 250, 0)], Sampling(1.0, 0, 24), 2)
    with pytest.raises(KeyboardInterrupt):
        many.generate(prompts, Sampling(1.0, 0, 200), 500, interrupt)
    with pytest.raises(EngineError, match=r"^vLLM on GPU 1 is dead since: .*broken off"):
        many.load_weights(many.policy)
    many.close()
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert not any(Path(process.files).exists() for process in many.processes)


def test_an_error_inside_vllm_or_a_hang_is_one_message_and_later_calls_name_it(tokenizer, tmp_path):
    """Bug: a run waits forever for an engine that hangs."""
    engine = start(tokenizer, tmp_path / "error")
    with pytest.raises(EngineError, match=r"no_such_method(.|\n)*last lines of .*vllm.log"):
        call_all(engine.processes, "ask", "collective_rpc", "no_such_method")
    with pytest.raises(EngineError, match=r"is dead since: .*no_such_method"):
        engine.generate(PROMPT, Sampling(max_tokens=4), 1)
    engine.close()
    engine = start(tokenizer, tmp_path / "hang")
    (process,) = engine.processes
    process.process.send_signal(signal.SIGSTOP)
    process.timeout_s = 2.0
    with pytest.raises(EngineError, match=r"rollout.timeout_s=2"):
        engine.generate(PROMPT, Sampling(max_tokens=4), 1)
    engine.close()
    assert process.process.poll() == -signal.SIGKILL


def test_closing_ends_a_call_in_another_thread(tokenizer, tmp_path):
    """Bug: a run that is interrupted while it samples ahead does not end."""
    engine, began = start(tokenizer, tmp_path), threading.Event()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(engine.generate, PROMPT, Sampling(1.0, 0, 200), 10_000, lambda *_: began.set())
        assert began.wait(600)
        engine.close()
        with pytest.raises(EngineError, match="it was closed"):
            call.result(600)
