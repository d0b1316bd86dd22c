"""Grade the saved rollouts of a run again: `rlreason inspect RUN --regrade [--other module:function] [--write]`.

Compares the rewards that a run was trained on with the current grader, with plain math-verify and with any other
function, and shows where they disagree.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlreason.config.groups import NAMED_REWARDS
from rlreason.errors import ConfigError, DataError
from rlreason.evaluation.cases import case_line
from rlreason.grading.build import RunGrading
from rlreason.health.finding import grading_warnings
from rlreason.records.console import Console
from rlreason.records.files import ROLLOUTS, ResponseFile
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_REGRADE, Row, grade_columns
from rlreason.records.writer import rewrite_rows
from rlreason.runtime.streams import folded, print_stderr
from rlreason.runtime.subcommand import Answer
from rlreason.types import Grade

EXAMPLES = 5


def regrade(folder: Path, other: str | None, write: bool, console: Console) -> Answer:
    """Grade the rollouts of a run with several graders, including `other`; with `write`, save the current grades.

    Raise `ConfigError` if the run's own reward fails on every response; then nothing is written.
    """
    run = RunFolder(folder)
    graded, files = RunGrading.of(*run.grading()), run.rollouts()
    if not files:
        raise ConfigError(f"{folder} has no {ROLLOUTS}/: only a run that saved its rollouts can be audited")
    found = [run.rows(file, TO_REGRADE) for file in files]
    rows = [row for of_file in found for row in of_file.values()]
    if not rows:
        raise DataError(f"{files[0].path.parent} holds no responses: choose another run")
    fresh = grade_rows(rows, graded, console)
    if all(grade.outcome == "error" for grade in fresh):
        raise ConfigError(f"{graded.reward} fails on every response of {folder}: start this where it can be imported")
    marks = {"saved": [row["outcome"] == "correct" for row in rows], "now": are_correct(fresh)}
    for name, function in other_graders(graded.reward, other).items():
        marks[name] = are_correct(grade_rows(rows, graded._replace(reward=function), console))
    graders = agreement(marks)
    settings = graded.settings or "default settings"
    lines = [f"{len(rows)} responses in {len(files)} files of {folder}; {graded.reward}, {settings}"]
    if graded.reward not in NAMED_REWARDS:
        lines += [f"math-verify is left out: it compares values, and {graded.reward} has rules of its own"]
    lines += [report(graders, rows)]
    if write:
        save(files, found, fresh)
        place = files[0].path.parent
        lines += [f"wrote {len(rows)} new grades into {place}; the old ones are in previous_grade"]
    figures = {"run": folder, "responses": len(rows), "files": len(files), "written": write}
    figures |= {"reward": graded.reward, "settings": graded.settings, "graders": graders}
    return Answer(folded("\n".join(lines), console.width), figures)


def other_graders(reward: str, other: str | None) -> dict[str, str]:
    """Return name -> reward function: what a run's grading is compared with."""
    graders = {"math-verify": f"rlreason.grading.peers:{reward}_math_verify"} if reward in NAMED_REWARDS else {}
    return graders | ({other: other} if other else {})


def are_correct(grades: Sequence[Grade]) -> list[bool]:
    """Return for each response whether its grade counts as correct."""
    return [grade.outcome == "correct" for grade in grades]


def grade_rows(rows: Sequence[Row], graded: RunGrading, console: Console) -> list[Grade]:
    """Grade the rows' responses again, in order; the grader's warnings go to stderr.

    Raise `ConfigError` before grading if a function cannot be loaded.
    """
    with graded.grader() as grader, console.wait(f"grading with {graded.reward}"):
        if grader.plugin and (why := graded.lacking(grader)):
            raise ConfigError(f"{graded.reward}: {why}")
        grades = grader.grade_batch([row["response"] for row in rows], [row["gold"] for row in rows])
        for warning in [*grading_warnings(grades), *([grader.broken] if grader.broken else [])]:
            print_stderr(f"{graded.reward}: {warning}")
    return grades


def agreement(marks: Mapping[str, Sequence[bool]]) -> dict[str, dict[str, Any]]:
    """Return for each grader its share of correct responses, its agreement with `now`, and the rows that differ.

    marks: grader -> whether it calls each response correct. `only_it`, `only_now`: indices of rows that only this
    grader, or only the current one, calls correct.

    >>> agreement({"saved": [True, True], "now": [True, False]})["saved"]
    {'correct': 1.0, 'agrees': 0.5, 'only_it': [1], 'only_now': []}
    """
    now = marks["now"]
    graders = {}
    for name, correct in marks.items():
        only_it = [place for place in range(len(now)) if correct[place] and not now[place]]
        only_now = [place for place in range(len(now)) if now[place] and not correct[place]]
        total = max(1, len(now))
        agrees = 1 - (len(only_it) + len(only_now)) / total
        graders[name] = {
            "correct": sum(correct) / total,
            "agrees": agrees,
            "only_it": only_it,
            "only_now": only_now,
        }
    return graders


def report(graders: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> str:
    """Return a line per grader, and examples of its disagreements with the current one."""
    width = max(map(len, graders)) + 2
    lines = ["", f"{'grader':<{width}}{'right':>8}{'agree':>8}{'only it':>9}{'only now':>10}"]
    examples = []
    for name, found in graders.items():
        more, fewer = found["only_it"], found["only_now"]
        lines.append(f"{name:<{width}}{found['correct']:>8.1%}{found['agrees']:>8.1%}{len(more):>9}{len(fewer):>10}")
        for title, places in ((f"right only for {name}", more), (f"wrong only for {name}", fewer)):
            examples += [f"\n{title}:"] * bool(places) + [case_line(rows[place]) for place in places[:EXAMPLES]]
    return "\n".join(lines + examples)


def save(files: Sequence[ResponseFile], found: Sequence[Mapping[int, Row]], grades: Sequence[Grade]) -> None:
    """Replace each file as a whole, so that an interruption leaves every file either old or new.

    found: for each file its rows by line number; grades: of all rows, in order. Other lines are unchanged.
    """
    left = iter(grades)
    for file, rows in zip(files, found, strict=True):
        rewrite_rows(file.path, {number: regraded(row, next(left)) for number, row in rows.items()})


def regraded(row: Row, grade: Grade) -> Row:
    """Return the row with its new grade, keeping the grade that the run was trained on."""
    new = {name: value for name, value in grade_columns(grade).items() if name != "path"}
    previous = row.get("previous_grade") or {key: row.get(key) for key in new}
    return {**row, **new, "previous_grade": previous}
