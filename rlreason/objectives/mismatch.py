"""Importance weights for the gap between the engine that sampled and the trainer that scores the same
weights.

The engine's kernels give slightly other probabilities than the trainer's, so samples are a little off-policy
even before the first update. Both sets of log-probs are of the weights that sampled: pi / pi_old is in the loss
already, and a weight that contained it again would count it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlreason.objectives.ratio import masked_log_ratio

if TYPE_CHECKING:  # so that the card and the rules need no torch
    from torch import Tensor


def no_weight(ratio: Tensor, mismatch_cap: float) -> Tensor:
    """1 everywhere: the gap is ignored. (batch, seq)"""
    return ratio.new_ones(ratio.shape)


def truncated_weight(ratio: Tensor, mismatch_cap: float) -> Tensor:
    """min(w, cap): truncated importance sampling. (batch, seq)"""
    return ratio.clamp(max=mismatch_cap)


def masked_weight(ratio: Tensor, mismatch_cap: float) -> Tensor:
    """w where w <= cap, 0 above: the token leaves the numerator, not the divisor. (batch, seq)"""
    return ratio.masked_fill(ratio > mismatch_cap, 0.0)


MISMATCH_WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "none": no_weight,
    "truncate": truncated_weight,
    "mask": masked_weight,
}


def mismatch_weights(
    old_log_probs: Tensor,
    engine_log_probs: Tensor,
    response_mask: Tensor,
    mismatch: str,
    mismatch_cap: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Factors of the per-token loss from w = pi_old / pi_engine. Each (batch, seq) -> (batch, seq)

    `old_log_probs` are the trainer's for the weights that sampled. If the engine's log-probs are used as the
    old ones (w = 1), the loss's own ratio covers the gap. No gradient passes. Stats: `mismatch_ratio` (the
    raw w) and `mismatch_capped` (1 where the cap acted). Outside the response the weight is 1.

    >>> import torch
    >>> old, engine = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.4, 0.1]]).log()
    >>> mismatch_weights(old, engine, torch.ones(1, 2).bool(), "truncate", 2.0)[0]
    tensor([[1.2500, 2.0000]])
    >>> mismatch_weights(old, engine, torch.ones(1, 2).bool(), "mask", 2.0)[0]
    tensor([[1.2500, 0.0000]])
    """
    ratio = masked_log_ratio(old_log_probs, engine_log_probs, response_mask).detach().exp()
    cap = float("inf") if mismatch == "none" else mismatch_cap
    if cap is None:
        raise ValueError(f"mismatch_cap=None: mismatch={mismatch} bounds the weights by it; 2.0 is usual")
    capped = (ratio > cap).to(ratio.dtype)
    return MISMATCH_WEIGHTS[mismatch](ratio, cap), {"mismatch_ratio": ratio, "mismatch_capped": capped}
