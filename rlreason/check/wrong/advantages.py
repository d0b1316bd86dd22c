"""Wrong advantages: groups, the mean, the standard deviation and eps as they go astray."""

from torch import Tensor

from rlreason.check.subject import Kind, Knobs

_GROUPS = "the reshape or loop that forms the groups: which places belong to one question"
_STD = "the line that computes the standard deviation"
_EPS = "where advantage_eps enters the division"
_BASE = "what is subtracted from the rewards"
_FLAG = "the branch that decides what is divided by"

KNOBS = {
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
        "mad": Kind("divides by the mean absolute deviation, not by the standard deviation", _STD),
        "range": Kind("divides by the range of the group, not by its standard deviation", _STD),
        "raw": Kind("the standard deviation is taken around 0, not around the mean", _STD),
        "error": Kind("divides by the standard error (std over the root of G)", _STD),
        "mean": Kind("divides by the mean where the standard deviation is asked for", _FLAG),
        "never": Kind("is not divided by the standard deviation where that is asked for", _FLAG),
        "norm": Kind("divides by the norm of the group, not by its standard deviation", _STD),
        "twice": Kind("divides by the standard deviation twice", _STD),
        "times": Kind("is multiplied with the standard deviation", _STD),
    },
    "unasked": {
        "std": Kind("is divided by the standard deviation although that is switched off", _FLAG),
        "std0": Kind("is divided by the standard deviation (of ddof 0) although that is switched off", _FLAG),
        "eps": Kind("is divided by 1 + eps although no normaliser is asked for", _EPS),
    },
    "flag": {
        "inverted": Kind("divides by the standard deviation exactly where it should not (switch inverted)", _FLAG)
    },
    "eps": {
        "dropped": Kind("advantage_eps is dropped: nothing is added to the divisor", _EPS),
        "inside": Kind("advantage_eps stands under the root, beside the variance", _EPS),
        "clamp": Kind("advantage_eps is a lower bound of the divisor, not added to it", _EPS),
        "squared": Kind("the square of advantage_eps is added to the divisor", _EPS),
        "fixed4": Kind("advantage_eps is ignored: a number of its own (1e-4) is added", _EPS),
        "fixed6": Kind("advantage_eps is ignored: a number of its own (1e-6) is added", _EPS),
        "fixed8": Kind("advantage_eps is ignored: a number of its own (1e-8) is added", _EPS),
        "numerator": Kind("advantage_eps is added to the numerator", _EPS),
        "after": Kind("advantage_eps is added after the division", _EPS),
        "minus": Kind("advantage_eps is subtracted from the divisor", _EPS),
        "root": Kind("the root of advantage_eps is added to the divisor", _EPS),
    },
    "center": {
        "none": Kind("the mean of the group is not subtracted", _BASE),
        "median": Kind("the median of the group is subtracted, not its mean", _BASE),
        "max": Kind("the best reward of the group is subtracted, not its mean", _BASE),
        "min": Kind("the worst reward of the group is subtracted, not its mean", _BASE),
        "others": Kind("the mean of the other responses is subtracted (leave one out)", _BASE),
        "sum": Kind("the sum of the group is subtracted, not its mean", _BASE),
        "added": Kind("the mean of the group is added, not subtracted", _BASE),
        "std": Kind("the standard deviation is subtracted, not the mean", _BASE),
        "n-1": Kind("the mean of the group divides by G - 1", _BASE),
        "always": Kind("the mean is subtracted although baseline is none", _BASE),
        "inverted": Kind("the mean is subtracted exactly where baseline is none (switch inverted)", _BASE),
    },
    "mean_divisor": {
        "sum": Kind("divides by the sum of the group where its mean is asked for", _FLAG),
        "std": Kind("divides by the standard deviation where the mean is asked for", _FLAG),
        "absolute": Kind("divides by the mean absolute deviation where the mean is asked for", _FLAG),
        "whole": Kind("groups mix questions: divides by the mean of the whole batch", _GROUPS),
        "never": Kind("is not divided by the mean where that is asked for", _FLAG),
        "no_eps": Kind("advantage_eps is dropped where the mean is divided by", _EPS),
        "clamp": Kind("advantage_eps is a lower bound of the mean, not added to it", _EPS),
        "root": Kind("divides by the root of the mean where the mean is asked for", _FLAG),
    },
    "advantage_sign": {"minus": Kind("advantages have the opposite sign", "the order of the subtraction")},
    "after": {
        "whiten": Kind("groups mix questions: advantages are normalised once more over the whole batch", _GROUPS),
        "center": Kind("groups mix questions: the mean of the whole batch is subtracted afterwards", _GROUPS),
        "clamp1": Kind("advantages are cut off at -1 and 1", "what is done with the advantages after the division"),
        "positive": Kind("negative advantages are set to 0", "what is done with the advantages after the division"),
        "sign": Kind("only the sign of the advantages is left", "what is done with the advantages after the division"),
        "raw": Kind("the raw rewards are given back as advantages", "the order of what is returned"),
        "zero": Kind("all advantages are 0", "the mean that is subtracted: of which dimension"),
    },
}
"""Knob -> setting -> the kind of bug it is."""


