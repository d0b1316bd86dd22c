"""Clean an answer and split it into tokens; limits on texts for the symbolic library."""

import re
import unicodedata
from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from rlreason.grading.formats import boxed


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


def pairs(text: str) -> dict[str, str]:
    """Return a table: every other word of a text with the word behind it."""
    found = text.split()
    return dict(zip(found[::2], found[1::2], strict=True))


class RefusedError(Exception):
    """Raised for an answer whose evaluation could cost more than any honest answer needs."""


MAX_CHARS = 400
MAX_DIGITS = 200
MAX_ITEMS = 60
MAX_POWER = 5_000  # of ten in 1e3, and of whole exponents elsewhere


class Token(NamedTuple):
    """`kind`: number, letter, word, command, text, begin, end or sign; `spaced`: white space came before it."""

    kind: str
    text: str
    spaced: bool = False
    value: Fraction = Fraction(0)  # of a number
    places: int | None = None  # digits after the decimal point, for a decimal written as such


class UnreadableError(Exception):
    """Raised for a text that does not follow the grammar."""


_GROUPS = r"\d{1,3}(?:\{,\}\d{3})+(?!\d)|\d{1,3}(?:[ ]\d{3})+(?![ ]?\d)"
_GROUPS_BY_COMMA = r"\d{1,3}(?:,\d{3})+(?![\d,]\d|\d)"


def _pattern(groups: str) -> re.Pattern[str]:
    """Return the pattern of a token, given that of digits in groups."""
    return re.compile(
        rf"""(?P<space>\s+)
        |(?=\.?\d|\.\\(?:overline|bar|dot))(?P<number>
            (?P<whole>{groups}|\d+)?
            (?:\.(?P<decimals>\d*)(?:
                \\(?:overline|bar|dot)\s*\{{?(?P<repeat>\d+)\}}?|\((?P<bracket>\d+)\)(?!\d)|\s?(?P<dots>\\ldots)
            )?)?
            (?:[eE](?P<power>[+-]?\d+)(?![\w.]))?
        )
        |\\begin\s*\{{(?P<begin>[a-zA-Z]+\*?)\}}(?:\{{[lcr|]*\}})?
        |\\end\s*\{{(?P<end>[a-zA-Z]+\*?)\}}
        |\\(?:text(?:[bsi][fct]|rm|tt|normal)?|mathrm|[mhf]box|operatorname)\s*\{{(?P<text>[^{{}}]*)\}}
        |\\(?P<command>[a-zA-Z]+|.)
        |(?P<word>[a-zA-Z]+)
        |(?P<sign>\*\*|<=|>=|!=|[^\s])
        """,
        re.VERBOSE,
    )


_TOKEN = _pattern(f"{_GROUPS_BY_COMMA}|{_GROUPS}")
_TOKEN_IN_BRACKETS = _pattern(_GROUPS)  # where a comma separates
_LISTS = pairs(r"( ) [ ] \{ \}")
_RAISED_DEGREE = re.compile(r"\^ ?(\{ ?)?\\(?:circ|degree)(?![a-zA-Z])(?(1) ?\})")
_SIGN_OF_TEXT = pairs(r"<= \le >= \ge != \ne")
_SIGN_OF_COMMAND = pairs(
    r"""
    cdot *   times *   ast *   div /   leq \le   leqslant \le   geq \ge   geqslant \ge   lt <   gt >   neq \ne
    lvert |   rvert |   vert |   mid |   colon :   lbrack [   rbrack ]   lparen (   rparen )   le \le   ge \ge
    ne \ne   pm \pm   mp \mp   cup \cup   cap \cap   in \in   { \{   } \}   \ \\   setminus \setminus
    backslash \setminus   approx \approx   sim \approx   $ $   & &   land and   wedge and   lor or   vee or
    circ °   degree °   langle \langle   rangle \rangle"""
)


