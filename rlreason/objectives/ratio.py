"""The log-ratio of two sets of log-probs over response tokens, which losses, KL and mismatch weights share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that the card and the rules need no torch
    from torch import Tensor


def masked_log_ratio(log_probs: Tensor, other_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """log p - log q on response tokens, 0 elsewhere. Each (batch, seq) -> (batch, seq)

    Padding is replaced *before* anything is exponentiated: whatever stands there (even inf or NaN) reaches
    neither the value nor, as 0 x inf, the gradient.
    """
    return (log_probs - other_log_probs).masked_fill(~response_mask.bool(), 0.0)
