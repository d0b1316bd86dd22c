"""Grade responses: extract the answer and decide whether it is right.

Exact, cheap rules in this process come first (`rlreason.grading.answers`); what they cannot decide goes to worker
processes that can be killed, where the symbolic library is loaded. Importing this package is cheap.

The functions here are rewards, (response, ground truth) -> format, answer and reward: those of the handout, and three
controls that reward something else than a right answer (`multirun_sweeps/controls.yaml`).
"""

import hashlib
from functools import cache

from rlreason.grading.formats import boxed
from rlreason.grading.grader import Grader, GroundTruth

__all__ = ["Grader", "GroundTruth", "boxed", "question_only_reward_fn", "r1_zero_reward_fn"]

Reward = dict[str, float]


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> Reward:
    """Reward for `... </think> <answer> ... </answer>`. `fast` decides in process and starts no worker.

    >>> r1_zero_reward_fn("so 19 * 2 </think> <answer> 38 </answer>", "38")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    """
    return _reward("r1_zero", response, ground_truth, fast)


def question_only_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> Reward:
    r"""Reward for an answer in the last `\boxed{...}`. `fast` decides in process and starts no worker.

    >>> question_only_reward_fn(r"It is \boxed{\frac12}.", "0.5")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    """
    return _reward("question_only", response, ground_truth, fast)


def _reward(reward: str, response: str, ground_truth: GroundTruth, fast: bool) -> Reward:
    grade = _grader(reward=reward, symbolic=not fast).grade(response, ground_truth)
    return {"format_reward": grade.format, "answer_reward": grade.answer, "reward": grade.reward}


_grader = cache(Grader)


def coin(response: str, ground_truth: GroundTruth) -> Reward:
    """Return 1 or 0, each for half of all responses, whatever they say: a hash of response and ground truth.

    Equal pairs get the same reward, so that a resumed run is graded as before. It teaches which texts were lucky, not
    the answer.

    >>> [coin(f"so {n}", "4")["reward"] for n in range(8)]
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    """
    digest = hashlib.sha256(f"{ground_truth}\n{response}".encode()).digest()
    return _rewarded(_graded(response, ground_truth), digest[0] % 2)


def format_only(response: str, ground_truth: GroundTruth) -> Reward:
    """Return 1 for the right format, whatever the answer.

    >>> format_only("so 5 </think> <answer>5</answer>", "4")["reward"], format_only("so 4", "4")["reward"]
    (1.0, 0.0)
    >>> format_only("so 4", "4")["format_reward"], coin("so 3", "4")["format_reward"]
    (0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _rewarded(graded, graded["format_reward"])


def inverted(response: str, ground_truth: GroundTruth) -> Reward:
    r"""Return 1 for a wrong answer in the right format, 0 for a right one.

    >>> inverted(r"\boxed{5}", "4")["reward"], inverted(r"\boxed{4}", "4")["reward"], inverted("so 5", "4")["reward"]
    (1.0, 0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _rewarded(graded, graded["format_reward"] - graded["answer_reward"])


def _graded(response: str, ground_truth: GroundTruth) -> Reward:
    """Grade by the reward whose format the response has, without the symbolic comparison, which needs a process."""
    graded = r1_zero_reward_fn(response, ground_truth)
    return graded if graded["format_reward"] else question_only_reward_fn(response, ground_truth)


def _rewarded(graded: Reward, value: float) -> Reward:
    """Return the control's value, next to the real format reward."""
    return {"format_reward": graded["format_reward"], "answer_reward": float(value), "reward": float(value)}
