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

from rlreason.config.training import CheckpointConfig, OptimizationConfig
from rlreason.engines.hf.engine import HFEngine
from rlreason.model.parameters import add_lora, build_model
from rlreason.model.policy import Policy
from rlreason.objectives.objective import Objective
from rlreason.records.console import Console
from rlreason.records.files import checkpoint_fault, checkpoints_in, moments_in, read_state
from rlreason.records.rows import collected_from, plain_collected
from rlreason.records.writer import RunWriter
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.algorithms import Batches
from rlreason.training.build import build_components
from rlreason.training.checkpoint import (
    adapters,
    checkpoint_due,
    moments,
    read_tensors,
    set_moments,
    set_weights,
    write_tensors,
)
from rlreason.training.learner import Learner
from rlreason.training.progress import Step
from rlreason.training.train import close_records, train, trainer_of
from rlreason.types import Collected, Grade, Response, Sample
from tests.run_records import responses_of, rows_of
from tests.test_learner import make_samples
from tests.test_trainer import run_of, trained


def there_and_back(plain: Any) -> Any:
    """What a file would give back."""
    return json.loads(json.dumps(plain))


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
    first = fresh(tokenizer, rank)
    samples = make_samples(first)
    learner = Learner(first, Objective(), settings)
    for _ in range(2):
        learner.update(samples)
    plain, tensors = moments(learner)
    assert tensors
    write_tensors(tmp_path, first, tensors | adapters(first))

    second = fresh(tokenizer, rank)
    other = Learner(second, Objective(), settings)
    found = read_tensors(tmp_path)
    set_weights(second, tmp_path, found)
    set_moments(other, there_and_back(plain), found)
    kinds = {tensor.dtype for tensor in moments(other)[1].values()}
    assert (torch.uint8 in kinds) == (optimizer == "adamw_8bit" and not rank)  # adapters are too small for 8 bits
    for name, tensor in moments(other)[1].items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
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
    plain, expected = there_and_back(plain), drawn()
    assert drawn() != expected
    set_random_states(plain, tensors)
    assert drawn() == expected


def some_samples() -> list[Sample]:
    grade = Grade(1.0, 0.0, 0.1 + 0.2, "wrong", path="math", milliseconds=1.5)
    texts = ("plain", "\x1b[31m\n\u2028 \U0001f600", "half a pair \ud800")
    responses = [Response("p", [1, 2], [3], [-1 / 3], text, "length", weight_version=4) for text in texts]
    return [
        Sample(responses[0], grade),
        Sample(responses[1], grade, grade, math.inf, False, [-1e-300], math.nan, [-0.0], [2**-1074]),
        Sample(responses[2], grade, advantage=-math.inf, entropy=1.0),
    ]


def test_samples_come_back_to_the_last_digit_and_as_often_as_there_were():
    samples, other = some_samples(), some_samples()[0]  # equal to the first and not the same: it stays apart
    batches = [[samples[2], samples[0]], [samples[0], other]]
    collected = Collected(samples, batches, {"a": 0.1 + 0.2, "b": math.nan}, {"few": "only 2"}, restart=True)
    plain = there_and_back(plain_collected(collected))
    assert len(plain["pool"]) == 4
    found = collected_from(plain)
    assert repr(found) == repr(collected)  # unlike ==, of NaN as well
    assert found.batches[0][1] is found.batches[1][0] is found.samples[0]
    assert found.batches[1][1] is not found.samples[0]


class Counting:
    """An algorithm whose steps are collected when they may be."""

    n_steps = 3

    def __init__(self) -> None:
        self.may, self.collected = threading.Event(), list[int]()

    def collect(self, step: int) -> Collected:
        if step > 1:
            assert self.may.wait(600)
        self.collected.append(step)
        return Collected([], [], {"step": step})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_what_was_sampled_ahead_is_kept_and_not_sampled_twice():
    first = Counting()
    batches = Batches(first, ahead=True)
    batches.collect(1)
    assert batches.state_dict()["next"] is None
    batches.sample_ahead(1)
    first.may.set()
    batches.finish_ahead()
    state = there_and_back(batches.state_dict())
    batches.close()

    second = Counting()
    second.may.set()
    other = Batches(second, ahead=True)
    other.load_state_dict(state)
    assert other.collect(2).metrics == {"step": 2}
    other.sample_ahead(2)
    assert other.collect(3).metrics == {"step": 3}
    other.sample_ahead(3)
    other.finish_ahead()
    assert second.collected == [3]
    other.close()


def test_how_often_checkpoints_are_written_follows_from_what_they_cost():
    every_3, never, by_share = CheckpointConfig(every=3), CheckpointConfig(every=0), CheckpointConfig(minutes=None)
    assert [step for step in range(1, 8) if checkpoint_due(step, every_3, True, 1e9, 1e9, 0.0, 0.0)] == [3, 6]
    assert not any(checkpoint_due(step, never, True, 1e9, 1e9, 0.0, 0.0) for step in range(1, 9))
    elapsed, spent = 0.0, 0.0
    for step in range(1, 400):
        elapsed += 1.0
        if checkpoint_due(step, by_share, step % 2 == 0, elapsed, 1e9, spent, 2.0):
            spent, elapsed = spent + 2.0, elapsed + 2.0
        assert spent <= 0.05 * elapsed
    assert spent > 4.0


