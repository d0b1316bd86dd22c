"""Plain math-verify behind our two response formats: what the audit and the benchmark compare with.

Runs in a worker as a plug-in, like any reward of the user's own. It must not import the rest of the grader.
"""

from math_verify import parse, verify

from rlreason.grading import formats


def r1_zero_math_verify(response: str, gold: str) -> dict[str, float]:
    return _grade(formats.r1_zero(response), gold)


def question_only_math_verify(response: str, gold: str) -> dict[str, float]:
    return _grade(formats.question_only(response), gold)


def _grade(extracted: formats.Extracted, gold: object) -> dict[str, float]:
    formatted, answer = extracted
    equal = answer is not None and any(
        equal_in_dollars(answer, str(member)) for member in (gold if isinstance(gold, list) else [gold])
    )
    return {"format_reward": float(formatted), "answer_reward": float(equal), "reward": float(equal)}


def equal_in_dollars(answer: str, gold: str) -> bool:
    """Both as LaTeX between dollars, with the library's own settings but without its signals."""
    left, right = (parse(f"${text}$", parsing_timeout=None) for text in (answer, gold))
    return bool(verify(right, left, timeout_seconds=None))
