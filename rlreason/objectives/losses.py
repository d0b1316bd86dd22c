"""Per-token policy-gradient losses: from advantages and log-probs to one number per token.

Knows tensors and the numbers of its formula. Must not know how tokens are averaged (`aggregation`), where
advantages come from (`advantages`), nor anything of the configuration. Every loss has the call

    loss, stats = LOSSES[name](advantages, policy_log_probs, old_log_probs, response_mask, **numbers)

with advantages A (batch, 1) or anything that broadcasts to (batch, seq), the others (batch, seq),
`response_mask` true on response tokens. `stats` are detached per-token values (batch, seq) for the caller to
average over response tokens. Where the mask is false, loss and stats are to be ignored.
In the formulas rho = exp(policy_log_probs - old_log_probs) and sg = stop-gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlreason.objectives.aggregation import masked_mean
from rlreason.objectives.ratio import masked_log_ratio

LossAndStats = tuple[Tensor, dict[str, Tensor]]


def policy_gradient(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor | None, response_mask: Tensor | None
) -> LossAndStats:
    """-A log pi: REINFORCE (Williams 1992), without any ratio. `A` may be a raw reward or an advantage.

    The only loss that reads neither `old_log_probs` nor `response_mask`.
    """
    return -advantages * policy_log_probs, {}


def grpo_no_clip(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor
) -> LossAndStats:
    """-rho A: the importance-weighted policy gradient without a trust region (the handout's GRPO-No-Clip)."""
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp()
    return -ratio * advantages, {"ratio": ratio.detach()}


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, cliprange_low: float, cliprange_high: float, dual_clip: float | None
) -> LossAndStats:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), and at most -dual_clip A where A < 0. (batch, seq)

    `clipped` is 1 where the bound is the smaller one, that is where the token has lost its gradient.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - cliprange_low, 1 + cliprange_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    lost = clipped < unclipped
    stats = {"clipped_low": lost & (ratio < 1), "clipped_high": lost & (ratio > 1)}
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        stats["dual_clipped"] = surrogate < floor
        surrogate = torch.maximum(surrogate, floor)
        lost = lost | stats["dual_clipped"]
    floats = {name: flag.to(ratio.dtype) for name, flag in {"clipped": lost, **stats}.items()}
    return -surrogate, {"ratio": ratio.detach(), **floats}


def grpo_clip(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
    dual_clip: float | None = None,
) -> LossAndStats:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) per token. PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300.

    low < high is DAPO's clip-higher (arXiv 2503.14476). `dual_clip` c > 1 + high bounds the loss by -c A
    where A < 0 (arXiv 1912.09729); None leaves it unbounded.
    """
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp()
    return _clipped_surrogate(ratio, advantages, cliprange_low, cliprange_high, dual_clip)


def gspo(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
) -> LossAndStats:
    """-min(s A, clip(s, 1 - low, 1 + high) A) with one ratio per sequence, s = exp(mean over t of log rho_t).

    GSPO, arXiv 2507.18071. The mean runs over response tokens only; s keeps its gradient and stands at every
    position of the row, so that `masked_mean` gives the paper's objective.
    """
    log_ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask)
    ratio = masked_mean(log_ratio, response_mask, dim=-1, empty="zero").exp()
    return _clipped_surrogate(
        ratio[:, None].expand_as(log_ratio), advantages, cliprange_low, cliprange_high, dual_clip=None
    )


def cispo(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    ratio_cap: float,
) -> LossAndStats:
    """-sg(min(rho, cap)) A log pi: the weight is capped, the gradient of every token stays.

    CISPO, arXiv 2506.13585. `ratio_cap` is the largest weight itself, not a distance from 1.
    """
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp().detach()
    stats = {"ratio": ratio, "clipped": (ratio > ratio_cap).to(ratio.dtype)}
    return -ratio.clamp(max=ratio_cap) * advantages * policy_log_probs, stats


#: The first two are one formula; the names say whether A is a raw reward or an advantage.
LOSSES: dict[str, Callable[..., LossAndStats]] = {
    "no_baseline": policy_gradient,
    "reinforce_with_baseline": policy_gradient,
    "grpo_clip": grpo_clip,
    "grpo_no_clip": grpo_no_clip,
    "gspo": gspo,
    "cispo": cispo,
}
