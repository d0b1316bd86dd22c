"""Whether two expressions have the same value, for every value of their symbols.

Fractions are compared exactly, irrational numbers at a precision that grows with the numbers written, and
expressions with symbols at fixed random points.
"""

import random
from fractions import Fraction
from typing import Any

from rlreason.answers.arithmetic import UndefinedError
from rlreason.answers.evaluate import NOWHERE, Evaluator, Point, exact, precision
from rlreason.answers.tree import Node, infinity, symbols

POINTS = 7
NEEDED = 2  # points at which both sides must have a value


def same(first: Node, second: Node, rel_tol: float) -> bool:
    """Equal in value; or one is a decimal and the other has no finite decimal form and rounds to it."""
    names = sorted(symbols(first) | symbols(second))
    if not names:
        return same_constant(first, second) or rounded(first, second, rel_tol) or rounded(second, first, rel_tol)
    found = _agreements(first, second, names, real=True)
    if found is None:
        found = _agreements(first, second, names, real=False)
    return bool(found)


def _agreements(first: Node, second: Node, names: list[str], real: bool) -> bool | None:
    """Whether the two agree at all points where both have a value, or None where these are too few."""
    agreed = 0
    whole = counts(first) or counts(second)
    for point in points(names, whole):
        found = same_at(first, second, point, real, partial=whole)
        if found is False:
            return False
        agreed += found is True
    return True if agreed >= NEEDED else None


def counts(node: Node) -> bool:
    """Whether a factorial or binomial of symbols asks for whole numbers."""
    return (node.op in ("fact", "binom") and bool(symbols(node))) or any(map(counts, node.args))


def same_constant(first: Node, second: Node) -> bool:
    """Whether two expressions without symbols have the same value, infinities included."""
    infinite = infinity(first), infinity(second)
    if any(infinite):
        return infinite[0] == infinite[1]
    return same_at(first, second, NOWHERE, real=False) is True


def same_at(first: Node, second: Node, point: Point, real: bool, partial: bool = False) -> bool | None:
    """None where neither side has a value. With `real`, a side that needs complex numbers on its way (the
    root of a negative number, but not a written `i`) has none there: `ln(x^2)` is `2 ln x` where both exist.
    With `partial`, a value on one side only is no difference: `n!/(n-k)!` has none where k > n.
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
    evaluator = Evaluator(point, bits)
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
    """The same fractions for the same names every time, of both signs, none special; or whole numbers."""
    source = random.Random(20260101)
    found = []
    for index in range(POINTS):
        signs = ((1,), (1,), (1,), (-1,), (-1,), (1, -1), (1, -1))[index]
        if whole:
            found.append({name: Fraction(source.randrange(5, 60)) for name in names})
            continue
        sizes = [Fraction(source.randrange(10**6, 10**7), source.randrange(10**6, 10**7)) for _ in names]
        found.append({name: size * source.choice(signs) for name, size in zip(names, sizes, strict=True)})
    return found


def ratio(first: Node, second: Node) -> int:
    """The sign of the constant k with first = k * second at every point, or 0 when there is none."""
    names = sorted(symbols(first) | symbols(second))
    ratios: list[Any] = []
    for point in points(names):
        evaluator = Evaluator(point, precision(first, second))
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
    """Whether two constants differ by no more than this share of the second."""
    if symbols(first) or symbols(second):
        return False
    evaluator = Evaluator(NOWHERE, precision(first, second))
    try:
        a, b = evaluator.approximate(first), evaluator.approximate(second)
    except UndefinedError:
        return False
    return bool(abs(a - b) <= share * abs(b))


def decimal_of(node: Node) -> tuple[Fraction, int] | None:
    """Value and number of places of a number written as a decimal, with a sign if it has one."""
    if node.op in ("neg", "group"):
        inner = decimal_of(node.args[0])
        return inner if inner is None or node.op == "group" else (-inner[0], inner[1])
    if node.op != "number" or node.places is None or node.value is None:
        return None
    return node.value, node.places


def rounded(decimal: Node, other: Node, rel_tol: float) -> bool:
    """Whether `decimal` is `other`, which does not fit its places, rounded or cut to them."""
    written = decimal_of(decimal)
    if written is None or decimal_of(other) is not None or written[1] <= 0 or not rel_tol:
        return False
    value, places = written
    if _exact(other, NOWHERE) == "undefined" or infinity(other):
        return False
    evaluator = Evaluator(NOWHERE, precision(decimal, other))
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
