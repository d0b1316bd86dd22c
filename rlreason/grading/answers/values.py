"""The kinds of values of an answer, and reading one quantity with its unit, currency or percent sign."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rlreason.grading.answers import vocabulary
from rlreason.grading.answers.lexer import Token, UnreadableError
from rlreason.grading.answers.parser import Node, number, parse, symbols
from rlreason.grading.answers.vocabulary import (
    CONSTANTS,
    CURRENCIES,
    DENIALS,
    FUNCTIONS,
    GREEK,
    LETTER_UNITS,
    OPERATORS,
    PERCENT,
    SCALES,
    SHORT_WORDS,
    words,
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


class Reals(NamedTuple):
    """A set of real numbers, for the variable `name` where one was given.

    `points`: its ends and single members in rising order. `inside`: whether the numbers below the first point belong to
    it, the first point, those up to the next point, and so on.
    """

    points: tuple[Node, ...]
    inside: tuple[bool, ...]
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


def is_product(tokens: Sequence[Token]) -> bool:
    """Lower-case letters side by side, or a word of consonants or of two letters that is no English word."""
    if len(tokens) > 1:
        return all(token.kind == "letter" and token.text.islower() for token in tokens)
    text = tokens[0].text
    return tokens[0].kind == "word" and bool(
        re.fullmatch("[b-df-hj-np-tv-z]{2,3}", text) or (re.fullmatch("[a-z]{2}", text) and text not in SHORT_WORDS)
    )


def read_quantity(tokens: Sequence[Token]) -> Quantity:
    """Read all tokens as one quantity. Raises `UnreadableError` where words that are no unit follow it."""
    tokens, currency = _without_currency(list(tokens))
    end = _end_of_number(tokens)
    tail = tokens[end:]
    if not tokens[:end]:
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
    node = parse(tokens[:end])
    if scale != 1:
        node = Node("mul", (Node("group", (node,)), number(scale)))
    return Quantity(node, unit or currency, percent)


def _without_currency(tokens: list[Token]) -> tuple[list[Token], str]:
    """Remove the signs or codes of one currency, and return it: `$5`, `-$5`, `5 $`, `USD 5`, `$7 - $2`."""
    places = [index for index, token in enumerate(tokens) if _bare(token) in CURRENCIES]
    kinds = {CURRENCIES[_bare(tokens[index])] for index in places}
    last = len(tokens) - 1
    if len(kinds) != 1 or any(0 < index < last and tokens[index + 1].kind != "number" for index in places):
        return tokens, ""
    return [token for index, token in enumerate(tokens) if index not in places], kinds.pop()


def _bare(token: Token) -> str:
    r"""Return the sign in `\text{\$}` and the code in `\text{USD }`."""
    return token.text.strip().removeprefix("\\").casefold()


def _end_of_number(tokens: Sequence[Token]) -> int:
    """Return where the expression ends and its unit begins: at the first word from which on there are only units."""
    depth = 0
    for index, token in enumerate(tokens):
        if token.kind == "sign" and token.text in ("(", "{", "[", "\\{"):
            depth += 1
        elif token.kind == "sign" and token.text in (")", "}", "]", "\\}"):
            depth -= 1
        if index and not depth and _begins_unit(tokens, index) and _only_units(tokens[index:]):
            return index
    return len(tokens)


def _begins_unit(tokens: Sequence[Token], index: int) -> bool:
    token, before = tokens[index], tokens[index - 1]
    if before.kind == "sign" and before.text in ("+", "-", "*", "/", "^", "_", "("):
        # 45^\circ: the sign of degrees is raised, and a unit only behind plain numbers
        return False
    name = token.text.strip()
    if token.kind == "text":
        return bool(name) and name not in FUNCTIONS and name not in ("i", "e")
    if token.kind == "sign":
        return token.text == "%" or (token.text in ("^", "°") and _degrees(tokens, index))
    if token.kind == "word":
        return not is_constant(name.casefold()) and vocabulary.is_word(name)
    return token.kind == "letter" and token.spaced and name in LETTER_UNITS and before.kind == "number"


def _degrees(tokens: Sequence[Token], index: int) -> bool:
    r"""Whether `°`, `^°` or `^{°}` follows an expression without functions."""
    texts = [token.text for token in tokens[index:]]
    raised = texts[:1] == ["°"] or texts[:2] == ["^", "°"] or texts[:4] == ["^", "{", "°", "}"]
    return raised and not any(token.text in FUNCTIONS for token in tokens[:index])


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


LONGEST = 80  # characters of a name, signs and braces included
_GREEK = "|".join(sorted(GREEK))
_LETTER = rf"(?:[a-zA-Z]|{_GREEK})"
_SIMPLE = re.compile(
    rf"{_LETTER}(?:_(?:\w|\{{\w+\}}))?'*(?:\^\{{-1\}})?(?:\({_LETTER}(?:,{_LETTER})*\))?"  # x, x_1, f'(x)
    rf"|(?:hat|bar|vec|dot)\{{?{_LETTER}\}}?"
    rf"|\({_LETTER}(?:,{_LETTER})+\)"  # (x,y)
    rf"|frac\{{d\w?\}}\{{d\w\}}|m?angle[A-Z]{{1,3}}"
)
_NUMBERED = re.compile(rf"({_LETTER})_(?:\d|\{{\d+\}})")

#: Points side by side, as `AB`, `AB'` or `A_1B_1`. Other capitals with an index, such as V_1V_2, are products.
_POINTS = r"(?:[A-Z]'{0,2}|[A-FM-Q]_\{?\w\}?'?){2,6}"
_VECTOR = rf"(?:vec|overrightarrow|mathbf|boldsymbol)(?:\{{(?:{_POINTS}|[a-zA-Z])\}}|[a-zA-Z])"
_SET = r"[A-W](?:\\c[au]p[A-W]){0,4}"  # or a matrix in bars
_MEASURE = (
    rf"(?:{_POINTS}|\|(?:{_POINTS}|{_VECTOR}|{_SET})\||(?:overline|overrightarrow|widehat|wideparen)\{{{_POINTS}\}}"
    rf"|\[{_POINTS}\]|triangle[A-Z]{{3}}|[A-Z]_(?:\w|\{{\w{{1,20}}\}}))"
)
_TERM = rf"(?:{_MEASURE}|[a-z])"
_RATIO = rf"frac\{{{_MEASURE}\}}\{{{_MEASURE}\}}|{_MEASURE}/{_MEASURE}|{_TERM}(?::{_TERM}){{1,5}}"
_OF_AN_ANGLE = rf"(?:sin|cos|tan|cot|sec|csc)\(?(?:m?angle)?(?:[A-Z]{{1,3}}|{_GREEK})\)?"
_COMPOUND = re.compile(f"{_MEASURE}|{_RATIO}|{_OF_AN_ANGLE}")
#: A length is one quantity whether it is written `|AB|`, `\overline{AB}` or `AB`.
_LENGTH = re.compile(rf"\|({_POINTS})\||overline\{{({_POINTS})\}}")

_FUNCTION = re.compile(
    r"(?:[fghpqFGHPQ]|phi|varphi|psi|Phi|Psi|Gamma|zeta|sigma|tau)(?:_(?:\w|\{\w+\}))?'*(?:\^\{-1\})?"
)
_SHAPES = words("triangle angle")
_PROBABILITY = words("P Pr mathbb{P}")
_EXPECTATION = words("E mathbb{E}")
_OF_EVENTS = words("| = < > \\le \\ge \\ne \\in \\cup \\cap and or")
_OF_NUMBERS = words("+ - * / ^ { } ( ) , . ° frac sqrt pi e i")
_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}


def name_of(piece: Sequence[Token]) -> str:
    """Return a piece's name in one spelling, else nothing: `x`, `x_1`, `f(x)`, `(x, y)`, a derivative, words, or one
    quantity of several signs, such as `AB`, `V_1/V_2` or `f(2)`.
    """
    return _simple(piece) or _compound(piece)


def family(name: str) -> str:
    """Return the common name of `x_1` and `x_2`; other names, such as `A_1B_1` and `S_{ABC}`, are their own."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else name


