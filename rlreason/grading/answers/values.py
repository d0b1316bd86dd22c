"""The kinds of values of an answer, and reading one quantity with its unit, currency or percent sign."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rlreason.grading.answers import vocabulary
from rlreason.grading.answers.lexer import Token, UnreadableError
from rlreason.grading.answers.parser import Node, number, parse
from rlreason.grading.answers.vocabulary import (
    CONSTANTS,
    CURRENCIES,
    FUNCTIONS,
    GREEK,
    LETTER_UNITS,
    PERCENT,
    SCALES,
    SHORT_WORDS,
)


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
    """`gap` is left minus right, which is not zero."""

    gap: Node


class End(NamedTuple):
    """One end of an interval. `closed`: the end itself belongs to it."""

    node: Node
    closed: bool


class Reals(NamedTuple):
    """A union of disjoint intervals in rising order, for the variable `name` where one was given."""

    pieces: tuple[tuple[End, End], ...]
    name: str = ""


class Matrix(NamedTuple):
    """A matrix or determinant. `kind` tells the two apart."""

    kind: str
    rows: tuple[tuple[Value, ...], ...]


class Based(NamedTuple):
    """Digits in a given base; compared as digits, since the base is part of such an answer."""

    digits: str
    base: int


class Ratio(NamedTuple):
    """`1:2:3`, its parts in order."""

    parts: tuple[Node, ...]


class TimeOfDay(NamedTuple):
    """A time of day: seconds after midnight or noon, and the half of the day, stated or implied by the hour.

    `parts`: the numbers as written where no half was stated, since `11:21` may also be a ratio.
    """

    seconds: int
    half: str
    stated: bool
    parts: tuple[int, ...] = ()


class Words(NamedTuple):
    """An answer in plain language, in small letters."""

    text: str


Value = Quantity | Collection | Equation | Inequality | Inequation | Reals | Matrix | Based | Ratio | TimeOfDay | Words


def is_constant(text: str) -> bool:
    """Whether a word names a constant, a function or a Greek letter."""
    return text in CONSTANTS or text in FUNCTIONS or text in GREEK or text == "sqrt"


def is_product(found: Sequence[Token]) -> bool:
    """Lower-case letters side by side, or a word of consonants or of two letters that is no English word."""
    if len(found) > 1:
        return all(token.kind == "letter" and token.text.islower() for token in found)
    text = found[0].text
    return found[0].kind == "word" and bool(
        re.fullmatch("[b-df-hj-np-tv-z]{2,3}", text) or (re.fullmatch("[a-z]{2}", text) and text not in SHORT_WORDS)
    )


def read_quantity(found: Sequence[Token]) -> Quantity:
    """Read all tokens as one quantity. Raises `UnreadableError` where words that are no unit follow it."""
    found, currency = _without_currency(list(found))
    end = _end_of_number(found)
    tail = found[end:]
    if not found[:end]:
        raise UnreadableError("no number")
    scale, percent = Fraction(1), False
    parts: list[str] = []
    for token in tail:
        word = token.text.strip().casefold()
        if word in SCALES and not parts:
            scale *= SCALES[word]
        elif word in PERCENT and not parts:
            percent = True
        else:
            parts.append(("" if not parts or not token.spaced else " ") + token.text)
    unit = vocabulary.canonical("".join(parts)) if parts else ""
    if unit is None or (percent and currency):
        raise UnreadableError("words that are no unit")
    if currency and unit not in ("", currency, "usd"):
        unit = currency + unit if unit.startswith("/") else f"{currency} {unit}"
    node = parse(found[:end])
    if scale != 1:
        node = Node("mul", (Node("group", (node,)), number(scale)))
    return Quantity(node, unit or currency, percent)


def _without_currency(found: list[Token]) -> tuple[list[Token], str]:
    """Remove the signs or codes of one currency, and return it: `$5`, `-$5`, `5 $`, `USD 5`, `$7 - $2`."""
    places = [index for index, token in enumerate(found) if _bare(token) in CURRENCIES]
    kinds = {CURRENCIES[_bare(found[index])] for index in places}
    last = len(found) - 1
    if len(kinds) != 1 or any(0 < index < last and found[index + 1].kind != "number" for index in places):
        return found, ""
    return [token for index, token in enumerate(found) if index not in places], kinds.pop()


def _bare(token: Token) -> str:
    r"""Return the sign in `\text{\$}` and the code in `\text{USD }`."""
    return token.text.strip().removeprefix("\\").casefold()


def _end_of_number(found: Sequence[Token]) -> int:
    """Return where the expression ends and its unit begins: at the first word from which on there are only units."""
    depth = 0
    for index, token in enumerate(found):
        if token.kind == "sign" and token.text in ("(", "{", "[", "\\{"):
            depth += 1
        elif token.kind == "sign" and token.text in (")", "}", "]", "\\}"):
            depth -= 1
        if index and not depth and _begins_unit(found, index) and _only_units(found[index:]):
            return index
    return len(found)


def _begins_unit(found: Sequence[Token], index: int) -> bool:
    token, before = found[index], found[index - 1]
    if before.kind == "sign" and before.text in ("+", "-", "*", "/", "^", "_", "("):
        # 45^\circ: the sign of degrees is raised, and a unit only behind plain numbers
        return False
    name = token.text.strip()
    if token.kind == "text":
        return bool(name) and name not in FUNCTIONS and name not in ("i", "e")
    if token.kind == "sign":
        return token.text == "%" or (token.text in ("^", "°") and _degrees(found, index))
    if token.kind == "word":
        return not is_constant(name.casefold()) and vocabulary.is_word(name)
    return token.kind == "letter" and token.spaced and name in LETTER_UNITS and before.kind == "number"


def _degrees(found: Sequence[Token], index: int) -> bool:
    r"""Whether `°`, `^°` or `^{°}` follows an expression without functions."""
    texts = [token.text for token in found[index:]]
    raised = texts[:1] == ["°"] or texts[:2] == ["^", "°"] or texts[:4] == ["^", "{", "°", "}"]
    return raised and not any(token.text in FUNCTIONS for token in found[:index])


def _only_units(tail: Sequence[Token]) -> bool:
    for index, token in enumerate(tail):
        name, before = token.text.strip(), tail[index - 1].text if index else ""
        hyphen = token.text == "-" and tail[index + 1 : index + 2] and tail[index + 1].kind in ("word", "text")
        if token.kind in ("text", "word") or hyphen or (token.kind == "letter" and _letter_unit(tail, index)):
            continue
        if token.kind == "sign" and name in ("%", "°", "^", "/", "*", "{", "}", "(", ")", "."):
            continue
        if (token.kind == "number" and before in ("^", "{", "-")) or (token.text == "-" and before in ("^", "{")):
            continue
        return False
    return True


def _letter_unit(tail: Sequence[Token], index: int) -> bool:
    """Whether a letter is a unit: next to words, alone or in a quotient, as in `9.8 m s^{-2}`; `2 m g` is a product."""
    if tail[0].kind != "letter" or any(token.kind in ("text", "word") for token in tail):
        return True
    alone = sum(token.kind == "letter" for token in tail) == 1
    return tail[index].text in LETTER_UNITS and (alone or any(token.text in ("/", "-") for token in tail))
