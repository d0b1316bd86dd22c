"""Answers with a notation of their own: times of day, numbers in a base, letters of a multiple choice.

Each is recognised as a whole text or not at all; nothing here reads an expression.
"""

import re

from rlreason.answers.tree import Node, number
from rlreason.answers.values import Based, Clock, Quantity, Words

_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/(?:\d{2}|\d{4})")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?(?::(\d\d))?\s*(?:\\text\{\s*)?(?:([ap])\.?\s?m\b\.?)?\s*\}?", re.I)
_DIGITS = r"([0-9][0-9A-Fa-f]*|[A-F][0-9A-F]+)"  # a_{12} is a term of a sequence
_BASE = re.compile(rf"\(?{_DIGITS}\)?_\{{?(?:\\text\{{)?\(?([a-z]+|\d{{1,2}})\)?\}}*")
_BASE_WORDS = re.compile(rf"{_DIGITS} ?(?:\\text\{{ ?)?\(?(?:in )?base[ -]([a-z]+|\d{{1,2}})\)?\}}?")
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BELOW_20 = [*_NUMBER_WORDS.split(), "seventeen", "eighteen", "nineteen"]
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_BELOW_100 = _BELOW_20 + [f"{ten}-{one}".removesuffix("-zero") for ten in _TENS for one in _BELOW_20[:10]]
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice) )?[(\[]?([A-E])[)\].:]*")


def date(text: str) -> Words | None:
    """`2024-01-02`, `1/2/2024`: no difference and no quotient."""
    return Words(text) if _DATE.fullmatch(text) else None


def choice(text: str) -> Quantity | None:
    """`C`, `(C)`, `C.`, `C)` or `Option C`."""
    match = _CHOICE.fullmatch(text)
    return Quantity(Node("symbol", name=match.group(1))) if match else None


def in_words(text: str) -> Quantity | None:
    """`zero` to `ninety-nine`."""
    word = text.casefold().replace(" ", "-")
    return Quantity(number(_BELOW_100.index(word))) if word in _BELOW_100 else None


def clock(text: str) -> Clock | None:
    """`9:30`, `9 am`, `21:30:00`, `9:30 \\text{ p.m.}`."""
    match = _CLOCK.fullmatch(text)
    if match is None or not (match.group(2) or match.group(4)):
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    if hour > 23 or minute > 59 or second > 59:
        return None
    half = (match.group(4) or "").lower()
    stated = bool(half)
    if not half and not 1 <= hour <= 12:
        half = "p" if hour else "a"
    parts = () if stated else tuple(int(part) for part in match.groups()[:3] if part)
    return Clock((hour % 12 * 60 + minute) * 60 + second, half, stated, parts)


def based(text: str) -> Based | None:
    """`101_2`, `(101)_{2}`, `101_{\\text{two}}`, `101 base 2`."""
    match = _BASE.fullmatch(text.replace(" ", "")) or _BASE_WORDS.fullmatch(text)
    if match is None:
        return None
    digits, base = match.groups()
    size = int(base) if base.isdigit() else (_BELOW_100.index(base) if base in _BELOW_100 else 0)
    if not 2 <= size <= 36 or any(int(digit, 36) >= size for digit in digits):
        return None
    return Based(digits.upper().lstrip("0") or "0", size)
