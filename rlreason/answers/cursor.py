r"""A place in a sequence of tokens, and the small pieces that are read without looking inside them.

The grammar in `parser` is written with these steps: look ahead, take a sign, take a subscript or a plain fraction.
"""

from collections.abc import Sequence
from fractions import Fraction

from rlreason.answers.lexer import Token, UnreadableError
from rlreason.answers.tree import Node, number
from rlreason.answers.vocabulary import APPLIED, CLOSING, FUNCTIONS


class Cursor:
    """`at` is the index of the next token. Steps that read nothing leave it where it is."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at = tokens, 0
        self.bars = 0  # 1 inside |...|, where the next bar closes

    def peek(self, ahead: int = 0) -> Token:
        """The next token, or the one `ahead` of it; a token of kind `end` behind the last."""
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else Token("end", "")

    def sign(self, *texts: str) -> str | None:
        """The next token's text when it is one of these signs, taken; else None."""
        token = self.peek()
        if token.kind == "sign" and token.text in texts:
            self.at += 1
            return token.text
        return None

    def expect(self, text: str) -> None:
        """Take this sign. Raises `UnreadableError` where another token stands."""
        if not self.sign(text):
            raise UnreadableError(f"no {text}")

    def replace(self, *tokens: Token) -> None:
        """Put these tokens in the place of the next one."""
        self.tokens = [*self.tokens[: self.at], *tokens, *self.tokens[self.at + 1 :]]

    def begins_factor(self) -> bool:
        """Whether a factor without a sign may follow; a bare number may not: `3 8` and `x2` mean nothing."""
        token = self.peek()
        if token.kind == "sign":
            return token.text in ("(", "{", "[") or (token.text == "|" and not self.bars)
        if token.kind == "text":
            return token.text.strip() in FUNCTIONS or len(token.text.strip()) == 1
        return token.kind in ("letter", "word", "command") and token.text not in CLOSING

    def digit(self) -> Node:
        r"""The first digit of the next number, as in `\frac12`; the others stay."""
        text = self.peek().text
        self.replace(*([Token("number", text[1:], value=Fraction(int(text[1:])))] if text[1:] else []))
        return number(int(text[0]))

    def letter(self, letter: str) -> Node:
        """A variable with its index, or the constant `e` or `i`."""
        self.at += 1
        if self.peek().text == "_":
            return Node("symbol", name=letter + self.subscript())
        if letter in APPLIED and self.peek().text == "(" and not self.peek().spaced:
            raise UnreadableError("an unknown function")  # f(2x) is no product
        if letter in ("e", "i"):
            return Node("constant", name=letter)
        return Node("symbol", name=letter)

    def subscript(self) -> str:
        r"""`_1`, `_{12}`, `_{\text{max}}`: part of the name; nothing where none follows."""
        if not self.sign("_"):
            return ""
        if not self.sign("{"):
            self.at += 1
            return "_" + self.tokens[self.at - 1].text if self.at <= len(self.tokens) else ""
        name = "_"
        while not self.sign("}"):
            if self.peek().kind == "end":
                raise UnreadableError("_")
            name += self.peek().text.strip()
            self.at += 1
        return name

    def degree_sign(self) -> bool:
        """Whether `°` or `{°}` stands here, which is taken."""
        if [self.peek(ahead).text for ahead in range(3)] == ["{", "°", "}"]:
            self.at += 3
            return True
        return self.sign("°") is not None

    def single_number(self) -> Node | None:
        """The number that stands here, never the whole part of a mixed one; else None."""
        token = self.peek()
        if token.kind != "number":
            return None
        self.at += 1
        return number(token.value or 0, token.places)

    def proper_fraction(self) -> Node | None:
        """`1/2` behind the whole part of a mixed number: plain digits, above 0 and below 1; else None."""
        top, slash, bottom = self.peek(), self.peek(1), self.peek(2)
        if not (top.text.isdigit() and slash.text == "/" and bottom.text.isdigit() and not bottom.spaced):
            return None
        if not 0 < int(top.text) < int(bottom.text):
            return None
        self.at += 3
        return Node("div", (number(int(top.text)), number(int(bottom.text))))
