"""Decide whether two values are the same answer."""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations, product
from typing import NamedTuple

from rlreason.config.groups import GradingConfig
from rlreason.grading.answers import lexer, structures
from rlreason.grading.answers.evaluate import UndefinedError, exact, ratio, same
from rlreason.grading.answers.lexer import RefusedError, clean, plain
from rlreason.grading.answers.parser import Node, number
from rlreason.grading.answers.quantities import NO_SIZE, SIZES, agree
from rlreason.grading.answers.values import (
    Based,
    Collection,
    Equation,
    Inequality,
    Quantity,
    Ratio,
    Reals,
    TimeOfDay,
    Value,
    Words,
    as_reals,
    equal_reals,
    minus,
)
from rlreason.types import Outcome


class Decision(NamedTuple):
    """The verdict on an answer; `path` names the rule that decided."""

    outcome: Outcome
    path: str


CHOICES = frozenset("ABCDE")
KINDS = (Equation, Reals, Inequality, Collection, Ratio, TimeOfDay, Quantity, Based, Words)  # the first one decides
MAX_CHAIN = 3  # links of an inequality, tried in every order


def equal(answer: Value, reference: Value, settings: GradingConfig) -> bool:
    """Whether two values are the same answer; equivalent kinds are converted to one kind first.

    `settings.rel_tol`: the tolerance of a decimal for a value without a finite decimal form; the decimal must also be
    that value rounded or cut, so 0.3333 is never 1/3 at 1e-6.
    """
    answer, reference = _expanded(answer), _expanded(reference)
    match answer, reference:
        case Quantity(), Quantity():
            return _quantities(answer, reference, settings)
        case Collection(), Collection():
            return _collections(answer, reference, settings)
        case Equation(), Equation():
            if answer.label == reference.label and answer.value and reference.value:
                return equal(answer.value, reference.value, settings)
            if answer.gap is None or reference.gap is None:
                return False
            return bool(ratio(answer.gap, reference.gap))
        case TimeOfDay(), TimeOfDay():
            left_out = not (answer.parts and reference.parts) and not (answer.half and reference.half)
            same_half = answer.half == reference.half or left_out  # 9:30 may be 9:30 pm, but is not 21:30
            return answer.seconds == reference.seconds and same_half
    one, other = sorted((answer, reference), key=lambda value: KINDS.index(type(value)))
    match one:
        case Equation():  # x = 38 and a bare 38: the name may be left out, as that of a ratio V_1/V_2
            other = _as_ratio(other) if "/" in one.label else other
            return one.value is not None and equal(one.value, other, settings)
        case Reals() | Inequality():
            return _sets_of_reals(one, other)
        case Collection(kind="set", items=(only,)):
            return equal(only, other, settings)
        case Ratio():
            other = _as_ratio(other)
            if isinstance(other, Quantity) and other.node.op == "div" and not other.unit:
                other = Ratio(other.node.args)
            if not isinstance(other, Ratio) or len(one.parts) != len(other.parts):
                return False
            (first, second), *pairs = zip(one.parts, other.parts, strict=True)
            return all(same(Node("mul", (a, second)), Node("mul", (b, first))) for a, b in pairs)
    return answer == reference


def _quantities(answer: Quantity, reference: Quantity, settings: GradingConfig) -> bool:
    if not agree(answer.unit, reference.unit):
        (size, kind), (other, kind_of_other) = SIZES.get(answer.unit, NO_SIZE), SIZES.get(reference.unit, NO_SIZE)
        if kind != kind_of_other or not kind:
            return False
        answer = answer._replace(node=Node("mul", (answer.node, number(size / other))))
    if (answer.percent and reference.unit) or (reference.percent and answer.unit):
        return False
    choices = {_choice(answer.node), _choice(reference.node)}
    if "" not in choices:
        return len(choices) == 1
    return any(
        same(first, second, settings.rel_tol)
        for first in _readings(answer, reference.percent, settings)
        for second in _readings(reference, answer.percent, settings)
    )


def _readings(quantity: Quantity, other_percent: bool, settings: GradingConfig) -> list[Node]:
    """Return the readings of 38%: 0.38 and, where the setting allows and the other side has no percent sign, also 38.

    Below 1 the sign may not be dropped: 0.5 is far more often a probability than half a percent.
    """
    if not quantity.percent or other_percent:
        return [quantity.node]
    share = Node("div", (quantity.node, number(100)))
    value = exact(quantity.node)
    droppable = settings.percent and (value is None or abs(value) >= 1)
    return [quantity.node, share] if droppable else [share]


def _choice(node: Node) -> str:
    """Return the letter of a multiple choice in upper case; else nothing."""
    letter = node.name.upper()
    return letter if node.op == "symbol" and letter in CHOICES else ""


def _collections(answer: Collection, reference: Collection, settings: GradingConfig) -> bool:
    kinds = {answer.kind, reference.kind}
    if len(answer.items) != len(reference.items):
        return False
    named = [any(isinstance(item, Equation) for item in side.items) for side in (answer, reference)]
    if named[0] != named[1]:  # x = 1, y = 2 may be written 1, 2 but not 2, 1
        bare, other = (reference, answer) if named[0] else (answer, reference)
        if answer.label or reference.label or "set" in kinds:
            return False
        if bare.kind not in ("list", "()", "\\langle\\rangle", other.kind):  # an interval
            return False
    elif not agree(answer.label, reference.label):
        return False
    elif kinds <= {"set", "list"}:
        left = list(answer.items)
        for member in reference.items:
            found = next((candidate for candidate in left if equal(candidate, member, settings)), None)
            if found is None:
                return False
            left.remove(found)
        return True
    elif len(kinds) > 1 and not kinds <= {"()", "\\langle\\rangle"}:
        return False
    return all(equal(first, second, settings) for first, second in zip(answer.items, reference.items, strict=True))


