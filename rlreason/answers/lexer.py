r"""Cut a cleaned answer into tokens: numbers, letters, words, commands, text groups and signs.

A number is one token with its value, whether it has thousands groups, repeating decimals or a power of ten.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from rlreason.answers.verdict import RefusedError

MAX_CHARS = 400
MAX_DIGITS = 200
MAX_POWER = 5_000  # of ten in 1e3, and of whole exponents elsewhere


class Token(NamedTuple):
    """`kind`: number, letter, word, command, text, begin, end or sign; `spaced`: white space stood before."""

    kind: str
    text: str
    spaced: bool = False
    value: Fraction | None = None
    places: int | None = None  # digits after the decimal point, for a decimal written as such


class UnreadableError(Exception):
    """The text does not follow the grammar."""


_GROUPS = r"\d{1,3}(?:,\d{3})+(?![\d,]\d|\d)|\d{1,3}(?:\{,\}\d{3})+(?!\d)|\d{1,3}(?:[ ]\d{3})+(?![ ]?\d)"
_NUMBER = rf"""(?P<number>
    (?P<whole>{_GROUPS}|\d+)?
    (?:\.(?P<decimals>\d*)(?:
        \\(?:overline|bar|dot)\s*\{{?(?P<repeat>\d+)\}}?|\((?P<bracket>\d+)\)(?!\d)|\s?(?P<dots>\\ldots)
    )?)?
    (?:[eE](?P<power>[+-]?\d+)(?![\w.]))?
)"""
_TOKEN = re.compile(
    rf"""(?P<space>\s+)
    |(?=\.?\d|\.\\(?:overline|bar|dot)){_NUMBER}
    |\\begin\s*\{{(?P<begin>[a-zA-Z]+\*?)\}}(?:\{{[lcr|]*\}})?
    |\\end\s*\{{(?P<end>[a-zA-Z]+\*?)\}}
    |\\(?:text(?:[bsi][fct]|rm|tt|normal)?|mathrm|[mhf]box|operatorname)\s*\{{(?P<text>[^{{}}]*)\}}
    |\\(?P<command>[a-zA-Z]+|.)
    |(?P<word>[a-zA-Z]+)
    |(?P<sign>\*\*|<=|>=|!=|[^\s])
    """,
    re.VERBOSE,
)
_SIGN_OF_TEXT = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
_SIGN_OF_COMMAND = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "leq": "\\le", "leqslant": "\\le", "geq": "\\ge",
    "geqslant": "\\ge", "lt": "<", "gt": ">", "neq": "\\ne", "lvert": "|", "rvert": "|",
    "vert": "|", "mid": "|",
    "colon": ":", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "le": "\\le", "ge": "\\ge",
    "ne": "\\ne", "pm": "\\pm", "mp": "\\mp", "cup": "\\cup", "cap": "\\cap", "in": "\\in", "{": "\\{",
    "}": "\\}", "\\": "\\\\", "setminus": "\\setminus", "backslash": "\\setminus",
    "approx": "\\approx", "sim": "\\approx", "$": "$", "&": "&",
    "land": "and", "wedge": "and", "lor": "or", "vee": "or", "circ": "°", "degree": "°",
}  # fmt: skip


def tokens(text: str) -> list[Token]:
    r"""Raises `RefusedError` over the length limits.

    >>> [token.text for token in tokens(r"x^{2}+1,000\text{ cm}")]
    ['x', '^', '{', '2', '}', '+', '1,000', ' cm']
    """
    if len(text) > MAX_CHARS:
        raise RefusedError("longer than 400 characters")
    found: list[Token] = []
    spaced, depth = False, 0
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(text[position : position + 10])
        position = match.end()
        kind = match.lastgroup if match.group("number") is None else "number"
        if kind == "space":
            spaced = True
            continue
        if kind == "number" and depth and "," in match.group("number").replace("{,}", ""):
            position = match.start() + match.group("number").index(",")  # inside brackets a comma separates
            match = _TOKEN.match(text[:position], match.start())
            assert match is not None
        token = _token(kind or "sign", match, spaced)
        found.append(token)
        spaced = False
        if token.kind == "sign":
            depth += (token.text in ("(", "[", "\\{")) - (token.text in (")", "]", "\\}"))
    return found


def _token(kind: str, match: re.Match[str], spaced: bool) -> Token:
    if kind == "number":
        return _number(match, spaced)
    text = match.group(kind)
    if kind == "word" and len(text) == 1:
        kind = "letter"
    if kind == "command" and text in _SIGN_OF_COMMAND:
        kind, text = "sign", _SIGN_OF_COMMAND[text]
    return Token(kind, _SIGN_OF_TEXT.get(text, text), spaced)


def _number(match: re.Match[str], spaced: bool) -> Token:
    text = match.group("number")
    if len(text) > MAX_DIGITS:
        raise RefusedError("a number of more than 200 digits")
    whole = re.sub(r"\D", "", match.group("whole") or "0")
    decimals = match.group("decimals") or ""
    repeat = match.group("repeat") or match.group("bracket")
    if match.group("dots"):  # 0.1666...: what is written twice goes on, a single digit three times
        going_on = re.search(r"(?:(\d)\1\1+|(\d{2,}?)\2+)\Z", decimals)
        if going_on is None:
            raise UnreadableError("digits that go on")
        decimals, repeat = decimals[: going_on.start()], going_on.group(1) or going_on.group(2)
    power = int(match.group("power") or 0)
    if abs(power) > MAX_POWER:
        raise RefusedError("a power of ten beyond 5000")
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    if repeat:
        value += Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(decimals))
    value *= Fraction(10) ** power
    plain_decimal = bool(decimals) and not repeat
    return Token("number", text, spaced, value, len(decimals) - power if plain_decimal else None)
