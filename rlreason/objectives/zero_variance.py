"""Groups whose rewards are all equal: keep them, or skip their tokens.

Such a group has advantage 0, so its policy-gradient term is 0 whether it is computed or not. Knows rewards
and group ids. What skipping does to the divisors is `aggregation.step_divisors`'s matter: nothing under
`constant`; under `masked_mean` and `token` the live sequences are averaged among themselves, so the gradient
grows by all / live.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlreason.objectives.advantages import group_by_id


def keep_all(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Every sample is kept. (n,), (n,) int64 -> (n,) bool"""
    return torch.ones_like(rewards, dtype=torch.bool)


def keep_live(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Samples of groups in which at least two rewards differ. (n,), (n,) int64 -> (n,) bool

    >>> keep_live(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5]), torch.tensor([4, 4, 9, 9, 2]))
    tensor([ True,  True, False, False, False])
    """
    groups = group_by_id(group_ids)
    blank = rewards.new_zeros(len(groups.sizes))
    highest = blank.scatter_reduce(0, groups.group_of, rewards, reduce="amax", include_self=False)
    lowest = blank.scatter_reduce(0, groups.group_of, rewards, reduce="amin", include_self=False)
    return (highest > lowest)[groups.group_of]


ZERO_VARIANCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"keep": keep_all, "skip": keep_live}
