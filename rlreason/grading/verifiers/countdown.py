r"""Verify Countdown answers: an expression must use exactly the given numbers, and its value must be the target.

The rule is TinyZero's (Jiayi-Pan/TinyZero, verl/utils/reward_score/countdown.py): the numbers in the answer are the
given ones, each as often as given and none left out; the answer is the expression alone, so `(1 + 2) * 3 = 9` is
wrong. Different here: values are fractions, not floats within 1e-5; only + - * / and signs count (not Python's `**`
and `//`); `\times`, `\div` and similar commands are read as * and /; and a well-formed wrong answer earns 0, not
TinyZero's 0.1, because format, answer and reward are 0 or 1 everywhere here.

A ground truth is one right expression, or, where none is known, the numbers and the target: `3 5 7 -> 22`. A response
that cannot be read is wrong; a ground truth that cannot be read raises, and the grader counts an error.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from rlreason.grading.verifiers import by_format

LONGEST = 500  # characters of an answer; six numbers need about 50
WRITTEN = re.compile(r"[0-9+\-*/() ]+")
SPELLINGS = {"\\times": "*", "\\cdot": "*", "×": "*", "·": "*", "\\div": "/", "÷": "/", "−": "-"}  # noqa: RUF001
OPERATIONS: dict[type[ast.operator], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def solves(answer: str, ground_truth: str) -> bool:
    """Whether `answer` uses the numbers and reaches the target of `ground_truth`.

    >>> solves("2 * (4 + 7)", "(7 + 4) * 2"), solves("22", "(7 + 4) * 2"), solves("7 * 2 + 4", "7 4 2 -> 22")
    (True, False, False)
    """
    given, target = read_ground_truth(ground_truth)
    expression = plain(answer)
    return expression is not None and numbers(expression) == given and value(expression) == target


r1_zero, question_only = by_format(solves)


def read_ground_truth(ground_truth: str) -> tuple[list[int], Fraction]:
    """Return the given numbers, sorted, and the target."""
    left, arrow, right = ground_truth.partition("->")
    target = Fraction(int(right)) if arrow else value(ground_truth)
    if target is None:
        raise ValueError(f"ground truth {ground_truth!r} is neither an expression nor NUMBERS -> TARGET")
    return numbers(left), target


def plain(answer: str) -> str | None:
    r"""Return the answer in Python's spelling; None where it has anything but whole numbers, + - * / and brackets.

    >>> plain(r" (3 \times 5)  + 7 "), plain("3 * 5 + 7 = 22")
    ('(3 * 5) + 7', None)
    """
    if len(answer) > LONGEST:
        return None
    for spelling, sign in SPELLINGS.items():
        answer = answer.replace(spelling, sign)
    answer = " ".join(answer.split())
    return answer if WRITTEN.fullmatch(answer) else None


def numbers(expression: str) -> list[int]:
    """Return all numbers in the expression, sorted."""
    return sorted(map(int, re.findall("[0-9]+", expression)))


def value(expression: str) -> Fraction | None:
    """Return the exact value of a plain expression, or None where it has none.

    >>> value("1 / (1 - 2 / 3)"), value("1 / (2 - 2)"), value("2 ** 9"), value("(1 + ")
    (Fraction(3, 1), None, None, None)
    """
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last two: nested too deep
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
    raise ValueError(f"{type(node).__name__} is no arithmetic")
