r"""Rewards that are wrong on purpose: controls, under which no gain is learning. `sweep=controls` trains with each.

Chosen as `prompt.reward=rlreason.grading.controls:coin`; evaluations go on with the right reward (`eval.prompt`). Each
takes a response and its ground truth, and understands the form of `r1_zero` and that of `\boxed{...}`.
"""

import hashlib

from rlreason.grading.ground_truth import GroundTruth
from rlreason.grading.rewards import question_only_reward_fn, r1_zero_reward_fn

Reward = dict[str, float]


def coin(response: str, ground_truth: GroundTruth) -> Reward:
    """1 or 0, each for half of all responses, whatever they say: a hash of response and ground truth.

    Equal responses with one ground truth get the same, so that a run that goes on is graded as before; what is learned
    from it is which texts were lucky, and no answer.

    >>> [coin(f"so {n}", "4")["reward"] for n in range(8)]
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    """
    digest = hashlib.sha256(f"{ground_truth}\n{response}".encode()).digest()
    return _reward(_graded(response, ground_truth), digest[0] % 2)


def format_only(response: str, ground_truth: GroundTruth) -> Reward:
    """1 for the right form, whatever the answer.

    >>> format_only("so 5 </think> <answer>5</answer>", "4")["reward"], format_only("so 4", "4")["reward"]
    (1.0, 0.0)
    >>> format_only("so 4", "4")["format_reward"], coin("so 3", "4")["format_reward"]
    (0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _reward(graded, graded["format_reward"])


def inverted(response: str, ground_truth: GroundTruth) -> Reward:
    r"""1 for a wrong answer in the right form, 0 for a right one.

    >>> inverted(r"\boxed{5}", "4")["reward"], inverted(r"\boxed{4}", "4")["reward"], inverted("so 5", "4")["reward"]
    (1.0, 0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _reward(graded, graded["format_reward"] - graded["answer_reward"])


def _graded(response: str, ground_truth: GroundTruth) -> Reward:
    """By the reward whose form the response has; without its symbolic comparison, which needs a process."""
    graded = r1_zero_reward_fn(response, ground_truth)
    return graded if graded["format_reward"] else question_only_reward_fn(response, ground_truth)


def _reward(graded: Reward, value: float) -> Reward:
    """The control's value, beside the format that the response really has."""
    return {"format_reward": graded["format_reward"], "answer_reward": float(value), "reward": float(value)}
