"""The handout's reward functions, and rewards that are wrong on purpose: controls under which no gain is learning."""

import hashlib
from functools import cache

from rlreason.grading.grader import Grader, GroundTruth


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


Reward = dict[str, float]


def coin(response: str, ground_truth: GroundTruth) -> Reward:
    """1 or 0, each for half of all responses, whatever they say: a hash of response and ground truth.

    Equal responses with one ground truth get the same, so that a run that goes on is graded as before; what is learned
    from it is which texts were lucky, and no answer.

    >>> [coin(f"so {n}", "4")["reward"] for n in range(8)]
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    """
    digest = hashlib.sha256(f"{ground_truth}\n{response}".encode()).digest()
    return _rewarded(_graded(response, ground_truth), digest[0] % 2)


def format_only(response: str, ground_truth: GroundTruth) -> Reward:
    """1 for the right form, whatever the answer.

    >>> format_only("so 5 </think> <answer>5</answer>", "4")["reward"], format_only("so 4", "4")["reward"]
    (1.0, 0.0)
    >>> format_only("so 4", "4")["format_reward"], coin("so 3", "4")["format_reward"]
    (0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _rewarded(graded, graded["format_reward"])


def inverted(response: str, ground_truth: GroundTruth) -> Reward:
    r"""1 for a wrong answer in the right form, 0 for a right one.

    >>> inverted(r"\boxed{5}", "4")["reward"], inverted(r"\boxed{4}", "4")["reward"], inverted("so 5", "4")["reward"]
    (1.0, 0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _rewarded(graded, graded["format_reward"] - graded["answer_reward"])


def _graded(response: str, ground_truth: GroundTruth) -> Reward:
    """By the reward whose form the response has; without its symbolic comparison, which needs a process."""
    graded = r1_zero_reward_fn(response, ground_truth)
    return graded if graded["format_reward"] else question_only_reward_fn(response, ground_truth)


def _rewarded(graded: Reward, value: float) -> Reward:
    """The control's value, beside the format that the response really has."""
    return {"format_reward": graded["format_reward"], "answer_reward": float(value), "reward": float(value)}


#: Stands in the protocol of every accuracy; accuracies of different versions are not compared. `tests/test_grading.py`
#: holds it to the verdicts on all cases and says what to do when one changes.
GRADER_VERSION = 2
