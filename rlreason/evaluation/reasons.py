r"""A guess in plain words at why a response earned what it earned. Pure functions of text.

A guess and no verdict: it reads the response as the grader's format rules do, then tries looser readings.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

from rlreason.answers.decide import decide, decide_pair
from rlreason.answers.verdict import Settings, gold_texts
from rlreason.grading.formats import THINK_TO_ANSWER, Extract, candidates
from rlreason.grading.grader import FORMATS
from rlreason.grading.run_grading import RunGrading

_ATTRIBUTE = re.compile(r"<answer\s[^>]*>")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SHOWN_CHARS = 60
COARSEST = 0.05  # of a value: 0.3 and 0.33 are thirds, rounded


class Reason(NamedTuple):
    """A guess at why a response earned what it did."""

    kind: str  # the same words for the same mistake, so that they can be counted
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def why(response: str, gold: Any, graded: RunGrading, outcome: str, truncated: bool) -> list[Reason]:
    """The likeliest reason first, then what else is worth knowing; judged by the settings the run was graded with."""
    cut = [Reason("cut at the token limit")] if truncated else []
    if outcome == "correct":
        return [Reason("right"), *cut]
    reward = graded.reward
    if reward not in FORMATS:
        return [Reason("not earned", f"{reward} has rules of its own"), *cut]
    golds = gold_texts(gold) or []
    formatted, answer = FORMATS[reward](response)
    if not formatted:
        stated = states(response, golds, graded.comparison)
        found = [Reason("the last number in it is the right one", stated)] if stated else []
        return [format_reason(response, reward), *cut, *found]
    if outcome not in ("wrong", "correct"):
        return [Reason("the grader could not work it out", outcome), *cut]
    return [answer_reason(answer, golds, graded), *cut]


def format_reason(response: str, reward: str) -> Reason:
    r"""What is missing for the format reward.

    >>> str(format_reason("so 4 </think> It is <answer>4</answer>", "r1_zero"))
    'text between </think> and <answer>: It is'
    >>> str(format_reason("so it is 4", "question_only"))
    'no \\boxed{}'
    """
    if reward == "question_only":
        return Reason("\\boxed is never closed" if "\\boxed" in response else "no \\boxed{}")
    if attribute := _ATTRIBUTE.search(response):
        return Reason("the answer tag has attributes", _short(attribute.group()))
    if "</think>" not in response:
        return Reason("no </think>", "it answers without ending its thinking" if "<answer>" in response else "")
    if "<answer>" not in response:
        return Reason("no <answer> tag")
    if THINK_TO_ANSWER in response:
        return Reason("no </answer>")
    before, _, _ = response.partition("<answer>")
    _, thought, between = before.rpartition("</think>")
    if not thought:
        return Reason("<answer> comes before </think>")
    if between.strip():
        return Reason("text between </think> and <answer>", _short(between.strip()))
    return Reason("not exactly one space between </think> and <answer>", repr(between))


def answer_reason(answer: str | None, golds: list[str], graded: RunGrading) -> Reason:
    """How a formatted answer misses the gold.

    >>> str(answer_reason("It costs 18 dollars a day", ["18"], RunGrading("r1_zero", {})))
    "a unit or a sentence around the right answer: 'It costs 18 dollars a day'"
    >>> str(answer_reason("17", ["18"], RunGrading("r1_zero", {})))
    "another answer: '17' instead of '18'"
    """
    if answer is None:
        return Reason("no answer can be read", "text behind </answer>")
    if not answer.strip():
        return Reason("the answer is empty")
    shown = repr(_short(answer.strip()))
    settings = graded.comparison
    if _right(answer, golds, graded.extract, settings):
        return Reason("right by the grader's rules of now, not of then", shown)
    if _right(answer, golds, graded.extract, replace(settings, percent=True)):
        return Reason("right but for a percent sign (grading.percent=false)", shown)
    if _right(answer, golds, graded.extract, replace(settings, rel_tol=COARSEST)):
        return Reason(f"rounded further than grading.rel_tol={settings.rel_tol:g} allows", shown)
    if _right(answer, golds, "sentence", settings):
        return Reason("a unit or a sentence around the right answer", shown)
    if any(_bare(answer) == _bare(gold) for gold in golds):
        return Reason("equal once marks are stripped: parser suspect", shown)
    if any(_equal(number, gold, settings) for number in _NUMBER.findall(answer) for gold in golds):
        return Reason("the right number is one of several", shown)
    if not re.search(r"\d", answer) and any(re.search(r"\d", gold) for gold in golds):
        return Reason("no number in the answer", shown)
    return Reason("another answer", f"{shown} instead of {_short(' or '.join(golds))!r}")


def states(response: str, golds: list[str], settings: Settings) -> str:
    """The last number of the response where it equals a gold answer, else nothing."""
    numbers = [n.rstrip(",") for n in _NUMBER.findall(response)]
    return numbers[-1] if numbers and any(_equal(numbers[-1], gold, settings) for gold in golds) else ""


def _right(answer: str, golds: list[str], extract: Extract, settings: Settings) -> bool:
    return decide(candidates(answer, extract), golds, settings)[0].outcome == "correct"


def _equal(answer: str, gold: str, settings: Settings) -> bool:
    verdict = decide_pair(answer, gold, settings)
    return verdict is not None and verdict.outcome == "correct"


def _bare(text: str) -> str:
    return re.sub(r"[^\w.]+", "", text).lower().rstrip(".")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + " ..."
