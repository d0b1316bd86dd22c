"""What a checkpoint keeps of a run comes back as it was: moments, random states, samples, problems, all at once."""

import json
import math
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlreason.config.training import OptimizationConfig
from rlreason.engines.hf import HFEngine
from rlreason.model.parameters import add_lora, build_model
from rlreason.model.policy import Policy
from rlreason.objectives.objective import Objective
from rlreason.records.console import Console
from rlreason.records.files import checkpoint_fault, checkpoints_in, moments_in
from rlreason.records.rows import collected_from, plain_collected
from rlreason.records.writer import RunWriter
from rlreason.runtime.clock import Clock
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.algorithms import Batches
from rlreason.training.build import build_components
from rlreason.training.checkpoint import adapters, moments, read_tensors, set_moments, set_weights, write_tensors
from rlreason.training.learner import Learner
from rlreason.training.train import close_records, train, trainer_of
from rlreason.types import Collected, Grade, Response, Sample
from tests.run_records import responses_of, rows_of
from tests.test_learner import make_samples
from tests.test_trainer import run_of, trained


def fresh(tokenizer: Any, rank: int) -> Policy:
    """Always the same model, large enough that 8-bit moments are really of 8 bits."""
    torch.manual_seed(5)
    policy = Policy(build_model(len(tokenizer), width=64, init_scale=0.3, seed=1), tokenizer)
    if rank:
        add_lora(policy.model, rank, 8.0, None, seed=2)
    return policy


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_the_next_update_is_the_same_from_the_files_of_a_checkpoint(tmp_path, tokenizer, optimizer, rank):
    settings = OptimizationConfig(1e-2, optimizer=optimizer)
    first, second = fresh(tokenizer, rank), fresh(tokenizer, rank)
    samples = make_samples(first)
    learner, other = (Learner(policy, Objective(), settings) for policy in (first, second))
    for _ in range(2):
        learner.update(samples)
    tensors = moments(learner)
    assert tensors
    states = random_states()[1] | adapters(first)
    write_tensors(tmp_path, first, {"state.safetensors": states, "moments.safetensors": tensors})
    found = read_tensors(tmp_path)
    set_weights(second, tmp_path, found)
    set_moments(other, found)
    again = moments(other)
    # Adapters are too small for 8 bits.
    assert (torch.uint8 in {t.dtype for t in again.values()}) == (optimizer == "adamw_8bit" and not rank)
    assert all(t.dtype == tensors[name].dtype and torch.equal(t, tensors[name]) for name, t in again.items())
    before = [p.detach().clone() for p in learner.parameters]
    one, two = learner.update(samples), other.update(samples)
    assert one == two
    assert one["train/grad_norm"] > 0
    assert all(torch.equal(p, q) for p, q in zip(learner.parameters, other.parameters, strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(learner.parameters, before, strict=True))


def test_every_generator_of_the_process_goes_on_where_it_was():
    def drawn() -> list[Any]:
        return [random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist(), random.random(), np.random.rand()]

    drawn()  # the second half of a pair of gaussians is kept for the next call
    plain, tensors = random_states()
    plain, expected = json.loads(json.dumps(plain)), drawn()
    assert drawn() != expected
    set_random_states(plain, tensors)
    assert drawn() == expected


def test_samples_come_back_to_the_last_digit_and_as_often_as_there_were():
    grade = Grade(1.0, 0.0, 0.1 + 0.2, "wrong", path="math", milliseconds=1.5)
    texts = ("plain", "\x1b[31m\n\u2028 \U0001f600", "half a pair \ud800")
    one, two, three = (Response("p", [1, 2], [3], [-1 / 3], text, "length", weight_version=4) for text in texts)
    samples, other = [Sample(one, grade)], Sample(one, grade)  # equal to the first and not the same: it stays apart
    samples.append(Sample(two, grade, grade, math.inf, False, [-1e-300], math.nan, [-0.0], [2**-1074]))
    samples.append(Sample(three, grade, advantage=-math.inf, entropy=1.0))
    batches = [[samples[2], samples[0]], [samples[0], other]]
    collected = Collected(samples, batches, {"a": 0.1 + 0.2, "b": math.nan}, {"few": "only 2"}, restart=True)
    plain = json.loads(json.dumps(plain_collected(collected)))
    assert len(plain["pool"]) == 4
    found = collected_from(plain)
    assert repr(found) == repr(collected)  # unlike ==, of NaN as well
    assert found.batches[0][1] is found.batches[1][0] is found.samples[0]
    assert found.batches[1][1] is not found.samples[0]


class Counting:
    """An algorithm that notes which steps were collected in which thread, and fails in one of them."""

    n_steps = 4
    questions = None

    def __init__(self, fails_in: int = 0) -> None:
        self.fails_in, self.log = fails_in, list[tuple[int, str]]()

    def collect(self, step: int) -> Collected:
        if step == self.fails_in:
            raise RuntimeError("engine died")
        self.log.append((step, threading.current_thread().name))
        return Collected([], [], {"step": step})


@pytest.mark.parametrize("ahead", [False, True])
def test_every_step_is_handed_over_once_and_in_order_also_after_a_checkpoint(ahead):
    first, second, dying = Counting(), Counting(), Counting(fails_in=2)
    batches, other, failing = (Batches(one, ahead, Clock()) for one in (first, second, dying))
    for step in (1, 2):
        assert batches.collect(step).metrics["step"] == step
        batches.sample_ahead(step)
        batches.finish_ahead()
        assert [s for s, _ in first.log] == list(range(1, step + 1 + ahead))  # exactly one ahead
    other.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    for step in (3, 4):
        assert other.collect(step).metrics["step"] == step
        other.sample_ahead(step)
        other.finish_ahead()
    assert [s for s, _ in second.log] == [3, 4][ahead:]
    assert ahead == any(name.startswith("sampling ahead") for _, name in first.log)
    failing.collect(1)
    failing.sample_ahead(1)
    with pytest.raises(RuntimeError, match="engine died"):
        failing.finish_ahead() if ahead else failing.collect(2)
    for one in (batches, other, failing):
        one.close()


WORDS = (
    "rollout_batch_size=16", "group_size=4", "eval_problems=8", "eval_every=1", "checkpoint.every=1", "skip_solved=1",
    "checkpoint.keep_final=true",
)  # fmt: skip


def resumed(folder: Path, *words: str) -> list[str]:
    """What a run that goes on says of it."""
    run, config = run_of(*words)
    said: list[str] = []
    train(run, RunWriter(folder, config, trains=True, say=said.append), Console())
    return said


def test_a_finished_run_keeps_models_without_moments_and_one_that_a_budget_ended_keeps_them(tmp_path):
    """Moments are two thirds of what a finished run leaves; the model, and what is no moment, stay whole."""
    words = (*WORDS, "checkpoint.keep_final=false", "save_model=true")
    _, summary = trained(tmp_path, *words, "n_steps=3", "budget.steps=1")
    assert summary["status"] == "budget"
    assert all(moments_in(path) for path in checkpoints_in(tmp_path))
    resumed(tmp_path, *words, "n_steps=3", "budget.steps=5")
    assert json.loads((tmp_path / "summary.json").read_text())["checkpoints"]["moments_removed"] > 0
    for path in checkpoints_in(tmp_path):
        assert checkpoint_fault(path) == ""
        assert not moments_in(path)
        assert (path / "model" / "model.safetensors").is_file()
    said = resumed(tmp_path, *words, "n_steps=4", "budget.steps=5")
    assert [line for line in said if "checkpoint.keep_final" in line]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:  # pickles begin with their protocol, torch's with the signature of a zip file
        assert path.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"), path


class OwnWeights(HFEngine):
    """An engine with weights of its own, as vLLM has: the next step can be sampled while this one learns."""

    def load_weights(self, policy: Policy) -> dict[str, float]:
        self.policy.model.load_state_dict(policy.model.state_dict())
        self.weight_version += 1
        return {}


def sampled_ahead(folder: Path, fails_in: int | None = None) -> None:
    """A run, or the rest of one, that samples one step ahead; an error ends it in this step."""
    run, config = run_of(*WORDS, "n_steps=4")
    console, records = Console(), RunWriter(folder, config, trains=True)
    parts = build_components(run, folder, console)
    engine = OwnWeights(parts.policy.copy())
    evaluator = replace(parts.evaluator, rollouts=replace(parts.evaluator.rollouts, engine=engine))
    parts = replace(parts, engine=engine, rollouts=replace(parts.rollouts, engine=engine), evaluator=evaluator)
    with trainer_of(run, parts, records, console) as trainer:
        trainer.batches.ahead = True
        finite = trainer.learner.weights_are_finite

        def finite_or_failed() -> bool:
            if trainer.steps_done + 1 == fails_in:
                raise RuntimeError("in the middle of a step")
            return finite()

        trainer.learner.weights_are_finite = finite_or_failed  # type: ignore[method-assign]
        close_records(trainer, *trainer.train())


def test_a_run_that_samples_ahead_goes_on_with_the_batch_that_it_had_in_hand(tmp_path):
    """It was sampled by weights that are gone, and which pairs the grader remembers is part of the numbers."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sampled_ahead(whole)
    for fails_in in (2, 4):
        with pytest.raises(RuntimeError, match="in the middle"):
            sampled_ahead(broken, fails_in)
    sampled_ahead(broken)
    assert rows_of(broken) == rows_of(whole)
    assert responses_of(broken) == responses_of(whole)
    assert [row["rollout/staleness"] for row in rows_of(whole) if "rollout/staleness" in row] == [0, 1, 1, 1]
