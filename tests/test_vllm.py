"""The real vLLM on the processor: it samples what the trainer would, holds its weights, and fails in words."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recording import Recording
from test_engine import LETTERS, check_stopped_texts, likely
from test_unread_settings import VLLM_SETTINGS, compare, settings
from test_vllm_smoke import (
    check,
    move,
    prompts_for,
    shipped_model,
    test_new_weights_reach_it,  # noqa: F401  # these two run here too, on tied and untied heads
    test_weights_that_were_not_sent_are_seen,  # noqa: F401
)

from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Prompt, Sampling, seed_for
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm import engine as vllm_engine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.process import Place, load_by_file
from rlreason.engines.vllm.server import largest_mismatch
from rlreason.errors import ConfigError, EngineError
from rlreason.model.parameters import PAD, build_model
from rlreason.model.policy import Policy, load_policy

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tokenizer, tmp_path_factory) -> Path:
    return shipped_model(tmp_path_factory.mktemp("shipped") / "model", tokenizer, request.param == "tied")


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    """One engine for the file, on a policy of its own; the tests that move the policy sync it again."""
    policy, said = load_policy(str(folder)), []
    run = settings("rollout=vllm", "rollout.placement=cpu")
    recording = Recording(run)
    logs = tmp_path_factory.mktemp("log")
    made = VLLMEngine(policy, run.rollout, [Place("the processor")], logs, Demand(512, 32), said.append)
    compare(run, recording.read, VLLM_SETTINGS)
    assert [line.split()[0] for line in said] == ["starting", "vLLM"]
    yield made
    made.close()


def test_both_engines_draw_from_one_distribution(engine, problems):
    """Other random numbers, so other samples; lengths and log-probabilities differ as chance allows."""
    prompts = prompts_for(engine.policy, problems, 1)
    seeds = [Prompt(str(i), prompts[0].token_ids, seed_for("parity", i)) for i in range(384)]
    sampling = Sampling(1.0, 0, 24, stop=("e",))  # e is common: lengths vary
    theirs, ours = (made.generate(seeds, sampling, 1) for made in (engine, HFEngine(engine.policy)))
    assert [r.token_ids for r in theirs] != [r.token_ids for r in ours]
    for figure in (lambda r: len(r.token_ids), lambda r: sum(r.log_probs) / len(r.log_probs)):
        a, b = (torch.tensor([float(figure(r)) for r in responses]) for responses in (theirs, ours))
        assert abs(a.mean() - b.mean()) < 4 * ((a.var() + b.var()) / len(a)).sqrt()


@contextmanager
def changed_head(engine):
    """Change the output head in this block, in the engine too from the next sync on."""
    before = engine.policy.head.detach().clone()
    try:
        with torch.no_grad():
            yield engine.policy.head
    finally:
        with torch.no_grad():
            engine.policy.head.copy_(before)
        engine.load_weights(engine.policy)


def test_before_min_tokens_the_end_is_banned_and_the_log_probs_say_so(engine):
    end, prompts = engine.policy.tokenizer.eos_token_id, [Prompt(str(i), [5, 6, 7 + i], seed=100 * i) for i in range(8)]
    with changed_head(engine) as head:
        head[end] *= 30  # make ending the likeliest thing to do
        engine.load_weights(engine.policy)
        free, held = (engine.generate(prompts, Sampling(1.0, least, 10), 4) for least in (0, 6))
        theirs, ours = (e.generate(prompts, Sampling(0.0, 6, 10), 1) for e in (engine, HFEngine(engine.policy)))
    assert min(len(r.token_ids) for r in free) < 6
    assert all((r.token_ids[-1] == end) == (r.finish_reason == "stop") for r in free)  # the end token is kept
    for r in held:
        assert end not in r.token_ids[:6]
        assert r.truncated == (len(r.token_ids) == 10 and r.token_ids[-1] != end)
    assert [r.token_ids for r in theirs] == [r.token_ids for r in ours]
    assert max(largest_mismatch(a.log_probs, b.log_probs) for a, b in zip(theirs, ours, strict=True)) < 1e-3


def test_a_stop_string_that_min_tokens_switched_off_neither_ends_nor_cuts(engine, problems):
    prompts = prompts_for(engine.policy, problems)
    for temperature in (1.0, 0.0):
        sampling = Sampling(temperature, 4, 40, LETTERS)
        responses = engine.generate(prompts, sampling, 4)
        check_stopped_texts(responses, engine.policy.tokenizer, sampling)
        assert all(len(r.token_ids) > 4 for r in responses)
    ours = HFEngine(engine.policy).generate(prompts, sampling, 4)
    assert [(r.token_ids, r.text, r.finish_reason) for r in responses] == [
        (r.token_ids, r.text, r.finish_reason) for r in ours
    ]


def test_a_special_token_that_is_a_stop_string_ends_the_response(engine, problems):
    pad, prompts = engine.policy.tokenizer.pad_token_id, prompts_for(engine.policy, problems)
    with changed_head(engine):
        likely(engine.policy, pad, 9.0)
        engine.load_weights(engine.policy)
        for stop, min_tokens in (((PAD,), 0), (("zzz", PAD), 6)):
            sampling = Sampling(1.0, min_tokens, 40, stop)
            responses = engine.generate(prompts, sampling, 8)
            check_stopped_texts(responses, engine.policy.tokenizer, sampling, special=True)
            ended = [r for r in responses if r.token_ids[-1] == pad and len(r.token_ids) < 40]
            assert ended
            assert all(r.finish_reason == "stop" and PAD not in r.text for r in ended)
            assert any(pad in r.token_ids[:min_tokens] for r in responses) == bool(min_tokens)


def test_a_stale_prefix_cache_is_seen(engine):
    """The weights are all new, and only what was computed with the old ones is left."""
    assert check(engine).holds  # leaves the probe in the cache
    move(engine.policy, seed=4)
    engine.send_weights()
    found = check(engine)
    assert not found.differing
    assert found.mismatch > 10 * found.bound
    engine.processes[0].call("forget_prompts")
    assert check(engine).holds


class Forgetful(Policy):
    """Gives away everything but one weight, as a new architecture or a renamed layer would."""

    def named_weights(self):
        return ((name, weight) for name, weight in super().named_weights() if name != "model.norm.weight")


def test_what_to_do_about_a_failed_weight_check_is_a_setting(engine):
    whole, said = engine.policy, []
    move(whole, seed=6, scale=1.0)
    forgetful = Forgetful(whole.model, whole.tokenizer)
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
    """The processor's vLLM answers the calls without giving memory back, so their order is what is tested."""
    prompts, sampling = prompts_for(engine.policy, problems, 2), Sampling(1.0, 0, 16)
    awake = [r.token_ids for r in engine.generate(prompts, sampling, 2)]
    (process,) = engine.processes
    process.place = replace(process.place, shared=True)
    for _ in range(3):
        assert [r.token_ids for r in engine.generate(prompts, sampling, 2)] == awake
        assert engine.asleep
    move(engine.policy, seed=7, scale=1.0)
    engine.load_weights(engine.policy)
    assert not engine.asleep
    assert [r.token_ids for r in engine.generate(prompts, sampling, 2)] != awake
    engine.load_weights(engine.policy)
    process.place = replace(process.place, shared=False)


