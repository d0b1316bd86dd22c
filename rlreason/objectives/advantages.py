"""From rewards to advantages: subtract a baseline, divide by a normaliser, both within groups that are given
by id.

Knows rewards and group ids. Must not know where they came from, nor the order in which they arrive:
interleaved, blocked, filtered and shuffled batches give every sample the same advantage.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """Which group each sample belongs to. `group_of` (n,) int64 in [0, g), `sizes` (g,) int64."""

    group_of: Tensor
    sizes: Tensor


def group_by_id(group_ids: Tensor) -> Groups:
    """Number the groups 0..g-1 and count their members; ids may be any integers in any order."""
    _, group_of, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return Groups(group_of, sizes)


def _sums(values: Tensor, groups: Groups) -> Tensor:
    """Sum of each group. (n,) -> (g,)"""
    return values.new_zeros(len(groups.sizes)).index_add(0, groups.group_of, values)


def _deviations(rewards: Tensor, groups: Groups) -> Tensor:
    """r - mean of the group, (n,) -> (n,), exactly 0 where all rewards of a group are equal.

    The mean of equal floats may differ from them in the last bit, and dividing that by a tiny std would turn
    rounding into a gradient. Measuring from the group's smallest reward first makes equal rewards exact
    zeros.
    """
    lowest = rewards.new_zeros(len(groups.sizes))
    lowest = lowest.scatter_reduce(0, groups.group_of, rewards, reduce="amin", include_self=False)
    raised = rewards - lowest[groups.group_of]
    return raised - (_sums(raised, groups) / groups.sizes)[groups.group_of]


def mean_baseline(rewards: Tensor, groups: Groups) -> Tensor:
    """r - mean(group). (n,) -> (n,). A group of one gives 0. GRPO, arXiv 2402.03300, section 4.1."""
    return _deviations(rewards, groups)


def no_baseline(rewards: Tensor, groups: Groups) -> Tensor:
    """r unchanged. (n,) -> (n,)"""
    return rewards


def leave_one_out_baseline(rewards: Tensor, groups: Groups) -> Tensor:
    """r_i - mean of the *other* rewards = G / (G - 1) * (r_i - mean). (n,) -> (n,). RLOO, arXiv 2402.14740.

    A group of one has no others to compare with and gives 0.
    """
    size = groups.sizes.to(rewards.dtype)
    return _deviations(rewards, groups) * (size / (size - 1).clamp(min=1))[groups.group_of]


def group_std_divisor(rewards: Tensor, groups: Groups, advantage_eps: float) -> Tensor:
    """std(group) + eps, unbiased (divisor G - 1; a group of one has std 0). (n,) -> (n,)"""
    squares = _sums(_deviations(rewards, groups) ** 2, groups)
    return (squares / (groups.sizes - 1).clamp(min=1)).sqrt()[groups.group_of] + advantage_eps


def no_divisor(rewards: Tensor, groups: Groups, advantage_eps: float) -> Tensor:
    """1: eps is not added where nothing is divided. (n,) -> (n,). Dr. GRPO, arXiv 2503.20783."""
    return torch.ones_like(rewards)


def batch_std_divisor(rewards: Tensor, groups: Groups, advantage_eps: float) -> Tensor:
    """std of all rewards handed in (around their mean, unbiased) + eps. (n,) -> (n,). arXiv 2508.08221."""
    return group_std_divisor(rewards, group_by_id(torch.zeros_like(groups.group_of)), advantage_eps)


def group_mean_divisor(rewards: Tensor, groups: Groups, advantage_eps: float) -> Tensor:
    """mean(group) + eps, for rewards that are never negative. (n,) -> (n,). MaxRL, arXiv 2602.02710.

    A group without any reward has advantage 0 / eps = 0 under the mean baseline.
    """
    return (_sums(rewards, groups) / groups.sizes)[groups.group_of] + advantage_eps


BASELINES: dict[str, Callable[[Tensor, Groups], Tensor]] = {
    "mean": mean_baseline,
    "none": no_baseline,
    "leave_one_out": leave_one_out_baseline,
}
STD_NORMS: dict[str, Callable[[Tensor, Groups, float], Tensor]] = {
    "group_std": group_std_divisor,
    "none": no_divisor,
    "batch_std": batch_std_divisor,
    "group_mean": group_mean_divisor,
}


def compute_group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: str = "mean",
    std_norm: str = "group_std",
    advantage_eps: float = 1e-6,
) -> Tensor:
    """A = baseline(r) / divisor(r), per group id. rewards (n,), group_ids (n,) int64 -> (n,)

    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 5.0])
    >>> ids = torch.tensor([7, 7, 7, 3])
    >>> compute_group_advantages(rewards, ids, std_norm="none")
    tensor([ 0.6667, -0.3333, -0.3333,  0.0000])
    >>> compute_group_advantages(rewards, ids)
    tensor([ 1.1547, -0.5773, -0.5773,  0.0000])
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        shapes = f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}"
        raise ValueError(f"{shapes} must be two vectors of one length: give each reward its group's id")
    if not rewards.is_floating_point():
        rewards = rewards.float()
    groups = group_by_id(group_ids)
    return BASELINES[baseline](rewards, groups) / STD_NORMS[std_norm](rewards, groups, advantage_eps)
