"""Faults that are planted into real runs: each is named by its monitor while the run goes on, and by `health` after."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.engine import HFEngine
from rlreason.errors import ConfigError
from rlreason.health.monitors import Finding
from rlreason.health.watch import examine
from rlreason.records.console import Console
from rlreason.records.writer import RunWriter
from rlreason.training.build import Components, build_components
from rlreason.training.train import close_records, trainer_of
from rlreason.training.trainer import Trainer
from rlreason.types import Response
from tests.starts import rlreason
from tests.test_trainer import run_of

#: Responses end at a vowel, as nearly random weights hardly end one by themselves; half of them earn a reward.
WORDS = (
    "n_steps=4", "rollout_batch_size=32", "group_size=4", "train_batch_size=16", "eval_every=2", "eval_problems=8",
    "prompt.reward=own_reward:halves", "sampling.max_tokens=24", "checkpoint.every=0",
)  # fmt: skip


class Stale:
    """An engine with weights of its own, which says that it took new ones and keeps those that it was made with."""

    def __init__(self, components: Components) -> None:
        self.inner = HFEngine(copy.deepcopy(components.policy))
        self.weight_version = self.drawn = 0

    def load_weights(self, policy) -> dict[str, float]:
        self.weight_version += 1
        return {}

    def generate(self, prompts, sampling, n=1, finished=None) -> list[Response]:
        self.inner.weight_version = self.weight_version
        return self.inner.generate(prompts, sampling, n, finished)

    def close(self) -> None:
        self.inner.close()


class OneSeed(Stale):
    """An engine that draws pairs of samples with one seed: two of every group of four are copies."""

    def __init__(self, components: Components) -> None:
        self.inner = HFEngine(components.policy)
        self.weight_version = self.drawn = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Callable | None = None
    ) -> list[Response]:
        half = self.inner.generate(prompts, sampling, max(1, n // 2))
        each = len(half) // len(prompts)
        out = [half[p * each + k % each] for p in range(len(prompts)) for k in range(n)]
        if finished is not None:
            for place, response in enumerate(out):
                finished(place, response)
        return out


def trained(
    folder: Path,
    *words: str,
    engine: Callable[[Components], object] | None = None,
    plant: Callable[[Trainer], object] | None = None,
) -> tuple[list[str], list[Finding]]:
    """(lines on the terminal, health) of a run whose engine, or another part of it, is exchanged."""
    run, config = run_of(*WORDS, *words)
    said: list[str] = []
    console = Console()
    records = RunWriter(folder, config)
    components = build_components(run, folder, console)
    if engine is not None:
        own = engine(components)
        rollouts = replace(components.rollouts, engine=own)
        evaluator = replace(components.evaluator, rollouts=replace(components.evaluator.rollouts, engine=own))
        components = replace(components, engine=own, rollouts=rollouts, evaluator=evaluator)
    with trainer_of(run, components, records, console) as trainer:
        trainer.monitors.say = said.append
        if plant is not None:
            plant(trainer)
        close_records(trainer, *trainer.train())
    return said, examine(folder)[1]


def rules(health: list[Finding]) -> set[str]:
    return {finding.rule for finding in health if finding.problem}


def test_a_run_without_a_fault_has_nothing_said_of_it(tmp_path):
    said, health = trained(tmp_path / "run")
    assert not [line for line in said if "truncated" not in line and "cut at" not in line]
    assert not rules(health) - {"truncated"}  # these weights are nearly random


@pytest.mark.parametrize(
    ("engine", "words", "rule", "step", "holds"),
    [
        (Stale, ("learning_rate=1e-6",), "engine_weights", 2, lambda f: f["mismatch"] > 20 * f["first"]),
        (Stale, ("learning_rate=3e-3",), "engine_weights", 2, lambda f: f["mismatch"] > 20 * f["first"]),
        (OneSeed, (), "identical_samples", 1, lambda f: f["copies"] > 0.2),
    ],
)
def test_an_engine_that_keeps_old_weights_or_shares_seeds(tmp_path, engine, words, rule, step, holds):
    said, health = trained(tmp_path / "run", *words, "n_steps=3", "eval_every=0", engine=engine)
    assert any("other weights" in line or "share a seed" in line for line in said)
    (found,) = [f for f in health if f.rule == rule]
    assert found.step == step  # with old weights, the first samples behind an update
    assert holds(found.figures)


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
    infinite = torch.full_like(first, float("inf"))
    trainer.learner.optimizer.state[first] = {
        "step": torch.tensor(1.0), "exp_avg": torch.zeros_like(first), "exp_avg_sq": infinite,
    }  # fmt: skip


class Forgetful:
    """A tokenizer that writes everything in lower case, and calls every digit 0, when it reads a text."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def encode(self, text: str, **options):
        return self.inner.encode("".join("0" if c.isdigit() else c for c in text.lower()), **options)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