def advantages(rewards: Tensor, group_size: int, baseline: str, eps: float, normalizer: str, k: Knobs) -> Tensor:
    """Advantages (n,) of rewards (n,) in runs of `group_size`, with the mistakes of `k`."""
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
    size = of.shape[1]
    mean = of.mean(1, keepdim=True)
    base = {
        "median": lambda: of.median(1, keepdim=True).values,
        "max": lambda: of.amax(1, keepdim=True),
        "min": lambda: of.amin(1, keepdim=True),
        "others": lambda: (of.sum(1, keepdim=True) - rows) / (size - 1),
        "sum": lambda: of.sum(1, keepdim=True),
        "added": lambda: -mean,
        "std": lambda: of.std(1, keepdim=True),
        "n-1": lambda: of.sum(1, keepdim=True) / (size - 1),
    }.get(center, lambda: mean)()
    return rows - base


def _divided(x: Tensor, of: Tensor, eps: float, normalizer: str, k: Knobs, everything: Tensor) -> Tensor:
    if "flag" in k:
        normalizer = {"std": "none", "none": "std"}.get(normalizer, normalizer)
    unasked, spread = k.get("unasked", ""), k.get("spread", "")
    if normalizer == "none":
        if unasked == "eps":
            return x / (1 + eps)
        if not unasked:
            return x
        spread, normalizer = ("ddof0" if unasked == "std0" else ""), "std"
    if normalizer == "mean":
        return _by_mean(x, of, eps, k.get("mean_divisor", ""), k.get("eps", ""), everything)
    if spread == "never":
        return x
    divisor = _spread(of, spread)
    if k.get("eps") == "inside":
        return x / (divisor.square() + eps).sqrt()
    if spread == "times":
        return x * (divisor + eps)
    out = _with_eps(x, divisor, eps, k.get("eps", ""))
    return _with_eps(out, divisor, eps, k.get("eps", "")) if spread == "twice" else out


def _spread(of: Tensor, spread: str) -> Tensor:
    mean, size = of.mean(1, keepdim=True), of.shape[1]
    found: Tensor = {
        "ddof0": lambda: of.std(1, keepdim=True, unbiased=False),
        "var": lambda: of.var(1, keepdim=True),
        "mad": lambda: (of - mean).abs().mean(1, keepdim=True),
        "range": lambda: of.amax(1, keepdim=True) - of.amin(1, keepdim=True),
        "raw": lambda: of.square().mean(1, keepdim=True).sqrt(),
        "error": lambda: of.std(1, keepdim=True) / size**0.5,
        "mean": lambda: mean,
        "norm": lambda: (of - mean).norm(dim=1, keepdim=True),
    }.get(spread, lambda: of.std(1, keepdim=True))()
    return found


def _with_eps(x: Tensor, divisor: Tensor, eps: float, how: str) -> Tensor:
    fixed = {"fixed4": 1e-4, "fixed6": 1e-6, "fixed8": 1e-8, "dropped": 0.0}
    if how in fixed:
        return x / (divisor + fixed[how])
    out: Tensor = {
        "clamp": lambda: x / divisor.clamp(min=eps),
        "squared": lambda: x / (divisor + eps**2),
        "numerator": lambda: (x + eps) / divisor,
        "after": lambda: x / divisor + eps,
        "minus": lambda: x / (divisor - eps),
        "root": lambda: x / (divisor + eps**0.5),
    }.get(how, lambda: x / (divisor + eps))()
    return out


def _by_mean(x: Tensor, of: Tensor, eps: float, how: str, eps_how: str, everything: Tensor) -> Tensor:
    mean = of.mean(1, keepdim=True)
    if how in ("never", "no_eps", "clamp"):
        return {"never": x, "no_eps": x / mean, "clamp": x / mean.clamp(min=eps)}[how]
    divisor = {
        "sum": lambda: of.sum(1, keepdim=True),
        "std": lambda: of.std(1, keepdim=True),
        "absolute": lambda: (of - mean).abs().mean(1, keepdim=True),
        "whole": lambda: everything.mean(1, keepdim=True),
        "root": lambda: mean.sqrt(),
    }.get(how, lambda: mean)()
    return _with_eps(x, divisor, eps, eps_how)


def _after(out: Tensor, rewards: Tensor, eps: float, how: str) -> Tensor:
    return {
        "whiten": lambda: (out - out.mean()) / (out.std() + eps),
        "center": lambda: out - out.mean(),
        "clamp1": lambda: out.clamp(-1, 1),
        "positive": lambda: out.clamp(min=0),
        "sign": lambda: out.sign(),
        "raw": lambda: rewards,
        "zero": lambda: out * 0,
    }.get(how, lambda: out)()
