r"""From a cleaned answer to a value: lists, sets, tuples, relations, unions, matrices, bases, times, words.

It splits tokens at the outermost level and hands the pieces to `quantities`.
"""

import re
from collections.abc import Callable, Sequence

from rlreason.answers import intervals as reals
from rlreason.answers import notations, quantities, relations
from rlreason.answers.lexer import Token, UnreadableError, tokens
from rlreason.answers.normalize import plain, whole_text
from rlreason.answers.values import Collection, Grid, Quantity, Ratio, Reals, Value, Words
from rlreason.answers.verdict import RefusedError
from rlreason.answers.vocabulary import SYNONYMS

MAX_ITEMS = 60
OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
RELATIONS = frozenset(("=", "\\approx", "<", ">", "\\le", "\\ge", "\\ne", "\\in"))
_ALL_REALS = (
    "all real numbers",
    "all reals",
    "all real numbers x",
    "the set of all real numbers",
    "all real x",
)
_EMPTY = ("emptyset", "varnothing")


def read(text: str) -> Value:
    """The value of a cleaned answer. Raises `UnreadableError` or `RefusedError`."""
    inner = whole_text(text)
    if inner:
        text = inner
    for notation in (notations.date, notations.choice, notations.clock, notations.based, notations.in_words):
        if special := notation(text):
            return special
    return read_tokens(tokens(text), 0)


def read_tokens(found: Sequence[Token], depth: int) -> Value:
    """The value of these tokens, which stand `depth` structures deep."""
    if depth > 8:
        raise RefusedError("structures nested deeper than 8")
    if not found:
        raise UnreadableError("nothing")
    if words := _words(found):
        return words
    for attempt in (_separated, _related, _set_algebra, _enclosed, _grid, _ratio):
        value = attempt(found, lambda part: read_tokens(part, depth + 1))
        if value is not None:
            return value
    return quantities.read(found)


Inner = Callable[[Sequence[Token]], Value]


def _words(found: Sequence[Token]) -> Words | Reals | None:
    """Nothing but language: all words and single letters, with at least one word that names no quantity."""
    if any(token.kind not in ("word", "letter", "text") or joiner(token) == "and" for token in found):
        return None
    if quantities.is_product(found):
        return None
    text = plain(" ".join(token.text for token in found)).casefold()
    if len(found) == 1 and (found[0].kind == "letter" or quantities.is_constant(text) or re.search(r"\d", text)):
        return None
    if text in _ALL_REALS:
        return reals.EVERYTHING
    text = re.sub(r"\A(?:an?|the) (?=[a-z]{3})", "", text)
    return Words(SYNONYMS.get(text, text)) if re.search("[a-z]", text) else None


def split(found: Sequence[Token], at: Callable[[Token], bool]) -> tuple[list[list[Token]], list[Token]]:
    """The pieces between tokens that `at` accepts outside all brackets, and those tokens."""
    pieces: list[list[Token]] = [[]]
    marks: list[Token] = []
    closers: list[str] = []
    for token in found:
        if (
            token.kind == "begin"
            or (token.kind == "sign" and token.text in OPENING)
            or token[:2] == ("command", "langle")
        ):
            closers.append(token.text)
        elif (
            token.kind == "end"
            or (token.kind == "sign" and token.text in OPENING.values())
            or token[:2] == ("command", "rangle")
        ):
            if not closers:
                raise UnreadableError(token.text)
            closers.pop()
        elif not closers and at(token):
            marks.append(token)
            pieces.append([])
            continue
        pieces[-1].append(token)
    if closers:
        raise UnreadableError(closers[-1])
    return pieces, marks


def joiner(token: Token) -> str:
    """`,` for a separator, `or` or `and` for those words, else nothing."""
    if token.kind == "sign" and token.text in (",", ";"):
        return ","
    word = token.text.strip(" ,").casefold()
    return word if word in ("or", "and") else ""


def _separated(found: Sequence[Token], inner: Inner) -> Value | None:
    pieces, marks = split(found, lambda token: bool(joiner(token)))
    if not marks:
        return None
    kinds = {joiner(mark) for mark in marks}
    kept = [piece for index, piece in enumerate(pieces) if piece or not _oxford(pieces, marks, index)]
    if not all(kept) or len(kept) > MAX_ITEMS:
        raise UnreadableError(",")
    items = tuple(inner(piece) for piece in kept)
    return relations.joined(items, kinds) or relations.unlabelled(items)