@contextmanager
def only(many: VLLMEngine, k: int) -> Iterator[VLLMEngine]:
    """Leave all to one of the engines."""
    whole, many.processes = many.processes, [many.processes[k]]
    try:
        yield many
    finally:
        many.processes = whole


HERE = (Place("the processor"),)


def start(tokenizer, folder: Path, places=HERE, **options) -> VLLMEngine:
    """An engine that a test may end."""
    policy = Policy(build_model(len(tokenizer), width=128, init_scale=0.3, seed=1), tokenizer)
    rollout = RolloutConfig("vllm", kv_cache_gb=0.1, **options)
    return VLLMEngine(policy, rollout, places, folder, Demand(256, 16), lambda line: None)


@pytest.fixture(scope="module")
def many(tokenizer, tmp_path_factory):
    """Two engines as one."""
    places, folder = (Place("GPU 1"), Place("GPU 2")), tmp_path_factory.mktemp("logs")
    made = start(tokenizer, folder, places, placement="second_gpu", gpus=2, timeout_s=300)
    yield made
    made.close()


def tokens(responses):
    return [(r.problem_id, r.token_ids) for r in responses]


@pytest.mark.parametrize("count", [5, 1])
def test_two_engines_draw_the_tokens_of_one(many, problems, count):
    """Dealt unevenly, and with one engine that gets none."""
    places = list[int]()
    prompts, sampling = prompts_for(many.policy, problems, count), Sampling(1.0, 0, 24)
    two = many.generate(prompts, sampling, 3, lambda place, response: places.append(place))
    drawn = many.drawn
    with only(many, 1) as one:
        assert tokens(two) == tokens(one.generate(prompts, sampling, 3))
    assert [r.problem_id for r in two] == [p.problem_id for p in prompts for _ in range(3)]
    assert sorted(places) == list(range(3 * count))
    assert 1 <= drawn / sum(len(r.token_ids) for r in two) < 4  # from both, and nothing of an earlier call


