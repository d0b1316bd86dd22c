r"""Units and plain counting words after a number, distinguished from words that mean more.

`38 clips` is 38 with a unit; `8 more`, `9 am` and `2 or 9` are not numbers with units.
"""

import re
from fractions import Fraction

from rlreason.answers.vocabulary import CURRENCIES, MEANING, PERCENT, SCALES, SIZES, UNIT_NAMES

MAX_WORDS = 5  # longer is a sentence


def is_word(text: str) -> bool:
    """Whether letters written after a number are a word of the language rather than a product of variables.

    >>> [is_word(text) for text in ("clips", "cm", "xy", "abc", "more")]
    [True, True, False, False, False]
    """
    lower = text.casefold()
    if lower in MEANING:
        return False
    if lower in ("sq", "cu") or lower in UNIT_NAMES or lower in SCALES or lower in PERCENT or lower in CURRENCIES:
        return len(text) > 1
    return len(text) > 3 or (len(text) == 3 and any(char in "aeiou" for char in text[1:]) and text.islower())


def canonical(text: str) -> str | None:
    """One spelling for each unit, or None when a word in it means more than a unit does.

    >>> canonical("square centimeters"), canonical("miles per hour"), canonical("more apples")
    ('cm^2', 'mi/h', None)
    """
    text = re.sub(r"\s+", " ", text.casefold().replace(".", "").replace("\\", " ")).strip()
    text = re.sub(r"\s*\^?\s*\{?\s*°\s*\}?\s*", "°", text)
    text = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    text = re.sub(r"\s*(?:/|\bper\b|\ban?\b(?= (?:hour|day|week|month|year|minute|second)\b))\s*", "/", text)
    text = re.sub(r"\s*\b([a-z]+)\^-(\d)", lambda unit: "/" + unit[1] + (f"^{unit[2]}" if unit[2] > "1" else ""), text)
    text = re.sub(r"\b(?:degrees? |deg )?(celsius|fahrenheit)\b", lambda scale: "°" + scale[1][0], text)
    parts = re.split(r"([ /*()])", text)
    if len(parts) > 2 * MAX_WORDS or any(part.split("^")[0] in MEANING for part in parts):
        return None
    text = "".join(map(_name, parts)).strip()
    text = re.sub(r"(?:square|sq) ([a-z]+)(?!\^)", r"\1^2", text)
    return re.sub(r"(?:cubic|cu) ([a-z]+)(?!\^)", r"\1^3", text)


def _name(part: str) -> str:
    """The short name of a known unit, and the singular of any other word."""
    stem, caret, power = part.partition("^")
    known = UNIT_NAMES.get(stem, stem)
    if known == stem and len(stem) > 3 and stem.endswith("s") and not stem.endswith("ss"):
        known = stem[:-3] + "y" if stem.endswith("ies") and len(stem) > 4 else stem[:-1]
        known = known[:-1] if known.endswith(("xe", "she", "che")) else known
    return known + caret + power


def agree(first: str, second: str) -> bool:
    """A unit may be left out; two that are given must be the same, `square units` being any area."""
    if not first or not second or first == second:
        return True
    (stem, _, power), (other, _, power_of_other) = first.partition("^"), second.partition("^")
    return power == power_of_other and "unit" in (stem, other)


def conversion(first: str, second: str) -> Fraction | None:
    """How many of the second unit make one of the first, or None where that is not known.

    >>> conversion("h", "min"), conversion("cm", "kg")
    (Fraction(60, 1), None)
    """
    (size, kind), (other, kind_of_other) = SIZES.get(first, (0, "")), SIZES.get(second, (0, "?"))
    return Fraction(size) / Fraction(other) if kind == kind_of_other else None
