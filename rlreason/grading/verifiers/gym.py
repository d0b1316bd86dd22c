"""Problems of the `reasoning-gym` package, scored by the package's own verifier of their task.

A ground truth is JSON: the problem's entry as the package made it, and its task. Those verifiers give shares for nearly
right answers; here an answer is right when it earns the whole point, as everywhere. Blanks around it do not count.
What a verifier raises on a hostile answer is the grader's error, counted apart from wrong answers.
"""

import contextlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

from rlreason.grading import formats
from rlreason.grading.verifiers import graded

with contextlib.suppress(ImportError):  # the loader of the problems says how to get it
    # Here and not at the first answer: that would spend its time limit on the import.
    from reasoning_gym.factory import get_score_answer_fn


def r1_zero(response: str, ground_truth: str) -> dict[str, float]:
    """The plug-in for answers in tags."""
    return graded(formats.r1_zero(response), lambda answer: solves(answer, ground_truth))


def question_only(response: str, ground_truth: str) -> dict[str, float]:
    """The plug-in for answers in a box."""
    return graded(formats.question_only(response), lambda answer: solves(answer, ground_truth))


def solves(answer: str, ground_truth: str) -> bool:
    """Whether the task's verifier gives the whole point."""
    entry = json.loads(ground_truth)
    return float(_scorer(entry["task"])(answer.strip(), entry)) >= 1.0


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    score: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return score
