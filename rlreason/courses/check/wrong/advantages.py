"""Compute wrong advantages: mistakes in groups, the mean, the standard deviation and eps."""

from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs

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
