"""From rewards to credit: length rule, KL in the reward, baseline and normaliser, dead groups; in this order.

Knows rewards, lengths and group ids; must not know responses, models or losses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlreason.objectives.advantages import compute_group_advantages, group_by_id
from rlreason.objectives.kl import subtract_kl_from_rewards
from rlreason.objectives.overlong import OVERLONG
from rlreason.objectives.zero_variance import ZERO_VARIANCE


@dataclass(frozen=True, slots=True)
class CreditRule:
    """The settings of `assign_credit`; each word is a key of the table of its name."""

    baseline: str = "mean"
    std_norm: str = "group_std"
    advantage_eps: float = 1e-6
    zero_variance: str = "keep"
    overlong: str = "none"
    max_length: int = 1  # tokens; with `cache_length`, read by overlong=penalty only
    cache_length: int = 1
    kl_coef: float = 0.0  # of the KL that is subtracted from the reward


def assign_credit(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    rule: CreditRule,
    kl: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages (n,), kept (n,) bool, live (n,) bool) from rewards (n,), ids (n,) int64, lengths (n,) int,
    truncated (n,) bool.

    `kl` (n, seq) is the KL estimate per token of the policy that sampled, for KL in the reward. A sample that is
    not kept carries no loss but did count in its group's baseline. A sample is live where its group carries any
    credit by its rewards: a KL term differs from response to response and would make every group seem alive.

    >>> import torch
    >>> rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    >>> rule = CreditRule(std_norm="none", zero_variance="skip")
    >>> advantages, kept, live = assign_credit(rewards, ids, torch.full((4,), 5), torch.zeros(4).bool(), rule)
    >>> advantages, kept, live.equal(kept)
    (tensor([ 0.5000, -0.5000,  0.0000,  0.0000]), tensor([ True,  True, False, False]), True)
    """
    shaped, kept = OVERLONG[rule.overlong](
        rewards, lengths, truncated, max_length=rule.max_length, cache_length=rule.cache_length
    )

    def compared(values: Tensor) -> Tensor:
        return compute_group_advantages(
            values, group_ids, baseline=rule.baseline, std_norm=rule.std_norm, advantage_eps=rule.advantage_eps
        )

    advantages = compared(shaped)
    live = credited_groups(advantages, group_ids)
    kept = kept & ZERO_VARIANCE[rule.zero_variance](shaped, group_ids)
    if rule.kl_coef and kl is not None:
        advantages = compared(subtract_kl_from_rewards(shaped, kl, rule.kl_coef))
    return advantages, kept, live


def credited_groups(advantages: Tensor, group_ids: Tensor) -> Tensor:
    """Samples of groups in which any advantage differs from 0. (n,), (n,) int64 -> (n,) bool"""
    groups = group_by_id(group_ids)
    some = torch.zeros(len(groups.sizes), device=advantages.device)
    return some.index_add(0, groups.group_of, (advantages != 0).float())[groups.group_of] > 0