def _as_ratio(value: Value) -> Value:
    """Return a time such as `11:21` as a ratio, where it could be one."""
    return Ratio(tuple(map(number, value.parts))) if isinstance(value, TimeOfDay) and value.parts else value


def _sets_of_reals(answer: Value, reference: Value) -> bool:
    first, second = as_reals(answer), as_reals(reference)
    if first is not None and second is not None:
        return agree(first.name, second.name) and equal_reals(first, second)
    if not isinstance(answer, Inequality) or not isinstance(reference, Inequality):
        return False
    if len(answer.links) != len(reference.links):
        return False
    orders = permutations(reference.links) if len(reference.links) <= MAX_CHAIN else [reference.links]
    return any(all(map(_same_link, answer.links, links)) for links in orders)


def _same_link(one: tuple[Node, str, Node], other: tuple[Node, str, Node]) -> bool:
    """Whether two links say the same: one is the other times a factor, above zero unless the sign is `ne`."""
    (left, sign, right), (left_of_other, sign_of_other, right_of_other) = one, other
    if sign != sign_of_other:
        return False
    factor = ratio(minus(left, right), minus(left_of_other, right_of_other))
    return factor > 0 or (factor < 0 and sign == "\\ne")


def _expanded(value: Value) -> Value:
    r"""Replace `2 \pm 3` and `(1, \pm 2)` by the set of their two values, alone or inside a list or set."""
    both = _both(value)
    if len(both) > 1:
        return Collection("set", tuple(both))
    if isinstance(value, Collection) and value.kind in ("set", "list"):
        return value._replace(items=tuple(part for item in value.items for part in _both(item)))
    return value


def _both(value: Value) -> list[Value]:
    """Return the two values of one with both signs, in a tuple at one place; else the value itself."""
    if isinstance(value, Quantity):
        signed: list[Value] = [value._replace(node=_with_sign(value.node, upper)) for upper in (True, False)]
        return signed if signed[0] != signed[1] else [value]
    if isinstance(value, Collection) and value.kind not in ("set", "list"):
        places = [_both(item) for item in value.items]
        if sum(len(place) > 1 for place in places) == 1:
            return [value._replace(items=tuple(place[pick % len(place)] for place in places)) for pick in (0, 1)]
    return [value]


def _with_sign(node: Node, upper: bool) -> Node:
    args = tuple(_with_sign(part, upper) for part in node.args)
    if node.op in ("pm", "mp"):
        return args[0] if (node.op == "pm") == upper else Node("neg", args)
    return node._replace(args=args)


MAX_CHARS = 4_000  # beyond, answers are compared as strings only
_BEST_FIRST = ("correct", "timeout", "error", "refused", "wrong")
_PLAIN_NUMBER = re.compile(r"[+-]?\\?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\.?")


def decide(
    candidates: Sequence[str], references: Sequence[str], settings: GradingConfig
) -> tuple[Decision, list[tuple[str, str]]]:
    """Return the best verdict over all pairs that can be decided here, and the pairs that cannot."""
    best, undecided = Decision("wrong", "undecided"), []
    for answer, reference in product(candidates, references):
        verdict = decide_pair(answer, reference, settings)
        if verdict is None:
            undecided.append((clean(answer), clean(reference)))
            continue
        best = better(best, verdict)
        if best.outcome == "correct":
            return best, []
    return best, undecided


def better(first: Decision, second: Decision) -> Decision:
    """Return the better verdict: correct first, then failures of the grader, then wrong, and undecided last."""
    return min(first, second, key=lambda one: (_BEST_FIRST.index(one.outcome), one.path == "undecided"))


def decide_pair(answer: str, reference: str, settings: GradingConfig) -> Decision | None:
    """Return the verdict, or None when only the symbolic library can decide."""
    answer, reference = answer.strip(), reference.strip()
    if not answer or not reference:
        return Decision("wrong", "empty")
    if answer == reference:
        return Decision("correct", "text")
    if max(len(answer), len(reference)) > MAX_CHARS:
        return Decision("wrong", "too_long")
    if _PLAIN_NUMBER.fullmatch(answer) and _PLAIN_NUMBER.fullmatch(reference):
        first, second = (Fraction(re.sub(r"[\\$,]|\.\Z", "", text)) for text in (answer, reference))
        return decision(first == second, "number")
    try:
        answer, reference = clean(answer), clean(reference)
        if not answer or not reference:
            return Decision("wrong", "empty")
        if plain(answer) == plain(reference):
            return Decision("correct", "text")
        left, right = structures.read(answer), structures.read(reference)
        in_words = isinstance(left, Words) or isinstance(right, Words)
        if left is None or right is None:
            sides = ((answer, left), (reference, right))
            if in_words or not all(value or lexer.readable(text) for text, value in sides):
                return Decision("wrong", "text")
            for text, value in sides:
                lexer.check(text)
                if value is not None:
                    equal(value, value, settings)  # raises for a value that must not reach the library either
            return None
        path = "text" if in_words else "structure"
        if isinstance(left, Quantity) and isinstance(right, Quantity):
            path = "number" if left.node.op == right.node.op == "number" else "expression"
        return decision(equal(left, right, settings), path)
    except UndefinedError:
        return Decision("wrong", "undefined")
    except (RefusedError, RecursionError):  # bars within bars have no depth that is counted
        return Decision("refused", "guard")
    except Exception as error:  # a bug in the rules must not end a run
        return Decision("error", f"internal_{type(error).__name__}")


def decision(equal: bool, path: str) -> Decision:
    """Return the decision on two values that were compared."""
    return Decision("correct" if equal else "wrong", path)
