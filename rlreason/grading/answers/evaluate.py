"""Evaluate expressions: exactly as fractions where possible, else with as many digits as needed."""

import math
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from operator import mul, neg
from typing import Any

from rlreason.grading.answers.lexer import RefusedError
from rlreason.grading.answers.parser import Node

MAX_BITS = 20_000  # of a numerator or denominator
MAX_POWER = 5_000
MAX_FACTORIAL = 1_000
MAX_ROOT = 64


class UndefinedError(Exception):
    """The expression has no value, or not at this point."""


def bits(value: Fraction) -> int:
    """Return the bit length of the longer of numerator and denominator."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def whole(value: Fraction) -> int:
    """Return the operand of a factorial or binomial. Raises `UndefinedError` or, beyond the limit, `RefusedError`."""
    if value.denominator != 1 or value < 0:
        raise UndefinedError("not a whole number")
    if value > MAX_FACTORIAL:
        raise RefusedError(f"a factorial or binomial beyond {MAX_FACTORIAL}")
    return int(value)


def power(base: Fraction, exponent: Fraction, real_root: bool = False) -> Fraction | None:
    """Return `base ** exponent`, or None where it is irrational.

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
        low, high = 0, 1 << (part.bit_length() // degree + 1)
        while high - low > 1:  # by bisection on whole numbers
            middle = (low + high) // 2
            low, high = (middle, high) if middle**degree <= part else (low, middle)
        if low**degree != part:
            return None
        parts.append(low)
    return Fraction(*parts)


MAX_LOG2 = 20_000.0  # of any intermediate magnitude
MAX_PRECISION = 8_192  # bits of an irrational value
UNKNOWN_BASE = Fraction(73, 10)  # of a `log` without base: an identity in this base holds in any
Point = Mapping[str, Fraction]
NOWHERE: Point = {}  # for constants, which have no symbols

#: Functions by the library's names. A function of RECIPROCAL is 1 divided by the function named there.
_LIBRARY = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc",
    "arsinh": "asinh", "arcosh": "acosh", "artanh": "atanh",
    "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
}  # fmt: skip
_PLAIN: dict[str, Callable[..., Any]] = {"group": lambda a: a, "neg": neg, "mul": mul, "abs": abs}
_RECIPROCAL = {"cot": "tan", "sec": "cos", "csc": "sin", "coth": "tanh"}


def exact(node: Node, at: Point = NOWHERE) -> Fraction | None:
    """Return the value as a fraction, with the symbols' values `at`, or None when it is irrational."""
    value: Fraction | None = Calculator(at).value(node)
    return value


