"""A loss of your own: TOPR (arXiv 2503.14286), which learns fully from good samples and with care from bad ones.

    cd examples
    python -m rlreason loss=own_loss:tapered loss.cap=0.5 off_policy=e4_quarter
    python -m rlreason -m loss=own_loss:tapered,grpo_clip seed=0,1 off_policy=e4_quarter

A loss gets the advantages (batch, 1) and log-probabilities (batch, seq) and returns the loss of each token, alone or
with statistics to be logged. It gets `old_log_probs` and `response_mask` where it asks for them. What stands behind the
`*` are its numbers, the settings `loss.NAME`.
"""

from torch import Tensor

from rlreason.objectives.losses import masked_log_ratio


def tapered(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, cap: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """-w A log pi, w = 1 where A > 0, else the response's pi / pi_old, at most cap and without gradient.

    Bad responses that the policy has moved away from weigh less and less, so nothing is pushed down for ever.
    """
    log_ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).detach()
    ratio = log_ratio.sum(-1, keepdim=True).exp()  # of the whole response
    weight = ratio.clamp(max=cap).where(advantages <= 0, 1.0)
    clipped = ((ratio > cap) & (advantages <= 0)).expand_as(log_ratio)
    return -weight * advantages * policy_log_probs, {"ratio": log_ratio.exp(), "clipped": clipped.float()}
