"""Groups whose rewards are all equal: keep them, or skip their tokens.

Such a group has advantage 0, so its policy-gradient term is 0 whether it is computed or not. Skipping it may change the
divisors (`aggregation.step_divisors`), so that the gradient grows by all / kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlreason.objectives.groups import group_by_id

if TYPE_CHECKING:  # so that the card and the rules need no torch
    from torch import Tensor


def keep_all(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Every sample is kept. (n,), (n,) int64 -> (n,) bool"""
    return rewards.new_ones(rewards.shape).bool()


def keep_live(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Samples of groups in which at least two rewards differ. (n,), (n,) int64 -> (n,) bool

    >>> import torch
    >>> keep_live(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5]), torch.tensor([4, 4, 9, 9, 2]))
    tensor([ True,  True, False, False, False])
    """
    groups = group_by_id(group_ids)
    blank = rewards.new_zeros(len(groups.sizes))
    highest = blank.scatter_reduce(0, groups.group_of, rewards, reduce="amax", include_self=False)
    lowest = blank.scatter_reduce(0, groups.group_of, rewards, reduce="amin", include_self=False)
    return (highest > lowest)[groups.group_of]


ZERO_VARIANCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"keep": keep_all, "skip": keep_live}
