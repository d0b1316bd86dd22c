"""The real command line, in its own process, on the smallest run there is."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason.records.loggers import AXES, COUNTERS
from rlreason.records.reader import without_clock
from tests.run_records import lines_of
from tests.starts import ENV, SMALL, rlreason

CARD = ["algorithm=grpo", "loss=grpo_clip", "epochs_per_rollout=2"]


def no_metric_lacks_an_axis(folder: Path) -> bool:
    """Whether Weights & Biases would draw every metric of a run over a counter of steps."""
    names = {name for line in (folder / "metrics.jsonl").open() for name in json.loads(line)}
    drawn = {name for of_counter in AXES.values() for name in of_counter}
    return all(drawn & {name, f"{name.partition('/')[0]}/*"} for name in names - set(COUNTERS))


def rows_of(folder: Path, metric: str = "rollout_step") -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if metric in row]


@pytest.fixture
def folder(finished_run):
    """What the command of the card left at the smallest size."""
    return finished_run.folder


def test_a_run_leaves_a_whole_folder_and_shows_what_happened(finished_run, folder):
    names = {p.name for p in folder.iterdir()}
    assert {"config.yaml", "provenance.json", "metrics.jsonl", "evals", "model", "summary.json", "curves.png"} <= names
    assert sorted(p.name for p in (folder / "rollouts").iterdir()) == ["step_00001.jsonl.gz", "step_00002.jsonl.gz"]
    assert "epochs_per_rollout: 2" in (folder / "config.yaml").read_text()
    assert "${" not in (folder / "config.yaml").read_text()
    assert not list(folder.rglob("*.partial"))
    assert all(word in finished_run.printed for word in ("cliprange_low=0.2", "accuracy", "notices", "finished in"))


def test_there_is_a_finite_row_for_every_update_and_every_row_carries_every_counter(folder):
    rows, updates, evals = rows_of(folder), rows_of(folder, "train/loss"), rows_of(folder, "eval/accuracy")
    counters = ("rollout_step", "train_step", "eval_step", "tokens/generated", "tokens/trained")
    for name in (*counters, "time/active", "time/total"):
        values = [row[name] for row in rows]
        assert values == sorted(values), name
    assert [(r["rollout_step"], r["train_step"]) for r in updates] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [(r["eval_step"], r["train_step"]) for r in evals] == [(1, 0), (2, 2), (3, 4)]
    saved = [json.loads(line) for path in sorted((folder / "rollouts").iterdir()) for line in lines_of(path)]
    assert len(saved) == 2 * 16
    assert rows[-1]["tokens/generated"] == sum(r["length"] for r in saved)
    assert rows[-1]["tokens/trained"] == 2 * rows[-1]["tokens/generated"] == sum(r["train/tokens"] for r in updates)
    assert rows[-1]["time/active"] < rows[-1]["time/total"] - sum(r.get("time/eval", 0) for r in rows)
    assert [("reward/mean" in r, "grading/responses" in r) for r in updates] == [(True, True), (False, False)] * 2
    for name in ("train/ratio", "train/approx_kl", "train/entropy", "train/grad_norm", "train/clip_fraction"):
        assert all(math.isfinite(r[name]) for r in updates), name
    for name in ("reward/mean", "reward/format", "reward/answer", "rollout/length", "rollout/truncated"):
        assert all(math.isfinite(r[name]) for r in rows_of(folder, "reward/mean")), name
    assert all(r["rollout/mismatch_max"] < 1e-4 < 0.25 < r["rollout/distinct"] for r in rows_of(folder, "reward/mean"))
    assert all({"eval/accuracy", "eval/format", "eval/length"} <= r.keys() for r in evals)
    assert no_metric_lacks_an_axis(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert [summary[name] for name in counters] == [rows[-1][name] for name in counters]
    assert json.loads((folder / "status.json").read_text())["status"] == summary["status"] == "finished"


@pytest.mark.long
def test_sft_then_expert_iteration_from_its_model(tmp_path):
    """Bug: a run's folder cannot be the next one's model, or a row lacks what its step did."""
    small = [word for word in SMALL if not word.startswith(("n_steps", "rollout_batch", "group_size"))]
    sft = ("algorithm=sft", "n_steps=3", "train_batch_size=8", "lr_schedule=cosine", "warmup_steps=1", "data.limit=16")
    ei = (
        "algorithm=ei", "n_ei_steps=2", "question_batch_size=8", "group_size=4", "sft_epochs=2", "train_batch_size=4",
        "model=local", f"model.path={tmp_path / 'sft'}", "data=stories", "prompt=r1_zero_short", "scale=embedded",
    )  # fmt: skip
    for words in ((*sft, *small), (*ei, *(word for word in small if not word.startswith("model.")))):
        name = words[0].partition("=")[2]
        done = rlreason(*words, f"hydra.run.dir={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert no_metric_lacks_an_axis(tmp_path / name)
    rows = rows_of(tmp_path / "sft", "train/loss")
    assert [r["sft/epoch"] for r in rows] == [0.5, 1.0, 1.5]
    assert rows[1]["train/learning_rate"] > rows[2]["train/learning_rate"] > 0
    assert not (tmp_path / "sft/rollouts").exists()
    assert not {"train/ratio", "train/approx_kl", "train/clip_fraction"} & rows[0].keys()  # nobody measured them
    assert "maximum likelihood" in (tmp_path / "sft/objective.md").read_text()
    rows = rows_of(tmp_path / "ei", "ei/kept")
    assert len(rows) == 2
    for r in rows:  # the handful of steps before leaves a model that is rarely right
        file = tmp_path / f"ei/rollouts/step_{r['rollout_step']:05d}.jsonl.gz"
        saved = [json.loads(line) for line in lines_of(file)]
        assert sum(s["kept"] for s in saved) == r["ei/kept"] == sum(s["outcome"] == "correct" for s in saved)
        assert ("train/loss" in r) == (r["ei/kept"] > 0)


def test_the_same_command_gives_the_same_numbers(folder, tmp_path):
    """In a fresh Python too, which hashes texts with a seed of its own."""
    argv = [sys.executable, "-m", "rlreason", *CARD, *SMALL, "hydra.run.dir=again"]
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | ENV, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, again = ([without_clock(row) for row in rows_of(place)] for place in (folder, tmp_path / "again"))
    assert first == again
