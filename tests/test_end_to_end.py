"""The real command line, in its own process, on the smallest run there is."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

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
def card(finished_run):
    """What the command of the card printed and left at the smallest size."""
    return finished_run.printed, finished_run.folder


def test_a_run_leaves_a_whole_folder_and_shows_what_happened(card):
    out, folder = card
    names = {p.name for p in folder.iterdir()}
    assert {"config.yaml", "provenance.json", "metrics.jsonl", "evals", "model", "summary.json", "curves.png"} <= names
    assert sorted(p.name for p in (folder / "rollouts").iterdir()) == ["step_00001.jsonl.gz", "step_00002.jsonl.gz"]
    assert len(lines_of(folder / "rollouts/step_00001.jsonl.gz")) == 16
    assert "epochs_per_rollout: 2" in (folder / "config.yaml").read_text()
    assert "${" not in (folder / "config.yaml").read_text()
    assert not list(folder.rglob("*.partial"))
    assert all(word in out for word in ("grpo_clip; cliprange_low=0.2", "accuracy", "notices", "finished in"))
    assert re.search(r"2/2 +0\.\d{3}", out)


def test_metrics_have_their_names_and_are_finite(card):
    _, folder = card
    train, evals = rows_of(folder, "reward/mean"), rows_of(folder, "eval/accuracy")
    assert [r["rollout_step"] for r in train] == [1, 2]
    assert [r["eval_step"] for r in evals] == [1, 2, 3]
    for name in (
        "train/loss", "train/grad_norm", "train/entropy", "train/clip_fraction", "reward/mean", "reward/format",
        "reward/answer", "rollout/length", "rollout/truncated", "rollout/distinct", "rollout/mismatch_mean",
        "time/total",
    ):  # fmt: skip
        assert all(math.isfinite(r[name]) for r in train), name
    assert all({"eval/accuracy", "eval/format", "eval/length"} <= r.keys() for r in evals)
    assert all(r["rollout/mismatch_max"] < 1e-4 < 0.25 < r["rollout/distinct"] for r in train)
    assert no_metric_lacks_an_axis(folder)


def test_there_is_a_row_for_every_update_and_every_row_carries_every_counter(card):
    _, folder = card
    rows, updates = rows_of(folder), rows_of(folder, "train/loss")
    counters = ("rollout_step", "train_step", "eval_step", "tokens/generated", "tokens/trained")
    for name in (*counters, "time/active", "time/total"):
        values = [row[name] for row in rows]
        assert values == sorted(values), name
    assert [(r["rollout_step"], r["train_step"]) for r in updates] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [r["train_step"] for r in rows_of(folder, "eval/accuracy")] == [0, 2, 4]
    saved = [json.loads(line) for path in sorted((folder / "rollouts").iterdir()) for line in lines_of(path)]
    assert rows[-1]["tokens/generated"] == sum(r["length"] for r in saved)
    assert rows[-1]["tokens/trained"] == 2 * rows[-1]["tokens/generated"] == sum(r["train/tokens"] for r in updates)
    assert rows[-1]["time/active"] < rows[-1]["time/total"] - sum(r.get("time/eval", 0) for r in rows)
    assert all({"train/ratio", "train/approx_kl", "train/entropy", "train/grad_norm"} <= r.keys() for r in updates)
    assert [("reward/mean" in r, "grading/responses" in r) for r in updates] == [(True, True), (False, False)] * 2
    summary = json.loads((folder / "summary.json").read_text())
    assert [summary[name] for name in counters] == [rows[-1][name] for name in counters]
    assert json.loads((folder / "status.json").read_text())["status"] == summary["status"] == "finished"


@pytest.mark.long
def test_sft_then_expert_iteration_from_its_model(tmp_path):
    small = [word for word in SMALL if not word.startswith(("n_steps", "rollout_batch", "group_size"))]
    done = rlreason(
        "algorithm=sft", "n_steps=3", "train_batch_size=8", "lr_schedule=cosine", "warmup_steps=1", "data.limit=16",
        *small, "hydra.run.dir=sft", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "sft", "train/loss")
    assert [r["sft/epoch"] for r in rows] == [0.5, 1.0, 1.5]
    assert rows[1]["train/learning_rate"] > rows[2]["train/learning_rate"] > 0
    assert not (tmp_path / "sft/rollouts").exists()
    assert not {"train/ratio", "train/approx_kl", "train/clip_fraction"} & rows[0].keys()  # nobody measured them
    assert "maximum likelihood" in (tmp_path / "sft/objective.md").read_text()
    done = rlreason(
        "algorithm=ei", "n_ei_steps=2", "question_batch_size=8", "group_size=4", "sft_epochs=2", "train_batch_size=4",
        "model=local", f"model.path={tmp_path / 'sft'}", "data=stories", "prompt=r1_zero_short", "scale=embedded",
        "eval_problems=8", "sampling.max_tokens=16", "data.n_train=256", "data.n_validation=32", "threads=1",
        "hydra.run.dir=ei", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "ei", "ei/kept")
    assert len(rows) == 2
    for r in rows:  # the handful of steps before leaves a model that is rarely right
        name = f"ei/rollouts/step_{r['rollout_step']:05d}.jsonl.gz"
        saved = [json.loads(line) for line in lines_of(tmp_path / name)]
        assert len(saved) == 32
        assert sum(s["kept"] for s in saved) == r["ei/kept"] == sum(s["outcome"] == "correct" for s in saved)
        assert ("train/loss" in r) == (r["ei/kept"] > 0)
        assert not {"train/ratio", "train/approx_kl", "train/clip_fraction"} & r.keys()
    assert no_metric_lacks_an_axis(tmp_path / "sft")
    assert no_metric_lacks_an_axis(tmp_path / "ei")
    counts = json.loads((tmp_path / "ei/summary.json").read_text())["notices"]
    assert counts.get("nothing_to_imitate", 0) == sum(r["ei/kept"] == 0 for r in rows)


def test_the_final_model_loads_with_transformers(card):
    _, folder = card
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = AutoTokenizer.from_pretrained(folder / "model")("User: 1+1?", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3


def test_the_same_command_gives_the_same_numbers(card, tmp_path):
    """In a fresh Python too, which hashes texts with a seed of its own."""
    _, folder = card
    env = os.environ | ENV
    argv = [sys.executable, "-m", "rlreason", *CARD, *SMALL, "hydra.run.dir=again"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, again = ([without_clock(row) for row in rows_of(place)] for place in (folder, tmp_path / "again"))
    assert first == again
