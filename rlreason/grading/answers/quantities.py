"""Read one quantity with its unit, currency or percent sign; units with their sizes; names of quantities."""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from rlreason.grading.answers.lexer import Token, UnreadableError, depths, is_enclosed, pairs, rewritten, words
from rlreason.grading.answers.parser import CONSTANTS, FUNCTIONS, GREEK, Node, number, parse, symbols
from rlreason.grading.answers.values import Collection, Quantity, Ratio, Value

#: Words that change the meaning of a number, or reject it: never part of a unit.
MEANING = words(
    """more less fewer am pm or not no nor isn't than least most many much few is are was were be it and but
    if maybe perhaps about approximately around roughly nearly almost over under above below between to from
    half halves quarter third thirds fourth fifth tenth tenths hundredth hundredths thousandth
    thousandths double twice triple negative minus plus factorial squared cubed wrong incorrect false
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

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SCALES |= {f"{name}s": SCALES[name] for name in ("dozen", "thousand", "million", "billion", "trillion")}
PERCENT = words("% percent pct percents")
CURRENCIES = pairs("$ usd  € eur  £ gbp  ¥ jpy  ₹ inr  ¢ cent  textdollar usd  texteuro eur  usd usd  eur eur  gbp gbp")

#: Words that name a constant, a function or a Greek letter.
NAMED = frozenset(("sqrt", *CONSTANTS, *FUNCTIONS, *GREEK))

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
_SCALES_OF_UNITS = """
    s 1 min 60 h 3600 day 86400 week 604800; mm 1 cm 10 m 1000 km 1000000; in 1 ft 12 yd 36 mi 63360;
    mg 1 g 1000 kg 1000000; oz 1 lb 16; ml 1 l 1000; cent 1 usd 100
"""
SIZES = {unit: (Fraction(size), kind) for kind in _SCALES_OF_UNITS.split(";") for unit, size in pairs(kind).items()}
NO_SIZE = Fraction(1), ""
LETTER_UNITS = words("m g s h l L N J W V A K C F")
_OF_UNITS = words("% ° ^ / * { } ( ) .")
_BEFORE_FACTORS = words("+ - * / ^ _ (")


_LINKING = SHORT_WORDS - MEANING - NAMED  # between a number and its unit
_NOT_PLAIN = NAMED | (SCALES.keys() - {"dozen"}) | PERCENT | {"times"}


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


_PLAIN_UNITS = (
    (r"\s*\^?\s*\{?\s*°\s*\}?\s*", "°"),
    (r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1"),
    (r"\s*(?:/|\bper\b|\ban?\b(?= (?:hour|day|week|month|year|minute|second)\b))\s*", "/"),
    (r"\s*\b([a-z]+)(?:\^-[01]|(\^)-(\d))", r"/\1\2\3"),  # s^-1 is /s, s^-2 is /s^2
    (r"\b(?:degrees? |deg )?(?:(c)elsius|(f)ahrenheit)\b", r"°\1\2"),
)
_POWERS = ((r"(?:square|sq) ([a-z]+)(?!\^)", r"\1^2"), (r"(?:cubic|cu) ([a-z]+)(?!\^)", r"\1^3"))


def canonical(text: str) -> str | None:
    """Return a unit in one spelling, or None when a word in it is more than a unit.

    >>> canonical("square centimeters"), canonical("miles per hour"), canonical("more apples")
    ('cm^2', 'mi/h', None)
    """
    text = rewritten(" ".join(text.casefold().replace(".", "").replace("\\", " ").split()), _PLAIN_UNITS)
    parts = re.split(r"([ /*()])", text)
    is_comparison = re.search(r"\btimes\b[^/]", text)  # 3 times as many
    is_more = is_comparison or any(part.split("^")[0] in MEANING for part in parts)
    if is_more or len(parts) > 2 * MAX_WORDS:
        return None
    return rewritten("".join(map(_name, parts)).strip(), _POWERS)


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


def is_product(tokens: Sequence[Token]) -> bool:
    """Lower-case letters side by side, or a word of consonants or of two letters that is no English word."""
    if len(tokens) > 1:
        return all(token.kind == "letter" and token.text.islower() for token in tokens)
    text = tokens[0].text
    return tokens[0].kind == "word" and bool(
        re.fullmatch("[b-df-hj-np-tv-z]{2,3}", text) or (re.fullmatch("[a-z]{2}", text) and text not in SHORT_WORDS)
    )


def read_quantity(tokens: Sequence[Token]) -> Quantity:
    r"""Read all tokens as one quantity. Raises `UnreadableError` where words that are no unit follow it.

    The signs or codes of one currency are its unit: `$5`, `-$5`, `5 $`, `\text{USD }5`, `$7 - $2`.
    """
    found = [CURRENCIES.get(token.text.strip().removeprefix("\\").casefold(), "") for token in tokens]
    currency = ""
    if len(set(found) - {""}) == 1 and not any(map(all, pairwise(found[1:]))):
        tokens, currency = [token for token, sign in zip(tokens, found, strict=True) if not sign], max(found)
    levels = depths(tokens)
    starts = (at for at in range(1, len(tokens)) if not levels[at] and _begins_unit(tokens, at, currency))
    end = next((at for at in starts if _is_unit(tokens[at:])), len(tokens))
    scale, percent, written = 1, False, ""
    for token in tokens[end:]:
        word = token.text.strip().casefold()
        if word in SCALES and not written:
            scale *= SCALES[word]
        elif word in PERCENT and not written:
            percent = True
        else:
            written += (" " if written and token.spaced else "") + token.text
    unit = canonical(written)
    if unit is None:
        raise UnreadableError  # words that are no unit
    if currency and unit not in ("", currency, "usd"):
        unit = currency + unit if unit.startswith("/") else f"{currency} {unit}"
    node = parse(tokens[:end])
    return Quantity(node if scale == 1 else Node("mul", (node, number(scale))), unit or currency, percent)


def _begins_unit(tokens: Sequence[Token], index: int, money: str) -> bool:
    token, before = tokens[index], tokens[index - 1]
    if before.kind == "sign" and before.text in _BEFORE_FACTORS:
        return False
    if token.text == "/" and before.kind == "number" and index + 1 < len(tokens):  # 18/hour; but 18/x is a quotient
        word, rest = tokens[index + 1].text.strip(), tokens[index + 1 :]
        plain = money or len(word) > 3 or word.casefold() in UNIT_NAMES or rest[0].kind == "text"
        if len(word) == 1 or not plain or any(one.kind == "letter" or one.text == "(" for one in rest):
            return False  # 18/x, 18/abc, 18/det(A)
        token, before = rest[0], token
    name, rest = token.text.strip(), tokens[index + 1 :]
    is_behind = token.spaced and (before.kind == "number" or before.text in ("}", ")"))
    if is_behind and (name == "a" or name in _LINKING) and rest and _is_plain(rest[0]):
        return True  # 840 a week, 12 of them
    if token.kind == "text":
        return bool(name) and name not in FUNCTIONS and name not in ("i", "e")
    if token.kind == "sign":  # degrees follow no function: sin 45° is a number
        return name == "%" or (name == "°" and not any(token.text in FUNCTIONS for token in tokens[:index]))
    if token.kind == "word":
        return name.casefold() not in NAMED and is_word(name)
    return token.kind == "letter" and token.spaced and name in LETTER_UNITS and before.kind == "number"


def _is_plain(token: Token) -> bool:
    """Whether a token is a word of plain language, without a meaning of its own, but for `a dozen`."""
    name = token.text.casefold()
    return token.kind == "word" and name not in _NOT_PLAIN and (is_word(name) or name == "us")


def _is_unit(tail: Sequence[Token]) -> bool:
    """Whether only words, letters of units, their signs and exponents follow; `2 m g` is a product."""
    spoken = tail[0].kind != "letter" or any(token.kind in ("text", "word") for token in tail)
    is_quotient = any(token.text in ("/", "-") for token in tail) or sum(token.kind == "letter" for token in tail) == 1
    nothing = Token("", "")
    for before, token, after in zip([nothing, *tail], tail, [*tail[1:], nothing], strict=False):
        match token.kind:
            case "text" | "word":
                continue
            case "letter" if spoken or (is_quotient and token.text in LETTER_UNITS):  # 9.8 m s^{-2}
                continue
            case "number" if before.text in ("^", "{", "-"):
                continue
            case "sign" if token.text in _OF_UNITS:
                continue
            case "sign" if token.text == "-" and (before.text in ("^", "{") or after.kind in ("word", "text")):
                continue
        return False
    return True


LONGEST = 80  # characters of a name, signs and braces included
_GREEK = "|".join(sorted(GREEK))
_LETTER = rf"(?:[a-zA-Z]|{_GREEK})"
_SIMPLE = re.compile(
    rf"{_LETTER}(?:_(?:\w|\{{\w+\}}))?'*(?:\^\{{-1\}})?(?:\({_LETTER}(?:,{_LETTER})*\))?"  # x, x_1, f'(x)
    rf"|(?:hat|bar|vec|dot)\{{?{_LETTER}\}}?"
    rf"|\({_LETTER}(?:,{_LETTER})+\)"  # (x,y)
    rf"|frac\{{d\w?\}}\{{d\w\}}|m?angle[A-Z]{{1,3}}"
)
NUMBERED = re.compile(rf"\A({_LETTER})_(?:\d|\{{\d+\}})\Z")  # others, such as A_1B_1 and S_{ABC}, are no family

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
#: A function at a point, an event's probability, an expectation, or an operator with one operand: `f(g(2))`, `P(X=2)`,
#: `E[X]`, `\gcd(12,18)`, `\max f`; not `k(k+1)`.
_FUNCTION = r"(?:[fghpqFGHPQ]|phi|varphi|psi|Phi|Psi|Gamma|zeta|sigma|tau)(?:_(?:\w|\{\w+\}))?'*(?:\^\{-1\})?"
_AT_A_POINT = rf"{_FUNCTION}\((?:[\d+*/^{{}}(),.°ei-]|frac|sqrt|pi|{_FUNCTION}(?=\())+\)"
_EVENT = r"[A-Z]+|.*(?:[|=<>]|\\(?:le|ge|ne|in|cup|cap)|and|or|[a-zA-Z]{4}|[a-z](?:[a-z][aeiou]|[aeiou][a-z])).*"
_CHANCE = rf"(?:P|Pr|mathbb\{{P\}})\((?:{_EVENT})\)|(?:E|mathbb\{{E\}})(?:\[[^\]]+\]|\([A-Z]+\))"
_OPERATORS = "det|dim|rank|deg|gcd|lcm|hcf|max|min|[vV]ar|[cC]ov|tr|area|perimeter|volume"
_OPERATION = rf"(?:{_OPERATORS})(?:_\{{?\w+\}}?)?(?:[a-zA-Z]{{0,3}}\(.+\)|[a-zA-Z]{{1,3}})"
_COMPOUND = re.compile("|".join((_MEASURE, _RATIO, _OF_AN_ANGLE, _AT_A_POINT, _CHANCE, _OPERATION)))
#: A length is one quantity whether it is written `|AB|`, `\overline{AB}` or `AB`.
_LENGTH = re.compile(rf"\|({_POINTS})\||overline\{{({_POINTS})\}}")

_SHAPES = words("triangle angle")


def name_of(piece: Sequence[Token]) -> str:
    """Return a piece's name in one spelling, else nothing: `x`, `x_1`, `f(x)`, `(x, y)`, a derivative, words, or one
    quantity of several signs, such as `AB`, `V_1/V_2` or `f(2)`.
    """
    text = _joined(piece)
    if name := _simple(piece):
        return name
    bracketed = piece[next((at for at, token in enumerate(piece) if token.text == "("), len(piece)) :]
    if len(text) > LONGEST or not _COMPOUND.fullmatch(text) or (bracketed and not is_enclosed(bracketed)):
        return ""
    text = _LENGTH.sub(lambda length: length[1] or length[2], text)
    if fraction := re.fullmatch(r"frac\{(.*)\}\{(.*)\}", text):
        return "/".join(fraction.groups())
    return text.casefold() if re.fullmatch("[A-Z]+", text) else text.replace(":", "/")


def occurs_in(piece: Sequence[Token], value: Value) -> bool:
    """Whether the named quantity occurs in the value too: then it is an equation to solve, `x = 2 - x`."""
    if simple := _simple(piece):
        return simple.replace("{", "").replace("}", "") in _symbols(value)
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


def _joined(piece: Sequence[Token]) -> str:
    return "".join(token.text.strip() for token in piece)


def _simple(piece: Sequence[Token]) -> str:
    text = _joined(piece)
    if len(piece) == 1 and text in ("e", "i"):
        return ""
    if _SIMPLE.fullmatch(text) and (len(piece) > 1 or piece[0].kind == "letter" or text in GREEK):
        return text
    drawn = len(piece) > 2 and piece[0].kind == "text"  # \text{Area of } \triangle ABC
    spoken = [token for token in piece if not (drawn and token.text in _SHAPES)]
    is_language = {token.kind for token in spoken} <= {"word", "text", "letter"} and text not in NAMED
    if spoken and is_language and not is_product(spoken) and len(spoken[-1].text.strip()) > 1:
        language = " ".join(token.text.strip().casefold() for token in piece)
        return "" if DENIALS.intersection(language.split()) else language
    return ""
