"""Exact steps on fractions, each bounded before it is taken; what could grow without measure is `RefusedError`."""

from fractions import Fraction

from rlreason.answers.verdict import RefusedError

MAX_BITS = 20_000  # of a numerator or denominator
MAX_POWER = 5_000
MAX_FACTORIAL = 1_000
MAX_ROOT = 64


class UndefinedError(Exception):
    """The expression has no value, or not at this point."""


def bits(value: Fraction) -> int:
    """Binary digits of the longer of numerator and denominator."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def bounded(value: Fraction) -> Fraction:
    """The value itself. Raises `RefusedError` where it has more than `MAX_BITS` bits."""
    if bits(value) > MAX_BITS:
        raise RefusedError("an exact value of more than 20000 bits")
    return value


def whole(value: Fraction) -> int:
    """The operand of a factorial or binomial. Raises `UndefinedError` or, beyond the limit, `RefusedError`."""
    if value.denominator != 1 or value < 0:
        raise UndefinedError("not a whole number")
    if value > MAX_FACTORIAL:
        raise RefusedError(f"a factorial or binomial beyond {MAX_FACTORIAL}")
    return int(value)


def power(base: Fraction, exponent: Fraction, real_root: bool = False) -> Fraction | None:
    """`base ** exponent`, or None where it is irrational.

    With `real_root`, a negative base has a value where the exponent's denominator is odd.

    >>> power(Fraction(4, 9), Fraction(1, 2)), power(Fraction(2), Fraction(1, 2))
    (Fraction(2, 3), None)
    """
    if base == 0:
        if exponent <= 0:
            raise UndefinedError("zero to no positive power")
        return Fraction(0)
    if exponent.denominator > MAX_ROOT:
        return None
    if abs(exponent.numerator) > MAX_POWER or abs(exponent.numerator) * bits(base) > MAX_BITS:
        if base in (1, -1) and exponent.denominator == 1:
            return base if exponent.numerator % 2 else Fraction(1)
        raise RefusedError("a power beyond the limits")
    if exponent.denominator == 1:
        return base**exponent.numerator
    negative = base < 0
    if negative and not (real_root and exponent.denominator % 2):
        return None
    root = _perfect_root(abs(base), exponent.denominator)
    return None if root is None else (-root if negative else root) ** exponent.numerator


def _perfect_root(value: Fraction, degree: int) -> Fraction | None:
    parts = []
    for part in (value.numerator, value.denominator):
        if part.bit_length() > 4_096:
            return None
        root = _whole_root(part, degree)
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(*parts)


def _whole_root(value: int, degree: int) -> int:
    """floor(value ** (1/degree)), by bisection on whole numbers."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle)
    return low
