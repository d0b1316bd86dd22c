"""The sections of a report: tables, pass@k, log, what differs, facts, warnings, and problems side by side."""

import json
from pathlib import Path

import numpy as np
import pytest
from report_objects import answered

from rlreason.health.monitors import Finding
from rlreason.report.content import Series
from rlreason.report.read import read_study
from rlreason.report.sections import (
    LONGEST_RESPONSE,
    cases_of,
    facts_of,
    health_of,
    health_table,
    log_of,
    passes_table,
    settings_table,
    warnings_of,
)
from rlreason.report.study import Answers, GradedProblem, Study
from rlreason.report.verdicts import verdicts_of
from tests.sweep_folders import answers, sweep

NONE = "\N{EN DASH}"


def study(chances: dict[str, float], seeds: tuple[int, ...] = (0, 1, 2, 3)) -> Study:
    made = answered(**{name: {seed: answers(seed, chance) for seed in seeds} for name, chance in chances.items()})
    for run in made.runs:
        run.seconds, run.totals = 60.0, {"step": 40.0, "tokens": 2e5, "updates": 40.0}
        steps = {"step": np.array([0.0, 20.0, 40.0])}
        run.series = {"eval/accuracy": Series(steps, np.array([0.1, 0.9, run.accuracy]))}
    return made


def test_the_table_of_settings_has_verdict_interval_and_the_biased_best():
    of = study({"1": 0.5, "2": 0.8})
    table = settings_table(of, verdicts_of(of))
    first, second = (dict(zip(table.head, row, strict=True)) for row in table.rows)
    assert (first["verdict"], first["difference"]) == ("reference", NONE)
    assert second["verdict"].startswith("\N{BLACK UP-POINTING TRIANGLE} better\np")
    low, high = (float(part.strip("%")) for part in first["accuracy"].split("\n")[1].split(" to "))
    assert low < 100 * np.mean(of.reference.accuracies) < high
    assert first["best checkpoint"] == "90.0%*\nbest of 3"
    assert (first["seeds"], first["time a run"], first["tokens a run"]) == ("4 of 4", "60 s", "0.20 M")
    of.runs[0].series, of.settings[0].runs = {}, of.runs[:1]
    assert settings_table(of, []).rows[0][5] == NONE


def test_pass_at_k_needs_samples_and_before_and_after_are_of_the_same_problems():
    """The evaluation before training asks fewer problems: what only the final one asks is no progress."""
    of = study({"1": 0.5})
    assert passes_table(of) is None
    for one in of.runs:
        hard = {f"hard{k}": GradedProblem(1, 4) for k in range(10)}
        one.start = Answers(hard)
        one.final = Answers({**hard, **{f"easy{k}": GradedProblem(4, 4) for k in range(30)}})
    table = passes_table(of)
    assert list(table.head) == ["setting", "training", "k = 1", "k = 2", "k = 4"]
    assert table.rows[0][1:] == ["before", "25.0%", "50.0%", "100.0%"]
    assert table.rows[1][2:] == table.rows[0][2:]


def test_the_table_of_health_counts_problems_and_no_notes():
    of = study({"1": 0.5}, seeds=(0, 1))
    note = Finding("no_live_group", "a step was mastered", problem=False, step=3)
    of.runs[0].findings, of.runs[1].findings = [note], [Finding("truncated", "90% were cut", step=2), note]
    assert health_of(of) == "something is wrong in 1 of 2 runs"
    assert [row[1:4] for row in health_table(of).rows] == [["truncated\n90% were cut", "1 of 2\nseed 1", "2"]]


def test_log_and_facts_are_of_all_runs():
    of = study({"1": 0.5, "2": 0.5})
    diverged, running = of.runs[:2]
    diverged.status, diverged.reason = "diverged:loss", "step 3: the loss is no number"
    running.status, running.totals, running.accuracy = "running", {"step": 7.0}, None
    of.runs[2].settings["data.overlap"], of.runs[4].protocol = "refuse", {"hash": "aa"}
    rows = log_of(of).rows
    assert [row[2] for row in rows[:3]] == ["diverged", "running", "finished"]
    assert (rows[0][3], rows[1][4]) == (diverged.reason, "7 of 40")
    facts = dict(facts_of(of))
    assert facts["Budget"] == "40 steps; 0.20 M tokens a run; 1 run ended early; 1 run still running"
    assert (facts["Protocol"], facts["Training and validation overlap"]) == ("aa", "none: it is refused")
    assert facts["Cost"] == "1.40 M tokens sampled so far; 8 ended, after 8 min"
    running.status, of.runs[5].protocol = "finished", {"hash": "bb"}
    assert dict(facts_of(of))["Protocol"] == "aa, bb: they differ"


def test_a_few_problems_are_shown_over_training_side_by_side(tmp_path: Path):
    sweep(tmp_path, "lr", ["1", "2"], lambda value, seed: answers(seed, 0.5 + 0.4 * (value == "2"), 40))
    for place in tmp_path.glob("lr=*"):
        lines = (place / "evals/step_00040.jsonl").read_text().splitlines()
        rows = [json.loads(line) | {"response": "x" * 700, "gold": "7", "format_reward": 1.0} for line in lines]
        for step in (0, 10, 40):
            text = "".join(json.dumps(row | {"step": step}) + "\n" for row in rows)
            (place / f"evals/step_{step:05d}.jsonl").write_text(text)
    cases = cases_of(read_study([tmp_path]))
    assert 1 <= len(cases) <= 4
    for shown in (shown for case in cases for shown in case.steps.values()):
        assert [one["setting"] for one in shown] == ["1", "2"]
        assert all(one["text"].endswith(f" ... {700 - LONGEST_RESPONSE} more characters") for one in shown)
        assert all(one["where"].startswith(f"lr={one['setting']},seed=0/evals/step_000") for one in shown)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.settings.update({"data.overlap": "allow"}), "may overlap"),
        (lambda r: r.totals.update({"tokens": 2e6}) if r.setting[0][1] == "2" else None, "2: 10.0 times"),
        (lambda r: r.series.update({"eval/grading_failures": Series({}, np.ones(2))}), "16 responses of evaluations"),
        (lambda r: setattr(r, "provenance", {"code": str(r.seed)}), "Not all runs had the same code"),
    ],
)
def test_what_is_odd_is_said_and_nothing_else(change, says):
    of = study({"1": 0.5, "2": 0.8})
    assert not any(says in line for line in warnings_of(of))
    for one in of.runs:
        change(one)
    assert any(says in line for line in warnings_of(of))
