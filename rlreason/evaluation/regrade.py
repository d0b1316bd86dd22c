"""Grade the saved responses of a run again, and compare graders with each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.errors import ConfigError
from rlreason.grading.grader import RunGrading, grading_warnings
from rlreason.records.console import Console
from rlreason.records.rows import Row, grade_columns
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.runtime.streams import print_stderr
from rlreason.types import Grade


def opinions(rows: Sequence[Row], graded: RunGrading, console: Console) -> list[bool | None]:
    """Return plain math-verify's verdict on each formatted answer; None where it has none.

    `ConfigError` for a reward without a second grader.
    """
    formatted = [number for number, row in enumerate(rows) if row["format_reward"] > 0]
    grades = grade_rows([rows[number] for number in formatted], second_grader(graded), console) if formatted else []
    verdicts: list[bool | None] = [None] * len(rows)
    for number, grade in zip(formatted, grades, strict=True):
        verdicts[number] = None if grade.outcome in ("timeout", "error") else grade.outcome == "correct"
    return verdicts


def second_grader(graded: RunGrading) -> RunGrading:
    """Return math-verify with the run's format."""
    if graded.reward not in NAMED_REWARDS:
        raise ConfigError(f"{graded.reward} has no second grader: only {' and '.join(NAMED_REWARDS)} have one")
    return graded._replace(reward=f"rlreason.grading.symbolic:{graded.reward}_math_verify")


def grade_rows(rows: Sequence[Row], graded: RunGrading, console: Console) -> list[Grade]:
    """Grade the rows' responses again, in order; the grader's warnings go to stderr.

    Raise `ConfigError` before grading if a function cannot be loaded.
    """
    with graded.grader() as grader, console.wait(f"grading with {graded.reward}"):
        if grader.plugin and (why := grader.wait()):
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
    now, graders = marks["now"], dict[str, dict[str, Any]]()
    for name, correct in marks.items():
        only_it = [place for place, right in enumerate(correct) if right and not now[place]]
        only_now = [place for place, right in enumerate(correct) if now[place] and not right]
        agrees = 1 - (len(only_it) + len(only_now)) / len(now)
        graders[name] = {"correct": sum(correct) / len(now), "agrees": agrees, "only_it": only_it, "only_now": only_now}
    return graders


def regraded(row: Row, grade: Grade) -> Row:
    """Return the row with its new grade, keeping the grade that the run was trained on."""
    new = {name: value for name, value in grade_columns(grade).items() if name != "path"}
    previous = row.get("previous_grade") or {key: row.get(key) for key in new}
    return {**row, **new, "previous_grade": previous}
