"""The loss laboratory: its numbers are the learner's, its weights are what the length norms promise."""

import json
import os
from dataclasses import replace

import pytest
import torch

from rlreason.objectives.published import NAMED, OF_LOSSES
from rlreason.records.console import Console
from rlreason.records.reader import RunFolder
from rlreason.records.writer import RunWriter
from rlreason.training import laboratory as lab
from rlreason.training.algorithms import with_advantages
from rlreason.training.build import make_learner
from rlreason.types import Problem
from tests.run_records import lines_of
from tests.starts import SMALL, rlreason, subcommand
from tests.test_learner import DEAD, grouped_samples
from tests.test_trainer import run_of

QUIET = Console(out=open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the tests


def run_with(*words: str):
    """The settings of a run, and their YAML."""
    return run_of("sampling.max_tokens=20", "micro_batch_tokens=100", *words)


def rewarded(policy, noise=0.3):
    """Ragged responses in groups of four, whose old log-probabilities are not today's; two groups earn alike."""
    samples = grouped_samples(policy, DEAD, noise=noise)
    return [replace(s, log_probs=s.response.log_probs, old_log_probs=s.response.log_probs) for s in samples]


@pytest.fixture
def folder(policy, tmp_path):
    """A finished run's folder with steps 1 and 3 saved, written by the parts that write it in a run."""
    path = tmp_path / "run"
    run, config = run_with("objective=grpo")
    records = RunWriter(path, config)
    problems = [Problem(f"p{i}", "q", "a") for i in range(6)]
    for step, noise in ((1, 0.5), (3, 0.3)):
        records.responses("rollouts", step, with_advantages(rewarded(policy, noise=noise), run)[0], problems)
    policy.save(path / "model")
    records.summary({"status": "finished"})
    return path


def test_the_numbers_of_every_objective_are_the_learners(policy):
    run = run_with("seed=3", "loss=grpo_clip", "entropy_coef=0.01")[0]
    of_losses = [f"loss={name}" for name in OF_LOSSES]
    assert [*lab.variants(run)] == [lab.OWN, *NAMED, *of_losses, "length_norm=constant", "length_norm=token"]
    samples = rewarded(policy)
    result = lab.compare(run, policy, samples, QUIET)
    parts = make_learner(run, policy).gradient(with_advantages(samples, run)[0]).parameters
    for m, other in zip(result, lab.variants(run).values(), strict=True):
        gradient = make_learner(other, policy).gradient(with_advantages(samples, other)[0]).parameters
        a, b = (torch.cat([p.flatten() for p in each]) for each in (parts, gradient))
        assert m["cosine"] == pytest.approx(torch.cosine_similarity(a, b, dim=0).item(), abs=1e-4), m["name"]
        assert m["grad_norm"] == pytest.approx(b.norm().item(), rel=1e-4)
    own, step = result[0], make_learner(run, policy).update(with_advantages(samples, run)[0])
    assert own["loss"] == pytest.approx(step["train/loss"], rel=1e-5)
    assert own["clipped"] == pytest.approx(step["train/clip_fraction"], rel=1e-6)
    assert own["zero_advantage"] >= 8 / 16  # the groups that earned alike
    assert 0 < own["clipped"] < 0.9


def test_a_constant_weighs_every_length_alike_and_masked_mean_favours_short_responses(policy):
    samples = rewarded(policy)
    for norm, low, high in (("constant", 0.9999, 1.0001), ("token", 0.9999, 1.0001), ("masked_mean", 2.0, 30.0)):
        (own, *_) = lab.compare(run_with(f"length_norm={norm}")[0], policy, samples, QUIET)
        assert low < own["short_to_long"] < high
    assert lab.short_to_long([torch.zeros(3), torch.zeros(1)], torch.zeros(2)) is None
    short, long = torch.tensor([1.0]), torch.tensor([0.5, 1.0])
    assert lab.short_to_long([long, short, torch.zeros(3)], torch.tensor([2.0, 1.0, 0.0])) == 1 / (1.5 / 4)


def test_the_command_leaves_a_table_and_numbers_of_the_recorded_advantages(folder, capsys):
    words = ("--gradients", "--step", "1", "--json", folder / "figures.json")
    assert subcommand("inspect", folder, *words) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {lab.OWN, *NAMED, "length_norm=token"} <= lines.keys()
    assert lines["grpo"].split()[3] == "1.000"  # the run's own objective under its name
    numbers = json.loads((folder / "lab/step_00001.json").read_text())
    assert numbers.items() <= json.loads((folder / "figures.json").read_text()).items()
    assert [m["name"] for m in numbers["objectives"][:2]] == [lab.OWN, "grpo"]


def test_frozen_weights_have_no_part_in_the_gradient(folder):
    """Bug: the gradients that `inspect` compares are of weights which the run does not train."""
    config, numbers = folder / "config.yaml", folder / "lab/step_00003.json"
    assert subcommand("inspect", folder, "--gradients") == 0
    whole = json.loads(numbers.read_text())["objectives"][0]["grad_norm"]
    config.write_text(config.read_text().replace("freeze: []", "freeze: ['*layers*']"))
    assert subcommand("inspect", folder, "--gradients") == 0
    assert 0 < json.loads(numbers.read_text())["objectives"][0]["grad_norm"] < whole


@pytest.mark.long
def test_the_reference_is_made_again_as_the_run_had_it_and_another_one_is_said(tmp_path, capsys):
    """KL in the reward: the recorded advantages follow from the remade reference; entropy moves the policy."""
    words = ["objective=dr_grpo", "kl_placement=reward", "kl_coef=1", "entropy_coef=0.1", "learning_rate=3e-3"]
    done = rlreason(*words, *SMALL, "hydra.run.dir=x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = RunFolder(tmp_path / "x")
    run = lab.read_run(saved)
    step, samples = lab.read_samples(saved, run, None, Console())
    assert step == 2
    rows = [json.loads(line) for line in lines_of(tmp_path / "x/rollouts/step_00002.jsonl.gz")]
    assert max(abs(r["advantage"]) for r in rows) > 0.01
    found = [s.advantage for s in with_advantages(samples, run)[0]]
    assert found == pytest.approx([r["advantage"] for r in rows], abs=2e-4)
    (tmp_path / "x/summary.json").write_text('{"start": {"weights": "another"}}')
    lab.read_samples(RunFolder(tmp_path / "x"), run, None, Console())
    assert "another start model" in " ".join(capsys.readouterr().out.split())
