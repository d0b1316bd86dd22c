"""Compare answers with reference answers in this process; sketches show quickly which surely differ."""

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from rlreason.grading.answers import compare, lexer, structures
from rlreason.grading.answers.equality import counts, points
from rlreason.grading.answers.evaluate import Calculator, UndefinedError, precision
from rlreason.grading.answers.lexer import ComparisonSettings, RefusedError, UnreadableError, Verdict
from rlreason.grading.answers.normalize import clean, plain
from rlreason.grading.answers.parser import symbols
from rlreason.grading.answers.values import Quantity, Value, Words

MAX_CHARS = 4_000  # beyond, answers are compared as strings only
_RANK = {"correct": 0, "timeout": 1, "error": 2, "refused": 3, "wrong": 4, "unformatted": 5}
_QUICK = re.compile(r"([+-]?)\\?\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\.?")


def decide(
    candidates: Sequence[str], references: Sequence[str], settings: ComparisonSettings
) -> tuple[Verdict, list[tuple[str, str]]]:
    """Return the best verdict over all pairs that can be decided here, and the pairs that cannot."""
    best, undecided = Verdict("wrong", "undecided"), []
    for answer in candidates:
        for reference in references:
            verdict = decide_pair(answer, reference, settings)
            if verdict is None:
                undecided.append((clean(answer), clean(reference)))
                continue
            best = better(best, verdict)
            if best.outcome == "correct":
                return best, []
    return best, undecided


def better(first: Verdict, second: Verdict) -> Verdict:
    """Return the better verdict: correct first, then failures of the grader, then wrong."""
    if first.path == "undecided":
        return second
    return second if _RANK[second.outcome] < _RANK[first.outcome] else first


def decide_pair(answer: str, reference: str, settings: ComparisonSettings) -> Verdict | None:
    """Return the verdict, or None when only the symbolic library can decide."""
    answer, reference = answer.strip(), reference.strip()
    if not answer or not reference:
        return Verdict("wrong", "empty")
    if answer == reference:
        return Verdict("correct", "text")
    if max(len(answer), len(reference)) > MAX_CHARS:
        return Verdict("wrong", "too_long")
    first, second = _QUICK.fullmatch(answer), _QUICK.fullmatch(reference)
    if first and second:
        return _verdict(_quick(first) == _quick(second), "number")
    try:
        return _decide_values(answer, reference, settings)
    except RefusedError:
        return Verdict("refused", "guard")
    except Exception as error:  # a bug in the rules must not end a run
        return Verdict("error", f"internal_{type(error).__name__}")


def _decide_values(answer: str, reference: str, settings: ComparisonSettings) -> Verdict | None:
    (answer, plain_answer), (reference, plain_reference) = _spelled(answer), _spelled(reference)
    if not answer or not reference:
        return Verdict("wrong", "empty")
    if plain_answer == plain_reference:
        return Verdict("correct", "text")
    right, left = value_of(reference), value_of(answer)
    if isinstance(left, RefusedError) or isinstance(right, RefusedError):
        raise RefusedError
    if left is None or right is None:
        readable = left if right is None else right
        if isinstance(readable, Words) or not (_sendable(answer, left) and _sendable(reference, right)):
            return Verdict("wrong", "text")
        for text, value in ((answer, left), (reference, right)):
            lexer.check(text)
            if value is not None:
                compare.equal(value, value, settings)  # raises for a value that must not reach the library either
        return None
    try:
        return _verdict(compare.equal(left, right, settings), _path(left, right))
    except UndefinedError:
        return Verdict("wrong", "undefined")


@lru_cache(maxsize=8192)
def _spelled(text: str) -> tuple[str, str]:
    """Return the cleaned text, and its plain form, by which two words or formulas are compared."""
    cleaned = clean(text)
    return cleaned, plain(cleaned)


@lru_cache(maxsize=8192)
def value_of(text: str) -> Value | RefusedError | None:
    """Return the value of a cleaned text; None when it is unreadable. Refusals are cached too."""
    try:
        return structures.read(text)
    except (UnreadableError, UndefinedError):
        return None
    except RefusedError as refusal:
        return RefusedError(*refusal.args)  # a new one: the caught one keeps its frames alive


def _sendable(text: str, value: Value | None) -> bool:
    """Whether the library may get a text: one that was parsed here, or one of commands that it knows."""
    return value is not None or lexer.readable(text)


def _path(left: Value, right: Value) -> str:
    if isinstance(left, Words) or isinstance(right, Words):
        return "text"
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        return "number" if left.node.op == right.node.op == "number" else "expression"
    return "structure"


def is_plain_number(text: str) -> bool:
    """Whether a text is a plain number, which is compared without the parser."""
    return _QUICK.fullmatch(text) is not None


def _quick(match: re.Match[str]) -> Fraction:
    sign, whole, decimals = match.groups()
    return Fraction(f"{sign}{whole.replace(',', '')}{decimals or ''}")


def _verdict(equal: bool, path: str) -> Verdict:
    return Verdict("correct" if equal else "wrong", path)


SLACK = 1e-9  # relative; numbers closer than this are left to the rules
NOTHING = 1e-30  # relative to the largest term of a sum: anything smaller may be rounding


class Sketch(NamedTuple):
    """A summary of an answer, for a quick comparison."""

    spelled: str  # equal ones are the same answer, whatever their value
    plain_number: bool  # two of these have their own quick comparison
    names: tuple[str, ...]  # of its symbols
    unit: str
    value: complex  # at the first of the fixed points for its symbols
    floor: float  # a value below it may be zero


@lru_cache(maxsize=8192)
def sketch(text: str) -> Sketch | None:
    """Return the sketch of an answer; None where it has none, such as a tuple, an equation or words."""
    text = text.strip()
    if not text or len(text) > MAX_CHARS:
        return None
    cleaned = clean(text)
    read = value_of(cleaned) if cleaned else None
    if not isinstance(read, Quantity) or read.percent or counts(read.node):
        return None
    names = tuple(sorted(symbols(read.node)))
    try:
        evaluator = Calculator(points(list(names))[0] if names else {}, precision(read.node))
        found: Any = evaluator.approximate(read.node)
        if names and evaluator.left_the_reals:
            return None
        value, floor = complex(found), float(evaluator.largest) * NOTHING
    except (UndefinedError, RefusedError, OverflowError, ArithmeticError, ValueError, TypeError):
        return None
    if not abs(value) < float("inf"):
        return None
    return Sketch(plain(cleaned), is_plain_number(text), names, read.unit, value, floor)


def apart(first: Sketch | None, second: Sketch | None, rel_tol: float) -> bool:
    """Whether two answers surely differ; `rel_tol`: see `ComparisonSettings`.

    >>> one, other, same = map(sketch, (r"\\frac{1}{3}", "0.5", r"\\frac{2}{6}"))
    >>> apart(one, other, 1e-3), apart(one, same, 1e-3)
    (True, False)
    """
    if first is None or second is None or first.names != second.names or first.unit != second.unit:
        return False
    if first.spelled == second.spelled or (first.plain_number and second.plain_number):
        return False
    largest = max(abs(first.value), abs(second.value))
    if not largest > max(first.floor, second.floor):
        return False
    return abs(first.value - second.value) > (2 * rel_tol + SLACK) * largest
