r"""The atoms of an expression: numbers, letters, brackets, fractions, roots and named functions.

The second half of the grammar in `expression`; it knows spellings and must not evaluate anything.
"""

from rlreason.answers.expression import Node, Reader, number
from rlreason.answers.lexer import Token, UnreadableError
from rlreason.answers.vocabulary import ACCENTS, APPLIED, CONSTANTS, FUNCTIONS, GREEK

_FENCES = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}
_BETWEEN = {"over": "div", "choose": "binom"}  # {3 \\over 4}
_SAME = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10"}


def read(reader: Reader) -> Node:
    token = reader.peek()
    if token.kind == "number":
        return _number(reader)
    if token.kind == "letter":
        return _letter(reader, token.text)
    if token.kind == "sign":
        return _bracket(reader)
    if token.kind in ("word", "command"):
        return _named(reader, token)
    name = token.text.strip()
    if token.kind == "text" and name in FUNCTIONS:
        return _named(reader, token._replace(kind="word", text=name))
    if token.kind == "text" and len(name) == 1 and name.isalpha():
        return _letter(reader, name)
    raise UnreadableError(token.text)


def _number(reader: Reader) -> Node:
    """A number, or a mixed number: a whole one, and then a proper fraction of plain digits."""
    token = reader.peek()
    reader.at += 1
    whole = number(token.value or 0, token.places)
    if not token.text.isdigit():
        return whole
    fraction = _plain_fraction(reader) if reader.peek().spaced else None
    if fraction is None and reader.peek()[:2] == ("command", "frac"):
        at, tokens = reader.at, reader.tokens
        candidate = read(reader)
        parts = [part.value for part in candidate.args if part.op == "number" and part.places is None]
        if len(parts) == 2 and 0 < parts[0] < parts[1] and reader.peek().text != "^":  # type: ignore[operator]
            fraction = candidate
        else:
            reader.at, reader.tokens = at, tokens
    return Node("add", (whole, fraction)) if fraction else whole


def _plain_fraction(reader: Reader) -> Node | None:
    top, slash, bottom = reader.peek(), reader.peek(1), reader.peek(2)
    if not (top.text.isdigit() and slash.text == "/" and bottom.text.isdigit() and not bottom.spaced):
        return None
    if not 0 < int(top.text) < int(bottom.text):
        return None
    reader.at += 3
    return Node("div", (number(int(top.text)), number(int(bottom.text))))


def _letter(reader: Reader, letter: str) -> Node:
    reader.at += 1
    if reader.peek().text == "_":
        return Node("symbol", name=letter + _subscript(reader))
    if letter in APPLIED and reader.peek().text == "(" and not reader.peek().spaced:
        raise UnreadableError("an unknown function")  # f(2x) is no product
    if letter in ("e", "i"):
        return Node("constant", name=letter)
    return Node("symbol", name=letter)


def _subscript(reader: Reader) -> str:
    """`_1`, `_{12}`, `_{\\text{max}}`: part of the name; nothing where none follows."""
    if not reader.sign("_"):
        return ""
    if not reader.sign("{"):
        reader.at += 1
        return "_" + reader.tokens[reader.at - 1].text if reader.at <= len(reader.tokens) else ""
    name = "_"
    while not reader.sign("}"):
        if reader.peek().kind == "end":
            raise UnreadableError("_")
        name += reader.peek().text.strip()
        reader.at += 1
    return name


def _bracket(reader: Reader) -> Node:
    opening = reader.peek().text
    closing = {"(": ")", "[": "]", "{": "}", "|": "|"}.get(opening)
    if closing is None:
        raise UnreadableError(opening)
    reader.at += 1
    bars, reader.bars = reader.bars, int(opening == "|")
    node = reader.sum()
    between = _BETWEEN.get(reader.peek().text) if opening == "{" else None
    if between:
        reader.at += 1
        node = Node(between, (node, reader.sum()))
    reader.expect(closing)
    reader.bars = bars
    return Node("abs" if opening == "|" else "group", (node,))


