r"""Ask the symbolic library for a verdict, in a worker, and check a "correct" before it counts.

The library rounds to six decimals, chops small numbers and unwraps equations; so "correct" counts only where both
sides, as it parsed them, agree to 60 digits (at random points where there are symbols). Only its LaTeX parser
is used: text is never evaluated as a program.
"""

from itertools import permutations
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from rlreason.grading.answers.compare import Decision, decision
from rlreason.grading.verifiers import by_format

DIGITS = 60
TOLERANCE = sympy.Float(10, DIGITS) ** -40
POINTS = 4
COUNTING = (sympy.Sum, sympy.Product, sympy.factorial, sympy.binomial)  # these need whole numbers
MAX_SET = 5  # members of a set, tried in every order


def judge(answer: str, reference: str) -> Decision:
    """Return the verdict on two texts that `answers.lexer.clean` cleaned and `answers.lexer.check` passed."""
    left, right = _parsed(answer), _parsed(reference)
    if left is None or right is None:
        return Decision("wrong", "unreadable")
    are_values = isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)
    yes = are_values or verify(right, left, float_rounding=15, timeout_seconds=None)
    return decision(bool(yes) and agree(left, right), "symbolic")


def _parsed(text: str) -> Any:
    config = LatexExtractionConfig(boxed_match_priority=-1)
    parts = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    value = next((part for part in parts if isinstance(part, sympy.Basic | sympy.MatrixBase)), None)
    return value.as_explicit() if isinstance(value, sympy.MatrixExpr) else value  # 2 * matrix, multiplied out


def agree(left: Any, right: Any) -> bool:
    """Whether kind, shape and the value of every leaf are equal; sets in any order."""
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return same_value(left, right)
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return left.shape == right.shape and all(map(agree, left, right))
    kind = type(left).__name__
    if kind != type(right).__name__ or len(left.args) != len(right.args):
        return False
    in_any_order = kind in ("FiniteSet", "Union", "And", "Or") and len(left.args) <= MAX_SET
    orders = permutations(left.args) if in_any_order else [left.args]
    return bool(left == right) or (bool(left.args) and any(all(map(agree, order, right.args)) for order in orders))


def same_value(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two values are equal to 60 digits, relative to size, without chopping; symbols take fixed values."""
    if left == right:
        return True
    if left.is_Boolean or right.is_Boolean:
        return False
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    if not names:
        return close(left, right)
    counting = left.has(*COUNTING) or right.has(*COUNTING)
    for point in range(POINTS):
        fractions = [
            sympy.Rational(7 + 4 * index + 13 * point, 11 + 3 * index) * (-1 if point == 1 else 1)
            for index in range(len(names))
        ]
        wholes = [sympy.Integer(3 + 4 * point + 5 * index) for index in range(len(names))]
        values = dict(zip(names, wholes if counting else fractions, strict=True))
        if not close(left.subs(values), right.subs(values)):
            return False
    return True


def close(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two values without symbols are equal: fractions exactly, others to 60 digits."""
    if left.is_Rational and right.is_Rational:
        return bool(left == right)
    a, b = _number(left), _number(right)
    if not (a.is_number and b.is_number) or a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return False
    if a.is_infinite or b.is_infinite:
        return bool(a == b)
    gap, size = abs(a - b).evalf(DIGITS), max(abs(a).evalf(DIGITS), abs(b).evalf(DIGITS))
    return bool(gap.is_comparable and gap <= size * TOLERANCE)


def _number(value: sympy.Expr) -> sympy.Expr:
    """Evaluate numerically where that works (an integral need not be solved), else after `doit`."""
    numeric = value.evalf(DIGITS)
    return numeric if numeric.is_Number else value.doit().evalf(DIGITS)


def library_says(answer: str, ground_truth: Any) -> bool:
    """Compare both as LaTeX between dollars, with the library's own settings but without its signals."""
    references = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    left = parse(f"${answer}$", parsing_timeout=None)
    right = (parse(f"${reference}$", parsing_timeout=None) for reference in references)
    return any(verify(one, left, timeout_seconds=None) for one in right)


#: The rewards of math-verify alone.
r1_zero_math_verify, question_only_math_verify = by_format(library_says)
