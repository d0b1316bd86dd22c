"""What given folders become: settings, seeds, a reference; and a report's tables, log, facts, warnings and cases."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_objects import answered

from rlreason.health.monitors import Finding
from rlreason.report import sections
from rlreason.report.content import PLUS_MINUS, Series
from rlreason.report.read import differing_keys, read_study
from rlreason.report.study import GradedProblem, Study
from rlreason.report.verdicts import verdicts_of
from tests.sweep_folders import CONFIG, PROTOCOL, answers, cut_short, ended, looked, sweep

ALL, NONE = [0, 1, 2, 3], sections.NONE


def loose(folder: Path, settings: str = "", seed: int = 0) -> Path:
    ended(folder, answers(seed, 0.5), config=f"{CONFIG}seed: {seed}\n{settings}")
    return folder


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """A sweep of three learning rates, each better than the one before."""
    folder = tmp_path / "s"
    sweep(folder, "lr", ["1", "2", "3"], lambda value, seed: answers(seed, int(value) / 4), reference={"lr": "2"})
    return folder


def seen(study: Study) -> dict[str, list[int]]:
    return {one.label: [run.seed for run in one.runs] for one in study.settings}


def test_settings_of_loose_runs(tmp_path: Path):
    """Bug: seeds of one setting count as two settings, also where each has a start model of its own, or two as one."""
    settings = "optimizer: {{lr: {}}}\nthreads: {}\n"
    runs = [loose(tmp_path / f"{lr}{s}", settings.format(lr, s + 1), s) for lr in (1, 2) for s in (1, 0)]
    study = read_study(runs)
    assert (seen(study), study.axes) == ({"1": [0, 1], "2": [0, 1]}, ["optimizer.lr"])
    many = [loose(tmp_path / name, "".join(f"k{k}: {name}\n" for k in range(6))) for name in ("old", "new")]
    assert [dict(one.key)["run"] for one in read_study(many).settings] == ["old", "new"]
    stages = [
        loose(tmp_path / f"{n}/seed={s}", f"n_steps: {n}\nmodel: {{path: before/seed={s}}}\n", s)
        for n in (7, 8) for s in (0, 1)
    ]  # fmt: skip
    assert seen(read_study(stages)) == {"7": [0, 1], "8": [0, 1]}
    models = [loose(tmp_path / f"of/seed={s}", f"model: {{path: before/seed={s}}}\n") for s in (0, 1)]
    assert [*seen(read_study(models)).values()] == [[0], [0]]  # of one seed each: these are two models
    twice = [loose(tmp_path / place / "run") for place in ("monday", "tuesday")]
    assert list(seen(read_study(twice))) == ["monday/run", "tuesday/run"]
    base = {"seed": 0, "model.path": "a", "save_model": True, "hydra.run.dir": "x"}  # what changes no figure
    assert differing_keys([base, base | {"seed": 1, "save_model": False, "hydra.run.dir": "y"}]) == []


def test_the_reference(rates: Path, tmp_path: Path):
    """Bug: another setting than the reference is compared with, or a chosen one without a caveat."""
    assert list(seen(read_study([rates]))) == ["2", "1", "3"]
    part = read_study([rates / "lr=3", rates / "lr=2"])
    assert seen(part) == {"3": ALL, "2": ALL}
    assert part.notes[0].startswith("lr=3 was the best of 3")
    assert read_study([rates / "lr=1", rates / "lr=2"]).notes == []
    report = sections.build_report(read_study([rates / "lr=1", rates / "lr=3"]))  # chosen on these same problems
    assert ("3 was chosen" in report.verdicts[0].sentence, "the best of 3" in report.warnings[-1]) == (True, True)
    sweep(tmp_path / "t", "lr", ["1", "2"], lambda value, seed: answers(seed, 0.5), reference={"lr": "9"})
    twice = read_study([tmp_path / "t", tmp_path / "t"])
    assert (seen(twice), twice.reference.label, len(twice.problems)) == ({"1": ALL, "2": ALL}, "1", 8)


def study(chances: dict[str, float], seeds: tuple[int, ...] = (0, 1, 2, 3)) -> Study:
    made = answered(**{name: {seed: answers(seed, chance) for seed in seeds} for name, chance in chances.items()})
    for run in made.runs:
        run.seconds, run.totals = 60.0, {"step": 40.0, "tokens": 2e5, "updates": 40.0}
        steps = {"step": np.array([0.0, 20.0, 40.0])}
        run.series = {"eval/accuracy": Series(steps, np.array([0.1, 0.9, run.accuracy]))}
    return made


def test_settings_table():
    """Bug: the interval lacks its mean, or a column shows the figure of another."""
    of = study({"1": 0.5, "2": 0.8})
    table = sections.settings_table(of, verdicts_of(of))
    first, second = (dict(zip(table.head, row, strict=True)) for row in table.rows)
    assert (first["verdict"], first["difference"]) == ("reference", "\N{EN DASH}")
    assert second["verdict"].startswith("\N{BLACK UP-POINTING TRIANGLE} better\np")
    mean, half = first["accuracy"].split(f"\n{PLUS_MINUS} ")
    assert float(mean.strip("%")) == pytest.approx(100 * np.mean(of.reference.accuracies), abs=0.05)
    assert 0 < float(half) < 50
    assert (first["seeds"], first["time a run"], first["tokens a run"]) == ("4 of 4", "60 s", "0.20 M")


def test_more_validation_sets_are_judged_as_one_family(tmp_path):
    """Bug: a verdict on a set is corrected as if it were the only one, or two ways to measure it are compared."""
    sweep(tmp_path / "s", "lr", "123", lambda value, seed: answers(seed, 0.4))
    for folder in (tmp_path / "s").glob("lr=*"):
        lr, seed = folder.name[3], int(folder.name[-1])
        ended(tmp_path / "other" / folder.name, answers(seed, 0.6 if lr == "2" else 0.4))
        shutil.copytree(tmp_path / "other" / folder.name / "evals", folder / "evals" / "hard")
        summary = json.loads((folder / "summary.json").read_text())
        summary["sets"] = {"hard": {"protocol": PROTOCOL | {"data": "e" if lr == "3" else "d"}}}
        (folder / "summary.json").write_text(json.dumps(summary))
    of = read_study([tmp_path / "s"])
    found = verdicts_of(of)
    assert [(v.setting, v.of_set, v.outcome) for v in found] == [
        ("2", "", "same"), ("3", "", "same"), ("2", "hard", "better"), ("3", "hard", ""),
    ]  # fmt: skip
    alone = verdicts_of(replace(of.sets["hard"], settings=of.sets["hard"].settings[:2]))
    assert (found[2].adjusted_p, found[3].word) == (pytest.approx(3 * alone[0].adjusted_p), "not compared")
    assert looked(tmp_path / "s", 4)[0] == {(("lr", "2"),): "same", (("lr", "3"),): "same"}  # by their own
    assert not [*sections.warnings_of(of)]
    shutil.rmtree(tmp_path / "s/lr=2,seed=1/evals/hard")
    assert [*sections.warnings_of(read_study([tmp_path / "s"]))] == [
        "Not measured on hard, and left out there: lr=2,seed=1."
    ]
    rows = sections.sets_table(of, found).rows
    assert [(row[:2], row[2] != NONE) for row in rows] == [([lr, "hard"], True) for lr in "123"]
    of.runs[0].sets = of.runs[0].final = {}  # it has not come to that
    assert not [*sections.warnings_of(of)]


def test_who_cannot_be_told_from_whom():
    """Bug: pairs are corrected as if each were alone, or a pair that was measured differently counts as equal."""
    right = {f"m{k}": {0: np.arange(200) < n} for k, n in enumerate((100, 160, 102, 105))}
    of = answered(**right)
    assert sections.measured_table(of, sections.measured_of(of)) is None  # trained, as far as is known
    for run in of.runs:
        run.settings = {"algorithm": "evaluate"}
    table = sections.measured_table(of, sections.measured_of(of))
    assert [(row[1], row[4]) for row in table.rows] == [("m1", NONE), ("m3", "3, 4"), ("m2", "2, 4"), ("m0", "2, 3")]
    assert verdicts_of(of)[2].adjusted_p < 0.05  # m3 beats m0 among three comparisons, and not among six
    of.runs[1].protocol = {"prompt": "another"}
    of.runs[0].protocol = of.runs[2].protocol = of.runs[3].protocol = {"prompt": "one"}
    table = sections.measured_table(of, sections.measured_of(of))
    assert table.rows[0][4] == "2 (not compared), 3 (not compared), 4 (not compared)"


def test_pass_at_k():
    """The evaluation before training asks fewer problems: what only the final one asks is no progress."""
    of = study({"1": 0.5})
    assert sections.passes_table(of) is None
    for one in of.runs:
        one.start = {f"hard{k}": GradedProblem("", 1, 4) for k in range(10)}
        one.final = one.start | {f"easy{k}": GradedProblem("", 4, 4) for k in range(30)}
    table = sections.passes_table(of)
    assert list(table.head) == ["setting", "training", "k = 1", "k = 2", "k = 4"]
    assert table.rows[0][1:] == ["before", "25.0%", "50.0%", "100.0%"]
    assert table.rows[1][2:] == table.rows[0][2:]


def test_log_health_and_facts():
    """Bug: a note counts as a problem, or a diverged or running run as finished."""
    of = study({"1": 0.5, "2": 0.5})
    diverged, running = of.runs[:2]
    note = Finding("no_live_group", "a step was mastered", problem=False, step=3)
    diverged.findings, running.findings = [note], [Finding("truncated", "90% were cut", step=2), note]
    assert sections.health_of(of) == "something is wrong in 1 of 8 runs"
    assert [row[1:4] for row in sections.health_table(of).rows] == [["truncated\n90% were cut", "1 of 4\nseed 1", "2"]]
    diverged.status, diverged.reason = "diverged:loss", "step 3: the loss is no number"
    running.status, running.totals, running.final = "running", {"step": 7.0}, {}
    of.runs[2].settings["data.overlap"], of.runs[4].protocol = "refuse", {"hash": "aa"}
    rows = sections.log_of(of).rows
    assert [row[2] for row in rows[:3]] == ["diverged", "running", "finished"]
    assert (rows[0][3], rows[1][4]) == (diverged.reason, "7 of 40")
    facts = dict(sections.facts_of(of))
    assert facts["Budget"] == "40 steps; 0.20 M tokens a run; 1 run ended early; 1 run still running"
    assert (facts["Protocol"], facts["Training and validation overlap"]) == ("aa", "none: it is refused")
    assert facts["Cost"] == "1.40 M tokens sampled so far; 8 ended, after 8 min"


def test_cases(rates: Path):
    """Bug: responses of different problems or steps stand side by side, or a damaged file of some ends the report."""
    for place in rates.glob("lr=*"):
        lines = (place / "evals/step_00040.jsonl").read_text().splitlines()
        rows = [json.loads(line) | {"response": "x" * 700, "gold": "7", "format_reward": 1.0} for line in lines]
        for step in (0, 10, 40):
            (place / f"evals/step_{step:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = sections.cases_of(read_study([rates]))
    cut_short(rates / "lr=1,seed=0/evals/step_00010.jsonl")
    assert len(sections.cases_of(read_study([rates]))) == len(cases)
    assert 1 <= len(cases) <= 4
    for shown in (shown for case in cases for shown in case.steps.values()):
        assert {one["setting"] for one in shown} <= {"1", "2", "3"}
        assert all(f"[... {700 - sections.LONGEST_RESPONSE} characters ...]" in one["text"] for one in shown)
        assert all(one["where"].startswith(f"lr={one['setting']},seed=0/evals/step_000") for one in shown)


COPY = {f"p{k}": GradedProblem("", k % 2, 1) for k in range(16)}
WARNINGS = (
    (lambda r: r.settings.update({"data.overlap": "allow"}), "may overlap"),
    (lambda r: r.totals.update({"tokens": 2e6}) if r.setting[0][1] == "2" else None, "2: 10.0 times"),
    (lambda r: r.series.update({"eval/grading_failures": Series({}, np.ones(2))}), "16 responses of evaluations"),
    (lambda r: setattr(r, "provenance", {"code": str(r.seed)}), "Not all runs had the same code"),
    (lambda r: setattr(r, "final", COPY) if r.setting[0][1] == "1" else None, "All 4 seeds of 1 gave the same answers"),
)


def test_warnings():
    """Bug: what makes runs less comparable is not said, or is said of all."""
    of = study({"1": 0.5, "2": 0.8})
    assert list(sections.warnings_of(of)) == []
    for number, (change, says) in enumerate(WARNINGS, 1):
        for one in of.runs:
            change(one)
        found = list(sections.warnings_of(of))
        assert (len(found), any(says in line for line in found)) == (number, True)
