r"""A guess in plain words at why a response earned what it earned. Pure functions of text.

A guess and no verdict: it reads the response as the grader does, then tries looser readings.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

from rlreason.grading import Grader
from rlreason.grading.formats import SHOWN_CHARS
from rlreason.grading.ground_truth import reference_answers
from rlreason.records.files import INCIDENTS
from rlreason.runtime.text import shorten

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
COARSEST = 0.05  # of a value: 0.3 and 0.33 are thirds, rounded


class Reason(NamedTuple):
    """A guess at why a response earned what it did."""

    kind: str  # the same words for the same mistake, so that they can be counted
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def why(response: str, ground_truth: Any, grader: Grader, outcome: str, truncated: bool) -> list[Reason]:
    """The likeliest reason first, then what else is worth knowing; `grader` has the settings of the run."""
    cut = [Reason("cut at the token limit")] if truncated else []
    if outcome == "correct":
        return [Reason("right"), *cut]
    if grader.plugin and outcome in ("error", "timeout"):
        what = "raised, or returned no number" if outcome == "error" else "took longer than grading.timeout_s"
        return [Reason(f"no verdict: {grader.plugin} {what}", f"see {INCIDENTS}"), *cut]
    if grader.plugin:
        return [Reason("not earned", f"{grader.plugin} has rules of its own"), *cut]
    references, read = reference_answers(ground_truth) or [], grader.read(response)
    if not read.formatted:
        number = last_number(response, references, grader)
        found = [Reason("the last number in it is the right one", number)] if number else []
        return [Reason(read.reason, read.detail), *cut, *found]
    if outcome not in ("wrong", "correct"):
        return [Reason("the grader could not work it out", outcome), *cut]
    if read.answer is None:
        return [Reason(read.reason, read.detail), *cut]
    return [answer_reason(read.answer, references, grader), *cut]


def answer_reason(answer: str, references: list[str], grader: Grader) -> Reason:
    """How a formatted answer misses the reference answers.

    >>> str(answer_reason("It costs 18 dollars a day", ["18"], Grader()))
    "a unit or a sentence around the right answer: 'It costs 18 dollars a day'"
    >>> str(answer_reason("17", ["18"], Grader()))
    "another answer: '17' instead of '18'"
    """
    if not answer.strip():
        return Reason("the answer is empty")
    shown = repr(shorten(answer, SHOWN_CHARS))
    if _right(answer, references, grader):
        return Reason("right by the grader's rules of now, not of then", shown)
    if _right(answer, references, grader, percent=True):
        return Reason("right but for a percent sign (grading.percent=false)", shown)
    if _right(answer, references, grader, rel_tol=COARSEST):
        return Reason(f"rounded further than grading.rel_tol={grader.grading.rel_tol:g} allows", shown)
    if _right(answer, references, grader, extract="sentence"):
        return Reason("a unit or a sentence around the right answer", shown)
    if any(_bare(answer) == _bare(reference) for reference in references):
        return Reason("equal once marks are stripped: parser suspect", shown)
    if any(_right(number, references, grader) for number in _NUMBER.findall(answer)):
        return Reason("the right number is one of several", shown)
    if not re.search(r"\d", answer) and any(re.search(r"\d", reference) for reference in references):
        return Reason("no number in the answer", shown)
    return Reason("another answer", f"{shown} instead of {shorten(' or '.join(references), SHOWN_CHARS)!r}")


def last_number(response: str, references: list[str], grader: Grader) -> str:
    """The last number of the response where it equals a reference answer, else nothing."""
    numbers = [n.rstrip(",") for n in _NUMBER.findall(response)]
    return numbers[-1] if numbers and _right(numbers[-1], references, grader) else ""


def _right(answer: str, references: list[str], grader: Grader, **other: Any) -> bool:
    """Whether the answer is one of these by the exact rules, under the grader's settings but for the `other` ones."""
    judge = Grader(replace(grader.grading, **other)) if other else grader
    return any(judge.same(answer, reference) for reference in references)


def _bare(text: str) -> str:
    return re.sub(r"[^\w.]+", "", text).lower().rstrip(".")
