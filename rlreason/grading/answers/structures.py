"""Read a cleaned answer as a value: lists, sets, tuples, relations, matrices, times, bases and letters."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, reduce

from rlreason.grading.answers.evaluate import UndefinedError, near, same
from rlreason.grading.answers.lexer import (
    MAX_DEPTH,
    WHOLE_FONT,
    RefusedError,
    Token,
    UnreadableError,
    depths,
    is_enclosed,
    plain,
    sign_of,
    split,
    tokens,
    words,
)
from rlreason.grading.answers.parser import Node, number, parse, symbols
from rlreason.grading.answers.quantities import NAMED, NUMBERED, is_product, name_of, occurs_in, read_quantity
from rlreason.grading.answers.values import (
    EVERYTHING,
    Based,
    Collection,
    Equation,
    Inequality,
    Quantity,
    Ratio,
    Reals,
    TimeOfDay,
    Value,
    Words,
    as_reals,
    difference,
    intersection,
    minus,
    union,
)

MATRICES = words("pmatrix bmatrix matrix Bmatrix array smallmatrix vmatrix")
RELATIONS = words(r"= \approx < > \le \ge \ne \in")
BRACKETS = words(r"() (] [) [] {} \{\} \langle\rangle")
SYNONYMS = {"dne": "does not exist", "no solutions": "no solution", "no real solutions": "no real solution"}
_ALL_REALS = ("all real numbers", "all reals", "all real numbers x", "the set of all real numbers", "all real x")
EMPTY = Collection("set", ())
NAMED_SETS: dict[str, Value] = {
    "emptyset": EMPTY, "varnothing": EMPTY, "mathbb{R}": EVERYTHING, "mathbbR": EVERYTHING,
}  # fmt: skip
SET_ALGEBRA = {"\\cup": union, "\\cap": intersection, "\\setminus": difference}
Pieces = Sequence[Sequence[Token]]


@lru_cache(maxsize=8192)
def read(text: str) -> Value | None:
    """Return the value of a cleaned answer; None when it is unreadable. Raises `RefusedError`."""
    if font := re.fullmatch(WHOLE_FONT, text):
        text = font[1].strip() or text
    if special := notation(text):
        return special
    try:
        found = tokens(text)
        if max(depths(found), default=0) > MAX_DEPTH:
            raise RefusedError  # nested deeper than MAX_DEPTH
        return read_tokens(found)
    except (UnreadableError, UndefinedError):
        return None


def read_tokens(tokens: Sequence[Token]) -> Value:
    """Read the value of these tokens: plain language, a structure, or one quantity."""
    if not tokens:
        raise UnreadableError
    if spoken := _words(tokens):
        return spoken
    for at, read_pieces in (((",", "or", "and"), _separated), (RELATIONS, read_relation)):
        pieces, signs = split(tokens, at)
        if signs:
            return read_pieces(pieces, signs)
    pieces, signs = split(tokens, SET_ALGEBRA)
    if signs:
        sets = [part for part in map(as_reals, map(read_tokens, pieces)) if part is not None]
        if len(sets) < len(pieces):
            raise UnreadableError
        value = sets[0]
        for sign, part in zip(signs, sets[1:], strict=True):
            value = SET_ALGEBRA[sign](value, part)
        return value
    pieces, signs = split(tokens, (":", "to"))
    if signs:
        parts = map(read_tokens, pieces)
        nodes = [part.node for part in parts if isinstance(part, Quantity) and not part.unit and not part.percent]
        if len(nodes) < len(pieces):
            raise UnreadableError
        return Ratio(tuple(nodes))
    named = NAMED_SETS.get("".join(token.text for token in tokens))
    return named or _enclosed(tokens) or _grid(tokens) or read_quantity(tokens)


def _words(tokens: Sequence[Token]) -> Words | Reals | None:
    """Read only words and single letters, with at least one word that names no quantity."""
    if any(token.kind not in ("word", "letter", "text") or sign_of(token) == "and" for token in tokens):
        return None
    text = plain(" ".join(token.text for token in tokens)).casefold()
    lone = len(tokens) == 1 and (tokens[0].kind == "letter" or text in NAMED)
    if lone or is_product(tokens):
        return None
    if text in _ALL_REALS:
        return EVERYTHING
    text = re.sub(r"\A(?:an?|the) (?=[a-z]{3})", "", text)
    return Words(SYNONYMS.get(text, text)) if re.search("[a-z]", text) else None


def _separated(pieces: Pieces, signs: Sequence[str]) -> Value:
    r"""Read a list: inequalities joined by `or` are a union, by `and` an intersection.

    A comma is an `and` where something is excluded: `x > 2, x \ne 3`. `x = 1, 2`, `x = 1, x = 2` and `x_1 = 1, x_2 = 2`
    are values of x; `x = 1, y = 2` stays a list.
    """
    items = tuple(map(read_tokens, pieces))
    connectives = set(signs) - {","}
    if not connectives and any(isinstance(item, Inequality) and item.links[0][1] == "\\ne" for item in items):
        connectives = {"and"}
    sets = [as_reals(item) for item in items if isinstance(item, Inequality | Reals)]
    reals = [part for part in sets if part is not None]
    if len(connectives) == 1 and len(reals) == len(items) and len({part.name for part in reals}) == 1:
        return reduce(union if connectives == {"or"} else intersection, reals)
    named = [isinstance(item, Equation) for item in items]
    names = {NUMBERED.sub(r"\1", item.label) for item in items if isinstance(item, Equation)}
    values = [item.value if isinstance(item, Equation) else item for item in items]
    stripped = tuple(value for value in values if value is not None)
    if len(names) != 1 or "" in names or (any(named[1:]) and not all(named)) or len(stripped) < len(items):
        return Collection("list", items)
    return Collection("list", stripped, names.pop())


def read_relation(pieces: Pieces, signs: Sequence[str]) -> Value:
    r"""Read pieces joined by these relation signs. Raises `UnreadableError` for signs that form no relation.

    `\approx 38` and `x \approx 38` state 38; in `\sqrt2 \approx 1.41` the exact side is the answer. `x \in A` is the
    set of reals for x where A is one, else an equation of x with the value A.
    """
    name, last = name_of(pieces[0]), len(signs) - 1
    if "\\approx" in signs:
        if not last and (not pieces[0] or name):
            return equation(pieces)
        if signs[-1] != "\\approx":
            raise UnreadableError
        exact, rough = map(read_tokens, pieces[last:])
        check_chain((exact, rough), near)
        return read_relation(pieces[:-1], signs[:-1]) if last else exact
    if set(signs) == {"="}:
        return equation(pieces)
    if "\\in" in signs:
        if last or not name:
            raise UnreadableError
        value = read_tokens(pieces[1])
        numbers = as_reals(value)
        if numbers is not None and not (isinstance(value, Collection) and value.kind == "set"):
            return numbers._replace(name=name)
        return Equation(name, value, None)
    nodes = [parse(piece) for piece in pieces]
    turned = {">": "<", "\\ge": "\\le"}
    links = []
    for left, sign, right in zip(nodes, signs, nodes[1:], strict=False):
        if sign == "=" or (sign == "\\ne" and last):
            raise UnreadableError
        links.append((right, turned[sign], left) if sign in turned else (left, sign, right))
    return Inequality(tuple(links))


def equation(pieces: Pieces) -> Value:
    """`name = value`, `value = name`, a chain of equal values, or any other equation in symbols."""
    if not pieces[0]:  # "= 38" states 38
        return read_tokens(pieces[1]) if len(pieces) == 2 else equation(pieces[1:])
    at = 0 if name_of(pieces[0]) or len(pieces) != 2 else 1
    if label := name_of(pieces[at]):
        rest = pieces[1:] if at == 0 else pieces[:1]
        values = list(map(read_tokens, rest))
        if not occurs_in(pieces[at], values[-1]):
            check_chain(values)
            gap = None
            with suppress(UnreadableError):
                gap = minus(parse(pieces[at]), parse(rest[-1])) if len(pieces) == 2 else None
            return Equation(label, values[-1], gap)
    values = list(map(read_tokens, pieces))
    if all(isinstance(value, Quantity) and not symbols(value.node) for value in values):
        check_chain(values)
        return values[-1]
    if len(pieces) != 2:
        raise UnreadableError
    return Equation("", None, minus(parse(pieces[0]), parse(pieces[1])))


def check_chain(values: Sequence[Value], agree: Callable[[Node, Node], bool] = same) -> None:
    """`UnreadableError` unless all links of a chain agree with its end; only numbers and formulas form one.

    A percent sign is a hundredth, as in 1/4 = 25%, or may be left out, as in 0.25 * 100 = 25%.
    """
    if len(values) < 2:
        return
    found = [value for value in values if isinstance(value, Quantity)]
    if len(found) < len(values):
        raise UnreadableError
    readings = [[one.node for one in found]]
    if any(one.percent for one in found):
        readings.append([Node("div", (one.node, number(100))) if one.percent else one.node for one in found])
    if not any(all(agree(node, last) for node in nodes) for *nodes, last in readings):
        raise UnreadableError  # a chain of values that are not equal


def _enclosed(tokens: Sequence[Token]) -> Value | None:
    """Read one pair of brackets around everything: a set, a tuple or an interval."""
    brackets = tokens[0].text + tokens[-1].text
    if brackets not in BRACKETS or not is_enclosed(tokens):
        return None
    content, is_set = tokens[1:-1], "{" in brackets
    pieces, signs = split(content, ("|", ":"))
    name = name_of(content[:1])
    if is_set and name and len(signs) == 1 and (len(pieces[0]) == 1 or pieces[0][1].text == "\\in"):
        numbers = as_reals(read_tokens(pieces[1]))  # as in `x \mid x > 2`
        if numbers is None or numbers.name != name:
            raise UnreadableError  # a set by its property
        return numbers._replace(name="")
    pieces, signs = split(content, (",",))
    if brackets == "\\{\\}" or (is_set and signs):
        return Collection("set", tuple(map(read_tokens, pieces)) if content else ())
    if signs:
        return Collection(brackets, tuple(map(read_tokens, pieces)))
    # more than an expression, as in `(x = 3)` or `(\text{A})`
    structured = any(token.text in RELATIONS or token.kind in ("text", "begin") for token in content)
    return read_tokens(content) if brackets == "()" and structured else None


def _grid(tokens: Sequence[Token]) -> Value | None:
    if tokens[0].kind != "begin" or tokens[0].text != tokens[-1].text:
        return None
    name = tokens[0].text
    rows, _ = split(tokens[1:-1], ("\\\\",))
    if not rows[-1]:
        rows.pop()
    cells = [split(row, ("&",))[0] for row in rows]
    if name not in MATRICES or len(set(map(len, cells))) != 1:
        raise UnreadableError
    rows_read = tuple(Collection("[]", tuple(map(read_tokens, row))) for row in cells)
    return Collection("vmatrix" if name == "vmatrix" else "matrix", rows_read)


_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/(?:\d{2}|\d{4})")
_CLOCK = re.compile(
    r"(?=.*[:m])(\d{1,2})(?::(\d\d))?(?::(\d\d))?\s*(?:\\text\{\s*)?(?:([ap])\.?\s?m\b\.?)?\s*\}?", re.I
)
_DIGITS = r"([0-9][0-9A-Fa-f]*|[A-F][0-9A-F]+)"  # a_{12} is a term of a sequence
_BASE = re.compile(rf"\(?{_DIGITS}\)?_\{{?(?:\\text\{{)?\(?([a-z]+|\d{{1,2}})\)?\}}*")
_BASE_WORDS = re.compile(rf"{_DIGITS} ?(?:\\text\{{ ?)?\(?(?:in )?base[ -]([a-z]+|\d{{1,2}})\)?\}}?")
_ONES = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBERS = _ONES.split()
_NUMBERS += [f"{ten}-{one}".removesuffix("-zero") for ten in _TENS.split() for one in _NUMBERS[:10]]
_VALUES = {word: value for value, word in enumerate(_NUMBERS)}
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice) )?[(\[]?([A-E])[)\].:]*")


def notation(text: str) -> Value | None:
    r"""Read what is no expression.

    A date, a multiple choice, a time of day (`9:30`, `9 am`, `9:30 \text{ p.m.}`), digits in a base (`101_2`,
    `101_{\text{two}}`, `101 base 2`), or a number word.
    """
    if _DATE.fullmatch(text):
        return Words(text)
    if match := _CHOICE.fullmatch(text):
        return Quantity(Node("symbol", name=match[1]))
    if match := _CLOCK.fullmatch(text):
        parts = tuple(int(part) for part in match.groups()[:3] if part)
        hour, minute, second = (*parts, 0, 0)[:3]
        if hour > 23 or minute > 59 or second > 59:
            return None
        stated = (match[4] or "").lower()
        implied = "" if 1 <= hour <= 12 else "p" if hour else "a"
        return TimeOfDay((hour % 12 * 60 + minute) * 60 + second, stated or implied, () if stated else parts)
    if match := _BASE.fullmatch(text.replace(" ", "")) or _BASE_WORDS.fullmatch(text):
        digits, base = match.groups()
        size = int(base) if base.isdigit() else _VALUES.get(base, 0)
        if not 2 <= size <= 36 or any(int(digit, 36) >= size for digit in digits):
            return None
        return Based(digits.upper().lstrip("0") or "0", size)
    value = _VALUES.get(text.casefold().replace(" ", "-"))
    return None if value is None else Quantity(number(value))
