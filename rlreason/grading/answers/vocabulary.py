"""Word lists for reading answers, and units with their sizes."""

import re
from fractions import Fraction


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


FUNCTIONS = words(
    """sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan asin acos atan arccot arcsec arccsc
    arsinh arcosh artanh ln log lg exp"""
)
CONSTANTS = {"pi": "pi", "infty": "oo", "infinity": "oo", "Infinity": "oo", "inf": "oo", "oo": "oo"}
GREEK = words(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma
    tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar"""
)
#: Accents and alphabets are part of a letter's name.
ACCENTS = words(
    "dot ddot hat bar tilde vec overline widehat mathbf boldsymbol bm mathcal mathbb mathfrak mathscr mathsf"
)
#: Letters that name a function when a bracket follows.
APPLIED = words("f g F G P")
#: Words that form one quantity with the operand that follows.
OPERATORS = words("det dim rank deg gcd lcm hcf max min var cov tr area perimeter volume")
#: Commands that end a factor instead of beginning one.
CLOSING = words("rfloor rceil rangle choose over mod bmod pmod to")

#: Words that change the meaning of a number, or reject it: never part of a unit.
MEANING = words(
    """more less fewer am pm or not no nor isn't than least most many much few is are was were be it and but
    if maybe perhaps about approximately around roughly nearly almost over under above below between to from
    half halves quarter third thirds fourth fifth tenth tenths hundredth hundredths thousandth
    thousandths double twice triple times negative minus plus factorial squared cubed wrong incorrect false
    true yes none never
    except without remainder r mod modulo out ratio first ago before after later earlier
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety wait actually sorry
    correction equal equals divided multiplied unknown undefined infinite
    infinity root else otherwise instead"""
)
#: Words before an equals sign that negate what follows.
DENIALS = words("not no never isn't wrong incorrect false unequal")

#: English words of two letters; any other two lower-case letters are a product of variables.
SHORT_WORDS = words(
    "ad ah am an as at be by do go he hi if ii in is it iv me my no of oh ok on or ox pi pm so to up us vi we xi"
)
SYNONYMS = {"dne": "does not exist", "no solutions": "no solution", "no real solutions": "no real solution"}

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PERCENT = words("% percent pct percents")
CURRENCIES = {"$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "¢": "cent"}
CURRENCIES |= {"textdollar": "usd", "texteuro": "eur", "usd": "usd", "eur": "eur", "gbp": "gbp"}

#: Units, each with its short name and then its other spellings.
UNITS = """
    usd dollar dollars bucks us$; cent cents ¢; eur euro euros; m meter meters metre metres; cm centimeter
    centimeters centimetre centimetres; mm millimeter millimeters millimetre millimetres; km kilometer kilometers
    kilometre kilometres; nm nanometer nanometers; in inch inches; ft foot feet; yd yard yards; mi mile miles; g
    gram grams; kg kilogram kilograms kgs kilo kilos; mg milligram milligrams; lb lbs pound pounds; oz ounce ounces;
    ton tons tonne tonnes; l liter liters litre litres; ml milliliter milliliters millilitre millilitres; gal gallon
    gallons; cup cups; pt pint pints; qt quart quarts; s sec secs second seconds; ms millisecond milliseconds; min
    mins minute minutes; h hr hrs hour hours; day days; week weeks wk wks; month months; year years yr yrs; deg
    degree degrees °; rad radian radians; mi/h mph; km/h kph kmph kmh; j joule joules; kj kilojoule kilojoules; ev;
    erg ergs; n newton newtons; w watt watts; kw kilowatt kilowatts; v volt volts; a ampere amperes amp amps; hz
    hertz; pa pascal pascals; k kelvin; mol mole moles; au; pc parsec parsecs; acre acres; ha hectare hectares; unit
    units; person people; child children; man men; woman women; mouse mice; goose geese; penny pennies pence
"""
UNIT_NAMES = {spelling: unit.split()[0] for unit in UNITS.split(";") for spelling in unit.split()}
#: Sizes of units that measure the same, as fractions of one of them.
SIZES = {
    unit: (size, kind)
    for kind, sizes in {
        "time": {"s": 1, "min": 60, "h": 3600, "day": 86400, "week": 604800},
        "metric length": {"mm": 1, "cm": 10, "m": 1000, "km": 1000000},
        "length": {"in": 1, "ft": 12, "yd": 36, "mi": 63360},
        "mass": {"mg": 1, "g": 1000, "kg": 1000000},
        "weight": {"oz": 1, "lb": 16},
        "volume": {"ml": 1, "l": 1000},
        "money": {"cent": 1, "usd": 100},
    }.items()
    for unit, size in sizes.items()
}
LETTER_UNITS = words("m g s h l L N J W V A K C F")


MAX_WORDS = 5  # a longer text is a sentence


def is_word(text: str) -> bool:
    """Whether letters after a number are a word rather than a product of variables.

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
    """Return a unit in one spelling, or None when a word in it is more than a unit.

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
    """Return the short name of a known unit, and the singular of any other word."""
    stem, caret, power = part.partition("^")
    name = UNIT_NAMES.get(stem, stem)
    if name == stem and len(stem) > 3 and stem.endswith("s") and not stem.endswith("ss"):
        name = stem[:-3] + "y" if stem.endswith("ies") and len(stem) > 4 else stem[:-1]
        name = name[:-1] if name.endswith(("xe", "she", "che")) else name
    return name + caret + power


def agree(first: str, second: str) -> bool:
    """Whether two units agree: either may be missing, and `square units` is any area."""
    if not first or not second or first == second:
        return True
    (stem, _, power), (other, _, power_of_other) = first.partition("^"), second.partition("^")
    return power == power_of_other and "unit" in (stem, other)


def conversion(first: str, second: str) -> Fraction | None:
    """Return the number of second units in one first unit, or None where it is not known.

    >>> conversion("h", "min"), conversion("cm", "kg")
    (Fraction(60, 1), None)
    """
    (size, kind), (other, kind_of_other) = SIZES.get(first, (0, "")), SIZES.get(second, (0, "?"))
    return Fraction(size) / Fraction(other) if kind == kind_of_other else None
