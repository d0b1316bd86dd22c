"""What happens to responses that hit, or come near, the length limit: nothing, no loss, or a lower reward.

Every rule returns `(rewards, kept)` of shapes (n,) and (n,) bool: the rewards for the advantages, and which sequences
carry loss. A sequence that is not kept still counts in its group's baseline; `aggregation.step_divisors` says whether
it counts in the divisors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that the card and the rules need no torch
    from torch import Tensor

    RewardsAndKept = tuple[Tensor, Tensor]


def soft_overlong_penalty(lengths: Tensor, max_length: int, cache_length: int) -> Tensor:
    """DAPO's soft punishment in [-1, 0] (arXiv 2503.14476, equation 13). lengths (n,) in tokens -> (n,) float

    0 up to max_length - cache_length tokens, then falling linearly to -1 at max_length, and -1 beyond.

    >>> import torch
    >>> soft_overlong_penalty(torch.tensor([70, 80, 90, 100, 120]), max_length=100, cache_length=20)
    tensor([ 0.0000,  0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not 0 < cache_length <= max_length:
        rule = "must be above 0 and at most the longest response"
        raise ValueError(f"cache_length={cache_length} with max_length={max_length}: {rule}; a fifth of it is usual")
    return ((max_length - cache_length - lengths) / cache_length).clamp(-1.0, 0.0)


def keep_overlong(rewards: Tensor, lengths: Tensor, truncated: Tensor) -> RewardsAndKept:
    """Truncated responses are responses like any other."""
    return rewards, truncated.new_ones(truncated.shape)


def mask_overlong(rewards: Tensor, lengths: Tensor, truncated: Tensor) -> RewardsAndKept:
    """Truncated responses carry no loss: being cut says little about the quality of what was written."""
    return rewards, ~truncated


def penalize_overlong(
    rewards: Tensor, lengths: Tensor, truncated: Tensor, *, max_length: int, cache_length: int
) -> RewardsAndKept:
    """Reward plus `soft_overlong_penalty`, before baseline and normaliser; every response carries loss."""
    penalty = soft_overlong_penalty(lengths, max_length, cache_length)
    return rewards + penalty.to(rewards.dtype), truncated.new_ones(truncated.shape)


#: name -> rule(rewards (n,), lengths (n,) int, truncated (n,) bool); the penalty also takes its two lengths
OVERLONG: dict[str, Callable[..., RewardsAndKept]] = {
    "none": keep_overlong,
    "mask": mask_overlong,
    "penalty": penalize_overlong,
}