def _named(reader: Reader, token: Token) -> Node:
    name = token.text
    reader.at += 1
    if name in ("frac", "binom", "dbinom", "tbinom"):
        top, bottom = reader.group(), reader.group()
        if top == Node("symbol", name="d"):
            raise UnreadableError("a derivative")
        return Node("div" if name == "frac" else "binom", (top, bottom))
    if name == "sqrt":
        return _root(reader)
    if name in FUNCTIONS:
        return _function(reader, name)
    if name in CONSTANTS:
        return Node("constant", name=CONSTANTS[name])
    if name in GREEK:
        return Node("symbol", name=name + _subscript(reader))
    if token.kind == "command" and name in ACCENTS:
        inner = reader.group()
        if inner.op not in ("symbol", "constant"):
            raise UnreadableError(name)
        return Node("symbol", name=f"{name} {inner.name}" + (_subscript(reader) if reader.peek().text == "_" else ""))
    if token.kind == "command" and name in _FENCES:
        node = reader.sum()
        if reader.peek()[:2] != ("command", _FENCES[name][0]):
            raise UnreadableError(name)
        reader.at += 1
        return Node(_FENCES[name][1], (node,))
    if token.kind == "word" and len(name) <= 3:
        return _letters(reader, name)
    raise UnreadableError(name)


def _letters(reader: Reader, name: str) -> Node:
    """Letters side by side are factors, each with nothing but its own power, as in `xy^2`."""
    letters = [Token("letter", letter) for letter in name]
    reader.tokens = [*reader.tokens[: reader.at - 1], *letters, *reader.tokens[reader.at :]]
    reader.at -= 1
    return read(reader)


def _root(reader: Reader) -> Node:
    degree = number(2)
    if reader.sign("["):
        degree = reader.sum()
        reader.expect("]")
    token = reader.peek()
    if token.kind == "number":  # \sqrt12 and √12 mean the root of twelve
        reader.at += 1
        return Node("root", (number(token.value or 0), degree))
    if token.kind == "sign" and token.text == "-":
        raise UnreadableError("sqrt-")
    return Node("root", (reader.atom(), degree))


def _function(reader: Reader, name: str) -> Node:
    """A function with its base or power, applied to a bracket or to the factors that follow: `\\sin 2x`."""
    name, base, power = _SAME.get(name, name), None, None
    if name == "log" and reader.sign("_"):
        base = reader.group() if reader.peek().text == "{" else _log_base(reader)
    if reader.sign("^"):
        power = reader.exponent()
    if name == "log" and base is None and reader.sign("_"):
        base = reader.group()
    argument = reader.atom() if reader.peek().text in ("(", "{", "|", "[") else _open_argument(reader)
    if power == Node("neg", (number(1),)) or power == Node("group", (Node("neg", (number(1),)),)):
        name, power = "arc" + name, None
    node = Node("call", (argument, base) if base else (argument,), name=name)
    return Node("pow", (node, power)) if power else node


def _log_base(reader: Reader) -> Node:
    token = reader.peek()
    if token.kind == "number" and token.text.isdigit() and not reader.peek(1).spaced:
        return reader.group() if reader.peek(1).kind == "end" else _whole_base(reader, token)
    return reader.atom()


def _whole_base(reader: Reader, token: Token) -> Node:
    """`\\log_28` is read as printed, base 2; `\\log_10(x)` as meant, base 10."""
    if reader.peek(1).text in ("(", "{") or reader.peek(1).kind in ("letter", "command"):
        reader.at += 1
        return number(int(token.text))
    return reader.group()


def _open_argument(reader: Reader) -> Node:
    node = reader.signed_factor()
    while reader.begins_factor() and reader.peek().text not in FUNCTIONS and reader.peek().text not in ("(", "["):
        node = Node("mul", (node, reader.factor()))
    return node