def test_new_weights_reach_both_and_the_one_that_lost_them_is_named(many, problems, monkeypatch):
    policy = many.policy
    prompts, sampling = prompts_for(policy, problems, 4), Sampling(0.0, 0, 16)
    before = many.generate(prompts, sampling, 1)
    move(policy, seed=8, scale=1.0)
    metrics = many.load_weights(policy)
    after = many.generate(prompts, sampling, 1)
    assert tokens(before) != tokens(after) == tokens(HFEngine(policy).generate(prompts, sampling, 1))
    assert {r.weight_version for r in after} == {before[0].weight_version + 1} == {many.weight_version}
    one, other = (check.compared for check in many.check_weights().values())
    assert metrics["rollout/weight_check_tensors"] == one + other == 2 * one > 10
    monkeypatch.setattr(vllm_engine, "load_by_file", lambda processes, policy: load_by_file(processes[:1], policy))
    move(policy, seed=9)
    with pytest.raises(EngineError, match=r"^vLLM on GPU 2 "):
        many.load_weights(policy)
    monkeypatch.undo()
    many.load_weights(policy)


def test_a_call_that_is_broken_off_ends_the_engines(many, problems):
    """What they still sample must not come with the next call; closing leaves no process and no file."""
    family = [psutil.Process(process.process.pid) for process in many.processes]
    prompts = prompts_for(many.policy, problems, 4)

    def interrupt(place: int, response: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ConfigError, match=r"max_tokens=24 .*250 tokens"):  # a user's mistake is none of it
        many.generate([*prompts, Prompt("long", [5] * 250, 0)], Sampling(1.0, 0, 24), 2)
    with pytest.raises(KeyboardInterrupt):
        many.generate(prompts, Sampling(1.0, 0, 200), 500, interrupt)
    with pytest.raises(EngineError, match=r"^vLLM on GPU 1 is dead since: .*broken off"):
        many.load_weights(many.policy)
    many.close()
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert not any(Path(process.files).exists() for process in many.processes)


PROMPT = [Prompt("p", [5, 6], 0)]


def test_an_error_inside_vllm_or_a_hang_is_one_message_and_later_calls_name_it(tokenizer, tmp_path):
    engine = start(tokenizer, tmp_path / "error")
    with pytest.raises(EngineError, match=r"no_such_method(.|\n)*last lines of .*vllm.log"):
        engine.processes[0].call("transfer", "no_such_method", {})
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
    """As a run does that is interrupted while it samples ahead."""
    engine, began = start(tokenizer, tmp_path), threading.Event()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(engine.generate, PROMPT, Sampling(1.0, 0, 200), 10_000, lambda *_: began.set())
        assert began.wait(600)
        engine.close()
        with pytest.raises(EngineError, match="it was closed"):
            call.result(600)
