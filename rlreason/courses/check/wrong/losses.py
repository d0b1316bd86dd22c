"""Compute wrong per-token losses: mistakes in the ratio, the clip, the advantage and the sequence's ratio."""

import torch
from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs

_RATIO = "the line that computes the ratio of new to old probabilities"
_CLIP = "the clip of the ratio, and which of the two terms is taken"
_SIGN = "the minus sign in front of the loss"
_ADV = "how the advantages meet the log-probabilities"
_GSPO = "the mean over the response that makes the sequence's ratio"

KNOBS = {
    "sign": {"plus": Kind("the loss has the opposite sign: descending it makes good responses rarer", _SIGN)},
    "pick": {
        "max": Kind("the larger of the two terms is taken, not the smaller (min and max swapped)", _CLIP),
        "clipped": Kind("only the clipped term is used: the other one is never compared with it", _CLIP),
        "unclipped": Kind("the clip is not applied", _CLIP),
        "min_ratio": Kind("the smaller ratio is taken before the advantage multiplies: wrong for negative ones", _CLIP),
    },
    "bounds": {
        "upper": Kind("the ratio is clipped above only", _CLIP),
        "lower": Kind("the ratio is clipped below only", _CLIP),
        "zero": Kind("the ratio is clipped around 0, not around 1", _CLIP),
        "log": Kind("the log of the ratio is clipped, not the ratio", _CLIP),
        "fixed": Kind("cliprange is ignored: 0.2 stands in its place", _CLIP),
    },
    "ratio": {
        "ignores_old": Kind("the old log-probabilities are not used: the ratio is always 1", _RATIO),
        "policy_old": Kind("gradient through old log-probabilities: old and new are the same tensor", _RATIO),
        "inverse": Kind("the ratio is upside down: old over new", _RATIO),
        "log": Kind("the log of the ratio is used as the ratio: exp is missing", _RATIO),
        "quotient": Kind("the quotient of the log-probabilities is used as the ratio", _RATIO),
        "detached": Kind("the ratio carries no gradient (detached)", _RATIO),
        "sequence": Kind("the ratio is that of the whole row, not of the token", _RATIO),
        "shifted": Kind("old and new log-probabilities are paired shifted by one", _RATIO),
    },
    "advantage": {
        "ignored": Kind("the advantage is not used", _ADV),
        "over_time": Kind("advantages are spread over positions, not over rows (broadcast along the wrong axis)", _ADV),
        "mean": Kind("every row gets the mean advantage of the batch", _ADV),
        "whitened": Kind("the advantages are normalised over the batch once more", _ADV),
        "other_input": Kind("raw rewards and advantages are swapped", "which of the two this loss type takes"),
        "reversed": Kind("rows get one another's advantages", _ADV),
    },
    "weight": {
        "probability": Kind("the probability is used where its logarithm belongs", "which of the two is multiplied"),
        "with_log": Kind("the ratio is multiplied with the log-probability besides", _RATIO),
        "detached": Kind("log-probabilities carry no gradient (detached)", "what is detached"),
    },
    "sequence": {
        "all": Kind("prompt or padding positions in the sequence's ratio", _GSPO),
        "width": Kind("the sequence's log-ratio is divided by the padded width, not by its own tokens", _GSPO),
        "sum": Kind("the sequence's ratio is a product, not a mean over its tokens (length is not divided out)", _GSPO),
        "mean_ratio": Kind("the sequence's ratio is a mean of ratios, not the exp of a mean of logs", _GSPO),
        "detached": Kind("the sequence's ratio carries no gradient (detached)", _GSPO),
        "token": Kind("the ratio is that of each token, not of the sequence", _GSPO),
    },
    "method": {
        "none": Kind("the ratio is not used: the loss is that of plain policy gradients", "the branch of this method"),
        "noclip": Kind("the clip is not applied", "the branch of this method"),
        "grpo": Kind("the clip is applied where none is asked for", "the branch of this method"),
    },
    "time": {
        "mean": Kind(
            "tokens are averaged already: every position of a row has the row's mean", "means inside the loss"
        ),
        "length": Kind("the loss of each token is divided by the length of the row", "means inside the loss"),
    },
}
"""Knob -> setting -> the kind of bug it is."""


