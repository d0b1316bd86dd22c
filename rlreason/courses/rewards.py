"""What both years share: the reward function's call, consecutive groups, averages for the log, missing arguments."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rlreason.objectives.aggregation import masked_mean

Value = TypeVar("Value")
RewardFn = Callable[[str, str], dict[str, float]]


def score_rollouts(
    reward_fn: RewardFn, rollout_responses: list[str], repeated_ground_truths: list[str]
) -> tuple[Tensor, dict[str, float]]:
    """(total rewards (n,) float32, mean of every part of the reward).

    `reward_fn(response, ground truth)` returns the parts by name: `reward` is the total; `format_reward` and
    `answer_reward` are usual. `ValueError` where there are not as many ground truths as responses.
    """
    if len(rollout_responses) != len(repeated_ground_truths):
        counts = f"{len(rollout_responses)} responses and {len(repeated_ground_truths)} ground truths"
        raise ValueError(f"{counts}: repeat each ground truth group_size times")
    parts = [reward_fn(*pair) for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    rewards = torch.tensor([part["reward"] for part in parts], dtype=torch.float32)
    names = sorted({name for part in parts for name in part})
    means = {f"mean_{name}": sum(part.get(name, 0.0) for part in parts) / len(parts) for name in names}
    return rewards, means


def consecutive_groups(n_samples: int, group_size: int) -> Tensor:
    """Group ids of samples that stand in runs of `group_size` -> (n,) int64. `ValueError` for an incomplete group.

    >>> consecutive_groups(6, 3)
    tensor([0, 0, 0, 1, 1, 1])
    """
    if n_samples % group_size:
        raise ValueError(f"group_size={group_size} does not divide {n_samples} responses into groups")
    return torch.arange(n_samples) // group_size


def summarize(stats: dict[str, Tensor], response_mask: Tensor) -> dict[str, Tensor]:
    """Average every per-token statistic over response tokens. Each (batch, seq) -> scalar"""
    return {name: masked_mean(values, response_mask, empty="zero") for name, values in stats.items()}


def required(value: Value | None, name: str, option: str) -> Value:
    """`value`; a `ValueError` that names the option where it is None."""
    if value is None:
        raise ValueError(f"{name}=None: {option!r} needs it")
    return value
