"""Sets of real numbers: intervals, unions and inequalities in one variable, in one normal form.

It must not know text or tokens.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cmp_to_key

from rlreason.grading.equality import infinity, same_constant, symbols
from rlreason.grading.evaluate import Undefined, exact, precision
from rlreason.grading.expression import Node, number
from rlreason.grading.numeric import Calculator
from rlreason.grading.values import Collection, End, Inequality, Inequation, Quantity, Reals, Value

PLUS = Node("constant", name="oo")
MINUS = Node("neg", (PLUS,))
EVERYTHING = Reals(((End(MINUS, False), End(PLUS, False)),))
Piece = tuple[End, End]


def order(first: Node, second: Node) -> int:
    """-1, 0 or 1 for two real constants or infinities. Raises `Undefined` for anything else."""
    infinite = infinity(first) - infinity(second)
    if infinity(first) or infinity(second):
        return (infinite > 0) - (infinite < 0)
    if same_constant(first, second):
        return 0
    calculator = Calculator(precision(first, second), {})
    a, b = calculator.value(first), calculator.value(second)
    if calculator.mp.im(a) != 0 or calculator.mp.im(b) != 0:
        raise Undefined("not real")
    return -1 if a < b else 1


def union(pieces: Sequence[Piece], name: str = "") -> Reals:
    """Sorted, without empty pieces, and with pieces that touch or overlap joined."""
    kept = [piece for piece in pieces if not _empty(piece)]
    kept.sort(key=cmp_to_key(lambda a, b: order(a[0].node, b[0].node) or b[0].closed - a[0].closed))
    joined: list[Piece] = []
    for low, high in kept:
        if joined and _touch(joined[-1][1], low):
            last = joined[-1]
            joined[-1] = (last[0], _higher(last[1], high))
        else:
            joined.append((low, high))
    return Reals(tuple(joined), name)


def intersection(first: Reals, second: Reals) -> Reals:
    pieces = [(_later(a[0], b[0]), _lower(a[1], b[1])) for a in first.pieces for b in second.pieces]
    return union(pieces, first.name or second.name)


def without(points: Sequence[Node], name: str = "", within: Reals = EVERYTHING) -> Reals:
    rest = within._replace(name=name or within.name)
    for point in points:
        below = Reals(((End(MINUS, False), End(point, False)), (End(point, False), End(PLUS, False))))
        rest = intersection(rest, below)
    return rest


def as_reals(value: Value) -> Reals | None:
    """The set of reals that an interval, an inequality in one variable or a finite set stands for, if it is one."""
    try:
        match value:
            case Reals():
                return value
            case Collection(kind=kind, items=(Quantity() as low, Quantity() as high)) if kind[0] in "([" and len(kind) == 2:
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
                return None if root is None else without([root[1]], root[0])
    except Undefined:
        return None
    return None


def _solution(value: Inequality) -> Reals | None:
    """Linear inequalities in the same one variable, solved."""
    found = None
    for gap, closed in value.gaps:
        root = _root(gap)
        if root is None:
            return None
        name, point, rising = root
        end = End(point, closed)
        piece = (End(MINUS, False), end) if rising else (end, End(PLUS, False))
        if found is not None and found.name != name:
            return None
        found = intersection(found or EVERYTHING, Reals((piece,), name))
    return found


def _root(gap: Node) -> tuple[str, Node, bool] | None:
    """Variable, zero and direction of a gap of the form a*x + b; also with irrational b where a is 1 or -1."""
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
    values = [exact(gap, {name: Fraction(x)}) for x in (0, 1, 3)]
    if any(value is None for value in values):
        return None
    at0, at1, at3 = (value for value in values if value is not None)
    slope = at1 - at0
    if not slope or at3 - at1 != 2 * slope:
        return None
    return name, number(-at0 / slope), slope > 0


def _empty(piece: Piece) -> bool:
    low, high = piece
    compared = order(low.node, high.node)
    return compared > 0 or (compared == 0 and not (low.closed and high.closed))


def _touch(high: End, low: End) -> bool:
    compared = order(high.node, low.node)
    return compared > 0 or (compared == 0 and (high.closed or low.closed))


def _higher(first: End, second: End) -> End:
    compared = order(first.node, second.node)
    return End(first.node, first.closed or second.closed) if compared == 0 else (first if compared > 0 else second)


def _lower(first: End, second: End) -> End:
    compared = order(first.node, second.node)
    return End(first.node, first.closed and second.closed) if compared == 0 else (first if compared < 0 else second)


def _later(first: End, second: End) -> End:
    compared = order(first.node, second.node)
    return End(first.node, first.closed and second.closed) if compared == 0 else (first if compared > 0 else second)
