"""The kinds of answer there are, as records: quantities, collections, relations, sets of reals, words.

Nothing here reads text or compares.
"""

from __future__ import annotations

from typing import NamedTuple

from rlreason.answers.tree import Node


class Quantity(NamedTuple):
    """An expression, with a unit where one was written. `percent`: a percent sign followed."""

    node: Node
    unit: str = ""
    percent: bool = False


class Collection(NamedTuple):
    """`kind` is set, list, or the brackets of a tuple such as `()` or `[)`. `label`: `x = 1, 2` lists x."""

    kind: str
    items: tuple[Value, ...]
    label: str = ""


class Equation(NamedTuple):
    """`label` is the name before the sign, where the left side is only a name; `gap` is left minus right."""

    label: str
    value: Value | None
    gap: Node | None


class Inequality(NamedTuple):
    """Each gap (left minus right, oriented so that it is below zero) with whether equality is allowed."""

    gaps: tuple[tuple[Node, bool], ...]


class Inequation(NamedTuple):
    """left minus right, which is not zero."""

    gap: Node


class End(NamedTuple):
    """One end of an interval. `closed`: the end itself belongs to it."""

    node: Node
    closed: bool


class Reals(NamedTuple):
    """A union of disjoint intervals in rising order, for the variable `name` where one was given."""

    pieces: tuple[tuple[End, End], ...]
    name: str = ""


class Grid(NamedTuple):
    """A matrix or determinant. `kind` tells the two apart."""

    kind: str
    rows: tuple[tuple[Value, ...], ...]


class Based(NamedTuple):
    """Digits in a written base; compared as digits, since the base is part of such an answer."""

    digits: str
    base: int


class Ratio(NamedTuple):
    """`1:2:3`, its parts in order."""

    parts: tuple[Node, ...]


class Clock(NamedTuple):
    """Seconds after midnight or noon, and the half of the day, stated or following from the hour.

    `parts`: the numbers as written where no half was stated, since `11:21` may be a ratio too.
    """

    seconds: int
    half: str
    stated: bool
    parts: tuple[int, ...] = ()


class Words(NamedTuple):
    """An answer in plain language, in small letters."""

    text: str


Value = Quantity | Collection | Equation | Inequality | Inequation | Reals | Grid | Based | Ratio | Clock | Words
