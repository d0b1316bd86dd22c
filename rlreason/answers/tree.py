"""The tree of an expression: numbers, symbols and constants as leaves, operations above them."""

from fractions import Fraction
from typing import NamedTuple


class Node(NamedTuple):
    """`op` is number, symbol, constant, or the operation on `args`."""

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction | None = None
    name: str = ""
    places: int | None = None  # digits after the point, on a number written as a decimal


def number(value: Fraction | int, places: int | None = None) -> Node:
    """A leaf with this value. `places`: digits after the point, where it was written as a decimal."""
    return Node("number", value=Fraction(value), places=places)


def symbols(node: Node) -> frozenset[str]:
    """The names of all symbols in the tree; constants such as pi are none.

    >>> sorted(symbols(Node("add", (Node("symbol", name="x"), Node("constant", name="pi")))))
    ['x']
    """
    if node.op == "symbol":
        return frozenset((node.name,))
    return frozenset().union(*map(symbols, node.args))


def infinity(node: Node) -> int:
    """1 or -1 for plus or minus infinity, else 0."""
    if node.op == "group":
        return infinity(node.args[0])
    if node.op == "neg":
        return -infinity(node.args[0])
    return int(node == Node("constant", name="oo"))
