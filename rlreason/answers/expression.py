r"""From tokens to an expression tree, by a small strict grammar; what does not follow it is `UnreadableError`.

It reads LaTeX and the plain spellings of models (`sqrt(3)`, `x^10`, `3 1/2`, `2pi`). Nothing is evaluated
here and no text ever reaches an interpreter. It must not know lists, intervals, units or equality.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rlreason.answers.lexer import Token, UnreadableError
from rlreason.answers.verdict import RefusedError
from rlreason.answers.vocabulary import CLOSING, FUNCTIONS

MAX_DEPTH = 25
_SIGNS = {"+": "", "-": "neg", "\\pm": "pm", "\\mp": "mp"}


class Node(NamedTuple):
    """`op` is number, symbol, constant, or the operation on `args`."""

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction | None = None
    name: str = ""
    places: int | None = None  # digits after the point, on a number written as a decimal


def number(value: Fraction | int, places: int | None = None) -> Node:
    return Node("number", value=Fraction(value), places=places)


class Reader:
    """Recursive descent over one token sequence."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at, self.depth, self.bars = tokens, 0, 0, 0

    def whole(self) -> Node:
        """The expression that all tokens make together."""
        node = self.sum()
        if self.at < len(self.tokens):
            raise UnreadableError(self.tokens[self.at].text)
        return node

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else Token("end", "")

    def sign(self, *texts: str) -> str | None:
        """The next token's text when it is one of these signs, taken; else None."""
        token = self.peek()
        if token.kind == "sign" and token.text in texts:
            self.at += 1
            return token.text
        return None

    def expect(self, text: str) -> None:
        if not self.sign(text):
            raise UnreadableError(f"no {text}")

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RefusedError("nested deeper than 25")
        node = self.term(self.sign(*_SIGNS))
        while sign := self.sign(*_SIGNS):
            node = Node("add", (node, self.term(sign)))
        self.depth -= 1
        return node

    def term(self, sign: str | None) -> Node:
        node, op = self.product(), _SIGNS.get(sign or "+")
        return Node(op, (node,)) if op else node

    def product(self) -> Node:
        """Factors joined by signs or side by side, from left to right: `1/2x` is `(1/2)x`."""
        node = self.signed_factor()
        while True:
            if self.sign("*"):
                node = Node("mul", (node, self.signed_factor()))
            elif self.sign("/"):
                node = Node("div", (node, self.signed_factor()))
            elif self.begins_factor() or (self.peek().kind == "number" and self.tokens[self.at - 1].text == "!"):
                node = Node("mul", (node, self.factor()))
            else:
                return node

    def signed_factor(self) -> Node:
        sign = self.sign("-", "+")
        node = self.factor()
        return Node("neg", (node,)) if sign == "-" else node

    def begins_factor(self) -> bool:
        """Whether a factor without a sign may follow; a bare number may not: `3 8` and `x2` mean nothing."""
        token = self.peek()
        if token.kind == "sign":
            return token.text in ("(", "{", "[") or (token.text == "|" and not self.bars)
        if token.kind == "text":
            return token.text.strip() in FUNCTIONS or len(token.text.strip()) == 1
        return token.kind in ("letter", "word", "command") and token.text not in CLOSING

    def factor(self) -> Node:
        """An atom with its powers, factorials and degree sign."""
        node = self.atom()
        while True:
            if self.sign("!"):
                node = Node("fact", (node,))
            elif self.sign("°"):
                node = Node("degree", (node,))
            elif self.sign("'"):
                if node.op != "symbol":
                    raise UnreadableError("'")
                node = node._replace(name=node.name + "'")
            elif self.sign("^", "**"):
                node = self.power(node)
            else:
                return node

    def power(self, base: Node) -> Node:
        exponent = self.exponent()
        if exponent.op == "symbol" and exponent.name == "°":
            return Node("degree", (base,))
        return Node("pow", (base, exponent))

    def exponent(self) -> Node:
        if self.sign("°"):
            return Node("symbol", name="°")
        if self.peek().text == "{" and self.peek(1).text == "°" and self.peek(2).text == "}":
            self.at += 3
            return Node("symbol", name="°")
        negative = self.sign("-")
        self.sign("+")
        token = self.peek()
        if token.kind == "number":  # never the whole part of a mixed number
            self.at += 1
            node = number(token.value or 0, token.places)
        else:
            node = self.atom()
        if self.sign("^", "**"):  # towers lean right
            node = self.power(node)
        return Node("neg", (node,)) if negative else node

    def atom(self) -> Node:
        from rlreason.answers import atoms

        return atoms.read(self)

    def group(self) -> Node:
        """`{...}` or, where braces were left out as in `\\frac12`, one digit, letter or command."""
        if self.sign("{"):
            bars, self.bars = self.bars, 0
            node = self.sum()
            self.expect("}")
            self.bars = bars
            return node
        token = self.peek()
        if token.kind == "number" and token.text.isdigit():
            self.take_digit()
            return number(int(token.text[0]))
        if token.kind == "word":
            raise UnreadableError(token.text)
        return self.atom()

    def take_digit(self) -> None:
        """Leave the rest of a run of digits for the next reader."""
        text = self.peek().text
        rest = [Token("number", text[1:], value=Fraction(int(text[1:])))] if text[1:] else []
        self.tokens = [*self.tokens[: self.at], *rest, *self.tokens[self.at + 1 :]]
