"""Faults that are planted into real runs: each is named by its monitor while the run goes on, and by `health` after."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlreason.engines.hf import HFEngine
from rlreason.health.monitors import Finding
from rlreason.health.watch import examine
from rlreason.records.console import Console
from rlreason.records.writer import RunWriter
from rlreason.training.build import Components, build_components
from rlreason.training.train import close_records, trainer_of
from rlreason.training.trainer import Trainer
from rlreason.types import Response
from tests.some import some
from tests.test_trainer import run_of

#: Responses end at a vowel, as nearly random weights hardly end one by themselves; half of them earn a reward.
WORDS = (
    "n_steps=4", "rollout_batch_size=32", "group_size=4", "train_batch_size=16", "eval_every=0", "eval_problems=4",
    "prompt.reward=own_reward:halves", "sampling.max_tokens=24", "checkpoint.every=0",
)  # fmt: skip


class Stale(HFEngine):
    """An engine with weights of its own, which says that it took new ones and keeps those that it was made with."""

    def __init__(self, components: Components) -> None:
        super().__init__(copy.deepcopy(components.policy))

    def load_weights(self, policy) -> dict[str, float]:
        self.weight_version += 1
        return {}


class OneSeed(HFEngine):
    """An engine that draws pairs of samples with one seed: two of every group of four are copies."""

    def __init__(self, components: Components) -> None:
        super().__init__(components.policy)

    def generate(self, prompts, sampling, n=1, finished=None) -> list[Response]:
        half = super().generate(prompts, sampling, max(1, n // 2))
        each = len(half) // len(prompts)
        out = [half[p * each + k % each] for p in range(len(prompts)) for k in range(n)]
        for place, response in enumerate(out if finished else []):
            finished(place, response)
        return out


def a_tokenizer_that_loses_text(trainer: Trainer) -> None:
    """It writes everything in lower case, and calls every digit 0, when it reads a text."""
    encode = trainer.policy.tokenizer.encode
    trainer.policy.tokenizer.encode = lambda text, **options: encode(re.sub(r"\d", "0", text.lower()), **options)


def scored_at_another_temperature(trainer: Trainer) -> None:
    """The ratio of the first update is not 1: what is learned at 0.5 was sampled, and scored, at 1."""
    trainer.learner.temperature = 0.5


def weights_that_no_update_reaches(trainer: Trainer) -> None:
    """The optimizer holds other tensors than the model's, as after a model was moved or wrapped."""
    (group,) = trainer.learner.optimizer.param_groups
    group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]


def moments_that_are_no_numbers(trainer: Trainer) -> None:
    """The update is x / inf = 0: nothing else shows it."""
    first = trainer.learner.parameters[-1]
    moments = {"exp_avg": torch.zeros_like(first), "exp_avg_sq": torch.full_like(first, float("inf"))}
    trainer.learner.optimizer.state[first] = {"step": torch.tensor(1.0), **moments}


def trained(folder: Path, fault: Callable | None, *words: str) -> tuple[str, list[Finding]]:
    """(what the monitors said, health) of a run whose engine, or another part of it, is exchanged."""
    run, config = run_of(*WORDS, *words)
    said, console, records = [], Console(), RunWriter(folder, config)
    components = build_components(run, folder, console)
    is_engine = isinstance(fault, type)
    if is_engine:
        own = fault(components)
        rollouts = replace(components.rollouts, engine=own)
        evaluator = replace(components.evaluator, rollouts=replace(components.evaluator.rollouts, engine=own))
        components = replace(components, engine=own, rollouts=rollouts, evaluator=evaluator)
    with trainer_of(run, components, records, console) as trainer:
        trainer.monitors.say = said.append
        if fault is not None and not is_engine:
            fault(trainer)
        close_records(trainer, *trainer.train())
        held = [bool(one.samples) for one in trainer.validation.history]
        assert (held[0], any(held[1:-1]), held[-1]) == (True, False, True)  # else memory grows with every evaluation
    return "\n".join(said), [finding for finding in examine(folder)[1] if finding.problem]


@pytest.mark.parametrize(
    ("fault", "words", "rule", "holds"),
    some([
        (Stale, ("learning_rate=1e-6", "n_steps=3"), "engine_weights", lambda f: f["mismatch"] > 20 * f["first"]),
        (OneSeed, ("n_steps=2",), "identical_samples", lambda f: f["copies"] > 0.2),
        (scored_at_another_temperature, ("off_policy=e4_quarter", "loss=grpo_clip", "n_steps=2"), "first_ratio",
         lambda f: abs(f["ratio"] - 1) > 0.05 or f["approx_kl"] > 0.05),
        (weights_that_no_update_reaches, (), "still_weights", lambda f: f["changed"] == 0),
        (None, ("model.weights=bfloat16", "learning_rate=1e-6"), "still_weights", lambda f: 0 < f["changed"] < 0.2),
        (moments_that_are_no_numbers, ("n_steps=1",), "optimizer", lambda f: True),
        (a_tokenizer_that_loses_text, ("n_steps=1",), "round_trip", lambda f: f["share"] < 0.5),
    ], 3),
    ids=["stale", "one seed", "temperature", "other tensors", "bfloat16", "moments", "tokenizer"],
)  # fmt: skip
def test_faults(tmp_path, fault, words, rule, holds):
    """Bug: a fault that is planted into a real run is not named, or by another rule."""
    said, health = trained(tmp_path / "run", fault, *words)
    found = {one.rule: one for one in health}
    assert found.keys() & {rule, f"ended:{rule}"}
    if rule in found:
        assert holds(found[rule].figures)
    if isinstance(fault, type):  # while the run goes on, in the first samples behind an update or of all
        assert (found[rule].what in said, found[rule].step) == (True, 2 if fault is Stale else 1)