def occurs_in(piece: Sequence[Token], value: Value) -> bool:
    """Whether the named quantity occurs in the value too: then it is an equation to solve, `x = 2 - x`."""
    if simple := _simple(piece):
        own = {simple.replace("{", "").replace("}", "")}
        return bool(own & _symbols(value))
    own = {char for token in piece if token.kind in ("letter", "word") for char in token.text}
    own |= {token.text for token in piece if token.text in GREEK}
    return bool(own & {name.split("_")[0].rstrip("'") for name in _symbols(value)})


def _symbols(value: Value) -> frozenset[str]:
    match value:
        case Quantity():
            return symbols(value.node)
        case Ratio():
            return frozenset().union(*map(symbols, value.parts))
        case Collection():
            return frozenset().union(*map(_symbols, value.items))
    return frozenset()


def _simple(piece: Sequence[Token]) -> str:
    text = _joined(piece)
    kinds = {token.kind for token in piece}
    if len(piece) == 1 and text in ("e", "i"):
        return ""
    if _SIMPLE.fullmatch(text) and (len(piece) > 1 or kinds <= {"letter"} or text in GREEK):
        return text
    drawn = len(piece) > 2 and piece[0].kind == "text"  # \text{Area of } \triangle ABC
    spoken = [token for token in piece if not (drawn and token.text in _SHAPES)]
    is_language = {token.kind for token in spoken} <= {"word", "text", "letter"} and not is_constant(text)
    if spoken and is_language and not is_product(spoken) and len(spoken[-1].text.strip()) > 1:
        language = [token.text.strip().casefold() for token in piece]
        return "" if DENIALS.intersection(" ".join(language).split()) else " ".join(language)
    return ""


