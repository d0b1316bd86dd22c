"""Which answers surely differ, by one number for each instead of a comparison of every two of them.

A sketch says only that two answers are far apart. Whether near ones are the same is left to the rules of `decide`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from rlreason.answers.arithmetic import UndefinedError
from rlreason.answers.decide import MAX_CHARS, is_plain_number, value_of
from rlreason.answers.equality import counts, points
from rlreason.answers.evaluate import Evaluator, precision
from rlreason.answers.normalize import clean, plain
from rlreason.answers.tree import symbols
from rlreason.answers.values import Quantity
from rlreason.answers.verdict import RefusedError

SLACK = 1e-9  # relative; numbers nearer than this are left to the rules
NOTHING = 1e-30  # of the largest term of a sum: what is smaller may be rounding


class Sketch(NamedTuple):
    """What is compared in place of an answer."""

    spelled: str  # equal ones are the same answer, whatever their value
    plain_number: bool  # two of these are compared by rules of their own, quickly
    names: tuple[str, ...]  # of its symbols
    unit: str
    value: complex  # at the first of the fixed points for its symbols
    floor: float  # a value below it may be zero


@lru_cache(maxsize=8192)
def sketch(text: str) -> Sketch | None:
    """The sketch of an answer; None where it has none, as a tuple, an equation or words."""
    text = text.strip()
    if not text or len(text) > MAX_CHARS:
        return None
    cleaned = clean(text)
    read = value_of(cleaned) if cleaned else None
    if not isinstance(read, Quantity) or read.percent or counts(read.node):
        return None
    names = tuple(sorted(symbols(read.node)))
    try:
        evaluator = Evaluator(points(list(names))[0] if names else {}, precision(read.node))
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
