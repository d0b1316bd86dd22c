"""Faults that are planted into real runs: each is named by its monitor while the run goes on, and by `health` after."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.engine import HFEngine
from rlreason.errors import ConfigError
from rlreason.health.examine import examine
from rlreason.health.finding import Finding
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


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[list[str], list[Finding]]:
    return trained(tmp_path_factory.mktemp("sound") / "run")


def test_a_run_without_a_fault_has_nothing_said_of_it(sound):
    said, health = sound
    assert not [line for line in said if "truncated" not in line and "cut at" not in line]
    assert not rules(health) - {"truncated"}  # these weights are nearly random


@pytest.mark.parametrize("rate", ["1e-6", "3e-3"])
def test_an_engine_that_keeps_old_weights(tmp_path, rate):
    said, health = trained(tmp_path / "run", f"learning_rate={rate}", "n_steps=3", "eval_every=0", engine=Stale)
    assert any("other weights" in line for line in said)
    (found,) = [f for f in health if f.rule == "engine_weights"]
    assert found.step == 2  # the first samples behind an update
    assert found.figures["mismatch"] > 20 * found.figures["first"]
    assert "weight sync" in found.causes


def test_samples_of_a_group_that_share_seeds(tmp_path):
    said, health = trained(tmp_path / "run", engine=OneSeed)
    assert any("samples share a seed" in line for line in said)
    (found,) = [f for f in health if f.rule == "identical_samples"]
    assert found.step == 1
    assert found.figures["copies"] > 0.2


def test_old_log_probabilities_of_another_temperature(tmp_path):
    """The ratio of the first update is not 1: what is learned at 0.5 was sampled, and scored, at 1."""

    def plant(trainer: Trainer) -> None:
        trainer.learner.temperature = 0.5

    _, health = trained(tmp_path / "run", "off_policy=e4_quarter", "loss=grpo_clip", plant=plant)
    (found,) = [f for f in health if f.rule == "first_ratio"]
    assert abs(found.figures["ratio"] - 1) > 0.05 or found.figures["approx_kl"] > 0.05


def test_weights_that_no_update_reaches(tmp_path):
    """An optimizer that holds other tensors than the model's, as after a model was moved or wrapped."""

    def plant(trainer: Trainer) -> None:
        (group,) = trainer.learner.optimizer.param_groups
        group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]

    said, health = trained(tmp_path / "run", plant=plant)
    assert any("only 0.0% of the weights" in line for line in said)
    assert "still_weights" in rules(health)


def test_updates_that_half_precision_rounds_away(tmp_path):
    _, health = trained(tmp_path / "run", "model.weights=bfloat16", "learning_rate=1e-6")
    (found,) = [f for f in health if f.rule == "still_weights"]
    assert 0 < found.figures["changed"] < 0.2


def test_moments_that_are_no_numbers(tmp_path):
    def plant(trainer: Trainer) -> None:
        state = trainer.learner.optimizer.state
        first = trainer.learner.parameters[-1]
        state[first] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(first),
            "exp_avg_sq": torch.full_like(first, float("inf")),  # the update is x / inf = 0: nothing else shows it
        }

    _, health = trained(tmp_path / "run", "n_steps=1", plant=plant)
    assert "optimizer" in rules(health) or "ended:optimizer" in rules(health)


class Forgetful:
    """A tokenizer that writes everything in lower case, and calls every digit 0, when it reads a text."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def encode(self, text: str, **options):
        return self.inner.encode("".join("0" if c.isdigit() else c for c in text.lower()), **options)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


def test_a_tokenizer_that_loses_text(tmp_path):
    def plant(trainer: Trainer) -> None:
        trainer.policy.tokenizer = Forgetful(trainer.policy.tokenizer)

    _, health = trained(tmp_path / "run", "n_steps=1", plant=plant)
    (found,) = [f for f in health if f.rule == "round_trip"]
    assert found.figures["share"] < 0.5


def test_rewards_that_are_all_zero(tmp_path):
    words = ("prompt.reward=r1_zero", "monitors.zero_reward_steps=3")
    said, health = trained(tmp_path / "run", *words)
    assert any("all rewards were 0 in 3 steps" in line for line in said)
    assert "zero_reward" in rules(health)


def test_a_grader_that_times_out(tmp_path):
    words = ("prompt.reward=own_reward:slow_at_times", "grading.timeout_s=2", "n_steps=1", "rollout_batch_size=8")
    _, health = trained(
        tmp_path / "run", *words, "group_size=2", "eval_problems=2", "eval_every=0", "train_batch_size=8"
    )
    (found,) = [f for f in health if f.rule == "grader_timeouts"]
    assert "ran out of time" in found.what
    assert any(line.startswith("grading_incidents.jsonl") for line in found.evidence)


@pytest.mark.long
@pytest.mark.parametrize(
    "judged",
    [(), ("eval.reward=r1_zero",)],
    ids=["by the same reward", "by another"],
)
def test_a_reward_that_can_be_hacked_on_the_built_in_task(tmp_path, judged):
    """It pays for the format and a short way: the model answers worse and worse, and earns more and more.

    Also where evaluations are judged by the same reward, and accuracy rises.
    """
    words = (
        "prompt.reward=own_reward:short_and_formatted", *judged, "n_steps=10", "rollout_batch_size=128",
        "train_batch_size=128", "eval_problems=128", "eval.final_problems=128", "eval_every=5", "threads=1",
        "save_model=false", "checkpoint.every=0", "hydra.run.dir=run",
    )  # fmt: skip
    done = rlreason(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "signs of reward hacking" in done.stdout
    again = rlreason("health", "run", "--json", cwd=tmp_path)
    assert again.returncode == 1
    (told,) = json.loads(again.stdout)["runs"]
    assert "reward_hacking" in {f["rule"] for f in told["findings"]}


def test_folders_of_all_kinds(tmp_path, sound):
    with pytest.raises(ConfigError, match="is no folder"):
        examine(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        examine(tmp_path / "empty")
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "config.yaml").write_text("n_steps: 10\n")
    (killed / "status.json").write_text('{"status": "running", "reason": "", "time": ""}')
    (killed / "metrics.jsonl").write_text('{"rollout_step": 1, "train/loss": 0.5}\n{"rollout_step": 2, "trai')
    state, health = examine(killed)
    assert state.startswith("broken off")
    assert rules(health) == {"killed", "broken_files"}
    failed = tmp_path / "failed"
    failed.mkdir()
    (failed / "config.yaml").write_text("n_steps: 10\n")
    (failed / "status.json").write_text('{"status": "failed", "reason": "CUDA out of memory. Tried to", "time": ""}')
    (found,) = [f for f in examine(failed)[1] if f.problem]
    assert "memory" in found.causes
    assert "rlreason plan" in found.cure
