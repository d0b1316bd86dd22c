"""The real vLLM on the processor: it samples what the trainer would, holds its weights, and fails in words."""

import json
import signal
import subprocess
import sys
import threading
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
    worst_mismatch,
)

from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Prompt, Sampling, seed_for
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.process import Place
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


def test_greedy_tokens_are_the_in_process_engines(engine, problems):
    prompts, sampling = prompts_for(engine.policy, problems), Sampling(0.0, max_tokens=24, stop=("</answer>",))
    theirs, ours = (e.generate(prompts, sampling, 1) for e in (engine, HFEngine(engine.policy)))
    assert [r.token_ids for r in theirs] == [r.token_ids for r in ours]
    assert [r.text for r in theirs] == [r.text for r in ours]
    assert max(largest_mismatch(a.log_probs, b.log_probs) for a, b in zip(theirs, ours, strict=True)) < 1e-3


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


def test_log_probs_are_the_trainers_and_no_shipped_setting_leaks(engine, problems):
    """Top-k, top-p or a penalty from the model's folder would put these off by tenths and more."""
    shipped = engine.policy.model.generation_config
    assert (shipped.top_k, shipped.repetition_penalty) == (20, 1.5)
    responses = engine.generate(prompts_for(engine.policy, problems), Sampling(0.7, max_tokens=24), 8)
    assert worst_mismatch(engine, responses, 0.7) < 1e-3
    assert len({t for r in responses for t in r.token_ids}) > 100  # top-k 20 alone would not forbid this, top-p would


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


def test_samples_depend_on_their_own_seed_and_not_on_the_batch(engine, problems):
    prompts, sampling = prompts_for(engine.policy, problems, 5), Sampling(1.0, 0, 16)
    together = [r.token_ids for r in engine.generate(prompts, sampling, 4)]
    again = [r.token_ids for r in engine.generate(prompts, sampling, 4)]
    apart = [r.token_ids for p in prompts for r in engine.generate([p], sampling, 4)]
    assert together == again == apart
    for i in range(len(prompts)):
        assert len(set(map(tuple, together[4 * i : 4 * i + 4]))) == 4  # a group is not one sample four times
    engine.generate([Prompt("p", [5], 2**63 - 1)], sampling, 4)  # the largest seed there is


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_a_stop_string_that_min_tokens_switched_off_neither_ends_nor_cuts(engine, problems, min_tokens):
    prompts, sampling = prompts_for(engine.policy, problems), Sampling(1.0, min_tokens, 40, LETTERS)
    responses = engine.generate(prompts, sampling, 4)
    assert bool(check_stopped_texts(responses, engine.policy.tokenizer, sampling)) == bool(min_tokens)
    assert all(len(r.token_ids) > min_tokens for r in responses)
    greedy = Sampling(0.0, min_tokens, 40, LETTERS)
    theirs, ours = (e.generate(prompts, greedy, 1) for e in (engine, HFEngine(engine.policy)))
    assert [(r.token_ids, r.text, r.finish_reason) for r in theirs] == [
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


def test_a_prompt_that_does_not_fit_is_a_users_mistake(engine):
    with pytest.raises(ConfigError, match=r"max_tokens=100 .* long \(450 tokens\)"):
        engine.generate([Prompt("long", [5] * 450, 0)], Sampling(max_tokens=100), 1)
    assert len(engine.generate([Prompt("long", [5] * 412, 0)], Sampling(max_tokens=100), 1)) == 1


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


def alone(tokenizer, folder: Path, timeout_s: float = 600) -> VLLMEngine:
    """An engine that a test may end."""
    policy = Policy(build_model(len(tokenizer), width=64, heads=2), tokenizer)
    rollout = RolloutConfig("vllm", kv_cache_gb=0.1, timeout_s=timeout_s)
    return VLLMEngine(policy, rollout, [Place("the processor")], folder, Demand(256, 4), lambda _: None)


PROMPT = [Prompt("p", [5, 6], 0)]


def test_an_error_inside_vllm_or_a_hang_is_one_message_and_later_calls_name_it(tokenizer, tmp_path):
    engine = alone(tokenizer, tmp_path / "error")
    with pytest.raises(EngineError, match=r"no_such_method(.|\n)*last lines of .*vllm.log"):
        engine.processes[0].call("transfer", "no_such_method", {})
    with pytest.raises(EngineError, match=r"is dead since: .*no_such_method"):
        engine.generate(PROMPT, Sampling(max_tokens=4), 1)
    engine.close()
    engine = alone(tokenizer, tmp_path / "hang")
    (process,) = engine.processes
    process.process.send_signal(signal.SIGSTOP)
    process.timeout_s = 2.0
    with pytest.raises(EngineError, match=r"rollout.timeout_s=2"):
        engine.generate(PROMPT, Sampling(max_tokens=4), 1)
    engine.close()
    assert process.process.poll() == -signal.SIGKILL


def test_a_killed_engine_is_one_error_and_close_leaves_no_process_and_no_file(tokenizer, tmp_path):
    engine = alone(tokenizer, tmp_path)
    (process,) = engine.processes
    family = [psutil.Process(process.process.pid), *psutil.Process(process.process.pid).children(recursive=True)]
    prompts = [*PROMPT, Prompt("longer", [5, 6, 8], 0)]
    with pytest.raises(EngineError, match=r"exit code -9"):
        engine.generate(prompts, Sampling(1.0, 0, 200), 500, lambda place, response: process.process.kill())
    engine.close()
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert not Path(process.files).exists()


def test_closing_ends_a_call_in_another_thread(tokenizer, tmp_path):
    """As a run does that is interrupted while it samples ahead."""
    engine, began, errors = alone(tokenizer, tmp_path), threading.Event(), list[BaseException]()

    def sample() -> None:
        try:
            engine.generate(PROMPT, Sampling(1.0, 0, 200), 10_000, lambda place, response: began.set())
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    assert began.wait(600)
    engine.close()
    thread.join(600)
    assert "it was closed" in str(errors[0])


@pytest.mark.long
def test_a_grpo_run_that_samples_ahead_with_vllm_from_the_command_line(tmp_path):
    small = ["n_steps=3", "eval_problems=4", "model.warm_start.steps=10", "rollout_batch_size=16", "group_size=4"]
    ahead = ["rollout.async_level=1", "rollout.sleep=false", "loss=grpo_clip"]
    command = [sys.executable, "-m", "rlreason", "rollout=vllm", *small, *ahead, f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting vLLM" in done.stdout
    assert "WARNING" not in done.stdout + done.stderr  # vLLM's own talk is in its log
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["rollout/mismatch_mean"] for row in rows if "rollout/mismatch_mean" in row]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3
    steps = [row for row in rows if "rollout/staleness" in row]
    assert [row["rollout/staleness"] for row in steps] == [0, 1, 1]
    assert [row["grading/responses"] for row in steps] == [16, 16, 16]  # of its own step, whatever is sampled besides