WORDS = (
    "rollout_batch_size=16", "group_size=4", "eval_problems=8", "eval_every=1", "checkpoint.every=1", "skip_solved=1",
    "checkpoint.keep_final=true",
)  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(("model.lora.rank=4",), marks=pytest.mark.long),
        pytest.param(("optimizer=adamw_8bit", "train_batch_size=8"), marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_put_back_would_write_the_same_checkpoint_again(tmp_path, more):
    trained(tmp_path, *WORDS, *more, "n_steps=2")
    newest = checkpoints_in(tmp_path)[-1]
    before, tensors = read_state(newest), read_tensors(newest)
    run, config = run_of(*WORDS, *more, "n_steps=3")
    console, records = Console(), RunWriter(tmp_path, config, trains=True)
    with trainer_of(run, build_components(run, tmp_path, console), records, console) as trainer:
        assert records.checkpoint == newest
        random.seed(1)
        torch.manual_seed(1)
        assert trainer.checkpoints.restore() == 2
        newest.parent.rename(tmp_path / "before")
        trainer.checkpoints.write(2)
    after, found = read_state(newest), read_tensors(newest)
    assert after.pop("config").replace("n_steps: 3", "n_steps: 2") == before.pop("config")
    clocks = [state["parts"]["counters"].pop("clock") for state in (before, after)]
    for state in (before, after):
        for name in ("time/active", "time/total"):
            del state["parts"]["counters"][name]
    assert clocks[0]["seconds"][0].keys() <= clocks[1]["seconds"][0].keys()
    assert after == before
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_finished_run_keeps_models_without_moments_and_says_what_more_steps_mean(tmp_path):
    """Moments are two thirds of what a finished run leaves; the model, and what is no moment, stay whole."""
    words = (*WORDS, "checkpoint.keep_final=false", "save_model=true", "optimizer=adamw_8bit", "train_batch_size=8")
    _, summary = trained(tmp_path, *words, "n_steps=2")
    assert summary["checkpoints"]["moments_removed"] > 0
    for path in checkpoints_in(tmp_path):
        assert checkpoint_fault(path) == ""
        assert not moments_in(path)
        assert not [name for name in read_tensors(path) if name.startswith("optimizer")]
        assert (path / "model" / "model.safetensors").is_file()
    run, config = run_of(*words, "n_steps=3")
    said: list[str] = []
    train(run, RunWriter(tmp_path, config, trains=True, say=said.append), Console())
    assert [line for line in said if "checkpoint.keep_final" in line]
    assert json.loads((tmp_path / "summary.json").read_text())["rollout_step"] == 3


def test_a_run_that_gets_another_step_has_the_evaluation_that_was_due_where_it_had_ended(tmp_path):
    """After its last step stood the last evaluation, which the longer run does not have there."""
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    trained(whole, *WORDS, "n_steps=2")
    trained(longer, *WORDS, "n_steps=1")
    run, config = run_of(*WORDS, "n_steps=2")
    train(run, RunWriter(longer, config, trains=True), Console())
    assert rows_of(longer) == rows_of(whole)
    assert responses_of(longer) == responses_of(whole)


class OwnWeights(HFEngine):
    """An engine with weights of its own, as vLLM has: the next step can be sampled while this one learns."""

    def load_weights(self, policy: Policy) -> dict[str, float]:
        with torch.no_grad():
            for own, new in zip(self.policy.model.parameters(), policy.model.parameters(), strict=True):
                own.copy_(new)
        self.weight_version += 1
        return {}


def sampled_ahead(folder: Path, fails_in: int | None = None) -> None:
    """A run, or the rest of one, that samples one step ahead; an error ends it in this step."""
    run, config = run_of(*WORDS, "n_steps=4")
    console, records = Console(), RunWriter(folder, config, trains=True)
    parts = build_components(run, folder, console)
    engine = OwnWeights(parts.policy.copy())
    rollouts = replace(parts.rollouts, engine=engine)
    evaluator = replace(parts.evaluator, rollouts=replace(parts.evaluator.rollouts, engine=engine))
    parts = replace(parts, engine=engine, rollouts=rollouts, evaluator=evaluator)
    with trainer_of(run, parts, records, console) as trainer:
        trainer.batches.ahead = True
        learn = trainer.learn

        def learn_or_fail(step: Step) -> None:
            learn(step)
            if step.number == fails_in:
                raise RuntimeError("in the middle of a step")

        trainer.learn = learn_or_fail  # type: ignore[method-assign]
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


def test_a_run_that_a_budget_has_ended_keeps_its_moments(tmp_path):
    """It is meant to go on with a larger one."""
    _, summary = trained(tmp_path, *WORDS, "checkpoint.keep_final=false", "n_steps=3", "budget.steps=1")
    assert summary["status"] == "budget"
    assert all(moments_in(path) for path in checkpoints_in(tmp_path))


def test_nothing_in_a_run_folder_is_a_pickle(tmp_path):
    trained(tmp_path, *WORDS, "n_steps=1", "save_model=true")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:  # pickles begin with their protocol, torch's with the signature of a zip file
        assert path.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"), path
