"""Irrational values to many digits, with a record of how large the intermediate sums were.

That record is what makes "equal" safe: a difference counts as zero only where it is far below what rounding
leaves of the numbers that were added. It must not know how answers are written or compared.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rlreason.answers.evaluate import UndefinedError, context, exact
from rlreason.answers.expression import Node
from rlreason.answers.verdict import RefusedError

MAX_LOG2 = 20_000.0  # of any intermediate magnitude
UNKNOWN_BASE = Fraction(73, 10)  # of a `log` without base: what holds in this base holds in any


class Calculator:
    """Values of expressions at one point, with `bits` of precision."""

    def __init__(self, bits: int, at: Mapping[str, Fraction]) -> None:
        self.mp, self.at, self.bits = context(bits), at, bits
        self.largest: Any = self.mp.zero  # magnitude among all terms of sums
        self.left_the_reals = False  # a step made a complex number out of real ones

    def value(self, node: Node) -> Any:
        known = exact(node, self.at)
        if known is not None:
            return self.rational(known)
        if node.op == "constant":
            return self.constant(node.name)
        if node.op == "call":
            return self.call(node)
        parts = [self.value(part) for part in node.args]
        return self.watched(self.bounded(self.step(node.op, parts)), parts)

    def watched(self, value: Any, parts: list[Any]) -> Any:
        if self.mp.im(value) != 0 and all(self.mp.im(part) == 0 for part in parts):
            self.left_the_reals = True
        return value

    def rational(self, value: Fraction) -> Any:
        return self.mp.mpf(value.numerator) / value.denominator

    def bounded(self, value: Any) -> Any:
        if not self.mp.isfinite(value):
            raise UndefinedError("not finite")
        return value if self.mp.im(value) != 0 else self.mp.re(value)

    def constant(self, name: str) -> Any:
        if name == "oo":
            raise UndefinedError("infinity inside an expression")
        return {"pi": +self.mp.pi, "e": +self.mp.e, "i": self.mp.j}[name]

    def step(self, op: str, parts: list[Any]) -> Any:
        mp = self.mp
        match op, parts:
            case "group", [a]:
                return a
            case "neg", [a]:
                return -a
            case "add", [a, b]:
                self.largest = max(self.largest, abs(a), abs(b))
                return a + b
            case "mul", [a, b]:
                return a * b
            case "div", [a, b]:
                if self.vanishes(b):
                    raise UndefinedError("division by zero")
                return a / b
            case "pow", [a, b]:
                return self.power(a, b)
            case "root", [a, b]:
                return self.root(a, b)
            case "abs", [a]:
                return abs(a)
            case "degree", [a]:
                return a * mp.pi / 180
            case (("floor" | "ceil"), [a]):
                return self.step_to_whole(op, a)
        raise UndefinedError(op)

    def vanishes(self, value: Any) -> bool:
        """Zero up to the rounding of the sums that made it."""
        return bool(abs(value) <= self.largest * self.mp.ldexp(1, -3 * self.bits // 4))

    def power(self, base: Any, exponent: Any) -> Any:
        if self.vanishes(base):
            if self.mp.re(exponent) <= 0:
                raise UndefinedError("zero to no positive power")
            return self.mp.zero
        size = abs(self.mp.log(abs(base), 2)) * abs(exponent) + abs(self.mp.im(exponent)) * 10
        if size > MAX_LOG2:
            raise RefusedError("a power beyond 2^20000")
        return self.mp.power(base, exponent)

    def root(self, base: Any, degree: Any) -> Any:
        """The real root of a negative number where the degree is odd, else the principal one."""
        if self.mp.im(base) == 0 and base < 0 and degree == int(self.mp.re(degree)) and int(self.mp.re(degree)) % 2:
            return -self.power(-base, 1 / degree)
        return self.power(base, 1 / degree)

    def step_to_whole(self, op: str, value: Any) -> Any:
        if self.mp.im(value) != 0:
            raise UndefinedError(op)
        near = self.mp.nint(value)
        if abs(value - near) < self.mp.ldexp(max(1, abs(value)), -self.bits // 2):
            return near
        return self.mp.floor(value) if op == "floor" else self.mp.ceil(value)

    def call(self, node: Node) -> Any:
        mp, name = self.mp, node.name
        argument = self.value(node.args[0])
        if name in ("ln", "log", "log10"):
            return self.logarithm(node, argument)
        real = {"cot": "tan", "sec": "cos", "csc": "sin", "coth": "tanh"}.get(name)
        known = {
            "arcsin": mp.asin,
            "arccos": mp.acos,
            "arctan": mp.atan,
            "arsinh": mp.asinh,
            "arcosh": mp.acosh,
        }
        known |= {"artanh": mp.atanh, "arccot": mp.acot, "arcsec": mp.asec, "arccsc": mp.acsc}
        known |= {"arcsinh": mp.asinh, "arccosh": mp.acosh, "arctanh": mp.atanh}
        function = known.get(name) or getattr(mp, real or name)
        if abs(argument) > 2**64 or (name in ("exp", "sinh", "cosh") and abs(argument) > MAX_LOG2 * math.log(2)):
            raise RefusedError("an argument of a function beyond the limits")
        value = function(argument)
        self.largest = max(self.largest, mp.one)  # these lose digits near their zeros, as sums do
        if real or name == "tan":
            pole = value if real else mp.cos(argument)
            if self.vanishes(pole):
                raise UndefinedError("a pole")
        return self.watched(self.bounded(1 / value if real else value), [argument])

    def logarithm(self, node: Node, argument: Any) -> Any:
        if self.vanishes(argument):
            raise UndefinedError("the logarithm of zero")
        self.largest = max(self.largest, self.mp.one)
        value = self.watched(self.mp.log(argument), [argument])
        if node.name == "ln":
            return value
        base = self.mp.mpf(10) if node.name == "log10" else self.rational(UNKNOWN_BASE)
        if len(node.args) == 2:
            base = self.value(node.args[1])
        divisor = self.mp.log(base) if base != 0 else self.mp.zero
        if self.vanishes(divisor):
            raise UndefinedError("a logarithm to this base")
        return value / divisor