def token_loss(
    method: str,
    advantages: Tensor,
    policy: Tensor,
    old: Tensor | None,
    cliprange: float,
    mask: Tensor | None,
    k: Knobs,
) -> Tensor:
    """The loss of each token (batch, seq) by none, noclip, grpo or gspo, with the mistakes of `k`.

    advantages (batch, 1); policy, old and mask (batch, seq).
    """
    method = k.get("method", method)
    a = _advantage(advantages, k.get("advantage", ""))
    loss = -_surrogate(method, a, policy, old, cliprange, mask, k)
    loss = -loss if "sign" in k else loss
    time = k.get("time", "")
    if time == "mean":
        loss = loss.mean(-1, keepdim=True).expand_as(loss)
    return loss / (policy.shape[-1] if time == "length" else 1)


def _advantage(a: Tensor, how: str) -> Tensor:
    changed: Tensor = {
        "ignored": lambda: torch.ones_like(a),
        "over_time": lambda: a.reshape(1, -1),
        "mean": lambda: a.mean().expand_as(a),
        "whitened": lambda: (a - a.mean()) / (a.std() + 1e-8),
        "reversed": lambda: a.flip(0),
    }.get(how, lambda: a)()
    return changed


def _surrogate(
    method: str, a: Tensor, policy: Tensor, old: Tensor | None, cliprange: float, mask: Tensor | None, k: Knobs
) -> Tensor:
    weight = k.get("weight", "")
    if method == "none" or old is None:
        return a * _plain(policy, weight)
    ratio = _sequence_ratio(policy, old, mask, k) if method == "gspo" else _ratio(policy, old, k.get("ratio", ""))
    unclipped = ratio.detach() * a * policy if weight == "with_log" else a * ratio
    if method == "noclip":
        return unclipped
    clipped = _clip(ratio, a, cliprange, k.get("bounds", ""))
    return _pick(unclipped, clipped, ratio, a, cliprange, k.get("pick", ""))


def _plain(policy: Tensor, weight: str) -> Tensor:
    return {
        "probability": lambda: policy.exp(),
        "detached": lambda: policy.detach() + 0 * policy,
    }.get(weight, lambda: policy)()


def _ratio(policy: Tensor, old: Tensor, how: str) -> Tensor:
    gap = policy - old
    return {
        "inverse": lambda: (-gap).exp(),
        "log": lambda: gap,
        "quotient": lambda: policy / old,
        "detached": lambda: gap.exp().detach() + 0 * policy,
        "ignores_old": lambda: (policy - policy.detach()).exp(),
        "policy_old": lambda: (policy - policy).exp(),
        "sequence": lambda: gap.sum(-1, keepdim=True).exp().expand_as(gap),
        "shifted": lambda: (policy - old.roll(1, -1)).exp(),
    }.get(how, lambda: gap.exp())()


def _sequence_ratio(policy: Tensor, old: Tensor, mask: Tensor | None, k: Knobs) -> Tensor:
    how = k.get("sequence", "")
    if how == "token":
        return _ratio(policy, old, k.get("ratio", ""))
    m = torch.ones_like(policy) if mask is None else mask.to(policy.dtype)
    gap = old - policy if k.get("ratio") == "inverse" else policy - old
    total, count = (gap * m).sum(-1, keepdim=True), m.sum(-1, keepdim=True).clamp(min=1)
    mean = total / count
    ratio = {
        "all": lambda: gap.mean(-1, keepdim=True).exp(),
        "width": lambda: (total / policy.shape[-1]).exp(),
        "sum": lambda: total.exp(),
        "mean_ratio": lambda: (gap.exp() * m).sum(-1, keepdim=True) / count,
        "detached": lambda: mean.exp().detach() + 0 * mean,
    }.get(how, lambda: mean.exp() if k.get("ratio") != "log" else mean)()
    if k.get("ratio") == "ignores_old":
        ratio = (mean - mean.detach()).exp()
    return ratio.expand_as(policy)


def _clip(ratio: Tensor, a: Tensor, c: float, bounds: str) -> Tensor:
    if bounds == "log":
        return ratio.clamp(min=1e-9).log().clamp(-c, c).exp() * a
    limits: dict[str, tuple[float | None, float | None]] = {
        "upper": (None, 1 + c),
        "lower": (1 - c, None),
        "zero": (-c, c),
        "fixed": (0.8, 1.2),
    }
    low, high = limits.get(bounds, (1 - c, 1 + c))
    return ratio.clamp(low, high) * a


def _pick(unclipped: Tensor, clipped: Tensor, ratio: Tensor, a: Tensor, c: float, how: str) -> Tensor:
    return {
        "max": lambda: unclipped.maximum(clipped),
        "clipped": lambda: clipped,
        "unclipped": lambda: unclipped,
        "min_ratio": lambda: ratio.minimum(ratio.clamp(1 - c, 1 + c)) * a,
    }.get(how, lambda: unclipped.minimum(clipped))()
