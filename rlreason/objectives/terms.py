"""The KL to a reference, in the loss or in the reward, and the weights for the engine's mismatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlreason.objectives.losses import masked_log_ratio

if TYPE_CHECKING:
    from torch import Tensor


def k1(x: Tensor) -> Tensor:
    """x = log pi - log ref: unbiased, may be negative."""
    return x


def k2(x: Tensor) -> Tensor:
    """x^2 / 2: biased as a value, the right gradient as a loss."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased, never negative, low variance. expm1 keeps the small values exact."""
    return (-x).expm1() + x


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_per_token(
    policy_log_probs: Tensor,
    reference_log_probs: Tensor,
    response_mask: Tensor,
    estimator: str,
    old_log_probs: Tensor | None = None,
) -> Tensor:
    """The chosen estimator at every response token, 0 elsewhere. Each (batch, seq) -> (batch, seq), in nats.

    Tokens sampled from an older policy: pass `old_log_probs`, and each token is weighted by sg(pi / pi_old),
    so that value and gradient keep the expectations of the table.

    >>> import torch
    >>> pi, ref = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    >>> [kl_per_token(pi, ref, torch.ones(1, 2).bool(), name) for name in KL_ESTIMATORS]
    [tensor([[ 0.6931, -0.6931]]), tensor([[0.2402, 0.2402]]), tensor([[0.1931, 0.3069]])]
    """
    kl = KL_ESTIMATORS[estimator](masked_log_ratio(policy_log_probs, reference_log_probs, response_mask))
    if old_log_probs is None:
        return kl
    return kl * masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp().detach()


def subtract_kl_from_rewards(rewards: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """r - kl_coef * sum over the response of KL, before baseline and normaliser. (n,), (n, seq) -> (n,)

    `kl`: `kl_per_token` of the sampling policy, 0 outside the response. No gradient passes.
    """
    return rewards - kl_coef * kl.detach().sum(-1)


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
