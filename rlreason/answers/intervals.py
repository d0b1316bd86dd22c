"""Sets of real numbers: intervals, unions and inequalities in one variable, in one normal form."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cmp_to_key

from rlreason.answers.arithmetic import UndefinedError
from rlreason.answers.equality import same_constant
from rlreason.answers.evaluate import NOWHERE, Evaluator, exact, precision
from rlreason.answers.tree import Node, infinity, number, symbols
from rlreason.answers.values import Collection, End, Inequality, Inequation, Quantity, Reals, Value

PLUS = Node("constant", name="oo")
MINUS = Node("neg", (PLUS,))
EVERYTHING = Reals(((End(MINUS, False), End(PLUS, False)),))
Piece = tuple[End, End]


def order(first: Node, second: Node) -> int:
    """-1, 0 or 1 for two real constants or infinities. Raises `UndefinedError` for anything else."""
    infinite = infinity(first) - infinity(second)
    if infinity(first) or infinity(second):
        return (infinite > 0) - (infinite < 0)
    if same_constant(first, second):
        return 0
    evaluator = Evaluator(NOWHERE, precision(first, second))
    a, b = evaluator.approximate(first), evaluator.approximate(second)
    if evaluator.mp.im(a) != 0 or evaluator.mp.im(b) != 0:
        raise UndefinedError("not real")
    return -1 if a < b else 1


def union(pieces: Sequence[Piece], name: str = "") -> Reals:
    """Sorted, without empty pieces, and with pieces that touch or overlap joined."""
    kept = [piece for piece in pieces if not _empty(piece)]
    kept.sort(key=cmp_to_key(_by_low_end))
    joined: list[Piece] = []
    for low, high in kept:
        if joined and _touch(joined[-1][1], low):
            last = joined[-1]
            joined[-1] = (last[0], _farther(last[1], high, 1, either=True))
        else:
            joined.append((low, high))
    return Reals(tuple(joined), name)


def _by_low_end(first: Piece, second: Piece) -> int:
    return order(first[0].node, second[0].node) or second[0].closed - first[0].closed


def intersection(first: Reals, second: Reals) -> Reals:
    """The numbers that are in both sets."""
    pieces = [
        (_farther(a[0], b[0], 1, either=False), _farther(a[1], b[1], -1, either=False))
        for a in first.pieces
        for b in second.pieces
    ]
    return union(pieces, first.name or second.name)


def complement(value: Reals) -> Reals:
    """The real numbers that are not in the set."""
    rest = EVERYTHING._replace(name=value.name)
    for low, high in value.pieces:
        below = (End(MINUS, False), End(low.node, not low.closed))
        above = (End(high.node, not high.closed), End(PLUS, False))
        rest = intersection(rest, union([below, above]))
    return rest


def as_reals(value: Value) -> Reals | None:
    """The set of reals that an interval, a linear inequality or a finite set stands for, if it is one."""
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
    """Linear inequalities in the same one variable, solved."""
    if outside := _outside(value):
        return outside
    found = None
    for gap, closed in _without_bars(value.gaps):
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


def _outside(value: Inequality) -> Reals | None:
    """`|u| > c` as `u > c` or `-u > c`, for one such inequality alone."""
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
    """`|u| < c` as `u < c` and `-u < c`."""
    found = []
    for gap, closed in gaps:
        sides = [gap]
        if gap.op == "add" and gap.args[0].op == "abs" and not symbols(gap.args[1]):
            inner = Node("group", gap.args[0].args)
            sides = [gap._replace(args=(part, gap.args[1])) for part in (inner, Node("neg", (inner,)))]
        found += [(side, closed) for side in sides]
    return found


def _root(gap: Node) -> tuple[str, Node, bool] | None:
    """Variable, zero and direction of a gap a*x + b; b may be irrational where a is 1 or -1."""
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
    known = [value for value in values if value is not None]
    if len(known) < len(places):
        return None
    slope = known[1] - known[0]
    if not slope or any(value != known[0] + slope * place for place, value in zip(places, known, strict=True)):
        return None
    return name, number(-known[0] / slope), slope > 0


def _empty(piece: Piece) -> bool:
    low, high = piece
    compared = order(low.node, high.node)
    return compared > 0 or (compared == 0 and not (low.closed and high.closed))


def _touch(high: End, low: End) -> bool:
    compared = order(high.node, low.node)
    return compared > 0 or (compared == 0 and (high.closed or low.closed))


def _farther(first: End, second: End, up: int, either: bool) -> End:
    """The higher end (`up` is 1) or the lower one (-1); where they meet, closed if either is or if both are."""
    compared = order(first.node, second.node) * up
    if compared:
        return first if compared > 0 else second
    return first._replace(closed=first.closed or second.closed if either else first.closed and second.closed)
