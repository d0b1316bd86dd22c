"""Compare two expressions for all values of their symbols; solve and combine sets of real numbers."""

import random
from collections.abc import Sequence
from fractions import Fraction
from functools import cmp_to_key
from typing import Any

from rlreason.grading.answers.evaluate import NOWHERE, Calculator, Point, UndefinedError, exact, precision
from rlreason.grading.answers.parser import Node, infinity, number, symbols
from rlreason.grading.answers.values import Collection, End, Inequality, Inequation, Quantity, Reals, Value

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
    bits = precision(first, second)
    close = _close(first, second, point, bits, real)
    return _close(first, second, point, 3 * bits, real) if close else close


def _exact(node: Node, point: Point) -> Fraction | str | None:
    try:
        return exact(node, point)
    except UndefinedError:
        return "undefined"


def _close(first: Node, second: Node, point: Point, bits: int, real: bool) -> bool | None:
    evaluator = Calculator(point, bits)
    values = []
    for node in (first, second):
        try:
            values.append(evaluator.approximate(node))
            if real and evaluator.left_the_reals:
                return None
        except UndefinedError:
            values.append(None)
    a, b = values
    if a is None or b is None:
        return None if a is b else False
    gap = abs(a - b)
    return bool(gap <= evaluator.mp.ldexp(max(abs(a), abs(b)), -bits // 2)) or (
        evaluator.vanishes(a) and evaluator.vanishes(b)
    )


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
    names = sorted(symbols(first) | symbols(second))
    ratios: list[Any] = []
    for point in points(names):
        evaluator = Calculator(point, precision(first, second))
        try:
            a, b = evaluator.approximate(first), evaluator.approximate(second)
        except UndefinedError:
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
    evaluator = Calculator(NOWHERE, precision(first, second))
    try:
        a, b = evaluator.approximate(first), evaluator.approximate(second)
    except UndefinedError:
        return False
    return bool(abs(a - b) <= share * abs(b))


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
    evaluator = Calculator(NOWHERE, precision(decimal, other))
    try:
        target = evaluator.approximate(other)
    except UndefinedError:
        return False
    if evaluator.mp.im(target) != 0:
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
EVERYTHING = Reals(((End(MINUS, False), End(PLUS, False)),))
Piece = tuple[End, End]


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


def union(pieces: Sequence[Piece], name: str = "") -> Reals:
    """Return the union: sorted, without empty pieces, with touching or overlapping pieces joined."""
    nonempty = [piece for piece in pieces if not _empty(piece)]
    nonempty.sort(key=cmp_to_key(_by_low_end))
    joined: list[Piece] = []
    for low, high in nonempty:
        if joined and _touch(joined[-1][1], low):
            last = joined[-1]
            joined[-1] = (last[0], _farther(last[1], high, 1, either=True))
        else:
            joined.append((low, high))
    return Reals(tuple(joined), name)


def _by_low_end(first: Piece, second: Piece) -> int:
    return order(first[0].node, second[0].node) or second[0].closed - first[0].closed


def intersection(first: Reals, second: Reals) -> Reals:
    """Return the numbers that are in both sets."""
    pieces = [
        (_farther(a[0], b[0], 1, either=False), _farther(a[1], b[1], -1, either=False))
        for a in first.pieces
        for b in second.pieces
    ]
    return union(pieces, first.name or second.name)


def complement(value: Reals) -> Reals:
    """Return the real numbers that are not in the set."""
    rest = EVERYTHING._replace(name=value.name)
    for low, high in value.pieces:
        below = (End(MINUS, False), End(low.node, not low.closed))
        above = (End(high.node, not high.closed), End(PLUS, False))
        rest = intersection(rest, union([below, above]))
    return rest


def as_reals(value: Value) -> Reals | None:
    """Return the set of reals of an interval, a linear inequality or a finite set; None for anything else."""
    try:
        match value:
            case Reals():
                return value
            case Collection(kind=kind, items=(Quantity() as low, Quantity() as high)) if (
                kind[0] in "([" and len(kind) == 2
            ):
                if order(low.node, high.node) >= 0:
                    return None
                return union([(End(low.node, kind[0] == "["), End(high.node, kind[1] == "]"))])
            case Collection(kind="set", items=items):
                nodes = [item.node for item in items if isinstance(item, Quantity)]
                if len(nodes) == len(items) and not any(map(symbols, nodes)):
                    return union([(End(node, True), End(node, True)) for node in nodes])
            case Inequality():
                return _solution(value)
            case Inequation(gap=gap):
                root = _root(gap)
                return root and complement(Reals(((End(root[1], True), End(root[1], True)),), root[0]))
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
        end = End(point, closed)
        piece = (End(MINUS, False), end) if rising else (end, End(PLUS, False))
        if solution is not None and solution.name != name:
            return None
        solution = intersection(solution or EVERYTHING, Reals((piece,), name))
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
    return union([*sides[0].pieces, *sides[1].pieces], sides[0].name)


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


def _empty(piece: Piece) -> bool:
    low, high = piece
    compared = order(low.node, high.node)
    return compared > 0 or (compared == 0 and not (low.closed and high.closed))


def _touch(high: End, low: End) -> bool:
    compared = order(high.node, low.node)
    return compared > 0 or (compared == 0 and (high.closed or low.closed))


def _farther(first: End, second: End, up: int, either: bool) -> End:
    """Return the higher end (`up` is 1) or the lower one (-1); equal ends are closed if `either` or both are."""
    compared = order(first.node, second.node) * up
    if compared:
        return first if compared > 0 else second
    return first._replace(closed=first.closed or second.closed if either else first.closed and second.closed)
