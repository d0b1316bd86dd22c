"""Compute advantages, averages and per-token losses with known mistakes in them, to name the bug of a user's function.

A mistake is a knob and its setting, such as `{"eps": "dropped"}`. Without one the functions compute what
`rlreason.courses` does, which a test checks. They never decide what is right.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs

KnobKinds = Mapping[str, Mapping[str, Kind]]  # knob -> setting -> the kind of bug it is

_GROUPS = "the reshape or loop that forms the groups: which places belong to one question"
_STD = "the line that computes the standard deviation"
_EPS = "where advantage_eps enters the division"
_BASE = "what is subtracted from the rewards"
_FLAG = "the branch that decides what is divided by"

ADVANTAGE_KNOBS: KnobKinds = {
    "groups": {
        "interleaved": Kind("groups mix questions: a group takes every n-th response, not neighbours", _GROUPS),
        "interleaved_kept": Kind("groups mix questions: a group takes every n-th response, not neighbours", _GROUPS),
        "by_count": Kind("groups mix questions: group_size is used as the number of groups", _GROUPS),
        "by_count_interleaved": Kind("groups mix questions: rows and columns of the groups are swapped", _GROUPS),
        "whole": Kind("groups mix questions: statistics are those of the whole batch", _GROUPS),
        "mean_whole": Kind("groups mix questions: the mean is that of the whole batch", _GROUPS),
        "std_whole": Kind("groups mix questions: the divisor is that of the whole batch", _GROUPS),
        "shifted": Kind("groups mix questions: every group begins one place too late", _GROUPS),
        "first": Kind("groups mix questions: the first group's statistics are used for all", _GROUPS),
        "reversed": Kind("advantages are given back in another order than the responses", _GROUPS),
        "regrouped": Kind("advantages are given back in another order than the responses (transposed)", _GROUPS),
    },
    "spread": {
        "ddof0": Kind("the standard deviation divides by G, not by G - 1 (ddof 0)", _STD),
        "var": Kind("divides by the variance, not by the standard deviation", _STD),
        "mean": Kind("divides by the mean where the standard deviation is asked for", _FLAG),
        "never": Kind("is not divided by the standard deviation where that is asked for", _FLAG),
    },
    "unasked": {
        "std": Kind("is divided by the standard deviation although that is switched off", _FLAG),
    },
    "flag": {
        "inverted": Kind("divides by the standard deviation exactly where it should not (switch inverted)", _FLAG)
    },
    "eps": {
        "dropped": Kind("advantage_eps is dropped: nothing is added to the divisor", _EPS),
        "inside": Kind("advantage_eps stands under the root, beside the variance", _EPS),
        "clamp": Kind("advantage_eps is a lower bound of the divisor, not added to it", _EPS),
        "fixed6": Kind("advantage_eps is ignored: a fixed number is added in its place", _EPS),
        "fixed8": Kind("advantage_eps is ignored: a fixed number is added in its place", _EPS),
    },
    "center": {
        "none": Kind("the mean of the group is not subtracted", _BASE),
        "others": Kind("the mean of the other responses is subtracted (leave one out)", _BASE),
        "always": Kind("the mean is subtracted although baseline is none", _BASE),
        "inverted": Kind("the mean is subtracted exactly where baseline is none (switch inverted)", _BASE),
    },
    "mean_divisor": {
        "sum": Kind("divides by the sum of the group where its mean is asked for", _FLAG),
        "std": Kind("divides by the standard deviation where the mean is asked for", _FLAG),
        "whole": Kind("groups mix questions: divides by the mean of the whole batch", _GROUPS),
        "never": Kind("is not divided by the mean where that is asked for", _FLAG),
        "no_eps": Kind("advantage_eps is dropped where the mean is divided by", _EPS),
    },
    "advantage_sign": {"minus": Kind("advantages have the opposite sign", "the order of the subtraction")},
    "after": {
        "whiten": Kind("groups mix questions: advantages are normalised once more over the whole batch", _GROUPS),
        "center": Kind("groups mix questions: the mean of the whole batch is subtracted afterwards", _GROUPS),
        "raw": Kind("the raw rewards are given back as advantages", "the order of what is returned"),
        "zero": Kind("all advantages are 0", "the mean that is subtracted: of which dimension"),
    },
}


def wrong_advantages(rewards: Tensor, group_size: int, baseline: str, eps: float, normalizer: str, k: Knobs) -> Tensor:
    """Return advantages (n,) of rewards (n,) in runs of `group_size`, with the mistakes of `k`."""
    groups = k.get("groups", "")
    n = len(rewards)
    flat = rewards.reshape(-1)
    if groups == "shifted":
        flat = flat.roll(-1)
    rows = flat.reshape(-1, group_size)
    if groups in ("interleaved", "interleaved_kept"):
        rows = flat.reshape(group_size, -1).T
    elif groups == "by_count_interleaved":
        rows = rows.T
    elif groups == "by_count":
        rows = flat.reshape(group_size, -1)
    elif groups == "whole":
        rows = flat.reshape(1, -1)
    rows_stat = rows[:1].expand_as(rows) if groups == "first" else rows
    everything = flat.reshape(1, -1).expand(len(rows), n)
    centered = _centered(rows, everything if groups == "mean_whole" else rows_stat, baseline, k.get("center", ""))
    divided = _divided(centered, everything if groups == "std_whole" else rows_stat, eps, normalizer, k, everything)
    if groups in ("interleaved", "by_count_interleaved", "regrouped"):
        divided = divided.T
    out = divided.reshape(-1)
    if groups == "shifted":
        out = out.roll(1)
    elif groups == "reversed":
        out = out.flip(0)
    if "advantage_sign" in k:
        out = -out
    return {
        "whiten": lambda: (out - out.mean()) / (out.std() + eps),
        "center": lambda: out - out.mean(),
        "raw": lambda: flat,
        "zero": lambda: out * 0,
    }.get(k.get("after", ""), lambda: out)()


def _centered(rows: Tensor, of: Tensor, baseline: str, center: str) -> Tensor:
    if center == "inverted":
        center, baseline = "", "none" if baseline == "mean" else "mean"
    if (baseline == "none" and center != "always") or center == "none":
        return rows
    if center == "others":
        return rows - (of.sum(1, keepdim=True) - rows) / (of.shape[1] - 1)
    return rows - of.mean(1, keepdim=True)


def _divided(x: Tensor, of: Tensor, eps: float, normalizer: str, k: Knobs, everything: Tensor) -> Tensor:
    if "flag" in k:
        normalizer = {"std": "none", "none": "std"}.get(normalizer, normalizer)
    unasked, spread = k.get("unasked", ""), k.get("spread", "")
    if normalizer == "none":
        if not unasked:
            return x
        spread, normalizer = "", "std"
    if normalizer == "mean":
        return _by_mean(x, of, eps, k.get("mean_divisor", ""), k.get("eps", ""), everything)
    if spread == "never":
        return x
    divisor: Tensor = {
        "ddof0": lambda: of.std(1, keepdim=True, unbiased=False),
        "var": lambda: of.var(1, keepdim=True),
        "mean": lambda: of.mean(1, keepdim=True),
    }.get(spread, lambda: of.std(1, keepdim=True))()
    if k.get("eps") == "inside":
        return x / (divisor.square() + eps).sqrt()
    return _with_eps(x, divisor, eps, k.get("eps", ""))


def _with_eps(x: Tensor, divisor: Tensor, eps: float, how: str) -> Tensor:
    if how == "clamp":
        return x / divisor.clamp(min=eps)
    return x / (divisor + {"fixed6": 1e-6, "fixed8": 1e-8, "dropped": 0.0}.get(how, eps))


def _by_mean(x: Tensor, of: Tensor, eps: float, how: str, eps_how: str, everything: Tensor) -> Tensor:
    mean = of.mean(1, keepdim=True)
    if how in ("never", "no_eps"):
        return x if how == "never" else x / mean
    divisor = {
        "sum": lambda: of.sum(1, keepdim=True),
        "std": lambda: of.std(1, keepdim=True),
        "whole": lambda: everything.mean(1, keepdim=True),
    }.get(how, lambda: mean)()
    return _with_eps(x, divisor, eps, eps_how)


_MASK = "where the mask is applied: which positions it is true for"
_ROWS = "what the sum over tokens is divided by"
_BATCH = "what the sum over rows is divided by"
_GA = "where gradient_accumulation_steps enters"
_CONSTANT = "where the constant enters"

AGGREGATION_KNOBS: KnobKinds = {
    "mask": {
        "ignored": Kind("the mask is ignored: prompt and padding positions count", _MASK),
        "inverted": Kind("the mask is upside down: prompt and padding count, the response does not", _MASK),
        "late": Kind("the mask is shifted by one: the first response token is lost", _MASK),
        "early": Kind("the mask is shifted by one: the last response token is lost", _MASK),
        "rolled_late": Kind("the mask is shifted by one: the first response token is lost", _MASK),
        "rolled_early": Kind("the mask is shifted by one: the last response token is lost", _MASK),
        "to_end": Kind("padding positions count", _MASK),
        "from_start": Kind("prompt positions count", _MASK),
        "no_first": Kind("the first response token is lost", _MASK),
        "no_last": Kind("the last response token is lost", _MASK),
    },
    "rows": {
        "token": Kind("all tokens of the (micro-)batch are averaged together, not row by row", _ROWS),
        "sum": Kind("tokens are summed, not averaged", _ROWS),
        "width": Kind("sums over tokens are divided by the padded width, not by the response's own tokens", _ROWS),
        "longest": Kind(
            "sums over tokens are divided by the longest response, not by the response's own tokens", _ROWS
        ),
    },
    "batch": {
        "sum": Kind("rows are summed, not averaged", _BATCH),
        "mean": Kind("the sum is divided by the number of rows besides", _BATCH),
        "no_last": Kind("remainder of a batch dropped: the last row does not count", _BATCH),
        "tokens": Kind("the loss is divided by the (micro-)batch's own tokens", _BATCH),
    },
    "constant": {
        "ignored": Kind("the constant is ignored", _CONSTANT),
        "squared": Kind("the constant divides twice", _CONSTANT),
        "times": Kind("the constant multiplies", _CONSTANT),
        "tokens": Kind("sums are divided by the tokens that count, not by the constant", _CONSTANT),
        "width": Kind("sums are divided by the padded width, not by the constant", _CONSTANT),
        "mean": Kind("the mean over tokens is divided by the constant, not their sum", _CONSTANT),
    },
    "accumulation": {
        "ignored": Kind("gradient_accumulation_steps does not divide the loss", _GA),
        "twice": Kind("gradient_accumulation_steps divides the loss twice", _GA),
        "times": Kind("gradient_accumulation_steps multiplies the loss", _GA),
        "returned": Kind(
            "the loss that is returned is not the one that goes backward (not divided)", "the return line"
        ),
        "backward": Kind(
            "the loss that goes backward is not the one that is returned (not divided)", "the call of backward"
        ),
    },
    "loss_sign": {"plus": Kind("the loss has the opposite sign", "the minus sign in front of the loss")},
    "backward": {
        "missing": Kind("backward is not called: there is no gradient", "the call of backward"),
        "twice": Kind("the gradient is that of two backward calls", "the calls of backward"),
        "overwritten": Kind(
            "gradients of micro-batches are not added up: each call clears what was there", "zero_grad, or grad = None"
        ),
    },
}


def wrong_mask(mask: Tensor, how: str) -> Tensor:
    """Return the mask (batch, seq) as bool, with one mistake."""
    m = mask.bool()
    after, before = m.long().cumsum(-1), m.long().flip(-1).cumsum(-1).flip(-1)
    blank = torch.zeros_like(m[:, :1])
    return {
        "ignored": lambda: torch.ones_like(m),
        "inverted": lambda: ~m,
        "late": lambda: torch.cat([blank, m[:, :-1]], 1),
        "early": lambda: torch.cat([m[:, 1:], blank], 1),
        "rolled_late": lambda: m.roll(1, -1),
        "rolled_early": lambda: m.roll(-1, -1),
        "to_end": lambda: after > 0,
        "from_start": lambda: before > 0,
        "no_first": lambda: m & (after > 1),
        "no_last": lambda: m & (before > 1),
    }.get(how, lambda: m)()


def wrong_average(loss: Tensor, mask: Tensor, how: str, constant: float, k: Knobs) -> Tensor:
    """Average per-token losses (batch, seq) to a scalar, with the mistakes of `k`.

    `how` is sequence (mean of the rows' means), constant (masked sum / constant) or constant_mean (mean over rows of
    masked sum / constant).
    """
    m = wrong_mask(mask, k.get("mask", "")).to(loss.dtype)
    batch = k.get("batch", "")
    if batch == "no_last":
        loss, m = loss[:-1], m[:-1]
    sums, counts = (loss * m).sum(-1), m.sum(-1)
    if how == "sequence":
        rows = {
            "token": lambda: sums / counts.sum(),
            "sum": lambda: sums,
            "width": lambda: sums / loss.shape[-1],
            "longest": lambda: sums / counts.max(),
        }.get(k.get("rows", ""), lambda: sums / counts.clamp(min=1))()
    else:
        rows = {
            "ignored": lambda: sums,
            "squared": lambda: sums / constant**2,
            "times": lambda: sums * constant,
            "tokens": lambda: sums / counts.sum(),
            "width": lambda: sums / loss.shape[-1],
            "mean": lambda: sums / counts.clamp(min=1) / constant,
        }.get(k.get("constant", ""), lambda: sums / constant)()
    n = len(rows)
    if how == "constant" or k.get("rows") == "token":
        return rows.sum() / {"mean": n, "tokens": float(counts.sum())}.get(batch, 1)
    return rows.sum() / {"sum": 1, "tokens": float(counts.sum())}.get(batch, n)


def wrong_step(loss: Tensor, accumulation: int, leaf: Tensor, k: Knobs) -> Tensor:
    """Divide the loss by the micro-batches, call backward, return the loss; with the mistakes of `k`."""
    loss = -loss if "loss_sign" in k else loss
    how, backward = k.get("accumulation", ""), k.get("backward", "")
    scaled = {
        "ignored": lambda: loss,
        "twice": lambda: loss / accumulation**2,
        "times": lambda: loss * accumulation,
    }.get(how, lambda: loss / accumulation)()
    backpropagated = loss if how == "backward" else scaled
    if backward == "overwritten":
        leaf.grad = None
    if backward != "missing":
        (backpropagated * (2 if backward == "twice" else 1)).backward()
    return (loss if how == "returned" else scaled).detach()


_RATIO = "the line that computes the ratio of new to old probabilities"
_CLIP = "the clip of the ratio, and which of the two terms is taken"
_SIGN = "the minus sign in front of the loss"
_ADV = "how the advantages meet the log-probabilities"
_GSPO = "the mean over the response that makes the sequence's ratio"

LOSS_KNOBS: KnobKinds = {
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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Everything that a per-token loss is computed from: advantages (batch, 1), the other tensors (batch, seq)."""

    method: str  # none, noclip, grpo or gspo
    advantages: Tensor
    policy: Tensor
    old: Tensor | None = None
    cliprange: float = 0.0
    mask: Tensor | None = None  # only gspo reads it


