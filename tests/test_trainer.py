"""What a run measures, when it evaluates and how it ends, through the real loop at the smallest size."""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlreason.config.store import typed
from rlreason.records.console import Console
from rlreason.records.reader import STATUSES, RunFolder, ended_by_itself
from rlreason.records.rows import Counters
from rlreason.records.training_curves import draw_curves
from rlreason.records.writer import RunWriter
from rlreason.training.build import build_components
from rlreason.training.train import train
from tests.run_records import lines_of
from tests.run_settings import composed
from tests.test_end_to_end import no_metric_lacks_an_axis

SMALL = (
    "model.width=32", "model.warm_start.steps=4", "sampling.max_tokens=12", "data.n_train=128", "data.n_validation=24",
    "save_model=false", "threads=1", "log_generations=0", "grading.timeout_s=60", "grading.start_timeout_s=600",
)  # fmt: skip


def run_of(*words: str):
    """The settings of a small run; of the built-in model, where the words give no other."""
    small = [word for word in SMALL if "model=local" not in words or not word.startswith("model.")]
    cfg = composed(*small, *words)
    OmegaConf.resolve(cfg)
    return typed(cfg), OmegaConf.to_yaml(cfg)


def trained(folder, *words: str):
    """(rows of metrics.jsonl, summary) of a run, or of one that goes on in its folder."""
    run, config = run_of(*words)
    train(run, RunWriter(folder, config, trains=True), Console())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "summary.json").read_text())


#: The model of these runs has nearly random weights, which rarely end a response by themselves.
EI = (
    "algorithm=ei", "question_batch_size=12", "group_size=4", "sft_epochs=2", "train_batch_size=5",
    "prompt.reward=own_reward:halves", "learning_rate=0.02", "prompt.stop=[a,e,i,o,u,n,s]",
)  # fmt: skip


def test_expert_iteration_counts_and_imitates_whole_credit_only_and_is_evaluated_after_each_step(tmp_path):
    words = (*EI, "n_steps=3", "interim_eval_problems=4", "sampling.temperature=0.7")
    rows, summary = trained(tmp_path / "run", *words)
    steps = [[json.loads(line) for line in lines_of(p)] for p in sorted((tmp_path / "run/rollouts").iterdir())]
    saved = [s for step in steps for s in step]
    assert no_metric_lacks_an_axis(tmp_path / "run")
    assert ({s["reward"] for s in saved}, {s["kept"] for s in saved}) == ({0.1, 1.0}, {True, False})
    assert all(s["kept"] <= (s["reward"] == 1.0) == (s["outcome"] == "correct") for s in saved)
    evaluations = [r for r in rows if "eval/accuracy" in r]
    found = [(r["eval_step"], r["rollout_step"], r["eval/problems"]) for r in evaluations]
    assert found == [(1, 0, 4), (2, 1, 4), (3, 2, 4), (4, 3, 4)]
    assert evaluations[-1]["final/problems"] == summary["eval_problems"] == summary["protocol"]["problems"] == 24
    assert summary["accuracy"] == evaluations[-1]["final/accuracy"]
    assert summary["interim_eval_problems"] == 4
    asked = [json.loads(line)["outcome"] for line in lines_of(tmp_path / "run/evals/step_00003.jsonl.gz")]
    assert summary["accuracy"] == asked.count("correct") / 24  # a bonus alone is not right
    assert sum(r.get("grading/responses", 0) for r in rows) == len(saved)  # no probe, and no evaluation
    # Entropies are of the weights that sampled, the run's first here, whatever is learned in between.
    components = build_components(run_of(*words)[0], tmp_path, Console())
    expected = components.scorer([(s["prompt_ids"], s["token_ids"]) for s in steps[0]])
    components.close()
    means = defaultdict(list)
    for s, (log_probs, entropies) in zip(steps[0], expected, strict=True):
        means["correct" if s["outcome"] == "correct" else "wrong"].append(sum(entropies) / len(entropies))
        assert s["entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-3)
        assert s["trainer_log_probs"] == pytest.approx(log_probs, abs=1e-3)
    row = next(r for r in rows if "ei/kept" in r)
    assert "rollout/mismatch_mean" not in row  # another temperature than the one that sampled
    for outcome, values in means.items():
        assert row[f"rollout/entropy_{outcome}"] == pytest.approx(sum(values) / len(values), abs=1e-4)


def test_the_documented_statuses_and_counters_are_the_ones_there_are():
    text = (Path(__file__).parents[1] / "docs/runs.md").read_text()
    for name, code in STATUSES.items():
        shown, whole = "" if code is None else f"{code} ", ended_by_itself(name)
        assert re.search(rf"\| `{name}` \| .+ \| {shown}\| {'yes' if whole else 'no'} \|", text)
    assert re.findall(r"^\| `(\w+|\w+/\w+)` \| ", text.partition("## Counters")[2], re.M) == list(Counters().row())


def test_the_only_step_of_a_run_is_traced_and_one_whose_updates_all_overflow_is_no_finished_one(tmp_path):
    """Bug: a short run has no profile, or one without its phases; weights that never moved end with exit code 0."""
    words = ("algorithm=sft", "train_batch_size=8", "n_steps=1", "eval_problems=4", "profile=true")
    float16 = ("model.dtype=float16", "length_norm=constant", "length_norm.constant=0.0001")
    _, summary = trained(tmp_path, *words, *float16)
    found = summary["status"], summary["reason"].partition(" in ")[0]
    assert found == ("diverged:gradient", "no update was taken: all 1 overflowed")
    assert draw_curves(RunFolder(tmp_path)).read_bytes().startswith(b"\x89PNG")  # which runs of tests leave out
    assert no_metric_lacks_an_axis(tmp_path)
    assert (tmp_path / "profile.md").read_text().startswith("Step 1:")
    with gzip.open(tmp_path / "profile.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert {"train", "aten::mm"} <= {event.get("name", "") for event in events}
