r"""What may be sent to the symbolic library: texts of bounded cost, of commands that it knows.

The characters are checked before any parser runs. What could cost too much is `RefusedError`; what the library
would read by dropping a command it does not know is not for it at all.
"""

import re

from rlreason.answers.verdict import RefusedError
from rlreason.answers.vocabulary import words

MAX_CHARS = 400
MAX_DEPTH = 25
MAX_DIGITS = 30
MAX_EXPONENT = 100
MAX_RANGE = 1_000

#: Commands with a meaning that the library keeps. Anything else (arrows, angles, bars, fonts) it may drop.
KNOWN = words(
    """frac sqrt int iint oint sum prod lim limits to infty pi cdot times div pm mp ln log exp sin cos tan cot
    sec csc arcsin arccos arctan sinh cosh tanh le ge leq geq lt gt ne neq in cup cap begin end left right det
    lfloor rfloor lceil rceil binom min max gcd lcm mod bmod mathrm cdots rightarrow
    alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi chi psi omega xi eta zeta
    Gamma Delta Theta Lambda Sigma Phi Psi Omega setminus emptyset varnothing mathbb"""
)
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{4,}")
_RANGE = re.compile(r"\\(?:sum|prod)[^\\]*\^\s*\{?\s*(\d+)")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*-?\s*(\d+)")
#: A power in an exponent: of a number or a bracket, or with a third power above it, or without braces.
_TOWER = re.compile(r"(?:\^|\*\*)\s*(?:\{[^{}]*(?:[\d)}]\s*(?:\^|\*\*)|\^\s*\{?[^{}]*\^)|[^{}\s]{0,6}(?:\^|\*\*))")


def readable(text: str) -> bool:
    """Whether the library may be asked about this cleaned text: no text groups, no words, known commands."""
    commands = re.findall(r"\\([a-zA-Z]+)", text)
    if re.search(r"\\i?int(?!\s*(?:\\limits\s*)?_)", text):
        return False  # an integral without limits is a family of functions, not a value
    if "=" in re.sub(r"_\s*\{[^{}]*\}", "", text):
        return False  # the library would keep the last side of an equation and drop the rest
    if "'" in text:
        return False  # nor does it keep the sign of a derivative
    return bool(commands) and all(command in KNOWN for command in commands) and not _WORD.search(text)


def check(text: str) -> None:
    """Raises `RefusedError` for what could cost more than a short formula does."""
    if len(text) > MAX_CHARS:
        raise RefusedError("longer than 400 characters")
    if re.search(rf"\d{{{MAX_DIGITS + 1},}}", text):
        raise RefusedError("a number of more than 30 digits")
    if any(int(power) > MAX_EXPONENT for power in _EXPONENT.findall(text)) and not re.search(r"\\int|\\lim", text):
        raise RefusedError("an exponent over 100")
    if any(int(end) > MAX_RANGE for end in _RANGE.findall(text)):
        raise RefusedError("a sum or product over more than 1000 terms")
    if _TOWER.search(text):
        raise RefusedError("a tower of powers")
    if text.count("!") > 2 or re.search(r"\d{4,}\}?\)?!|!\s*[!^)}]", text):
        raise RefusedError("a large or repeated factorial")
    if len(re.findall(r"\\(?:int|sum|prod|lim)(?![a-z])", text)) > 3:
        raise RefusedError("more than three nested operators")
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise RefusedError("nested deeper than 25")