class Calculator:
    """Evaluates expressions at one point. Without `bits` of precision, a value that is no fraction is None."""

    def __init__(self, at: Point, bits: int | None = None) -> None:
        self.at, self.bits = at, bits or 0
        self.mp: Any = context(bits) if bits else None
        self.largest: Any = 0  # magnitude among all terms of sums
        self.left_the_reals = False  # a step made a complex number out of real ones

    def value(self, node: Node) -> Any:
        """Return a fraction, or one of the library's numbers; None for an irrational value without a precision.

        Raises `UndefinedError` where there is no value and `RefusedError` where it would cost too much.
        """
        if node.op == "number":
            return node.value
        if node.op == "symbol" and node.name in self.at:
            return self.at[node.name]
        if self.mp is None and node.op in ("symbol", "constant", "call", "degree"):
            return None
        if node.op == "constant":
            if node.name == "oo":
                raise UndefinedError("infinity inside an expression")
            return {"pi": +self.mp.pi, "e": +self.mp.e, "i": self.mp.j}[node.name]
        if node.op == "call":
            return self._call(node)
        parts = [self.value(part) for part in node.args]
        return None if any(part is None for part in parts) else self._step(node.op, parts)

    def approximate(self, node: Node) -> Any:
        """The value as one of the library's numbers, real or complex."""
        return self.number(self.value(node))

    def number(self, value: Any) -> Any:
        """A fraction as one of the library's numbers; these stay as they are."""
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def vanishes(self, value: Any) -> bool:
        """Zero, up to the rounding of the sums that made it."""
        if isinstance(value, Fraction):
            return value == 0
        return bool(abs(value) <= self.largest * self.mp.ldexp(1, -3 * self.bits // 4))

    def _step(self, op: str, parts: list[Any]) -> Any:
        """One operation, on fractions alone or on the library's numbers alone."""
        if op == "degree" or not all(isinstance(part, Fraction) for part in parts):
            parts = [self.number(part) for part in parts]
        match op, parts:
            case (("group" | "neg" | "mul" | "abs"), _):
                value = _PLAIN[op](*parts)
            case "add", [a, b]:
                if not isinstance(a, Fraction):
                    self.largest = max(self.largest, abs(a), abs(b))
                value = a + b
            case "div", [a, b]:
                if self.vanishes(b):
                    raise UndefinedError("division by zero")
                value = a / b
            case (("pow" | "root"), [a, b]):
                value = self._power(a, b) if op == "pow" else self._root(a, b)
            case "degree", [a]:
                value = a * self.mp.pi / 180
            case (("floor" | "ceil"), [a]):
                value = self._to_whole(op, a)
            case "fact", [Fraction() as a]:
                value = Fraction(math.factorial(whole(a)))
            case "binom", [Fraction() as a, Fraction() as b]:
                value = Fraction(math.comb(whole(a), whole(b)))
            case _:
                raise UndefinedError(op)
        return self._checked(value, parts)

    def _checked(self, value: Any, parts: list[Any]) -> Any:
        """Return the value of a step if it is within the bounds; note a complex value of real parts."""
        if value is None:
            return None
        if isinstance(value, Fraction):
            if bits(value) > MAX_BITS:
                raise RefusedError("an exact value of more than 20000 bits")
            return value
        if not self.mp.isfinite(value):
            raise UndefinedError("not finite")
        if self.mp.im(value) == 0:
            return self.mp.re(value)
        if all(isinstance(part, Fraction) or self.mp.im(part) == 0 for part in parts):
            self.left_the_reals = True
        return value

    def _power(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, Fraction):
            exact = power(base, exponent)
            if exact is not None or self.mp is None:
                return exact
            base, exponent = self.number(base), self.number(exponent)
        if self.vanishes(base):
            if self.mp.re(exponent) <= 0:
                raise UndefinedError("zero to no positive power")
            return self.mp.zero
        size = abs(self.mp.log(abs(base), 2)) * abs(exponent) + abs(self.mp.im(exponent)) * 10
        if size > MAX_LOG2:
            raise RefusedError("a power beyond 2^20000")
        return self.mp.power(base, exponent)

    def _root(self, base: Any, degree: Any) -> Any:
        """Return the real root of a negative number where the degree is odd, else the principal root."""
        if isinstance(base, Fraction):
            if degree == 0:
                raise UndefinedError("zeroth root")
            exact = power(base, 1 / degree, real_root=True)
            if exact is not None or self.mp is None:
                return exact
            base, degree = self.number(base), self.number(degree)
        if self.mp.im(base) == 0 and base < 0 and degree == int(self.mp.re(degree)) and int(self.mp.re(degree)) % 2:
            return -self._power(-base, 1 / degree)
        return self._power(base, 1 / degree)

    def _to_whole(self, op: str, value: Any) -> Any:
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if op == "floor" else math.ceil(value))
        if self.mp.im(value) != 0:
            raise UndefinedError(op)
        near = self.mp.nint(value)
        if abs(value - near) < self.mp.ldexp(max(1, abs(value)), -self.bits // 2):
            return near
        return self.mp.floor(value) if op == "floor" else self.mp.ceil(value)

    def _call(self, node: Node) -> Any:
        mp, name, argument = self.mp, node.name, self.approximate(node.args[0])
        if name in ("ln", "log", "log10"):
            return self._logarithm(node, argument)
        function = getattr(mp, _LIBRARY.get(name) or _RECIPROCAL.get(name, name))
        if abs(argument) > 2**64 or (name in ("exp", "sinh", "cosh") and abs(argument) > MAX_LOG2 * math.log(2)):
            raise RefusedError("an argument of a function beyond the limits")
        value = function(argument)
        self.largest = max(self.largest, mp.one)  # these lose digits near their zeros, as sums do
        if (name in _RECIPROCAL and self.vanishes(value)) or (name == "tan" and self.vanishes(mp.cos(argument))):
            raise UndefinedError("a pole")
        return self._checked(1 / value if name in _RECIPROCAL else value, [argument])

    def _logarithm(self, node: Node, argument: Any) -> Any:
        if self.vanishes(argument):
            raise UndefinedError("the logarithm of zero")
        self.largest = max(self.largest, self.mp.one)
        value = self._checked(self.mp.log(argument), [argument])
        if node.name == "ln":
            return value
        base = self.mp.mpf(10) if node.name == "log10" else self.number(UNKNOWN_BASE)
        if len(node.args) == 2:
            base = self.approximate(node.args[1])
        divisor = self.mp.log(base) if base != 0 else self.mp.zero
        if self.vanishes(divisor):
            raise UndefinedError("a logarithm to this base")
        return value / divisor


def precision(*nodes: Node) -> int:
    """Return the bits that distinguish any two values written with numbers of this length."""
    return 256 + 2 * sum(map(_written_bits, nodes))


def _written_bits(node: Node) -> int:
    """Return the bits of the numbers in the tree; a power of numbers counts as written out."""
    if node.op == "number":
        return bits(node.value or Fraction(0))
    own = sum(map(_written_bits, node.args))
    if node.op in ("pow", "fact", "binom"):
        try:
            value = exact(node)
        except UndefinedError:
            return own
        return own if value is None else max(own, bits(value))
    return own


_local = threading.local()


def context(bits: int) -> Any:
    """Return this thread's mpmath context with `bits` of precision; the library's shared one is not thread-safe."""
    if bits > MAX_PRECISION:
        raise RefusedError("irrational values that need more than 8192 bits to tell apart")
    if not hasattr(_local, "context"):
        import mpmath

        _local.context = mpmath.MPContext()
    _local.context.prec = bits
    return _local.context
