"""Verify answers to problems of the `reasoning-gym` package by the package's own verifier of the task.

A ground truth is JSON: the package's entry of the problem, and its task. Its verifiers give partial scores; here an
answer is right only with the full score. Spaces around it do not count. An exception of a verifier is an error of the
grader, counted separately from wrong answers.
"""

import contextlib
import json
from functools import cache

from rlreason.grading.verifiers import by_format

with contextlib.suppress(ImportError):  # the loader of the problems says how to get it
    # Here, so that the import does not count against the time limit of the first answer.
    from reasoning_gym.factory import get_score_answer_fn

    scorer_of = cache(get_score_answer_fn)


def solves(answer: str, ground_truth: str) -> bool:
    """Whether the task's verifier gives the full score."""
    entry = json.loads(ground_truth)
    return float(scorer_of(entry["task"])(answer.strip(), entry)) >= 1.0


r1_zero, question_only = by_format(solves)
