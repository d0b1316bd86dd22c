"""A user's reward function, named `module:function`: build its requests, and interpret its values as grades.

The function itself runs in the worker processes.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from rlreason.grading.pool import PoolReply
from rlreason.types import Grade, Outcome

KEYS = ("format_reward", "answer_reward", "reward")
ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1


def key(response: str, ground_truth: Any) -> tuple[str, str] | Grade:
    """Return the request as two texts, which find equal ones, or a grade where the ground truth cannot be sent."""
    try:
        return (response, json.dumps(ground_truth))
    except (TypeError, ValueError, RecursionError):
        return Grade(0.0, 0.0, 0.0, "error", "bad_gold")


def failure(reply: PoolReply, grade: Grade) -> PoolReply | None:
    """Return the failed reply, with the reason in one sentence, where the plug-in gave no reward; else None.

    >>> unusable = PoolReply("ok", {"value": "1.0"})
    >>> failure(unusable, grade(unusable)).error
    "returned '1.0', and must return a number, or a dictionary with a number as reward"
    """
    if reply.status != "ok":
        return reply
    if grade.path != "plugin_value":
        return None
    returned = f"returned {repr(reply.value.get('value'))[:100]}"
    return PoolReply("error", error=f"{returned}, and must return a number, or a dictionary with a number as reward")


def grade(reply: PoolReply, correct_at: float | None = None) -> Grade:
    """Turn a reply into a grade. A number is a reward; a dictionary must have `reward` and may have the two others.
    All else is an error, never a silent zero among the wrong answers.

    The response is correct where its answer reward (by default the reward) is at least `correct_at`, or 1 where that
    is None: partial credit is a reward to learn from, but no right answer.

    >>> grade(PoolReply("ok", {"value": 1.0})).outcome, grade(PoolReply("ok", {"value": 0.1})).outcome
    ('correct', 'wrong')
    >>> grade(PoolReply("ok", {"value": None})).path
    'plugin_value'
    """
    if reply.status == "timeout":
        return Grade(0.0, 0.0, 0.0, "timeout", "plugin")
    if reply.status != "ok":
        return Grade(0.0, 0.0, 0.0, "error", "killed" if reply.status == "killed" else "plugin")
    value = reply.value.get("value")
    if isinstance(value, int | float):
        value = {"reward": value, "format_reward": 1.0, "answer_reward": value}
    if not isinstance(value, dict) or "reward" not in value:
        return Grade(0.0, 0.0, 0.0, "error", "plugin_value")
    numbers = [value.get(name, value["reward"]) for name in KEYS]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return Grade(0.0, 0.0, 0.0, "error", "plugin_value")
    formatted, answer, reward = (float(number) for number in numbers)
    outcome: Outcome = "wrong" if formatted > 0 else "unformatted"
    whole = 1.0 if correct_at is None else correct_at
    return Grade(formatted, answer, reward, "correct" if answer >= whole - ROUNDING else outcome, "plugin")


def correct_at_warnings(name: str, grades: Sequence[Grade], correct_at: float | None) -> list[str]:
    """Suggest `grading.correct_at` where it does not fit a plug-in's largest answer reward."""
    top = max((grade.answer for grade in grades), default=0.0)
    if correct_at is None and top > 1 + ROUNDING:
        return [
            f"grading: {name} gives up to {top:g}, and every response that earns 1 or more counts as "
            f"correct: set grading.correct_at={top:g} where only that is a right answer, or grading.correct_at=1"
        ]
    whole = 1.0 if correct_at is None else correct_at
    if 0 < top < whole - ROUNDING:
        return [
            f"grading: no response earned {whole:g}, from which on one counts as correct; the most was "
            f"{top:g}: set grading.correct_at where that is a right answer, or eval.reward=r1_zero (or another) to "
            "measure right answers apart from what is paid for"
        ]
    return []
