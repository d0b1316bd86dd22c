"""Evaluate expressions, as fractions where that is exact and else with as many digits as needed, and compare them."""

import math
import operator
import random
import threading
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from rlreason.grading.answers.lexer import MAX_POWER, RefusedError, pairs, words
from rlreason.grading.answers.parser import Node, infinity, symbols

MAX_BITS = 20_000  # of a numerator or denominator
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
        raise UndefinedError  # not a whole number
    if value > MAX_FACTORIAL:
        raise RefusedError  # a factorial or binomial beyond MAX_FACTORIAL
    return int(value)


def power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return `base ** exponent`, or None where it is irrational or complex.

    >>> power(Fraction(4, 9), Fraction(1, 2)), power(Fraction(2), Fraction(1, 2))
    (Fraction(2, 3), None)
    """
    if base == 0:
        if exponent <= 0:
            raise UndefinedError  # zero to no positive power
        return Fraction(0)
    if exponent.denominator > MAX_ROOT:
        return None
    if abs(exponent.numerator) > MAX_POWER or abs(exponent.numerator) * bits(base) > MAX_BITS:
        raise RefusedError  # a power beyond the limits
    if exponent.denominator == 1:
        return base**exponent.numerator
    degree, roots = exponent.denominator, []
    for part in (base.numerator, base.denominator):
        if part < 0 or part.bit_length() > 4_096:
            return None
        low, high = 0, 1 << (part.bit_length() // degree + 1)
        while high - low > 1:  # by bisection on whole numbers
            middle = (low + high) // 2
            low, high = (middle, high) if middle**degree <= part else (low, middle)
        if low**degree != part:
            return None
        roots.append(low)
    return Fraction(*roots) ** exponent.numerator


MAX_LOG2 = 20_000.0  # of any intermediate magnitude
MAX_PRECISION = 8_192  # bits of an irrational value
UNKNOWN_BASE = Fraction(73, 10)  # of a `log` without base: an identity in this base holds in any
Point = Mapping[str, Fraction]
NOWHERE: Point = {}  # for constants, which have no symbols
LOGARITHMS = words("ln log log10")
_RECIPROCAL = pairs("cot tan  sec cos  csc sin  coth tanh")  # 1 divided by the function named here


class Calculator:
    """Evaluates expressions at one point. The library of `mp` is loaded for the first value that is no fraction."""

    def __init__(self, at: Point, bits: int) -> None:
        self.at, self.bits = at, bits
        self.largest: Any = 0  # magnitude among all terms of sums
        self.left_the_reals = False  # a step made a complex number out of real ones

    @cached_property
    def mp(self) -> Any:
        """This thread's mpmath context with `bits` of precision; the library's shared one is not thread-safe."""
        if self.bits > MAX_PRECISION:
            raise RefusedError  # irrational values that need more than 8192 bits to tell apart
        if not hasattr(_local, "context"):
            import mpmath

            _local.context = mpmath.MPContext()
        _local.context.prec = self.bits
        return _local.context

    def value(self, node: Node) -> Any:
        """Return a fraction, or one of the library's numbers.

        Raises `UndefinedError` where there is no value and `RefusedError` where it would cost too much.
        """
        if node.op == "number":
            return node.value
        if node.op == "symbol" and node.name in self.at:
            return self.at[node.name]
        if node.op == "constant":
            if node.name == "oo":
                raise UndefinedError  # infinity inside an expression
            return {"pi": +self.mp.pi, "e": +self.mp.e, "i": self.mp.j}[node.name]
        parts = [self.value(part) for part in node.args]
        return self._call(node.name, *map(self.number, parts)) if node.op == "call" else self._step(node.op, parts)

    def values(self, *nodes: Node) -> list[Any]:
        """Return the value of each node, None for one without a value; all as the library's numbers if one is."""
        found: list[Any] = []
        for node in nodes:
            try:
                found.append(self.value(node))
            except UndefinedError:
                found.append(None)
        exact = all(value is None or isinstance(value, Fraction) for value in found)
        return found if exact else list(map(self.number, found))

    def number(self, value: Any) -> Any:
        """Return a fraction as one of the library's numbers; these stay as they are."""
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def is_real(self, value: Any) -> bool:
        """Whether the value has no imaginary part."""
        return isinstance(value, Fraction) or self.mp.im(value) == 0

    def vanishes(self, value: Any) -> bool:
        """Whether it is zero, up to the rounding of the sums that made it."""
        if isinstance(value, Fraction):
            return value == 0
        return bool(abs(value) <= self.largest * self.mp.ldexp(1, -3 * self.bits // 4))

    def _step(self, op: str, parts: list[Any]) -> Any:
        """One operation, on fractions alone or on the library's numbers alone."""
        if op == "degree" or not all(isinstance(part, Fraction) for part in parts):
            parts = [self.number(part) for part in parts]
        match op, parts:
            case (("neg" | "abs" | "mul" | "add"), _):
                if op == "add" and not isinstance(parts[0], Fraction):
                    self.largest = max(self.largest, *map(abs, parts))
                value = getattr(operator, op)(*parts)
            case "div", [a, b]:
                if self.vanishes(b):
                    raise UndefinedError  # division by zero
                value = a / b
            case "pow", [a, b]:
                value = self._power(a, b)
            case "root", [a, b]:  # the real one where the degree is odd
                negative = self.is_real(a) and a < 0 and self.is_real(b) and b % 2 == 1
                exponent = self._step("div", [Fraction(1), b])
                value = -self._power(-a, exponent) if negative else self._power(a, exponent)
            case "degree", [a]:
                value = a * self.mp.pi / 180
            case (("floor" | "ceil"), [Fraction() as a]):
                value = Fraction(getattr(math, op)(a))
            case (("floor" | "ceil"), [a]) if self.is_real(a):
                near = self.mp.nint(a)
                is_whole = abs(a - near) < self.mp.ldexp(max(1, abs(a)), -self.bits // 2)
                value = near if is_whole else getattr(self.mp, op)(a)
            case "fact", [Fraction() as a]:
                value = Fraction(math.factorial(whole(a)))
            case "binom", [Fraction() as a, Fraction() as b]:
                value = Fraction(math.comb(whole(a), whole(b)))
            case _:
                raise UndefinedError
        return self._checked(value, parts)

    def _checked(self, value: Any, parts: list[Any]) -> Any:
        """Return the value of a step if it is within the bounds; note a complex value of real parts."""
        if isinstance(value, Fraction):
            if bits(value) > MAX_BITS:
                raise RefusedError  # an exact value of more than 20000 bits
            return value
        if not self.mp.isfinite(value):
            raise UndefinedError  # not finite
        if self.is_real(value):
            return self.mp.re(value)
        if all(map(self.is_real, parts)):
            self.left_the_reals = True
        return value

    def _power(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, Fraction):
            exact = power(base, exponent)
            if exact is not None:
                return exact
            base, exponent = self.number(base), self.number(exponent)
        if self.vanishes(base):
            if self.mp.re(exponent) <= 0:
                raise UndefinedError  # zero to no positive power
            return self.mp.zero
        size = abs(self.mp.log(abs(base), 2)) * abs(exponent) + abs(self.mp.im(exponent)) * 10
        if size > MAX_LOG2:
            raise RefusedError  # a power beyond 2^20000
        return self.mp.power(base, exponent)

    def _call(self, name: str, argument: Any, base: Any = None) -> Any:
        mp = self.mp
        if name in LOGARITHMS and self.vanishes(argument):
            raise UndefinedError  # the logarithm of zero
        self.largest = max(self.largest, mp.one)  # functions lose digits near their zeros, as sums do
        if name in LOGARITHMS:
            value = self._checked(mp.log(argument), [argument])
            if name == "ln":
                return value
            if base is None:
                base = self.number(Fraction(10) if name == "log10" else UNKNOWN_BASE)
            divisor = mp.log(base) if base != 0 else mp.zero
            if self.vanishes(divisor):
                raise UndefinedError  # a logarithm to this base
            return value / divisor
        if abs(argument) > 2**64 or (name in ("exp", "sinh", "cosh") and abs(argument) > MAX_LOG2 * math.log(2)):
            raise RefusedError  # an argument of a function beyond the limits
        value = getattr(mp, _RECIPROCAL.get(name, name))(argument)
        if (name in _RECIPROCAL and self.vanishes(value)) or (name == "tan" and self.vanishes(mp.cos(argument))):
            raise UndefinedError  # a pole
        return self._checked(1 / value if name in _RECIPROCAL else value, [argument])


_local = threading.local()


def exact(node: Node, at: Point = NOWHERE) -> Fraction | None:
    """Return the value as a fraction, with the symbols' values `at`; None when it is irrational, or has none."""
    (value,) = Calculator(at, 256).values(node)
    return value if isinstance(value, Fraction) else None


def evaluated(first: Node, second: Node, at: Point = NOWHERE, times: int = 1) -> tuple[Calculator, Any, Any]:
    """Evaluate two expressions; return the calculator and both values, None for one without a value.

    Its precision, `times` what is needed, distinguishes any two values written with these numbers.
    """
    evaluator = Calculator(at, times * (256 + 2 * (_written_bits(first) + _written_bits(second))))
    return evaluator, *evaluator.values(first, second)


def _written_bits(node: Node) -> int:
    """Return the bits of the numbers in the tree; a power of numbers counts as written out."""
    if node.op == "number":
        return bits(node.value)
    own = sum(map(_written_bits, node.args))
    if node.op in ("pow", "fact", "binom"):
        value = exact(node)
        return own if value is None else max(own, bits(value))
    return own


SIGNS: list[tuple[int, ...]] = [(1,)] * 3 + [(-1,)] * 2 + [(1, -1)] * 2  # that numbers may have at each point
NEEDED = 2  # points at which both sides must have a value


def same(first: Node, second: Node, rel_tol: float = 0.0) -> bool:
    """Whether two expressions are equal, or one is a decimal to which the other, without finite decimals, rounds."""
    names = sorted(symbols(first) | symbols(second))
    if not names:
        return same_constant(first, second) or rounded(first, second, rel_tol) or rounded(second, first, rel_tol)
    whole = counts(first) or counts(second)
    for real in (True, False):
        agreed = 0
        for point in points(names, whole):
            equal = same_at(first, second, point, real, partial=whole)
            if equal is False:
                return False
            agreed += equal is True
        if agreed >= NEEDED:
            return True
    return False


def counts(node: Node) -> bool:
    """Whether a factorial or binomial of symbols needs whole numbers."""
    return (node.op in ("fact", "binom") and bool(symbols(node))) or any(map(counts, node.args))


def same_constant(first: Node, second: Node) -> bool:
    """Whether two expressions without symbols have the same value, infinities included."""
    infinite = infinity(first), infinity(second)
    return infinite[0] == infinite[1] if any(infinite) else same_at(first, second, NOWHERE, real=False) is True


def same_at(first: Node, second: Node, point: Point, real: bool, partial: bool = False) -> bool | None:
    """Whether two expressions agree at a point; None where neither has a value. With `real`, a side whose
    computation needs complex numbers (the root of a negative number, but not a written `i`) has none there: `ln(x^2)`
    is `2 ln x` where both exist. With `partial`, a value on one side only is no difference: `n!/(n-k)!` has none
    where k > n.
    """
    for times in (1, 3):
        evaluator, a, b = evaluated(first, second, point, times)
        if (real and evaluator.left_the_reals) or (a is None and b is None):
            return None
        if a is None or b is None:
            return None if partial else False
        if isinstance(a, Fraction):
            return bool(a == b)
        near = abs(a - b) <= evaluator.mp.ldexp(max(abs(a), abs(b)), -evaluator.bits // 2)
        if not near and not (evaluator.vanishes(a) and evaluator.vanishes(b)):
            return False
    return True


def points(names: list[str], whole: bool = False) -> list[dict[str, Fraction]]:
    """Return fixed evaluation points for these names: fractions of both signs, none special; or whole numbers."""
    source = random.Random(20260101)
    if whole:
        return [{name: Fraction(source.randrange(5, 60)) for name in names} for _ in SIGNS]
    values = []
    for signs in SIGNS:
        sizes = [Fraction(source.randrange(10**6, 10**7), source.randrange(10**6, 10**7)) for _ in names]
        values.append({name: size * source.choice(signs) for name, size in zip(names, sizes, strict=True)})
    return values


def ratio(first: Node, second: Node) -> int:
    """Return the sign of the constant k with first = k * second at every point, or 0 when there is none."""
    ratios: list[Any] = []
    for point in points(sorted(symbols(first) | symbols(second))):
        evaluator, a, b = evaluated(first, second, point)
        if a is None or b is None:
            continue
        if evaluator.vanishes(a) or evaluator.vanishes(b):
            return 0
        ratios.append(evaluator.number(a / b))
    if len(ratios) < NEEDED or not evaluator.is_real(ratios[0]):
        return 0
    tolerance = evaluator.mp.ldexp(abs(ratios[0]), -100)
    if any(abs(other - ratios[0]) > tolerance for other in ratios):
        return 0
    return 1 if evaluator.mp.re(ratios[0]) > 0 else -1  # of a complex number without imaginary part


def near(value: Node, rough: Node) -> bool:
    """Whether two constants differ by at most 1%."""
    _, a, b = evaluated(value, rough)
    return a is not None and b is not None and bool(abs(a - b) <= 0.01 * abs(b))


def places(node: Node) -> int | None:
    """Return the number of places of a number written as a decimal, with or without a sign."""
    return places(node.args[0]) if node.op == "neg" else node.places


def rounded(decimal: Node, other: Node, rel_tol: float) -> bool:
    """Whether `decimal` is `other`, which needs more places, rounded or cut."""
    value, digits = exact(decimal), places(decimal) or 0
    if value is None or digits <= 0 or places(other) is not None or not rel_tol:
        return False
    evaluator, _, target = evaluated(decimal, other)
    if target is None or not evaluator.is_real(target):
        return False
    target = evaluator.number(target)
    scaled = abs(target) * 10**digits
    if scaled == evaluator.mp.nint(scaled):
        return False
    near = {int(evaluator.mp.floor(scaled)), int(evaluator.mp.nint(scaled))}
    error = abs(evaluator.number(value) - target)  # of another sign, it is too large
    return abs(value) * 10**digits in near and bool(error <= rel_tol * abs(target) * (1 + 1e-9))