def _compound(piece: Sequence[Token]) -> str:
    text = _joined(piece)
    if not text or len(text) > LONGEST:
        return ""
    if _COMPOUND.fullmatch(text):
        return _one_spelling(text)
    return text if _is_applied(piece) or _is_operator(piece) else ""


def _one_spelling(text: str) -> str:
    r"""Write `|AB|` and `\overline{AB}` like the word AB, and every ratio with a slash."""
    text = _LENGTH.sub(lambda length: length[1] or length[2], text)
    if fraction := re.fullmatch(r"frac\{(.*)\}\{(.*)\}", text):
        return "/".join(fraction.groups())
    return text.casefold() if re.fullmatch("[A-Z]+", text) else text.replace(":", "/")


def _is_applied(piece: Sequence[Token]) -> bool:
    """Whether it is a function at a point or of an event: `f(2)`, `f(g(2))`, `P(X = 2)`, `E[X]`; not `k(k+1)`."""
    at = next((index for index, token in enumerate(piece) if token.kind == "sign" and token.text in ("(", "[")), 0)
    if not at or _ends(piece, at) != len(piece) - 1:
        return False
    head, inner = _joined(piece[:at]), piece[at + 1 : -1]
    if head in _EXPECTATION and (piece[at].text == "[" or _capitals(inner)):
        return True
    if head in _PROBABILITY and _is_event(inner):
        return True
    return bool(_FUNCTION.fullmatch(head)) and piece[at].text == "(" and _without_letters(inner)


def _is_event(inner: Sequence[Token]) -> bool:
    stated = any(token.kind == "text" or token.text in _OF_EVENTS for token in inner)
    spoken = any(token.kind == "word" and (len(token.text) > 3 or vocabulary.is_word(token.text)) for token in inner)
    return stated or spoken or _capitals(inner)


def _capitals(inner: Sequence[Token]) -> bool:
    return bool(inner) and all(token.kind in ("letter", "word") and token.text.isupper() for token in inner)


def _without_letters(inner: Sequence[Token]) -> bool:
    """Whether an argument consists of numbers and functions of numbers."""
    following = [token.text for token in inner[1:]] + [""]
    return bool(inner) and all(
        token.kind == "number" or token.text in _OF_NUMBERS or (_FUNCTION.fullmatch(token.text) and after == "(")
        for token, after in zip(inner, following, strict=True)
    )


def _is_operator(piece: Sequence[Token]) -> bool:
    r"""Whether it is an operator with one operand, no sum or product: `\gcd(12, 18)`, `\max f`, `Var(X)`."""
    if len(piece) < 2 or not _operator(piece[0]):
        return False
    at = 1
    while at < len(piece):
        token, end = piece[at], _ends(piece, at)
        if token.text in ("+", "-", "*", "/", "^", "!") or token.kind == "number" or _operator(token):
            return False
        if end > at and end != len(piece) - 1 and piece[at - 1].text != "_":
            return False  # something follows the operand
        at = end + 1
    return True


def _operator(token: Token) -> bool:
    return token.kind != "letter" and token.text.strip().casefold() in OPERATORS


def _ends(piece: Sequence[Token], start: int) -> int:
    """Return where the bracket opened at `start` closes; `start` where none opens, the end where none closes."""
    closers: list[str] = []
    for index in range(start, len(piece)):
        text = piece[index].text
        if text in _OPENING:
            closers.append(_OPENING[text])
        elif closers and text == closers[-1]:
            closers.pop()
        if not closers:
            return index
    return len(piece)


def _joined(piece: Sequence[Token]) -> str:
    return "".join(token.text.strip() for token in piece)