def wrong_token_loss(i: LossInputs, k: Knobs) -> Tensor:
    """Return the loss of each token (batch, seq), with the mistakes of `k`."""
    a = i.advantages
    a = {
        "ignored": lambda: torch.ones_like(a),
        "over_time": lambda: a.reshape(1, -1),
        "mean": lambda: a.mean().expand_as(a),
        "whitened": lambda: (a - a.mean()) / (a.std() + 1e-8),
        "reversed": lambda: a.flip(0),
    }.get(k.get("advantage", ""), lambda: a)()
    loss = -_surrogate(i, a, k)
    if "sign" in k:
        loss = -loss
    time = k.get("time", "")
    if time == "mean":
        loss = loss.mean(-1, keepdim=True).expand_as(loss)
    return loss / i.policy.shape[-1] if time == "length" else loss


def _surrogate(i: LossInputs, a: Tensor, k: Knobs) -> Tensor:
    method, weight, policy, c = k.get("method", i.method), k.get("weight", ""), i.policy, i.cliprange
    if method == "none" or i.old is None:
        return (
            a
            * {
                "probability": lambda: policy.exp(),
                "detached": lambda: policy.detach() + 0 * policy,
            }.get(weight, lambda: policy)()
        )
    of_tokens = method != "gspo" or k.get("sequence") == "token"
    ratio = _ratio(policy, i.old, k.get("ratio", "")) if of_tokens else _sequence_ratio(policy, i.old, i.mask, k)
    unclipped = ratio.detach() * a * policy if weight == "with_log" else a * ratio
    if method == "noclip":
        return unclipped
    clipped = _clip(ratio, c, k.get("bounds", "")) * a
    return {
        "max": lambda: unclipped.maximum(clipped),
        "clipped": lambda: clipped,
        "unclipped": lambda: unclipped,
        "min_ratio": lambda: ratio.minimum(ratio.clamp(1 - c, 1 + c)) * a,
    }.get(k.get("pick", ""), lambda: unclipped.minimum(clipped))()


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
    }.get(k.get("sequence", ""), lambda: mean.exp() if k.get("ratio") != "log" else mean)()
    if k.get("ratio") == "ignores_old":
        ratio = (mean - mean.detach()).exp()
    return ratio.expand_as(policy)


def _clip(ratio: Tensor, c: float, bounds: str) -> Tensor:
    if bounds == "log":
        return ratio.clamp(min=1e-9).log().clamp(-c, c).exp()
    limits: dict[str, tuple[float | None, float | None]] = {
        "upper": (None, 1 + c),
        "lower": (1 - c, None),
        "zero": (-c, c),
        "fixed": (0.8, 1.2),
    }
    low, high = limits.get(bounds, (1 - c, 1 + c))
    return ratio.clamp(low, high)
