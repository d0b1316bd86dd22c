r"""Equations, inequalities and membership, read from pieces between relation signs.

It must not know brackets or tokens beyond a piece, nor compare two answers.
"""

from collections.abc import Callable, Sequence

from rlreason.grading import quantities, reals
from rlreason.grading.equality import same, symbols
from rlreason.grading.expression import Node
from rlreason.grading.lexer import Token, Unreadable
from rlreason.grading.values import Collection, Equation, Inequality, Inequation, Quantity, Reals, Value, Words

Inner = Callable[[Sequence[Token]], Value]


def read(pieces: Sequence[Sequence[Token]], signs: Sequence[str], inner: Inner) -> Value:
    if set(signs) == {"="}:
        return equation(pieces, inner)
    if "\\in" in signs:
        return membership(pieces, signs, inner)
    nodes = [quantities.bare(piece) for piece in pieces]
    if len(signs) == 1 and signs[0] == "\\ne":
        return Inequation(minus(nodes[0], nodes[1]))
    gaps = []
    for left, sign, right in zip(nodes, signs, nodes[1:], strict=False):
        if sign not in ("<", ">", "\\le", "\\ge"):
            raise Unreadable(sign)
        rising = sign in ("<", "\\le")
        gaps.append((minus(left, right) if rising else minus(right, left), sign in ("\\le", "\\ge")))
    return Inequality(tuple(gaps))


def equation(pieces: Sequence[Sequence[Token]], inner: Inner) -> Value:
    """`name = value`, `value = name`, a chain of equal values, or any other equation in symbols."""
    if not pieces[0]:  # "= 38" states 38
        return inner(pieces[1]) if len(pieces) == 2 else equation(pieces[1:], inner)
    label = name_of(pieces[0])
    rest = pieces[1:]
    if not label and len(pieces) == 2 and name_of(pieces[1]):
        label, rest = name_of(pieces[1]), pieces[:1]
    if label:
        values = [inner(piece) for piece in rest]
        if not all(agree(value, values[-1]) for value in values[:-1]):
            raise Unreadable("a chain of values that are not equal")
        return Equation(label, values[-1], _gap(pieces[0], rest[-1]) if len(pieces) == 2 else None)
    if not any(symbols(quantities.bare(piece)) for piece in pieces):
        values = [inner(piece) for piece in pieces]
        if not all(agree(value, values[-1]) for value in values[:-1]):
            raise Unreadable("a false equation")
        return values[-1]
    if len(pieces) != 2:
        raise Unreadable("=")
    return Equation("", None, minus(quantities.bare(pieces[0]), quantities.bare(pieces[1])))


def agree(first: Value, second: Value) -> bool:
    """Whether two links of a chain have the same value; only numbers can form one."""
    return isinstance(first, Quantity) and isinstance(second, Quantity) and same(first.node, second.node, 0.0)


def _gap(left: Sequence[Token], right: Sequence[Token]) -> Node | None:
    try:
        return minus(quantities.bare(left), quantities.bare(right))
    except Unreadable:
        return None


def minus(left: Node, right: Node) -> Node:
    return Node("add", (left, Node("neg", (right,))))


def name_of(piece: Sequence[Token]) -> str:
    """The name that a piece is: a letter with its index, `f(x)`, `(x, y)`, or words; else nothing."""
    texts = [token.text.strip() for token in piece]
    kinds = [token.kind for token in piece]
    if not piece:
        return ""
    if all(kind in ("word", "text", "letter") for kind in kinds) and (len(piece) > 1 or kinds[0] != "letter"):
        if not quantities.is_constant(texts[0].casefold()) and all(len(text) > 1 for text in texts[-1:]):
            return " ".join(texts).casefold()
    head = kinds[0] == "letter" or (kinds[0] == "command" and quantities.is_greek(texts[0]))
    if head and texts[0] not in ("e", "i") or (head and len(piece) > 1):
        if len(piece) == 1 or texts[1] == "_" and len(piece) in (3, 5) and (len(piece) == 3 or texts[4] == "}"):
            return "".join(texts)
        if texts[1] == "(" and texts[-1] == ")" and all(text.isalnum() and len(text) == 1 or text == "," for text in texts[2:-1]):
            return "".join(texts)
    if texts[0] == "(" and texts[-1] == ")" and len(piece) % 2 == 1:
        if all(kind == "letter" for kind in kinds[1:-1:2]) and all(text == "," for text in texts[2:-1:2]):
            return "".join(texts)
    return ""


def membership(pieces: Sequence[Sequence[Token]], signs: Sequence[str], inner: Inner) -> Value:
    name = name_of(pieces[0])
    if list(signs) != ["\\in"] or not name:
        raise Unreadable("\\in")
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
        raise Unreadable("a set by its property")
    return value._replace(name="")


def joined(items: Sequence[Value], kinds: set[str]) -> Value | None:
    """Inequalities joined by `or` (a union) or by `and` (an intersection), as one set of reals."""
    words = kinds - {","}
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


def unlabelled(items: tuple[Value, ...]) -> tuple[Value, ...]:
    """`x = 1, 2` and `x = 1, x = 2` and `x_1 = 1, x_2 = 2` are lists of values of x; `x = 1, y = 2` is not."""
    names = {item.label.split("_")[0] for item in items if isinstance(item, Equation)}
    bare_tail = all(not isinstance(item, Equation) for item in items[1:])
    all_named = all(isinstance(item, Equation) for item in items)
    if len(names) != 1 or "" in names or not (bare_tail or all_named):
        return items
    values = [item.value if isinstance(item, Equation) else item for item in items]
    return tuple(value for value in values if value is not None) if None not in values else items


__all__ = ["Words", "agree", "builder", "joined", "read", "unlabelled"]
