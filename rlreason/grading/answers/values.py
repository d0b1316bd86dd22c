"""The kinds of values of an answer, and sets of real numbers: read from intervals and inequalities, combined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction
from functools import cmp_to_key, partial, reduce
from itertools import pairwise, product
from typing import NamedTuple

from rlreason.grading.answers.evaluate import UndefinedError, evaluated, exact, same_constant
from rlreason.grading.answers.parser import Node, infinity, number, symbols


class Quantity(NamedTuple):
    """An expression, with a unit where one was written. `percent`: a percent sign followed."""

    node: Node
    unit: str = ""
    percent: bool = False


class Collection(NamedTuple):
    """`kind` is set, list, matrix, vmatrix, or the brackets of a tuple such as `()` or `[)`.

    `label`: `x = 1, 2` lists x. The items of a matrix are its rows.
    """

    kind: str
    items: tuple[Value, ...]
    label: str = ""


class Equation(NamedTuple):
    """`label` is the name before the sign, where the left side is only a name; `gap` is left minus right."""

    label: str
    value: Value | None
    gap: Node | None


class Inequality(NamedTuple):
    r"""Links (left, sign, right), the sign of each turned to `<`, `\le` or `\ne`."""

    links: tuple[tuple[Node, str, Node], ...]


class Reals(NamedTuple):
    """A set of real numbers, for the variable `name` where one was given.

    `points`: in rising order, every number at which membership may change. `contains`: whether a number belongs to it.
    """

    points: tuple[Node, ...]
    contains: Callable[[Node], bool]
    name: str = ""


class Based(NamedTuple):
    """Digits in a given base; compared as digits, since the base is part of such an answer."""

    digits: str
    base: int


class Ratio(NamedTuple):
    """`1:2:3`, its parts in order."""

    parts: tuple[Node, ...]


class TimeOfDay(NamedTuple):
    """A time of day: seconds after midnight or noon, and the half of the day, stated or implied by the hour.

    `parts`: the numbers as written where no half was stated, since `11:21` may also be a ratio; else empty.
    """

    seconds: int
    half: str
    parts: tuple[int, ...]


class Words(NamedTuple):
    """An answer in plain language, in small letters."""

    text: str


Value = Quantity | Collection | Equation | Inequality | Reals | Based | Ratio | TimeOfDay | Words

PLUS = Node("constant", name="oo")
MINUS = Node("neg", (PLUS,))
PLACES = [*map(Fraction, ("0", "1", "-1", "7/3", "-17/5", "100", "-1000", "123456"))]  # where a line is seen to be one


def minus(left: Node, right: Node) -> Node:
    """Return the tree of `left - right`."""
    return Node("add", (left, Node("neg", (right,))))


def order(first: Node, second: Node) -> int:
    """Compare two real constants or infinities: -1, 0 or 1. Raises `UndefinedError` for anything else."""
    one, other = infinity(first), infinity(second)
    if one or other:
        return (one > other) - (one < other)
    if same_constant(first, second):
        return 0
    evaluator, a, b = evaluated(first, second)
    if a is None or b is None or not evaluator.is_real(a) or not evaluator.is_real(b):
        raise UndefinedError  # not real
    return -1 if a < b else 1


def interval(low: Node, high: Node, low_closed: bool, high_closed: bool, name: str = "") -> Reals:
    """Return the numbers between two ends, each of which belongs to them where it is closed."""

    order(low, high)  # raises where one of them is not real
    excluded = [end for end, closed in ((low, low_closed), (high, high_closed)) if not closed]

    def contains(point: Node) -> bool:
        return order(low, point) <= 0 <= order(high, point) and all(order(end, point) for end in excluded)

    return Reals((low, high), contains, name)


EVERYTHING = interval(MINUS, PLUS, False, False)
NOTHING = interval(PLUS, MINUS, False, False)


def combined(first: Reals, second: Reals, keep: Callable[[bool, bool], bool]) -> Reals:
    """Return the numbers for which `keep` says so, given whether they are in the first and in the second set."""
    points = sorted(first.points + second.points, key=cmp_to_key(order))
    return Reals(
        tuple(points), lambda point: keep(first.contains(point), second.contains(point)), first.name or second.name
    )


def equal_reals(first: Reals, second: Reals) -> bool:
    """Whether two sets have the same members: at every point where one may change, between these and outside them."""
    agreed = combined(first, second, operator.eq)
    finite = [point for point in agreed.points if not infinity(point)] or [number(0)]
    between = [Node("div", (Node("add", ends), number(2))) for ends in pairwise(finite)]
    outside = [minus(finite[0], number(1)), Node("add", (finite[-1], number(1)))]
    return all(map(agreed.contains, (*agreed.points, *between, *outside)))


union, intersection = partial(combined, keep=operator.or_), partial(combined, keep=operator.and_)
difference = partial(combined, keep=operator.gt)  # in the first, and not in the second


def as_reals(value: Value) -> Reals | None:
    """Return the set of reals of an interval, a linear inequality or a finite set; None for anything else."""
    try:
        match value:
            case Reals():
                return value
            case Collection(kind="()" | "(]" | "[)" | "[]" as kind, items=(Quantity() as low, Quantity() as high)):
                if order(low.node, high.node) < 0:
                    return interval(low.node, high.node, kind[0] == "[", kind[1] == "]")
            case Collection(kind="set", items=items):
                nodes = [item.node for item in items if isinstance(item, Quantity)]
                if len(nodes) == len(items) and not any(map(symbols, nodes)):
                    return reduce(union, (interval(node, node, True, True) for node in nodes), NOTHING)
            case Inequality(links=((left, "\\ne", right),)):
                root = _root(left, right)
                return root and difference(EVERYTHING, interval(root[1], root[1], True, True, root[0]))
            case Inequality():
                return _solution(value)
    except UndefinedError:
        return None
    return None


def _solution(value: Inequality) -> Reals | None:
    """Solve linear inequalities in one common variable; None where they are something else.

    |u| < c is u < c and -u < c, and c < |u| by itself is c < u or c < -u.
    """
    rays: list[Reals] = []
    outside = len(value.links) == 1 and not symbols(value.links[0][0])
    for left, sign, right in value.links:
        lefts = _without_bars(left) if not symbols(right) else [left]
        rights = _without_bars(right) if outside else [right]
        for below, above in product(lefts, rights):
            root = _root(below, above)
            if root is None:
                return None
            name, point, rising = root
            low, high = (MINUS, point) if rising else (point, PLUS)
            rays.append(interval(low, high, sign == "\\le" and not rising, sign == "\\le" and rising, name))
    if len({ray.name for ray in rays}) != 1:
        return None
    return reduce(union if outside else intersection, rays)


def _without_bars(node: Node) -> list[Node]:
    return [node.args[0], Node("neg", node.args)] if node.op == "abs" else [node]


def _root(left: Node, right: Node) -> tuple[str, Node, bool] | None:
    """Return variable, zero and direction of left - right, if that is a line; the zero of `x - c` may be irrational."""
    names = symbols(left) | symbols(right)
    if len(names) != 1:
        return None
    (name,) = names
    variable = Node("symbol", name=name)
    if left == variable and not symbols(right):
        return name, right, True
    if right == variable and not symbols(left):
        return name, left, False
    values = [exact(minus(left, right), {name: place}) for place in PLACES]
    first, second = values[:2]
    if first is None or second is None or first == second:
        return None
    slope = second - first
    if values != [first + slope * place for place in PLACES]:
        return None
    return name, number(-first / slope), slope > 0