def a_tokenizer_that_loses_text(trainer: Trainer) -> None:
    trainer.policy.tokenizer = Forgetful(trainer.policy.tokenizer)


SLOW = (
    "prompt.reward=own_reward:slow_at_times", "grading.timeout_s=2", "n_steps=1", "rollout_batch_size=8",
    "group_size=2", "eval_problems=2", "eval_every=0", "train_batch_size=8",
)  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "words", "rule", "holds"),
    [
        (scored_at_another_temperature, ("off_policy=e4_quarter", "loss=grpo_clip", "n_steps=2"), "first_ratio",
         lambda f: abs(f["ratio"] - 1) > 0.05 or f["approx_kl"] > 0.05),
        (weights_that_no_update_reaches, (), "still_weights", lambda f: f["changed"] == 0),
        (None, ("model.weights=bfloat16", "learning_rate=1e-6"), "still_weights", lambda f: 0 < f["changed"] < 0.2),
        (moments_that_are_no_numbers, ("n_steps=1",), "optimizer", lambda f: True),
        (a_tokenizer_that_loses_text, ("n_steps=1",), "round_trip", lambda f: f["share"] < 0.5),
        (None, ("prompt.reward=r1_zero", "monitors.zero_reward_steps=3"), "zero_reward", lambda f: True),
        (None, SLOW, "grader_timeouts", lambda f: True),
    ],
    ids=["temperature", "other tensors", "half precision", "moments", "tokenizer", "rewards 0", "timeouts"],
)  # fmt: skip
def test_a_fault_is_named_by_its_monitor(tmp_path, plant, words, rule, holds):
    _, health = trained(tmp_path / "run", *words, plant=plant)
    assert rules(health) & {rule, f"ended:{rule}"}
    assert all(holds(f.figures) for f in health if f.rule == rule)


@pytest.mark.long
def test_a_reward_that_can_be_hacked_on_the_built_in_task(tmp_path):
    """It pays for the format and a short way: the model answers worse and worse, and earns more and more.

    Evaluations are judged by the same reward, so accuracy rises.
    """
    words = (
        "prompt.reward=own_reward:short_and_formatted", "n_steps=10", "rollout_batch_size=128",
        "train_batch_size=128", "eval_problems=128", "eval.final_problems=128", "eval_every=5", "threads=1",
        "save_model=false", "checkpoint.every=0", "hydra.run.dir=run",
    )  # fmt: skip
    done = rlreason(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "signs of reward hacking" in done.stdout
    assert "reward_hacking" in rules(examine(tmp_path / "run")[1])


def test_folders_of_no_run_and_of_runs_that_came_to_no_end(tmp_path):
    for folder, says in ((tmp_path / "nothing", "is no folder"), (tmp_path, r"has no config\.yaml")):
        with pytest.raises(ConfigError, match=says):
            examine(folder)
    (tmp_path / "config.yaml").write_text("n_steps: 10\n")
    (tmp_path / "status.json").write_text('{"status": "running", "reason": "", "time": ""}')
    (tmp_path / "metrics.jsonl").write_text('{"rollout_step": 1}\n{"rollout_step": 2, "trai')
    assert rules(examine(tmp_path)[1]) == {"killed", "broken_files"}
    (tmp_path / "status.json").write_text('{"status": "failed", "reason": "CUDA out of memory. Tried to", "time": ""}')
    (tmp_path / "metrics.jsonl").write_text("")
    (failed,) = [finding for finding in examine(tmp_path)[1] if finding.problem]
    assert (failed.rule, "rlreason plan" in failed.cure) == ("failed", True)
