"""One answer against one gold in process: which rule decides, and what is left for the workers.

It must not know response formats, processes or metrics.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from rlreason.answers import compare, structures
from rlreason.answers import limits as guard
from rlreason.answers.arithmetic import UndefinedError
from rlreason.answers.lexer import UnreadableError
from rlreason.answers.normalize import clean, plain
from rlreason.answers.values import Quantity, Value, Words
from rlreason.answers.verdict import RefusedError, Settings, Verdict

MAX_CHARS = 4_000  # beyond, answers are compared as strings only
_RANK = {"correct": 0, "timeout": 1, "error": 2, "refused": 3, "wrong": 4, "unformatted": 5}
_QUICK = re.compile(r"([+-]?)\\?\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\.?")


def decide(
    candidates: Sequence[str], golds: Sequence[str], settings: Settings
) -> tuple[Verdict, list[tuple[str, str]]]:
    """The best verdict over all pairs that can be decided here, and the pairs that cannot."""
    best, undecided = Verdict("wrong", "undecided"), []
    for answer in candidates:
        for gold in golds:
            verdict = decide_pair(answer, gold, settings)
            if verdict is None:
                undecided.append((clean(answer), clean(gold)))
                continue
            best = better(best, verdict)
            if best.outcome == "correct":
                return best, []
    return best, undecided


def better(first: Verdict, second: Verdict) -> Verdict:
    """Any yes wins; among the others a failure of the grader is kept visible before a plain wrong."""
    if first.path == "undecided":
        return second
    return second if _RANK[second.outcome] < _RANK[first.outcome] else first


def decide_pair(answer: str, gold: str, settings: Settings) -> Verdict | None:
    """The verdict, or None when only the symbolic library can tell."""
    answer, gold = answer.strip(), gold.strip()
    if not answer or not gold:
        return Verdict("wrong", "empty")
    if answer == gold:
        return Verdict("correct", "text")
    if max(len(answer), len(gold)) > MAX_CHARS:
        return Verdict("wrong", "too_long")
    first, second = _QUICK.fullmatch(answer), _QUICK.fullmatch(gold)
    if first and second:
        return _verdict(_quick(first) == _quick(second), "number")
    try:
        return _decide_values(answer, gold, settings)
    except RefusedError:
        return Verdict("refused", "guard")
    except Exception as error:  # the boundary: whatever a response does to us is counted, never raised
        return Verdict("error", f"internal_{type(error).__name__}")


def _decide_values(answer: str, gold: str, settings: Settings) -> Verdict | None:
    answer, gold = clean(answer), clean(gold)
    if not answer or not gold:
        return Verdict("wrong", "empty")
    if plain(answer) == plain(gold):
        return Verdict("correct", "text")
    right, left = _value(gold), _value(answer)
    if isinstance(left, RefusedError) or isinstance(right, RefusedError):
        raise RefusedError
    if left is None or right is None:
        readable = left if right is None else right
        if isinstance(readable, Words) or not (_sendable(answer, left) and _sendable(gold, right)):
            return Verdict("wrong", "text")
        for text, value in ((answer, left), (gold, right)):
            guard.check(text)
            if value is not None:
                compare.equal(value, value, settings)  # what is too dear for us is too dear for the library
        return None
    try:
        return _verdict(compare.equal(left, right, settings), _path(left, right))
    except UndefinedError:
        return Verdict("wrong", "undefined")


@lru_cache(maxsize=8192)
def _value(text: str) -> Value | RefusedError | None:
    """The value of a cleaned text; None when it is unreadable. Refusals are remembered too."""
    try:
        return structures.read(text)
    except (UnreadableError, UndefinedError):
        return None
    except RefusedError as refusal:
        return RefusedError(*refusal.args)  # a new one: the caught one holds on to its frames


def _sendable(text: str, value: Value | None) -> bool:
    """What we read ourselves the library may see too; what we cannot read must be wholly known to it."""
    return value is not None or guard.readable(text)


def _path(left: Value, right: Value) -> str:
    if isinstance(left, Words) or isinstance(right, Words):
        return "text"
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        return "number" if left.node.op == right.node.op == "number" else "expression"
    return "structure"


def _quick(match: re.Match[str]) -> Fraction:
    sign, whole, decimals = match.groups()
    return Fraction(f"{sign}{whole.replace(',', '')}{decimals or ''}")


def _verdict(equal: bool, path: str) -> Verdict:
    return Verdict("correct" if equal else "wrong", path)
