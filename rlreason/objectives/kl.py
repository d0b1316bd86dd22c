"""Estimators of KL(pi || ref) from tokens sampled from pi, and the two places where the penalty may stand.

With x = log pi - log ref per token. As a *value*, k1 and k3 have expectation KL. As a *loss*, what counts is
the gradient on tokens sampled from pi (J. Schulman, "Approximating KL divergence", 2020, gives the values):

    estimator  formula             E[value]         E[gradient]
    k1         x                   KL(pi || ref)    0: no penalty at all
    k2         x^2 / 2             E[x^2] / 2       grad KL(pi || ref)
    k3         exp(-x) - 1 + x     KL(pi || ref)    grad KL(ref || pi): the other direction

The gradient is that of one token given its prefix; the effect of a token on later ones is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlreason.objectives.ratio import masked_log_ratio

if TYPE_CHECKING:  # so that the card and the rules need no torch
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

    Tokens sampled from an older policy: give `old_log_probs`, and each token is weighted by sg(pi / pi_old),
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

    `kl` is what `kl_per_token` gives for the policy that sampled, 0 outside the response. No gradient passes.
    """
    return rewards - kl_coef * kl.detach().sum(-1)
