"""Parse tokens into an expression tree by a small, strict grammar."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rlreason.grading.answers.lexer import Token, UnreadableError, pairs, words

FUNCTIONS = words(
    """sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan asin acos atan arccot arcsec arccsc
    arsinh arcosh artanh ln log lg exp"""
)
CONSTANTS = pairs("pi pi  infty oo  infinity oo  Infinity oo  inf oo  oo oo")
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
#: Commands that end a factor instead of beginning one.
CLOSING = words("rfloor rceil choose over mod bmod pmod to")


class Node(NamedTuple):
    """`op` is number, symbol, constant, or the operation on `args`."""

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction = Fraction(0)  # of a number
    name: str = ""
    places: int | None = None  # digits after the point, on a number written as a decimal


def number(value: Fraction | int, places: int | None = None) -> Node:
    """Return a leaf with this value. `places`: digits after the point, where it was written as a decimal."""
    return Node("number", value=Fraction(value), places=places)


def symbols(node: Node) -> frozenset[str]:
    """Return the names of all symbols in the tree, without constants such as pi.

    >>> sorted(symbols(Node("add", (Node("symbol", name="x"), Node("constant", name="pi")))))
    ['x']
    """
    if node.op == "symbol":
        return frozenset((node.name,))
    return frozenset().union(*map(symbols, node.args))


def infinity(node: Node) -> int:
    """Return 1 or -1 for plus or minus infinity, else 0."""
    if node.op == "neg":
        return -infinity(node.args[0])
    return int(node.name == "oo")


_SIGNS = {"+": "", "-": "neg", "\\pm": "pm", "\\mp": "mp"}
_BRACKETS = pairs("( ) [ ] { } | |")
_FENCES = pairs("lfloor floor lceil ceil")
_FRACTIONS = pairs("frac div  binom binom  dbinom binom  tbinom binom")
_BETWEEN = pairs("over div  choose binom")
_AFTER = pairs("! fact ° degree")
#: Functions that the library calls otherwise.
_LIBRARY = pairs(
    """arcsin asin  arccos acos  arctan atan  arccot acot  arcsec asec  arccsc acsc  arsinh asinh  arcosh acosh
    artanh atanh  lg log10"""
)
_INVERSE = Node("neg", (number(1),))


def parse(tokens: Sequence[Token]) -> Node:
    """Parse all tokens as one expression. Raises `UnreadableError`."""
    parser = ExpressionParser(tokens)
    node = parser.sum()
    if parser.at < len(parser.tokens):
        raise UnreadableError
    return node


class ExpressionParser:
    """Recursive descent over one token sequence; each method reads one rule of the grammar.

    `at` is the index of the next token, and moves only past what is read.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at = tokens, 0
        self.bars = 0  # 1 inside |...|, where the next bar closes

    def peek(self, ahead: int = 0) -> Token:
        """Return the next token, or the one `ahead` of it; after the last, a token of kind `end`."""
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else Token("end", "")

    def sign(self, *texts: str) -> str | None:
        """Take the next token if it is one of these signs and return its text; else None."""
        token = self.peek()
        if token.kind == "sign" and token.text in texts:
            self.at += 1
            return token.text
        return None

    def expect(self, text: str) -> None:
        """Take this sign. Raises `UnreadableError` where the next token is another."""
        if not self.sign(text):
            raise UnreadableError

    def replace(self, *tokens: Token) -> None:
        """Replace the next token by these."""
        self.tokens = [*self.tokens[: self.at], *tokens, *self.tokens[self.at + 1 :]]

    def sum(self) -> Node:
        """Terms joined by `+`, `-` or both at once."""
        node = self.term(self.sign(*_SIGNS))
        while sign := self.sign(*_SIGNS):
            node = Node("add", (node, self.term(sign)))
        return node

    def term(self, sign: str | None) -> Node:
        """A product of the sign that was taken before it: factors joined by signs or side by side, from left to right.

        `1/2x` is `(1/2)x`.
        """
        node, op = self.signed_factor(), _SIGNS[sign or "+"]
        while True:
            if joined := self.sign("*", "/"):
                node = Node("mul" if joined == "*" else "div", (node, self.signed_factor()))
            elif self.begins_factor() or (self.peek().kind == "number" and self.tokens[self.at - 1].text == "!"):
                node = Node("mul", (node, self.factor()))
            else:
                return Node(op, (node,)) if op else node

    def signed_factor(self) -> Node:
        """A factor with at most one sign of its own, as behind `*`."""
        negative = self.sign("-", "+") == "-"
        return Node("neg", (self.factor(),)) if negative else self.factor()

    def factor(self) -> Node:
        """An atom with its powers, factorials, primes and degree sign."""
        node = self.atom()
        while sign := self.sign(*_AFTER, "'", "^", "**"):
            if sign in _AFTER:
                node = Node(_AFTER[sign], (node,))
            elif sign != "'":
                node = Node("pow", (node, self.exponent()))
            elif node.op == "symbol":
                node = node._replace(name=node.name + "'")
            else:
                raise UnreadableError
        return node

    def begins_factor(self) -> bool:
        """Whether a factor without a sign may follow; a bare number may not: `3 8` and `x2` mean nothing."""
        token = self.peek()
        if token.kind == "sign":
            return token.text in ("(", "{", "[") or (token.text == "|" and not self.bars)
        if token.kind == "text":
            return token.text.strip() in FUNCTIONS or len(token.text.strip()) == 1
        return token.kind in ("letter", "word", "command") and token.text not in CLOSING

    def exponent(self) -> Node:
        """What stands behind `^`: one number or atom with its sign and the tower above it."""
        negative = self.sign("-", "+") == "-"
        node = self.single_number() or self.atom()
        if self.sign("^", "**"):  # towers lean right
            node = Node("pow", (node, self.exponent()))
        return Node("neg", (node,)) if negative else node

    def group(self) -> Node:
        r"""`{...}` or, where braces were left out as in `\frac12`, one digit, letter or command."""
        if self.sign("{"):
            bars, self.bars = self.bars, 0
            node = self.sum()
            self.expect("}")
            self.bars = bars
            return node
        token = self.peek()
        if token.kind == "number" and token.text.isdigit():
            rest = token.text[1:]  # the other digits stay
            self.replace(*([Token("number", rest, value=Fraction(int(rest)))] if rest else []))
            return number(int(token.text[0]))
        return self.atom()

    def letter(self, letter: str) -> Node:
        """A variable with its index, or the constant `e` or `i`."""
        self.at += 1
        if self.peek().text == "_":
            return Node("symbol", name=letter + self.subscript())
        if letter in APPLIED and self.peek().text == "(" and not self.peek().spaced:
            raise UnreadableError  # an unknown function
        return Node("constant" if letter in ("e", "i") else "symbol", name=letter)

    def subscript(self) -> str:
        r"""An index, which is part of the name: `_1`, `_{12}`, `_{\text{max}}`; nothing where none follows."""
        if not self.sign("_"):
            return ""
        if not self.sign("{"):
            self.at += 1
            return "_" + self.peek(-1).text
        name = "_"
        while not self.sign("}"):
            if self.peek().kind == "end":
                raise UnreadableError
            name += self.peek().text.strip()
            self.at += 1
        return name

    def single_number(self) -> Node | None:
        """The next number, never as part of a mixed one; None where there is none."""
        token = self.peek()
        if token.kind != "number":
            return None
        self.at += 1
        return number(token.value, token.places)

    def atom(self) -> Node:
        """A number, a letter, a bracket, or what a word or command stands for."""
        token = self.peek()
        name = token.text.strip()
        match token.kind:
            case "number":
                return self.number()
            case "sign" if name in _BRACKETS:  # in bars too, or `{a \over b}` and its like
                self.at += 1
                bars, self.bars = self.bars, int(name == "|")
                node, between = self.sum(), self.peek().text
                if name == "{" and between in _BETWEEN:
                    self.at += 1
                    node = Node(_BETWEEN[between], (node, self.sum()))
                self.expect(_BRACKETS[name])
                self.bars = bars
                return Node("abs", (node,)) if name == "|" else node
            case "word" | "command":
                return self.named(token)
            case "letter":
                return self.letter(name)
            case "text" if len(name) == 1 and name.isalpha():
                return self.letter(name)
            case "text" if name in FUNCTIONS:
                return self.named(Token("word", name))
        raise UnreadableError

    def number(self) -> Node:
        """A number, or a mixed number: a whole one, and then a proper fraction of plain digits."""
        plain, whole = self.peek().text.isdigit(), self.single_number()
        assert whole is not None
        top, slash, bottom = self.peek(), self.peek(1), self.peek(2)
        if plain and top.spaced and slash.text == "/" and top.text.isdigit() and bottom.text.isdigit():
            if not bottom.spaced and 0 < int(top.text) < int(bottom.text):
                self.at += 3
                return Node("add", (whole, Node("div", (number(int(top.text)), number(int(bottom.text))))))
        elif plain and top[:2] == ("command", "frac"):
            at, tokens = self.at, self.tokens
            fraction = self.atom()
            parts = [part.value for part in fraction.args if part.op == "number" and part.places is None]
            if len(parts) == 2 and 0 < parts[0] < parts[1]:
                return Node("add", (whole, fraction))
            self.at, self.tokens = at, tokens
        return whole

    def named(self, token: Token) -> Node:
        """What a word or command stands for, with its arguments."""
        name, is_command = token.text, token.kind == "command"
        self.at += 1
        if name in _FRACTIONS:
            top, bottom = self.group(), self.group()
            if top.name == "d":
                raise UnreadableError  # a derivative
            return Node(_FRACTIONS[name], (top, bottom))
        if name == "sqrt":
            degree = number(2)
            if self.sign("["):
                degree = self.sum()
                self.expect("]")
            return Node("root", (self.single_number() or self.atom(), degree))  # \sqrt12: the root of twelve
        if name in FUNCTIONS:
            return self.function(name)
        if name in CONSTANTS:
            return Node("constant", name=CONSTANTS[name])
        if name in GREEK:
            return Node("symbol", name=name + self.subscript())
        if is_command and name in ACCENTS:
            inner = self.group()
            if inner.op not in ("symbol", "constant"):
                raise UnreadableError
            return Node("symbol", name=f"{name} {inner.name}" + self.subscript())
        if is_command and name in _FENCES:
            node = self.sum()
            if self.peek()[:2] != ("command", name.replace("l", "r", 1)):
                raise UnreadableError
            self.at += 1
            return Node(_FENCES[name], (node,))
        if not is_command and len(name) <= 3:  # letters side by side are factors, as in `xy^2`
            self.at -= 1
            self.replace(*[Token("letter", letter) for letter in name])
            return self.atom()
        raise UnreadableError

    def function(self, name: str) -> Node:
        r"""A function with its base or power, applied to a bracket or to the factors that follow: `\sin 2x`."""
        name, base, power = _LIBRARY.get(name, name), None, None
        if name == "log" and self.sign("_"):
            token, following = self.peek(), self.peek(1)
            if token.kind != "number" or not token.text.isdigit() or following.spaced:
                base = self.atom()
            elif following.text in ("(", "{") or following.kind in ("letter", "command"):
                base = self.single_number()  # `\log_10(x)` is read as meant, base 10
            else:
                base = self.group()  # `\log_28` as printed, base 2
        if self.sign("^"):
            power = self.exponent()
        if self.peek().text in _BRACKETS:
            argument = self.atom()
        else:  # up to the next sum, function or bracket
            argument = self.signed_factor()
            while self.begins_factor() and self.peek().text not in FUNCTIONS and self.peek().text not in ("(", "["):
                argument = Node("mul", (argument, self.factor()))
        if power == _INVERSE:
            name, power = "a" + name, None
        node = Node("call", (argument, base) if base else (argument,), name=name)
        return Node("pow", (node, power)) if power else node
