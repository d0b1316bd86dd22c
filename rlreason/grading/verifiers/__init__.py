"""Verifiers of tasks whose answer is checked rather than compared: a module per task, a function per prompt format.

`r1_zero(response, ground_truth)` and `question_only(response, ground_truth)` are plug-ins of the grader and run in its
worker processes. Answers are extracted as everywhere, and the reward is the answer's: format, answer and reward are 0
or 1.
"""

from collections.abc import Callable
from typing import Any

from rlreason.grading.formats import Extracted, question_only, r1_zero

Reward = Callable[[str, Any], dict[str, float]]


def graded(read: Extracted, is_right: Callable[[str], bool]) -> dict[str, float]:
    """Return a plug-in's rewards for an extracted answer.

    >>> graded(Extracted(True, "4"), lambda answer: answer == "4")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    >>> graded(Extracted(False, None), lambda answer: True)["reward"]
    0.0
    """
    right = float(read.formatted and read.answer is not None and is_right(read.answer))
    return {"format_reward": float(read.formatted), "answer_reward": right, "reward": right}


def by_format(solves: Callable[[str, Any], bool]) -> tuple[Reward, Reward]:
    """Return the rewards `r1_zero` and `question_only` by a task's rule, (answer, ground truth) -> whether it is right.

    >>> by_format(str.__eq__)[0]("so </think> <answer>4</answer>", "4")["reward"]
    1.0
    """

    def reward(read: Callable[[str], Extracted]) -> Reward:
        return lambda response, truth: graded(read(response), lambda answer: solves(answer, truth))

    return reward(r1_zero), reward(question_only)
