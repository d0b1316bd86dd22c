"""The value of an expression: exactly, as a fraction, where it has one, else to as many digits as are wanted.

Every step is bounded before it is taken; what could grow without measure is `RefusedError`. It must not know how
answers are written.
"""

import math
import threading
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rlreason.answers.expression import Node
from rlreason.answers.verdict import RefusedError

MAX_BITS = 20_000  # of an exact numerator or denominator
MAX_POWER = 5_000
MAX_FACTORIAL = 1_000
MAX_PRECISION = 8_192  # bits of an irrational value
MAX_ROOT = 64


class UndefinedError(Exception):
    """The expression has no value, or not at this point."""


def exact(node: Node, at: Mapping[str, Fraction]) -> Fraction | None:
    """The value as a fraction, the symbols being `at` their values, or None when it is irrational."""
    if node.op == "number":
        return node.value
    if node.op == "symbol":
        return at.get(node.name)
    if node.op in ("constant", "call", "degree"):
        return None
    values = [exact(part, at) for part in node.args]
    if any(value is None for value in values):
        return None
    return _exact_step(node.op, [value for value in values if value is not None])


def _exact_step(op: str, values: list[Fraction]) -> Fraction | None:
    match op, values:
        case "group", [a]:
            return a
        case "neg", [a]:
            return -a
        case "add", [a, b]:
            return _bounded(a + b)
        case "mul", [a, b]:
            return _bounded(a * b)
        case "div", [a, b]:
            if b == 0:
                raise UndefinedError("division by zero")
            return _bounded(a / b)
        case "pow", [a, b]:
            return _power(a, b)
        case "root", [a, b]:
            if b == 0:
                raise UndefinedError("zeroth root")
            return _power(a, 1 / b, real_root=True)
        case "abs", [a]:
            return abs(a)
        case "floor", [a]:
            return Fraction(math.floor(a))
        case "ceil", [a]:
            return Fraction(math.ceil(a))
        case "fact", [a]:
            return Fraction(math.factorial(_small(a, MAX_FACTORIAL)))
        case "binom", [a, b]:
            return Fraction(math.comb(_small(a, MAX_FACTORIAL), _small(b, MAX_FACTORIAL)))
    raise UndefinedError(op)


def _small(value: Fraction, limit: int) -> int:
    if value.denominator != 1 or value < 0:
        raise UndefinedError("not a whole number")
    if value > limit:
        raise RefusedError(f"a factorial or binomial beyond {limit}")
    return int(value)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise RefusedError("an exact value of more than 20000 bits")
    return value


def _power(base: Fraction, exponent: Fraction, real_root: bool = False) -> Fraction | None:
    if base == 0:
        if exponent <= 0:
            raise UndefinedError("zero to no positive power")
        return Fraction(0)
    if exponent.denominator > MAX_ROOT:
        return None
    if abs(exponent.numerator) > MAX_POWER or abs(exponent.numerator) * _bits(base) > MAX_BITS:
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
    for whole in (value.numerator, value.denominator):
        if whole.bit_length() > 4_096:
            return None
        root = _whole_root(whole, degree)
        if root**degree != whole:
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


def symbols(node: Node) -> frozenset[str]:
    if node.op == "symbol":
        return frozenset((node.name,))
    return frozenset().union(*map(symbols, node.args))


def precision(*nodes: Node) -> int:
    """Bits that keep apart any two values written with numbers as long as these."""
    return 256 + 2 * sum(map(_written_bits, nodes))


def _written_bits(node: Node) -> int:
    """Bits of the numbers in the tree; those of a power of numbers count as written out."""
    if node.op == "number":
        return _bits(node.value or Fraction(0))
    own = sum(map(_written_bits, node.args))
    if node.op in ("pow", "fact", "binom"):
        try:
            value = exact(node, {})
        except UndefinedError:
            return own
        return own if value is None else max(own, _bits(value))
    return own


_local = threading.local()


def context(bits: int) -> Any:
    """This thread's own calculator with `bits` of precision; the library's shared one is not thread-safe."""
    if bits > MAX_PRECISION:
        raise RefusedError("irrational values that need more than 8192 bits to tell apart")
    if not hasattr(_local, "context"):
        import mpmath

        _local.context = mpmath.MPContext()
    _local.context.prec = bits
    return _local.context
