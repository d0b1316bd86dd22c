"""Compare two expressions for all values of their symbols; solve and combine sets of real numbers."""

import operator
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any

from rlreason.grading.answers.evaluate import NOWHERE, Calculator, Point, UndefinedError, exact, precision
from rlreason.grading.answers.parser import Node, infinity, number, symbols
from rlreason.grading.answers.values import Collection, Inequality, Inequation, Quantity, Reals, Value

POINTS = 7
NEEDED = 2  # points at which both sides must have a value


def same(first: Node, second: Node, rel_tol: float) -> bool:
    """Whether two expressions are equal, or one is a decimal to which the other, without finite decimals, rounds."""
    names = sorted(symbols(first) | symbols(second))
    if not names:
        return same_constant(first, second) or rounded(first, second, rel_tol) or rounded(second, first, rel_tol)
    equal = _agreements(first, second, names, real=True)
    if equal is None:
        equal = _agreements(first, second, names, real=False)
    return bool(equal)


def _agreements(first: Node, second: Node, names: list[str], real: bool) -> bool | None:
    """Whether two expressions agree at all points where both have a value; None where these are too few."""
    agreed = 0
    whole = counts(first) or counts(second)
    for point in points(names, whole):
        equal = same_at(first, second, point, real, partial=whole)
        if equal is False:
            return False
        agreed += equal is True
    return True if agreed >= NEEDED else None


def counts(node: Node) -> bool:
    """Whether a factorial or binomial of symbols needs whole numbers."""
    return (node.op in ("fact", "binom") and bool(symbols(node))) or any(map(counts, node.args))


def same_constant(first: Node, second: Node) -> bool:
    """Whether two expressions without symbols have the same value, infinities included."""
    infinite = infinity(first), infinity(second)
    if any(infinite):
        return infinite[0] == infinite[1]
    return same_at(first, second, NOWHERE, real=False) is True


