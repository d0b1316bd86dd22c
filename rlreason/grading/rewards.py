"""The handout's two reward functions, one response at a time, with its names and its keys.

One grader per process and format stands behind them; for many responses use `Grader.grade_batch`.
"""

from functools import cache

from rlreason.grading.grader import Grader
from rlreason.grading.ground_truth import GroundTruth


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    """Reward for `... </think> <answer> ... </answer>`. `fast` decides in process and starts no worker.

    >>> r1_zero_reward_fn("so 19 * 2 </think> <answer> 38 </answer>", "38")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    """
    return _reward("r1_zero", response, ground_truth, fast)


def question_only_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward for an answer in the last `\boxed{...}`. `fast` decides in process and starts no worker.

    >>> question_only_reward_fn(r"It is \boxed{\frac12}.", "0.5")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    """
    return _reward("question_only", response, ground_truth, fast)


def _reward(reward: str, response: str, ground_truth: GroundTruth, fast: bool) -> dict[str, float]:
    grade = _shared(reward, fast).grade_batch([response], [ground_truth])[0]
    return {"format_reward": grade.format, "answer_reward": grade.answer, "reward": grade.reward}


@cache
def _shared(reward: str, fast: bool) -> Grader:
    return Grader(reward=reward, symbolic=not fast)