def tokens(text: str) -> list[Token]:
    r"""Split the text into tokens. Raises `RefusedError` over the length limits.

    >>> [token.text for token in tokens(r"x^{2}+1,000\text{ cm}")]
    ['x', '^', '{', '2', '}', '+', '1,000', ' cm']
    """
    if len(text) > MAX_CHARS:
        raise RefusedError  # longer than 400 characters
    text = _RAISED_DEGREE.sub(r"\\degree ", text)
    found, spaced, depth, position = list[Token](), False, 0, 0
    while match := (_TOKEN_IN_BRACKETS if depth else _TOKEN).match(text, position):
        position, kind = match.end(), str(match.lastgroup)
        if kind == "space":
            spaced = True
            continue
        written = match[kind]
        if kind == "number":
            found.append(_number(match, spaced))
        elif kind == "word" and len(written) == 1:
            found.append(Token("letter", written, spaced))
        elif kind == "command" and written in _SIGN_OF_COMMAND:
            found.append(Token("sign", _SIGN_OF_COMMAND[written], spaced))
        else:
            found.append(Token(kind, _SIGN_OF_TEXT.get(written, written), spaced))
        spaced = False
        depth += (found[-1].text in _LISTS) - (found[-1].text in _LISTS.values())
    return found


def _number(match: re.Match[str], spaced: bool) -> Token:
    text = match["number"]
    if len(text) > MAX_DIGITS:
        raise RefusedError  # a number of more than 200 digits
    whole, decimals = re.sub(r"\D", "", match["whole"] or "0"), match["decimals"] or ""
    repeat = match["repeat"] or match["bracket"]
    if match["dots"]:  # 0.1666...: digits repeat that are written twice, or a single one three times
        period = re.search(r"(?:(\d)\1\1+|(\d{2,}?)\2+)\Z", decimals)
        if period is None:
            raise UnreadableError  # digits that go on
        decimals, repeat = decimals[: period.start()], period[1] or period[2]
    power = int(match["power"] or 0)
    if abs(power) > MAX_POWER:
        raise RefusedError  # a power of ten beyond 5000
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    if repeat:
        value += Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(decimals))
    places = len(decimals) - power if decimals and not repeat else None
    return Token("number", text, spaced, value * Fraction(10) ** power, places)


_OPENING = pairs(r"( ) [ ] { } \{ \} \langle \rangle")
MAX_DEPTH = 25


def step(token: Token) -> int:
    """Return 1 for a token that opens a bracket or an environment, -1 for one that closes it, else 0."""
    if token.kind == "sign":
        return (token.text in _OPENING) - (token.text in _OPENING.values())
    return (token.kind == "begin") - (token.kind == "end")


def depths(tokens: Sequence[Token]) -> list[int]:
    """Return how many brackets are open at each token; a bracket itself stands outside of its pair."""
    steps = list(map(step, tokens))
    return [depth - (change > 0) for depth, change in zip(accumulate(steps), steps, strict=True)]


def is_enclosed(tokens: Sequence[Token]) -> bool:
    """Whether one pair of brackets stands around everything."""
    outside = [at for at, level in enumerate(depths(tokens)) if not level]
    return step(tokens[0]) > 0 and outside == [0, len(tokens) - 1]


def sign_of(token: Token) -> str:
    """Return the text of a sign, `,` for a semicolon, or the word `and`, `or` or `to`; else nothing."""
    word = token.text.strip(" ,").casefold()
    if word in ("and", "or") or (word == "to" and token.kind != "command"):
        return word
    if token.kind != "sign":
        return ""
    return "," if token.text == ";" else token.text


def split(tokens: Sequence[Token], at: Collection[str]) -> tuple[list[list[Token]], list[str]]:
    """Split at the tokens outside all brackets with one of these signs; return the pieces and the signs found."""
    levels = depths(tokens)
    if levels and (min(levels) < 0 or levels[-1] or step(tokens[-1]) > 0):
        raise UnreadableError  # brackets
    pieces, signs = [list[Token]()], list[str]()
    for token, level in zip(tokens, levels, strict=True):
        if level or step(token) or sign_of(token) not in at:
            pieces[-1].append(token)
        else:
            signs.append(sign_of(token))
            pieces.append([])
    if len(pieces) > MAX_ITEMS:
        raise RefusedError  # more than 60 items
    return pieces, signs


