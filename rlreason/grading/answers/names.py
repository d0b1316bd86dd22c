r"""Recognise names before an equals sign: of one quantity, whose value alone is the same answer; else an equation.

`|AB| = 1`, `V_1:V_2 = 11:21` and `f(2) = 12` name the requested quantity. `x^2 = 4`, `xy = 4` and `\frac xy = 2` are
equations: their right side alone is another answer.
"""

import re
from collections.abc import Sequence

from rlreason.grading.answers import vocabulary
from rlreason.grading.answers.lexer import Token
from rlreason.grading.answers.parser import symbols
from rlreason.grading.answers.values import Collection, Quantity, Ratio, Value, is_constant, is_product
from rlreason.grading.answers.vocabulary import DENIALS, GREEK, OPERATORS, words

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


def is_ratio(name: str) -> bool:
    """Whether a name is a ratio of two quantities, such as `V_1/V_2`."""
    return "/" in name


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
