"""Plain math-verify with the two response formats, for comparison in the audit and the benchmark.

Runs in a worker as a plug-in, like any user's reward.
"""

from math_verify import parse, verify

from rlreason.grading import formats
from rlreason.grading.verifiers import graded


def r1_zero_math_verify(response: str, ground_truth: str) -> dict[str, float]:
    """Grade the answer in the answer tags by math-verify."""
    return _grade(formats.r1_zero(response), ground_truth)


def question_only_math_verify(response: str, ground_truth: str) -> dict[str, float]:
    """Grade the answer in the last box by math-verify."""
    return _grade(formats.question_only(response), ground_truth)


def _grade(read: formats.Extracted, ground_truth: object) -> dict[str, float]:
    references = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return graded(read, lambda answer: any(equal_in_dollars(answer, str(reference)) for reference in references))


def equal_in_dollars(answer: str, reference: str) -> bool:
    """Compare both as LaTeX between dollars, with the library's own settings but without its signals."""
    left, right = (parse(f"${text}$", parsing_timeout=None) for text in (answer, reference))
    return bool(verify(right, left, timeout_seconds=None))