MAX_EXPONENT = 100
MAX_RANGE = 1_000

#: Commands whose meaning the library keeps. It may drop anything else (arrows, angles, bars, fonts).
KNOWN = words(
    """frac sqrt int iint oint sum prod lim limits to infty pi cdot times div pm mp ln log exp sin cos tan cot
    sec csc arcsin arccos arctan sinh cosh tanh le ge leq geq lt gt ne neq in cup cap begin end left right det
    lfloor rfloor lceil rceil binom min max gcd lcm mod bmod mathrm cdots rightarrow
    alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi chi psi omega xi eta zeta
    Gamma Delta Theta Lambda Sigma Phi Psi Omega setminus emptyset varnothing mathbb"""
)
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{4,}")
_NO_VALUE = re.compile(r"'|\\i?int(?!\s*(?:\\limits\s*)?_)")  # a derivative, an integral without limits
_RANGE = re.compile(r"\\(?:sum|prod)[^\\]*\^\s*\{?\s*(\d+)")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*-?\s*(\d+)")
#: Numbers of many digits; large or repeated factorials; a power in an exponent: of a number or a bracket, or with a
#: third power above it, or without braces.
_COSTLY = re.compile(
    r"\d{31,}|\d{4,}\}?\)?!|!\s*[!^)}]|(?:\^|\*\*)\s*(?:"
    r"\{[^{}]*(?:[\d)}]\s*(?:\^|\*\*)|\^\s*\{?[^{}]*\^)|[^{}\s]{0,6}(?:\^|\*\*))"
)


def readable(text: str) -> bool:
    """Whether this cleaned text may be sent to the library: known commands, and no words, text groups, families of
    functions, derivatives (it would drop the sign) or equations (it would keep the last side).
    """
    commands = re.findall(r"\\([a-zA-Z]+)", text)
    if _NO_VALUE.search(text) or "=" in re.sub(r"_\s*\{[^{}]*\}", "", text):
        return False
    return bool(commands) and KNOWN.issuperset(commands) and not _WORD.search(text)


def check(text: str) -> None:
    """Raise `RefusedError` for a text, of the length and depth that `read` allows, that could cost the library more
    than a short formula does.
    """
    powers = [] if re.search(r"\\int|\\lim", text) else _EXPONENT.findall(text)
    if (
        any(int(power) > MAX_EXPONENT for power in powers)
        or any(int(end) > MAX_RANGE for end in _RANGE.findall(text))
        or _COSTLY.search(text)
        or text.count("!") > 2
        or len(re.findall(r"\\(?:int|sum|prod|lim)(?![a-z])", text)) > 3
    ):
        raise RefusedError


# ruff: noqa: RUF001, RUF002 (a table of look-alikes)

