"""The real command line, in its own process, on the smallest run there is."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from rlreason import load_run
from rlreason.records.loggers import AXES, COUNTERS
from rlreason.records.reader import without_clock
from tests.run_records import lines_of
from tests.starts import ENV, SMALL


def no_metric_lacks_an_axis(folder: Path) -> bool:
    """Whether Weights & Biases would draw every metric of a run over a counter of steps."""
    names = {name for row in rows_of(folder) for name in row}
    drawn = {name for of_counter in AXES.values() for name in of_counter}
    return all(drawn & {name, f"{name.partition('/')[0]}/*"} for name in names - set(COUNTERS))


def rows_of(folder: Path, metric: str = "rollout_step") -> list[dict]:
    return [row for row in load_run(folder).metrics if metric in row]


def test_there_is_a_finite_row_for_every_update_and_every_row_carries_every_counter(finished_run):
    folder = finished_run.folder
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
    assert all(r["rollout/mismatch_max"] < 1e-4 < 0.25 < r["rollout/distinct"] for r in rows_of(folder, "reward/mean"))
    assert all({"eval/accuracy", "eval/format", "eval/length"} <= r.keys() for r in evals)
    assert no_metric_lacks_an_axis(folder)
    summary = load_run(folder).summary
    assert [summary[name] for name in counters] == [rows[-1][name] for name in counters]
    assert json.loads((folder / "status.json").read_text())["status"] == summary["status"] == "finished"


def test_the_same_command_gives_the_same_numbers(finished_run, tmp_path):
    """In a fresh Python too, which hashes texts with a seed of its own."""
    argv = [sys.executable, "-m", "rlreason", "loss=grpo_clip", "epochs_per_rollout=2", *SMALL, "hydra.run.dir=again"]
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | ENV, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, again = (
        [without_clock(row) for row in rows_of(place)] for place in (finished_run.folder, tmp_path / "again")
    )
    assert first == again
