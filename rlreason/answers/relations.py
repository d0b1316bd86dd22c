r"""Equations, inequalities and membership, read from pieces between relation signs."""

from collections.abc import Callable, Sequence

from rlreason.answers import intervals as reals
from rlreason.answers.equality import near, same
from rlreason.answers.lexer import Token, UnreadableError
from rlreason.answers.names import family, name_of, occurs_in
from rlreason.answers.parser import parse
from rlreason.answers.tree import Node, symbols
from rlreason.answers.values import Collection, Equation, Inequality, Inequation, Quantity, Reals, Value

Inner = Callable[[Sequence[Token]], Value]


def read(pieces: Sequence[Sequence[Token]], signs: Sequence[str], inner: Inner) -> Value:
    """The relation that these signs make between these pieces; `inner` reads the value of a piece.

    Raises `UnreadableError` for signs that make none together.
    """
    if "\\approx" in signs:
        return approximation(pieces, signs, inner)
    if set(signs) == {"="}:
        return equation(pieces, inner)
    if "\\in" in signs:
        return membership(pieces, signs, inner)
    nodes = [parse(piece) for piece in pieces]
    if len(signs) == 1 and signs[0] == "\\ne":
        return Inequation(minus(nodes[0], nodes[1]))
    gaps = []
    for left, sign, right in zip(nodes, signs, nodes[1:], strict=False):
        if sign not in ("<", ">", "\\le", "\\ge"):
            raise UnreadableError(sign)
        rising = sign in ("<", "\\le")
        gaps.append((minus(left, right) if rising else minus(right, left), sign in ("\\le", "\\ge")))
    return Inequality(tuple(gaps))


def equation(pieces: Sequence[Sequence[Token]], inner: Inner) -> Value:
    """`name = value`, `value = name`, a chain of equal values, or any other equation in symbols."""
    if not pieces[0]:  # "= 38" states 38
        return inner(pieces[1]) if len(pieces) == 2 else equation(pieces[1:], inner)
    at = 0 if name_of(pieces[0]) or len(pieces) != 2 else 1
    if label := name_of(pieces[at]):
        rest = pieces[1:] if at == 0 else pieces[:1]
        values = [inner(piece) for piece in rest]
        if not occurs_in(pieces[at], values[-1]):
            check_chain(values)
            return Equation(label, values[-1], _gap(pieces[at], rest[-1]) if len(pieces) == 2 else None)
    values = [inner(piece) for piece in pieces]
    if all(isinstance(value, Quantity) and not symbols(value.node) for value in values):
        check_chain(values)
        return values[-1]
    if len(pieces) != 2:
        raise UnreadableError("=")
    return Equation("", None, minus(parse(pieces[0]), parse(pieces[1])))


def approximation(pieces: Sequence[Sequence[Token]], signs: Sequence[str], inner: Inner) -> Value:
    r"""`\approx 38` and `x \approx 38` state 38; in `\sqrt2 \approx 1.41` the exact side is the answer."""
    at = list(signs).index("\\approx")
    if len(signs) == 1 and (not pieces[0] or name_of(pieces[0])):
        return equation(pieces, inner)
    if "\\approx" in signs[at + 1 :] or len(signs) > at + 1:
        raise UnreadableError("more than one approximation")
    exact, rough = inner(pieces[at]), inner(pieces[at + 1])
    if not (isinstance(exact, Quantity) and isinstance(rough, Quantity) and near(exact.node, rough.node, 0.01)):
        raise UnreadableError("an approximation that is not near")
    return read(pieces[: at + 1], signs[:at], inner) if at else exact


def check_chain(values: Sequence[Value]) -> None:
    """The links of a chain must have the same value; only numbers and formulas can form one."""
    last = values[-1]
    for value in values[:-1]:
        if not (isinstance(value, Quantity) and isinstance(last, Quantity) and same(value.node, last.node, 0.0)):
            raise UnreadableError("a chain of values that are not equal")


def _gap(left: Sequence[Token], right: Sequence[Token]) -> Node | None:
    try:
        return minus(parse(left), parse(right))
    except UnreadableError:
        return None


def minus(left: Node, right: Node) -> Node:
    """The tree of `left - right`."""
    return Node("add", (left, Node("neg", (right,))))


def membership(pieces: Sequence[Sequence[Token]], signs: Sequence[str], inner: Inner) -> Value:
    r"""`x \in A`: the set of reals for x where A is one, else x named with the value A."""
    name = name_of(pieces[0])
    if list(signs) != ["\\in"] or not name:
        raise UnreadableError("\\in")
    value = inner(pieces[1])
    found = reals.as_reals(value)
    if found is not None and not (isinstance(value, Collection) and value.kind == "set"):
        return found._replace(name=name)
    return Equation(name, value, None)


def builder(content: Sequence[Token], inner: Inner) -> Value | None:
    r"""`x \mid x > 2` inside set braces; None when the braces hold something else."""
    marks = [index for index, token in enumerate(content) if token.kind == "sign" and token.text in ("|", ":")]
    if len(marks) != 1 or not 0 < marks[0] < len(content) - 1:
        return None
    if not name_of(content[:1]) or (marks[0] > 1 and content[1].text != "\\in"):
        return None
    value = reals.as_reals(inner(content[marks[0] + 1 :]))
    if value is None or value.name != name_of(content[:1]):
        raise UnreadableError("a set by its property")
    return value._replace(name="")


def joined(items: Sequence[Value], kinds: set[str]) -> Value | None:
    """Inequalities joined by `or` (a union) or by `and` (an intersection), as one set of reals.

    A comma is an `and` where something is excluded: `x > 2, x \\ne 3`.
    """
    words = kinds - {","} or ({"and"} if any(isinstance(item, Inequation) for item in items) else set())
    if len(words) != 1 or not all(isinstance(item, Inequality | Inequation | Reals) for item in items):
        return None
    sets = [reals.as_reals(item) for item in items]
    found = [part for part in sets if part is not None]
    if len(found) != len(items) or len({part.name for part in found}) != 1:
        return None
    if words == {"or"}:
        return reals.union([piece for part in found for piece in part.pieces], found[0].name)
    result = found[0]
    for part in found[1:]:
        result = reals.intersection(result, part)
    return result


def unlabelled(items: tuple[Value, ...]) -> Collection:
    """`x = 1, 2`, `x = 1, x = 2` and `x_1 = 1, x_2 = 2` list values of x; `x = 1, y = 2` does not."""
    names = {family(item.label) for item in items if isinstance(item, Equation)}
    bare_tail = all(not isinstance(item, Equation) for item in items[1:])
    all_named = all(isinstance(item, Equation) for item in items)
    values = [item.value if isinstance(item, Equation) else item for item in items]
    stripped = tuple(value for value in values if value is not None)
    if len(names) != 1 or "" in names or not (bare_tail or all_named) or len(stripped) < len(items):
        return Collection("list", items)
    return Collection("list", stripped, names.pop())
