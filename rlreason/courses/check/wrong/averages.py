"""Compute wrong advantages: mistakes in groups, the mean, the standard deviation and eps."""

import torch
from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs

_GROUPS = "the reshape or loop that forms the groups: which places belong to one question"
_STD = "the line that computes the standard deviation"
_EPS = "where advantage_eps enters the division"
_BASE = "what is subtracted from the rewards"
_FLAG = "the branch that decides what is divided by"

ADVANTAGE_KNOBS = {
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
"""Knob -> setting -> the kind of bug it is."""


def advantages(rewards: Tensor, group_size: int, baseline: str, eps: float, normalizer: str, k: Knobs) -> Tensor:
    """Return advantages (n,) of rewards (n,) in runs of `group_size`, with the mistakes of `k`."""
    groups = k.get("groups", "")
    n = len(rewards)
    flat = rewards.reshape(-1)
    if groups == "shifted":
        flat = flat.roll(-1)
    rows = _grouped(flat, group_size, groups)
    rows_stat = rows[:1].expand_as(rows) if groups == "first" else rows
    everything = flat.reshape(1, -1).expand(len(rows), n)
    centered = _centered(rows, everything if groups == "mean_whole" else rows_stat, baseline, k.get("center", ""))
    divided = _divided(centered, everything if groups == "std_whole" else rows_stat, eps, normalizer, k, everything)
    out = _ungrouped(divided, groups).reshape(-1)
    out = out.roll(1) if groups == "shifted" else out
    out = out.flip(0) if groups == "reversed" else out
    out = -out if "advantage_sign" in k else out
    return _after(out, flat, eps, k.get("after", ""))


def _grouped(flat: Tensor, size: int, groups: str) -> Tensor:
    if groups in ("interleaved", "interleaved_kept"):
        return flat.reshape(size, -1).T
    if groups == "by_count_interleaved":
        return flat.reshape(-1, size).T
    if groups == "by_count":
        return flat.reshape(size, -1)
    return flat.reshape(1, -1) if groups == "whole" else flat.reshape(-1, size)


def _ungrouped(rows: Tensor, groups: str) -> Tensor:
    return rows.T if groups in ("interleaved", "by_count_interleaved", "regrouped") else rows


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
    divisor = _spread(of, spread)
    if k.get("eps") == "inside":
        return x / (divisor.square() + eps).sqrt()
    return _with_eps(x, divisor, eps, k.get("eps", ""))


def _spread(of: Tensor, spread: str) -> Tensor:
    found: Tensor = {
        "ddof0": lambda: of.std(1, keepdim=True, unbiased=False),
        "var": lambda: of.var(1, keepdim=True),
        "mean": lambda: of.mean(1, keepdim=True),
    }.get(spread, lambda: of.std(1, keepdim=True))()
    return found


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


def _after(out: Tensor, rewards: Tensor, eps: float, how: str) -> Tensor:
    return {
        "whiten": lambda: (out - out.mean()) / (out.std() + eps),
        "center": lambda: out - out.mean(),
        "raw": lambda: rewards,
        "zero": lambda: out * 0,
    }.get(how, lambda: out)()


_MASK = "where the mask is applied: which positions it is true for"
_ROWS = "what the sum over tokens is divided by"
_BATCH = "what the sum over rows is divided by"
_GA = "where gradient_accumulation_steps enters"
_CONSTANT = "where the constant enters"

AGGREGATION_KNOBS = {
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
"""Knob -> setting -> the kind of bug it is."""


def masked(mask: Tensor, how: str) -> Tensor:
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


def aggregate(loss: Tensor, mask: Tensor, how: str, constant: float, k: Knobs) -> Tensor:
    """Per-token losses (batch, seq) to a scalar with the mistakes of `k`.

    how: sequence (mean of the rows' means), constant (masked sum / constant), constant_mean (that, a mean over rows).
    """
    m = masked(mask, k.get("mask", "")).to(loss.dtype)
    batch = k.get("batch", "")
    if batch == "no_last":
        loss, m = loss[:-1], m[:-1]
    sums, counts = (loss * m).sum(-1), m.sum(-1)
    if how == "sequence":
        rows = _per_row(sums, counts, loss.shape[-1], k.get("rows", ""))
    else:
        rows = _by_constant(sums, counts, loss.shape[-1], constant, k.get("constant", ""))
    n = len(rows)
    if how == "constant" or k.get("rows") == "token":
        return rows.sum() / {"mean": n, "tokens": float(counts.sum())}.get(batch, 1)
    return rows.sum() / {"sum": 1, "tokens": float(counts.sum())}.get(batch, n)


def _per_row(sums: Tensor, counts: Tensor, width: int, how: str) -> Tensor:
    least = counts.clamp(min=1)
    return {
        "token": lambda: sums / counts.sum(),
        "sum": lambda: sums,
        "width": lambda: sums / width,
        "longest": lambda: sums / counts.max(),
    }.get(how, lambda: sums / least)()


def _by_constant(sums: Tensor, counts: Tensor, width: int, constant: float, how: str) -> Tensor:
    return {
        "ignored": lambda: sums,
        "squared": lambda: sums / constant**2,
        "times": lambda: sums * constant,
        "tokens": lambda: sums / counts.sum(),
        "width": lambda: sums / width,
        "mean": lambda: sums / counts.clamp(min=1) / constant,
    }.get(how, lambda: sums / constant)()


def micro_batch_step(loss: Tensor, accumulation: int, leaf: Tensor, k: Knobs) -> Tensor:
    """Divide by the micro-batches, go backward into `leaf`, return the loss; with the mistakes of `k`."""
    loss = -loss if "loss_sign" in k else loss
    how, backward = k.get("accumulation", ""), k.get("backward", "")
    scaled = {
        "ignored": lambda: loss,
        "twice": lambda: loss / accumulation**2,
        "times": lambda: loss * accumulation,
    }.get(how, lambda: loss / accumulation)()
    gone = loss if how == "backward" else scaled
    if backward == "overwritten":
        leaf.grad = None
    if backward != "missing":
        (gone * (2 if backward == "twice" else 1)).backward()
    return (loss if how == "returned" else scaled).detach()