def same_at(first: Node, second: Node, point: Point, real: bool, partial: bool = False) -> bool | None:
    """Whether two expressions agree at a point; None where neither has a value. With `real`, a side whose
    computation needs complex numbers (the root of a negative number, but not a written `i`) has none there: `ln(x^2)`
    is `2 ln x` where both exist. With `partial`, a value on one side only is no difference: `n!/(n-k)!` has none
    where k > n.
    """
    values = [_exact(first, point), _exact(second, point)]
    if "undefined" in values:
        return None if partial or values == ["undefined"] * 2 else False
    if None not in values:
        return bool(values[0] == values[1])
    for bits in (precision(first, second), 3 * precision(first, second)):
        evaluator, (a, b) = _approximated((first, second), point, bits)
        if (real and evaluator.left_the_reals) or (a is None and b is None):
            return None
        if a is None or b is None:
            return False
        near = abs(a - b) <= evaluator.mp.ldexp(max(abs(a), abs(b)), -bits // 2)
        if not near and not (evaluator.vanishes(a) and evaluator.vanishes(b)):
            return False
    return True


def _exact(node: Node, point: Point) -> Fraction | str | None:
    try:
        return exact(node, point)
    except UndefinedError:
        return "undefined"


def _approximated(nodes: Sequence[Node], point: Point, bits: int) -> tuple[Calculator, list[Any]]:
    """Return the values of the nodes, None for one without a value, and what computed them."""
    evaluator, values = Calculator(point, bits), list[Any]()
    for node in nodes:
        try:
            values.append(evaluator.approximate(node))
        except UndefinedError:
            values.append(None)
    return evaluator, values


def points(names: list[str], whole: bool = False) -> list[dict[str, Fraction]]:
    """Return fixed evaluation points for these names: fractions of both signs, none special; or whole numbers."""
    source = random.Random(20260101)
    values = []
    for index in range(POINTS):
        signs = ((1,), (1,), (1,), (-1,), (-1,), (1, -1), (1, -1))[index]
        if whole:
            values.append({name: Fraction(source.randrange(5, 60)) for name in names})
            continue
        sizes = [Fraction(source.randrange(10**6, 10**7), source.randrange(10**6, 10**7)) for _ in names]
        values.append({name: size * source.choice(signs) for name, size in zip(names, sizes, strict=True)})
    return values


def ratio(first: Node, second: Node) -> int:
    """Return the sign of the constant k with first = k * second at every point, or 0 when there is none."""
    ratios: list[Any] = []
    for point in points(sorted(symbols(first) | symbols(second))):
        evaluator, (a, b) = _approximated((first, second), point, precision(first, second))
        if a is None or b is None:
            continue
        if evaluator.vanishes(a) or evaluator.vanishes(b):
            return 0
        ratios.append(a / b)
    if len(ratios) < NEEDED or evaluator.mp.im(ratios[0]) != 0:
        return 0
    tolerance = evaluator.mp.ldexp(abs(ratios[0]), -100)
    if any(abs(other - ratios[0]) > tolerance for other in ratios):
        return 0
    return 1 if ratios[0] > 0 else -1


def near(first: Node, second: Node, share: float) -> bool:
    """Whether two constants differ by at most this share of the second."""
    if symbols(first) or symbols(second):
        return False
    _, (a, b) = _approximated((first, second), NOWHERE, precision(first, second))
    return a is not None and b is not None and bool(abs(a - b) <= share * abs(b))


def decimal_of(node: Node) -> tuple[Fraction, int] | None:
    """Return value and number of places of a number written as a decimal, with or without a sign."""
    if node.op in ("neg", "group"):
        inner = decimal_of(node.args[0])
        return inner if inner is None or node.op == "group" else (-inner[0], inner[1])
    if node.op != "number" or node.places is None or node.value is None:
        return None
    return node.value, node.places


def rounded(decimal: Node, other: Node, rel_tol: float) -> bool:
    """Whether `decimal` is `other`, which needs more places, rounded or cut."""
    written = decimal_of(decimal)
    if written is None or decimal_of(other) is not None or written[1] <= 0 or not rel_tol:
        return False
    value, places = written
    if _exact(other, NOWHERE) == "undefined" or infinity(other):
        return False
    evaluator, (target,) = _approximated((other,), NOWHERE, precision(decimal, other))
    if target is None or evaluator.mp.im(target) != 0:
        return False
    scaled = abs(evaluator.mp.re(target)) * 10**places
    if scaled == evaluator.mp.nint(scaled):
        return False
    near = {int(evaluator.mp.floor(scaled)), int(evaluator.mp.nint(scaled))}
    right_sign = (value < 0) == bool(target < 0)
    error = abs(evaluator.number(value) - target)
    return right_sign and abs(value) * 10**places in near and bool(error <= rel_tol * abs(target) * (1 + 1e-9))


PLUS = Node("constant", name="oo")
MINUS = Node("neg", (PLUS,))
EVERYTHING = Reals((MINUS, PLUS), (False, False, True, False, False))
NOTHING = Reals((), (False,))


def order(first: Node, second: Node) -> int:
    """Compare two real constants or infinities: -1, 0 or 1. Raises `UndefinedError` for anything else."""
    infinite = infinity(first) - infinity(second)
    if infinity(first) or infinity(second):
        return (infinite > 0) - (infinite < 0)
    if same_constant(first, second):
        return 0
    evaluator = Calculator(NOWHERE, precision(first, second))
    a, b = evaluator.approximate(first), evaluator.approximate(second)
    if evaluator.mp.im(a) != 0 or evaluator.mp.im(b) != 0:
        raise UndefinedError("not real")
    return -1 if a < b else 1


def interval(low: Node, high: Node, low_closed: bool, high_closed: bool, name: str = "") -> Reals:
    """Return the numbers between two ends, each of which belongs to them where it is closed."""
    compared = order(low, high)
    if compared < 0:
        return Reals((low, high), (False, low_closed, True, high_closed, False), name)
    if compared == 0 and low_closed and high_closed:
        return Reals((low,), (False, True, False), name)
    return Reals((), (False,), name)


def combined(first: Reals, second: Reals, keep: Callable[[bool, bool], bool]) -> Reals:
    """Return the numbers for which `keep` says so, given whether they are in the first and in the second set."""
    points, inside, a, b = list[Node](), [keep(first.inside[0], second.inside[0])], 0, 0
    while a // 2 < len(first.points) or b // 2 < len(second.points):
        left, right = first.points[a // 2 :], second.points[b // 2 :]
        compared = order(left[0], right[0]) if left and right else -1 if left else 1
        here = keep(first.inside[a + (compared <= 0)], second.inside[b + (compared >= 0)])
        a, b = a + 2 * (compared <= 0), b + 2 * (compared >= 0)
        behind = keep(first.inside[a], second.inside[b])
        if not inside[-1] == here == behind:
            points.append(left[0] if compared <= 0 else right[0])
            inside += [here, behind]
    return Reals(tuple(points), tuple(inside), first.name or second.name)


def complement(value: Reals) -> Reals:
    """Return the real numbers that are not in the set."""
    return combined(EVERYTHING, value, lambda real, inside: real and not inside)._replace(name=value.name)


def as_reals(value: Value) -> Reals | None:
    """Return the set of reals of an interval, a linear inequality or a finite set; None for anything else."""
    try:
        match value:
            case Reals():
                return value
            case Collection(kind=kind, items=(Quantity() as low, Quantity() as high)) if (
                kind[0] in "([" and len(kind) == 2
            ):
                found = interval(low.node, high.node, kind[0] == "[", kind[1] == "]")
                return found if len(found.points) == 2 else None
            case Collection(kind="set", items=items):
                nodes = [item.node for item in items if isinstance(item, Quantity)]
                if len(nodes) == len(items) and not any(map(symbols, nodes)):
                    members = [interval(node, node, True, True) for node in nodes]
                    return reduce(partial(combined, keep=operator.or_), members, NOTHING)
            case Inequality():
                return _solution(value)
            case Inequation(gap=gap):
                root = _root(gap)
                return root and complement(interval(root[1], root[1], True, True, root[0]))
    except UndefinedError:
        return None
    return None


def _solution(value: Inequality) -> Reals | None:
    """Solve linear inequalities in one common variable; None where they are something else."""
    if outside := _outside(value):
        return outside
    solution = None
    for gap, closed in _without_bars(value.gaps):
        root = _root(gap)
        if root is None:
            return None
        name, point, rising = root
        if solution is not None and solution.name != name:
            return None
        ray = interval(MINUS, point, False, closed, name) if rising else interval(point, PLUS, closed, False, name)
        solution = combined(solution or EVERYTHING, ray, operator.and_)
    return solution


def _outside(value: Inequality) -> Reals | None:
    """Solve a single inequality `|u| > c` as `u > c` or `-u > c`."""
    gap, closed = value.gaps[0]
    if len(value.gaps) != 1 or gap.op != "add" or gap.args[1].op != "neg" or gap.args[1].args[0].op != "abs":
        return None
    inner = Node("group", gap.args[1].args[0].args)
    sides = [
        _solution(Inequality(((Node("add", (gap.args[0], part)), closed),))) for part in (inner, Node("neg", (inner,)))
    ]
    if sides[0] is None or sides[1] is None or symbols(gap.args[0]):
        return None
    return combined(sides[0], sides[1], operator.or_)


def _without_bars(gaps: Sequence[tuple[Node, bool]]) -> list[tuple[Node, bool]]:
    """Replace each `|u| < c` by `u < c` and `-u < c`."""
    replaced = []
    for gap, closed in gaps:
        sides = [gap]
        if gap.op == "add" and gap.args[0].op == "abs" and not symbols(gap.args[1]):
            inner = Node("group", gap.args[0].args)
            sides = [gap._replace(args=(part, gap.args[1])) for part in (inner, Node("neg", (inner,)))]
        replaced += [(side, closed) for side in sides]
    return replaced


def _root(gap: Node) -> tuple[str, Node, bool] | None:
    """Return variable, zero and direction of a gap a*x + b; b may be irrational where a is 1 or -1."""
    names = symbols(gap)
    if len(names) != 1:
        return None
    name = next(iter(names))
    if gap.op == "add" and gap.args[1].op == "neg":
        left, right = gap.args[0], gap.args[1].args[0]
        if left == Node("symbol", name=name) and not symbols(right):
            return name, right, True
        if right == Node("symbol", name=name) and not symbols(left):
            return name, left, False
    places = [Fraction(place) for place in ("0", "1", "-1", "7/3", "-17/5", "100", "-1000", "123456")]
    values = [exact(gap, {name: place}) for place in places]
    defined = [value for value in values if value is not None]
    if len(defined) < len(places):
        return None
    slope = defined[1] - defined[0]
    if not slope or any(value != defined[0] + slope * place for place, value in zip(places, defined, strict=True)):
        return None
    return name, number(-defined[0] / slope), slope > 0
