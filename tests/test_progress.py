"""What a checkpoint keeps of a run comes back as it was: moments, random states, samples, problems, all at once."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rlreason.config.training import OptimizationConfig
from rlreason.engines.hf import HFEngine
from rlreason.errors import ConfigError
from rlreason.model.parameters import add_lora, build_model
from rlreason.model.policy import Policy
from rlreason.objectives.objective import Objective
from rlreason.records.console import Console
from rlreason.records.files import MANIFEST, MOMENTS, checkpoint_fault, checkpoints_in, moments_in, write_json
from rlreason.records.writer import RunWriter
from rlreason.runtime.clock import Clock
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.algorithms import Batches
from rlreason.training.build import build_components
from rlreason.training.checkpoint import read_tensors, write_tensors
from rlreason.training.learner import Learner
from rlreason.training.train import close_records, train, trainer_of
from rlreason.types import Collected
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
    generators = random_states()[1]
    write_tensors(tmp_path, first, learner, generators)
    write_json(tmp_path / MANIFEST, {})
    read_tensors(tmp_path, second, other)
    assert not any(other.moments())  # the file is there, and no part of the checkpoint
    write_json(tmp_path / MANIFEST, {MOMENTS: (1, "")})
    assert read_tensors(tmp_path, second, other).keys() == generators.keys()
    kept, again = ([torch.as_tensor(of[k]) for of in one.moments() for k in sorted(of)] for one in (learner, other))
    assert kept
    # Adapters are too small for 8 bits.
    assert (torch.uint8 in {t.dtype for t in again}) == (optimizer == "adamw_8bit" and not rank)
    assert all(t.dtype == before.dtype and torch.equal(t, before) for t, before in zip(again, kept, strict=True))
    one, two = learner.update(samples), other.update(samples)
    assert one == two
    assert one["train/grad_norm"] > 0
    assert all(torch.equal(p, q) for p, q in zip(learner.parameters, other.parameters, strict=True))


def test_every_generator_of_the_process_goes_on_where_it_was():
    def drawn() -> list[Any]:
        return [random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist(), random.random(), np.random.rand()]

    drawn()  # the second half of a pair of gaussians is kept for the next call
    plain, tensors = random_states()
    plain, expected = json.loads(json.dumps(plain)), drawn()
    assert drawn() != expected
    set_random_states(plain, tensors)
    assert drawn() == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_of_the_thread_that_samples_ahead_ends_the_run(ahead):
    collect = Mock(side_effect=[Collected([], [], {}), RuntimeError("died")])
    failing = Batches(Mock(n_steps=4, collect=collect), ahead, Clock())
    failing.collect(1)
    failing.sample_ahead(1)
    with pytest.raises(RuntimeError, match="died"):
        failing.finish_ahead() if ahead else failing.collect(2)
    failing.close()


WORDS = (
    "rollout_batch_size=16", "group_size=4", "eval_problems=4", "eval_every=1", "checkpoint.every=1", "skip_solved=1",
    "checkpoint.keep_final=true",
)  # fmt: skip


def test_a_run_that_a_budget_ended_can_be_given_more_and_a_finished_one_keeps_models_without_moments(tmp_path):
    """Bug: a budget of tokens is overdrawn or the last word, or moments, two thirds of a finished run's files, stay."""
    words = (*WORDS, "checkpoint.keep_final=false", "save_model=true", "n_steps=3")
    words += ("eval_problems=null", "interim_eval_problems=4", "budget.tokens=450")  # 192 in a step, or nearly so
    _, summary = trained(tmp_path, *words)
    assert (summary["status"], summary["rollout_step"], summary["eval_problems"]) == ("budget", 2, 24)  # asks all
    assert summary["tokens/generated"] <= 450
    assert all(moments_in(path) for path in checkpoints_in(tmp_path))
    with pytest.raises(ConfigError, match="a larger budget"):
        trained(tmp_path, *words)
    _, summary = trained(tmp_path, *words, "budget.tokens=9999")
    assert (summary["status"], summary["rollout_step"]) == ("finished", 3)
    assert summary["checkpoints"]["moments_removed"] > 0
    for path in checkpoints_in(tmp_path):
        assert (checkpoint_fault(path), moments_in(path)) == ("", 0)
        assert (path / "model" / "model.safetensors").is_file()
    run, config = run_of(*words, "n_steps=4", "budget.tokens=9999")
    said: list[str] = []
    train(run, RunWriter(tmp_path, config, trains=True, say=said.append), Console())
    assert "checkpoint.keep_final" in "".join(said)


class OwnWeights(HFEngine):
    """An engine with weights of its own, as vLLM has: the next step can be sampled while this one learns."""

    def load_weights(self, policy: Policy) -> dict[str, float]:
        self.policy.model.load_state_dict(policy.model.state_dict())
        self.weight_version += 1
        return {}


def sampled_ahead(folder: Path, fails_in: int | None = None) -> None:
    """A run, or the rest of one, that samples one step ahead; an error ends it in this step."""
    run, config = run_of(*WORDS, "n_steps=3")
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
    for fails_in in (2, 3):
        with pytest.raises(RuntimeError, match="in the middle"):
            sampled_ahead(broken, fails_in)
    sampled_ahead(broken)
    assert rows_of(broken) == rows_of(whole)
    assert responses_of(broken) == responses_of(whole)
    assert [row["rollout/staleness"] for row in rows_of(whole) if "rollout/staleness" in row] == [0, 1, 1]