_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ", "₀₁₂₃₄₅₆₇₈₉"
_FULL_SIZE = str.maketrans(_RAISED + _LOWERED, "0123456789+-()nx0123456789")
_SMALL = re.compile(f"(?P<up>[{_RAISED}]+)|[{_LOWERED}]+")
#: Signs, and after each run of them what stands for any of them; `~` is a space.
_SIGNS = r"""
    −–—﹣－‐‑‒ -  ＋ +  ×✕✖ \times~  ·⋅∙• \cdot~  ÷⁄∕／ /  √ \sqrt~  ∛ \sqrt[3]~  ∞ \infty~  ≤⩽≦ \le~  ≥⩾≧ \ge~
    ≠ \ne~  ∪ \cup~  ∩ \cap~  ∈ \in~  °º˚ ^\circ~  ± \pm~  ∓ \mp~  ∅ \emptyset~  ℝ \mathbb{R}  ≈ \approx~  ， ,
    （ (  ） )  ［ [  ］ ]  ｛ \{  ｝ \}  ％ %  ＝ =  ＜ <  ＞ >  ＄ \$  ： :  ． .  ’‘′ '  “” "  … \ldots~
    ⌊ \lfloor~  ⌋ \rfloor~  ⌈ \lceil~  ⌉ \rceil~  ∖ \setminus~  ⟨ \langle~  ⟩ \rangle~  ∗ *  ⅈ i  ℯ e
    α \alpha~  β \beta~  γ \gamma~  δ \delta~  ε \epsilon~  ζ \zeta~  η \eta~  θ \theta~  ι \iota~  κ \kappa~
    λ \lambda~  μ \mu~  ν \nu~  ξ \xi~  π \pi~  ρ \rho~  σ \sigma~  τ \tau~  υ \upsilon~  φ \phi~  χ \chi~  ψ \psi~
    ω \omega~
    Δ \Delta~  Ω \Omega~  Σ \Sigma~  Γ \Gamma~  ϕ \phi~
    ½ ~1/2~  ⅓ ~1/3~  ⅔ ~2/3~  ¼ ~1/4~  ¾ ~3/4~  ⅕ ~1/5~  ⅖ ~2/5~  ⅗ ~3/5~  ⅘ ~4/5~  ⅙ ~1/6~  ⅚ ~5/6~  ⅛ ~1/8~
    ⅜ ~3/8~  ⅝ ~5/8~  ⅞ ~7/8~
"""
_TABLE = {ord(char): out.replace("~", " ") for chars, out in pairs(_SIGNS).items() for char in chars}
_TABLE |= dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u2007\u2002\u2003\u3000\t\r\n"), " ")
_TABLE |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062"), "")


