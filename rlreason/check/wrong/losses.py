"""Wrong per-token losses: the ratio, the clip, the advantage and the sequence's ratio as they go astray."""

import torch
from torch import Tensor

from rlreason.check.subject import Kind, Knobs

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
        "min_abs": Kind("the term of smaller absolute value is taken", _CLIP),
        "mean": Kind("the two terms are averaged", _CLIP),
        "negated_min": Kind("the sign is inside the min: the smaller of the two losses is taken", _CLIP),
    },
    "bounds": {
        "upper": Kind("the ratio is clipped above only", _CLIP),
        "lower": Kind("the ratio is clipped below only", _CLIP),
        "zero": Kind("the ratio is clipped around 0, not around 1", _CLIP),
        "log": Kind("the log of the ratio is clipped, not the ratio", _CLIP),
        "exponential": Kind("the clip bounds are exp(-cliprange) and exp(cliprange)", _CLIP),
        "fixed": Kind("cliprange is ignored: 0.2 stands in its place", _CLIP),
        "fixed_high": Kind("cliprange is ignored above: 0.2 stands in its place", _CLIP),
        "fixed_low": Kind("cliprange is ignored below: 0.2 stands in its place", _CLIP),
        "double": Kind("the ratio is clipped at twice the cliprange", _CLIP),
        "half": Kind("the ratio is clipped at half the cliprange", _CLIP),
        "inverse": Kind("the lower bound of the clip is 1 / (1 + cliprange)", _CLIP),
        "wide": Kind("the ratio is clipped at 0 and 1 + cliprange", _CLIP),
        "one": Kind("the ratio is clipped at 1, without the cliprange", _CLIP),
        "product": Kind("the product of ratio and advantage is clipped, not the ratio", _CLIP),
        "stop": Kind("the clip bounds lie at cliprange and 1 + cliprange", _CLIP),
    },
    "dual": {"3": Kind("the loss of negative advantages is bounded once more (dual clip)", _CLIP)},
    "ratio": {
        "ignores_old": Kind("the old log-probabilities are not used: the ratio is always 1", _RATIO),
        "policy_old": Kind("gradient through old log-probabilities: old and new are the same tensor", _RATIO),
        "inverse": Kind("the ratio is upside down: old over new", _RATIO),
        "log": Kind("the log of the ratio is used as the ratio: exp is missing", _RATIO),
        "quotient": Kind("the quotient of the log-probabilities is used as the ratio", _RATIO),
        "detached": Kind("the ratio carries no gradient (detached)", _RATIO),
        "sequence": Kind("the ratio is that of the whole row, not of the token", _RATIO),
        "row_mean": Kind("the ratio is a mean over the row, not that of the token", _RATIO),
        "first_order": Kind("the ratio is approximated by 1 + log ratio", _RATIO),
        "shifted": Kind("old and new log-probabilities are paired shifted by one", _RATIO),
        "base2": Kind("the ratio is a power of 2, not of e", _RATIO),
        "probability": Kind("the ratio is that of log-probabilities taken as probabilities", _RATIO),
        "sigmoid": Kind("the ratio goes through a sigmoid", _RATIO),
        "policy_only": Kind("the probability itself is used as the ratio: old is left out", _RATIO),
    },
    "advantage": {
        "ignored": Kind("the advantage is not used", _ADV),
        "absolute": Kind("the advantage's absolute value is used", _ADV),
        "sign": Kind("only the sign of the advantage is used", _ADV),
        "over_time": Kind("advantages are spread over positions, not over rows (broadcast along the wrong axis)", _ADV),
        "mean": Kind("every row gets the mean advantage of the batch", _ADV),
        "centered": Kind("the mean advantage of the batch is subtracted once more", _ADV),
        "positive": Kind("negative advantages are dropped", _ADV),
        "first": Kind("every row gets the first row's advantage", _ADV),
        "squared": Kind("the advantage is squared", _ADV),
        "minus_policy": Kind("the log-probability is added to the advantage, not multiplied with it", _ADV),
        "whitened": Kind("the advantages are normalised over the batch once more", _ADV),
        "other_input": Kind("raw rewards and advantages are swapped", "which of the two this loss type takes"),
        "per_token": Kind("the advantage is divided by the number of positions", _ADV),
        "reversed": Kind("rows get one another's advantages", _ADV),
    },
    "weight": {
        "probability": Kind("the probability is used where its logarithm belongs", "which of the two is multiplied"),
        "with_log": Kind("the ratio is multiplied with the log-probability besides", _RATIO),
        "detached": Kind("log-probabilities carry no gradient (detached)", "what is detached"),
        "base2": Kind("logarithms have base 2", "which logarithm is taken"),
        "squared": Kind("the log-probability is squared", "what is multiplied with the advantage"),
        "shifted": Kind("log-probabilities are shifted by one", "slices of the log-probabilities"),
        "masked_ratio": Kind("the loss is multiplied with the ratio twice", _RATIO),
    },
    "sequence": {
        "all": Kind("prompt or padding positions in the sequence's ratio", _GSPO),
        "width": Kind("the sequence's log-ratio is divided by the padded width, not by its own tokens", _GSPO),
        "sum": Kind("the sequence's ratio is a product, not a mean over its tokens (length is not divided out)", _GSPO),
        "mean_ratio": Kind("the sequence's ratio is a mean of ratios, not the exp of a mean of logs", _GSPO),
        "detached": Kind("the sequence's ratio carries no gradient (detached)", _GSPO),
        "token": Kind("the ratio is that of each token, not of the sequence", _GSPO),
        "batch": Kind("responses are mixed: the ratio is a mean over the whole batch", _GSPO),
        "token_gradient": Kind("value of the sequence's ratio, gradient of the token alone", _GSPO),
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
        "batch": Kind("the loss of each token is divided by the number of rows", "means inside the loss"),
    },
    "masked": {"inverted": Kind("the mask is upside down: prompt and padding are kept", "where the mask is used")},
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
    a = _advantage(advantages, policy, k.get("advantage", ""))
    loss = -_surrogate(method, a, policy, old, cliprange, mask, k)
    loss = -loss if "sign" in k else loss
    time = k.get("time", "")
    if time == "mean":
        loss = loss.mean(-1, keepdim=True).expand_as(loss)
    if "masked" in k and mask is not None:
        loss = loss * (~mask.bool())
    return loss / {"length": policy.shape[-1], "batch": len(policy)}.get(time, 1)