def _oxford(pieces: list[list[Token]], marks: list[Token], index: int) -> bool:
    """The empty piece of `, and`."""
    return 0 < index < len(marks) and joiner(marks[index - 1]) == "," and joiner(marks[index]) != ","


def _related(found: Sequence[Token], inner: Inner) -> Value | None:
    pieces, marks = split(found, lambda token: token.kind == "sign" and token.text in RELATIONS)
    return relations.read(pieces, [mark.text for mark in marks], inner) if marks else None


def _set_algebra(found: Sequence[Token], inner: Inner) -> Value | None:
    """Unions, intersections and differences of sets of reals, from left to right."""
    pieces, marks = split(found, lambda token: token.kind == "sign" and token.text in ("\\cup", "\\cap", "\\setminus"))
    if not marks:
        return _named_set(found)
    value = inner(pieces[0])
    for mark, piece in zip(marks, pieces[1:], strict=True):
        left, right = reals.as_reals(value), reals.as_reals(inner(piece))
        if left is None or right is None:
            raise UnreadableError(mark.text)
        if mark.text == "\\cup":
            value = reals.union([*left.pieces, *right.pieces])
        else:
            value = reals.intersection(left, right if mark.text == "\\cap" else reals.complement(right))
    return value


def _named_set(found: Sequence[Token]) -> Value | None:
    texts = [token.text for token in found]
    if texts in (["mathbb", "{", "R", "}"], ["mathbb", "R"]):
        return reals.EVERYTHING
    return Collection("set", ()) if len(texts) == 1 and texts[0] in _EMPTY else None


def _enclosed(found: Sequence[Token], inner: Inner) -> Value | None:
    """One pair of brackets around everything: a set, a tuple or an interval."""
    first, last = found[0], found[-1]
    if first[:2] == ("command", "langle") and last[:2] == ("command", "rangle"):
        first, last = first._replace(kind="sign", text="<"), last._replace(kind="sign", text=">")
    brackets = first.text + last.text
    if first.kind != "sign" or brackets not in ("()", "(]", "[)", "[]", "{}", "\\{\\}", "<>") or not _one_pair(found):
        return None
    content = found[1:-1]
    if "{" in brackets:
        built = relations.builder(content, inner)
        if built is not None:
            return built
    pieces, marks = split(content, lambda token: joiner(token) == ",")
    if "{" in brackets and (brackets != "{}" or marks):
        return Collection("set", tuple(inner(piece) for piece in pieces) if content else ())
    if not marks:
        return inner(content) if brackets == "()" and _is_structure(content) else None
    if len(pieces) > MAX_ITEMS:
        raise RefusedError("more than 60 items")
    return Collection(brackets, tuple(inner(piece) for piece in pieces))


def _one_pair(found: Sequence[Token]) -> bool:
    try:
        split(found[1:-1], lambda token: False)
    except UnreadableError:
        return False
    return len(found) > 1


def _is_structure(content: Sequence[Token]) -> bool:
    """Whether brackets hold more than an expression, as in `(x = 3)` or `(\\text{A})`."""
    return any(token.text in RELATIONS or token.kind in ("text", "begin") for token in content)


def _grid(found: Sequence[Token], inner: Inner) -> Value | None:
    if found[0].kind != "begin" or found[-1].kind != "end" or found[0].text != found[-1].text:
        return None
    name = found[0].text.rstrip("*")
    if name not in ("pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "array", "smallmatrix"):
        raise UnreadableError(name)
    rows, _ = split(found[1:-1], lambda token: token.text == "\\\\")
    if not rows[-1]:
        rows.pop()
    cells = [split(row, lambda token: token.text == "&")[0] for row in rows]
    if not cells or len({len(row) for row in cells}) != 1 or len(cells) * len(cells[0]) > MAX_ITEMS:
        raise UnreadableError("matrix")
    kind = "determinant" if name == "vmatrix" else "matrix"
    return Grid(kind, tuple(tuple(inner(cell) for cell in row) for row in cells))


def _ratio(found: Sequence[Token], inner: Inner) -> Value | None:
    pieces, marks = split(found, lambda token: token.text.strip() in (":", "to") and token.kind != "command")
    if not marks:
        return None
    parts = [inner(piece) for piece in pieces]
    if any(not isinstance(part, Quantity) or part.unit or part.percent for part in parts):
        raise UnreadableError(":")
    return Ratio(tuple(part.node for part in parts if isinstance(part, Quantity)))