def rewritten(text: str, rules: Sequence[tuple[str, str]]) -> str:
    """Apply these rules to a text in turn: regular expressions with their replacements."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


#: A comma without its space is a thousands sign; with one (`\,` or a blank alone) it separates two numbers.
_GROUP = r"(?=\d{3}(?!\d))"
_PLAIN_LATEX = (  # for texts with a backslash
    (r"\\neg(?:thin|med|thick)space(?![a-zA-Z])", r"\\!"),  # the space is taken away
    (rf"(?<=\d)(?:\s|\\!)*,\s*\\!(?:\s|\\!)*{_GROUP}|(?<=\d)\s*\\!\s*,\s*{_GROUP}", "{,}"),
    (r"\\!", ""),
    (r"\{:\}", ":"),
    (r"(\\\\)\s*\[[^\[\]]*(?:e[mx]|pt|[cm]m|in)\]", r"\1"),  # a gap between two rows
    (r"\\(?:left|right|[bB]ig{1,2}[lr]?|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])\.?", ""),
    (r"(?<!\\)\\[()\[\]]", " "),
    (r"(?<!\\)\\(?:[,;:> ]|(?:q?quad|enspace|(?:thin|med|thick)space)(?![a-zA-Z])|hspace\{[^{}]*\})|~", " "),
    (r"(?<=\d) ?\{ ?\} ?(?=\d)", " "),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\([%#])", r"\1"),
    (r"\\lbrace", r"\\{"),
    (r"\\rbrace", r"\\}"),
    (r"(\\mathbb ?\{?R\}?) ?- ?(?=\\\{)", r"\1\\setminus "),
)
_PLAIN_SIGNS = (
    (r"\\(?:[cl]|hel)?dots[cbmi]?(?![a-zA-Z])|(?<!\.)\.\.\.(?!\.)", r"\\ldots "),
    ("~", " "),
    (r"(?<=\d) ?[xX] ?10\^", r"\\times 10^"),
    (r", *(?=(?:\\text *\{ *)?\b(?:and|or)(?![a-zA-Z]))", " "),
)
_PLAIN_SPACES = ((r"\s+", " "), (rf"(?<=\d) ?\{{,\}} ?{_GROUP}", "{,}"))
_FONT = r"(?:text(?:[bsi][fct]|rm|tt|normal)?|math(?:rm|[bsi][ft])|[mhf]box|underline|operatorname\*?|boldsymbol)"
WHOLE_FONT = rf"\\{_FONT}\s*\{{([^{{}}]*)\}}"
_UPRIGHT = (
    (WHOLE_FONT, r" \1 "),
    (r"\\(gcd|max|min|deg|det|dim|ker|Pr)(?![a-zA-Z])", r" \1 "),
    (r"\\\$", "$"),
)
_SQUEEZED = (
    (r"\{(\w)\}", r" \1 "),  # x_{1} is x_1, but x^{2}5 is not x^{25}
    (r"\s+", " "),
    (r"(?<=\d)([.,]) (?=\d{3}(?!\d)|(?<=\. )\d)", r"\1  "),
    (r"(?<![a-zA-Z0-9 ]) (?! )|(?<! ) (?![a-zA-Z0-9 ])", ""),
)
_ANNOUNCED = re.compile(r"\A(?:the )?(?:final )?answer(?: is)?\s*:\s*", re.I)
_CLOSING_STOP = re.compile(r"[^.]\.\Z|[^\\,;][,;]\Z")  # `\,` is a space
_WRAPPERS = pairs(r"\( \) \[ \] ** ** __ __ ` ` $$ $$" + ' " "')


def clean(text: str) -> str:
    r"""Rewrite an answer in plain LaTeX spelling.

    >>> clean("**$−½$**"), clean(r"\[ \dfrac{1}{2} \]"), clean("x² ≥ 1\u202f000")
    ('- 1/2', '\\frac{1}{2}', 'x^{2} \\ge 1 000')
    """
    if not text.isascii():
        text = _SMALL.sub(lambda run: f"{'^' if run['up'] else '_'}{{{run[0].translate(_FULL_SIZE)}}}", text)
        text = re.sub("[\U0001d400-\U0001d7ff]", lambda letter: unicodedata.normalize("NFKC", letter[0]), text)
        text = re.sub(r"\d", lambda digit: str(int(digit[0])), text).translate(_TABLE)
    text = _unwrap(_ANNOUNCED.sub("", _unwrap(text.strip())))
    text = rewritten(text, _PLAIN_SIGNS)
    if "\\" in text:
        text = rewritten(text, _PLAIN_LATEX)
    return rewritten(text, _PLAIN_SPACES).strip()


def plain(text: str) -> str:
    r"""Remove fonts, spacing and the closing stop, so that equal words or formulas become equal texts.

    Spaces stay between two letters or digits, so `3 8` is not `38`.

    >>> plain(r"\text{(A)}."), plain("x = 3 8")
    ('(A)', 'x=3 8')
    """
    return rewritten(rewritten(text, _UPRIGHT).strip().rstrip(".").strip(), _SQUEEZED)


def _unwrap(text: str) -> str:
    before = None
    while before != text:
        before = text
        for left, right in _WRAPPERS.items():
            inner = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and left not in inner and inner.strip():
                text = inner.strip()
        text = _undollar(text)
        if _CLOSING_STOP.search(text):
            text = text[:-1].rstrip()
        if text == f"\\boxed{{{boxed(text)}}}":
            text = text[7:-1].strip()
    return text


def _undollar(text: str) -> str:
    r"""Remove `$` where pairs of them mark mathematics; a single `$` is money and stays.

    >>> _undollar("$38$"), _undollar("$38"), _undollar("$x=1$ or $x=2$"), _undollar("$5 and $6")
    ('38', '$38', 'x=1 or x=2', '$5 and $6')
    """
    marks = [match.start() for match in re.finditer(r"(?<!\\)\$", text)]
    if len(marks) < 2 or len(marks) % 2:
        return text
    for opening, closing in zip(marks[::2], marks[1::2], strict=True):
        outside = text[closing + 1 : closing + 2]
        if outside.isalnum() or closing == opening + 1:
            return text
    return re.sub(r"(?<!\\)\$", "", text).strip()