def _advantage(a: Tensor, policy: Tensor, how: str) -> Tensor:
    changed = {
        "ignored": lambda: torch.ones_like(a),
        "absolute": lambda: a.abs(),
        "sign": lambda: a.sign(),
        "over_time": lambda: a.reshape(1, -1),
        "mean": lambda: a.mean().expand_as(a),
        "centered": lambda: a - a.mean(),
        "positive": lambda: a.clamp(min=0),
        "first": lambda: a[:1].expand_as(a),
        "squared": lambda: a.square(),
        "whitened": lambda: (a - a.mean()) / (a.std() + 1e-8),
        "per_token": lambda: a / policy.shape[-1],
        "reversed": lambda: a.flip(0),
    }.get(how, lambda: a)()
    return changed


def _surrogate(
    method: str, a: Tensor, policy: Tensor, old: Tensor | None, cliprange: float, mask: Tensor | None, k: Knobs
) -> Tensor:
    weight, advantage = k.get("weight", ""), k.get("advantage", "")
    if method == "none" or old is None:
        plain = _plain(policy, weight)
        return a + plain if advantage == "minus_policy" else a * plain
    ratio = _sequence_ratio(policy, old, mask, k) if method == "gspo" else _ratio(policy, old, k.get("ratio", ""))
    if weight == "masked_ratio":
        ratio = ratio * ratio
    unclipped = a + ratio if advantage == "minus_policy" else a * ratio
    if weight == "with_log":
        unclipped = ratio.detach() * a * policy
    if method == "noclip":
        return unclipped
    clipped = _clip(ratio, a, cliprange, k.get("bounds", ""))
    surrogate = _pick(unclipped, clipped, ratio, a, cliprange, k.get("pick", ""))
    return surrogate.maximum(3 * a).where(a < 0, surrogate) if "dual" in k else surrogate


def _plain(policy: Tensor, weight: str) -> Tensor:
    return {
        "probability": lambda: policy.exp(),
        "detached": lambda: policy.detach() + 0 * policy,
        "base2": lambda: policy / 0.6931471805599453,
        "squared": lambda: policy.square(),
        "shifted": lambda: policy.roll(-1, -1),
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
        "row_mean": lambda: gap.mean(-1, keepdim=True).exp().expand_as(gap),
        "first_order": lambda: 1 + gap,
        "shifted": lambda: (policy - old.roll(1, -1)).exp(),
        "base2": lambda: torch.pow(2.0, gap),
        "probability": lambda: policy.exp() - old.exp(),
        "sigmoid": lambda: gap.sigmoid(),
        "policy_only": lambda: policy.exp(),
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
        "batch": lambda: (total.sum() / count.sum()).exp().expand_as(total),
        "token_gradient": lambda: mean.exp().detach() * (policy - policy.detach()).exp(),
    }.get(how, lambda: mean.exp() if k.get("ratio") != "log" else mean)()
    if k.get("ratio") == "ignores_old":
        ratio = (mean - mean.detach()).exp()
    return ratio.expand_as(policy)


def _clip(ratio: Tensor, a: Tensor, c: float, bounds: str) -> Tensor:
    if bounds == "product":
        return (ratio * a).clamp(1 - c, 1 + c)
    if bounds == "log":
        return ratio.clamp(min=1e-9).log().clamp(-c, c).exp() * a
    limits: dict[str, tuple[float | None, float | None]] = {
        "upper": (None, 1 + c),
        "lower": (1 - c, None),
        "zero": (-c, c),
        "exponential": (2.718281828459045**-c, 2.718281828459045**c),
        "fixed": (0.8, 1.2),
        "fixed_high": (1 - c, 1.2),
        "fixed_low": (0.8, 1 + c),
        "double": (1 - 2 * c, 1 + 2 * c),
        "half": (1 - c / 2, 1 + c / 2),
        "inverse": (1 / (1 + c), 1 + c),
        "wide": (0.0, 1 + c),
        "one": (1.0, 1.0),
        "stop": (c, 1 + c),
    }
    low, high = limits.get(bounds, (1 - c, 1 + c))
    return ratio.clamp(low, high) * a


def _pick(unclipped: Tensor, clipped: Tensor, ratio: Tensor, a: Tensor, c: float, how: str) -> Tensor:
    return {
        "max": lambda: unclipped.maximum(clipped),
        "negated_min": lambda: unclipped.maximum(clipped),
        "clipped": lambda: clipped,
        "unclipped": lambda: unclipped,
        "min_ratio": lambda: ratio.minimum(ratio.clamp(1 - c, 1 + c)) * a,
        "min_abs": lambda: unclipped.where(unclipped.abs() < clipped.abs(), clipped),
        "mean": lambda: (unclipped + clipped) / 2,
    }.get(how, lambda: unclipped.minimum(clipped))()
