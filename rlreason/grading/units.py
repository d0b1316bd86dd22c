r"""Units, currencies and plain counting words after a number, and the words that are never one.

`38 clips` is 38 with a unit; `8 more`, `9 am` and `2 or 9` are not numbers with units. This module knows
words; it must not know expressions or how values are compared.
"""

import re

#: Words that change what a number means, or say that it is not the answer.
MEANING = frozenset(
    "more less fewer am pm or not no nor isn't than least most many much few is are was were be it and but if maybe "
    "perhaps about approximately around roughly nearly almost over under above below between to from half halves "
    "quarter third thirds fourth fifth tenth tenths hundredth hundredths thousandth thousandths double twice triple "
    "times negative minus plus factorial squared cubed wrong incorrect false true yes none never except without "
    "remainder r mod modulo out ratio left right up down first second-last ago before after later earlier "
    "equal equals divided multiplied unknown undefined infinite infinity root else otherwise instead".split()
)

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PERCENT = frozenset(("%", "percent", "pct", "percents"))
CURRENCIES = {"$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "usd": "usd", "eur": "eur", "gbp": "gbp"}

_ALIASES = {
    "usd": "dollar dollars bucks usd us$", "cent": "cent cents ¢", "eur": "euro euros eur", "gbp": "pound-sterling gbp",
    "m": "m meter meters metre metres", "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres", "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "g": "g gram grams", "kg": "kg kilogram kilograms kgs kilo kilos", "mg": "mg milligram milligrams",
    "lb": "lb lbs pound pounds", "oz": "oz ounce ounces", "l": "l liter liters litre litres",
    "ml": "ml milliliter milliliters millilitre millilitres", "gal": "gal gallon gallons", "s": "s sec secs second seconds",
    "min": "min mins minute minutes", "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks wk wks",
    "month": "month months", "year": "year years yr yrs", "deg": "deg degree degrees °", "rad": "rad radian radians",
    "mi/h": "mph", "km/h": "kph kmph kmh", "j": "j joule joules", "n": "n newton newtons", "w": "w watt watts",
    "v": "v volt volts", "a": "a ampere amperes amp amps", "hz": "hz hertz", "pa": "pa pascal pascals", "k": "k kelvin",
    "mol": "mol mole moles", "unit": "unit units", "kw": "kw kilowatt kilowatts", "kj": "kj kilojoule kilojoules",
    "ms": "ms millisecond milliseconds", "nm": "nm nanometer nanometers", "acre": "acre acres", "ha": "ha hectare hectares",
    "cup": "cup cups", "pt": "pt pint pints", "qt": "qt quart quarts", "ton": "ton tons tonne tonnes", "person": "person people",
    "child": "child children", "man": "man men", "woman": "woman women", "mouse": "mouse mice", "goose": "goose geese",
    "penny": "penny pennies pence", "ev": "ev", "erg": "erg ergs", "au": "au", "pc": "pc parsec parsecs", "sr": "sr",
}  # fmt: skip
_CANONICAL = {word: name for name, words in _ALIASES.items() for word in words.split()}
LETTER_UNITS = frozenset("mgshlLNJWVAKCF")
_ALGEBRA = frozenset("abcdfknmpqrstuvwxyz")


def is_word(text: str) -> bool:
    """Whether letters written after a number are a word of the language rather than a product of variables.

    >>> [is_word(text) for text in ("clips", "cm", "xy", "abc", "more")]
    [True, True, False, False, False]
    """
    lower = text.casefold()
    if lower in MEANING:
        return False
    if lower in _CANONICAL or lower in SCALES or lower in PERCENT or lower in CURRENCIES:
        return len(text) > 1
    return len(text) > 3 or (len(text) == 3 and any(char in "aeiou" for char in text[1:]) and text.islower())


def canonical(parts: list[str]) -> str | None:
    """One spelling for each unit, or None when a word in it means more than a unit does.

    >>> canonical(["square", "centimeters"]), canonical(["miles per hour"]), canonical(["more", "apples"])
    ('cm^2', 'mi/h', None)
    """
    text = re.sub(r"\s+", " ", " ".join(parts).casefold().replace(".", "").replace("\\", " ")).strip()
    text = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    text = re.sub(r"\s*(?:/|\bper\b|\ban?\b(?= (?:hour|day|week|month|year|minute|second)\b))\s*", "/", text)
    words = re.split(r"([ /*()])", text)
    if any(word.split("^")[0] in MEANING for word in words):
        return None
    named = [_name(word) for word in words]
    text = "".join(named).strip()
    text = re.sub(r"(?:square|sq) ([a-z]+)(?!\^)", r"\1^2", text)
    return re.sub(r"(?:cubic|cu) ([a-z]+)(?!\^)", r"\1^3", text)


def _name(word: str) -> str:
    stem, caret, power = word.partition("^")
    known = _CANONICAL.get(stem)
    if known is None and len(stem) > 3 and stem.endswith("s") and not stem.endswith("ss"):
        known = stem[:-3] + "y" if stem.endswith("ies") and len(stem) > 4 else stem[:-1]
        known = known[:-1] if known.endswith(("xe", "she", "che")) else known
    return (known or stem) + caret + power


def agree(first: str, second: str) -> bool:
    """A unit may be left out; two that are given must be the same."""
    return not first or not second or first == second
