"""The objective's settings as plain values: options, defaults, named objectives, and the rules between
settings.

Knows names and numbers. Must not import torch, so that a configuration can be checked before torch is loaded;
tests hold the option names equal to the keys of the function tables.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Settings = Mapping[str, Any]

#: Setting -> the names it may take.
OPTIONS: dict[str, tuple[str, ...]] = {
    "loss_type": ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo"),
    "length_norm": ("masked_mean", "constant", "token"),
    "baseline": ("mean", "none", "leave_one_out"),
    "std_norm": ("group_std", "none", "batch_std", "group_mean"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_placement": ("none", "loss", "reward"),
    "overlong": ("none", "mask", "penalty"),
    "zero_variance": ("keep", "skip"),
    "mismatch": ("none", "truncate", "mask"),
}

#: What a setting is when nothing is said. None: not set; `constant` then is the longest possible response.
DEFAULTS: dict[str, Any] = {
    "loss_type": "reinforce_with_baseline",
    "cliprange_low": None,
    "cliprange_high": None,
    "dual_clip": None,
    "ratio_cap": None,
    "length_norm": "masked_mean",
    "constant": None,
    "baseline": "mean",
    "std_norm": "group_std",
    "advantage_eps": 1e-6,
    "kl_estimator": "k3",
    "kl_placement": "none",
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "overlong": "none",
    "zero_variance": "keep",
    "mismatch": "none",
    "mismatch_cap": None,
    "epochs_per_rollout": 1,
    "on_policy": True,
    "refill_rounds": 0,
}

_GRPO: dict[str, Any] = {
    "loss_type": "grpo_clip",
    "cliprange_low": 0.2,
    "cliprange_high": 0.2,
    "dual_clip": None,
    "ratio_cap": None,
    "length_norm": "masked_mean",
    "baseline": "mean",
    "std_norm": "group_std",
    "kl_placement": "none",
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "overlong": "none",
    "zero_variance": "keep",
}
_REINFORCE: dict[str, Any] = {
    **_GRPO,
    "loss_type": "reinforce_with_baseline",
    "cliprange_low": None,
    "cliprange_high": None,
    "length_norm": "constant",
    "std_norm": "none",
}

#: Name -> the axes it sets. Every entry sets the same keys, so that nothing is left over from another
#: objective.
NAMED_OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "grpo_constant": {**_GRPO, "length_norm": "constant"},
    "dr_grpo": {**_GRPO, "length_norm": "constant", "std_norm": "none"},
    "rloo": {**_REINFORCE, "baseline": "leave_one_out"},
    "rft": {**_REINFORCE, "loss_type": "no_baseline", "baseline": "none"},
    "maxrl": {**_REINFORCE, "std_norm": "group_mean"},
    "dapo": {
        **_GRPO,
        "cliprange_high": 0.28,
        "length_norm": "token",
        "overlong": "penalty",
        "zero_variance": "skip",
    },
    "gspo": {**_GRPO, "loss_type": "gspo", "cliprange_low": 3e-4, "cliprange_high": 4e-4},
    "cispo": {
        **_GRPO,
        "loss_type": "cispo",
        "cliprange_low": None,
        "cliprange_high": None,
        "ratio_cap": 5.0,
        "length_norm": "token",
    },
    "reinforce": _REINFORCE,
}

#: Losses that read the setting; any other loss would ignore it without a word.
READERS: dict[str, tuple[str, ...]] = {
    "cliprange_low": ("grpo_clip", "gspo"),
    "cliprange_high": ("grpo_clip", "gspo"),
    "dual_clip": ("grpo_clip",),
    "ratio_cap": ("cispo",),
}

#: Settings under which a reward that starts at 0 or more may end below 0.
_MAY_GO_NEGATIVE = (("overlong", "penalty"), ("kl_placement", "reward"))


def check_objective(settings: Settings) -> list[str]:
    """Every violated rule, one line each: setting, value, rule, cure. Missing settings are at their default.

    >>> check_objective(NAMED_OBJECTIVES["dr_grpo"])
    []
    >>> check_objective({**NAMED_OBJECTIVES["dr_grpo"], "kl_coef": 0.1})
    ['kl_coef=0.1: kl_placement=none has no KL term; set kl_coef=0 or kl_placement=loss']
    """
    known = {**DEFAULTS, **settings}
    unknown = [
        f"{key}={known[key]}: no such option; choose one of {', '.join(names)}"
        for key, names in OPTIONS.items()
        if known[key] not in names
    ]
    if unknown:
        return unknown
    return [
        *_check_ratio_numbers(known),
        *_check_advantage(known),
        *_check_aggregation(known),
        *_check_extra_terms(known),
        *_check_data(known),
    ]


def _check_ratio_numbers(s: Settings) -> Iterator[str]:
    loss = s["loss_type"]
    for key, readers in READERS.items():
        if s[key] is not None and loss not in readers:
            cure = f"set it to null or use {' or '.join(readers)}"
            yield f"{key}={s[key]}: loss_type={loss} has no such number; {cure}"
        if s[key] is None and loss in readers and key != "dual_clip":
            yield f"{key}=null: loss_type={loss} needs it; name a number, as in objective={_example(loss)}"
    low, high, dual = s["cliprange_low"], s["cliprange_high"], s["dual_clip"]
    if low is not None and not 0 < low <= 1:
        yield f"cliprange_low={low}: the ratio is kept above 1 - cliprange_low; give a number in (0, 1]"
    if high is not None and high <= 0:
        yield f"cliprange_high={high}: the ratio is kept below 1 + cliprange_high; give a number above 0"
    if dual is not None and dual <= 1 + (high or 0):
        yield f"dual_clip={dual}: it must lie above 1 + cliprange_high={1 + (high or 0)}; 3.0 is usual"
    if s["ratio_cap"] is not None and s["ratio_cap"] < 1:
        yield f"ratio_cap={s['ratio_cap']}: the cap is the largest weight, not a distance from 1; try 5.0"


def _example(loss: str) -> str:
    return next(name for name, axes in NAMED_OBJECTIVES.items() if axes["loss_type"] == loss)


def _check_advantage(s: Settings) -> Iterator[str]:
    loss, baseline, std_norm = s["loss_type"], s["baseline"], s["std_norm"]
    if loss == "no_baseline" and (baseline, std_norm) != ("none", "none"):
        rule = "it weighs tokens by the raw reward"
        cure = "set baseline=none std_norm=none, or use loss_type=reinforce_with_baseline"
        yield f"loss_type=no_baseline with baseline={baseline} std_norm={std_norm}: {rule}; {cure}"
    if loss == "reinforce_with_baseline" and baseline == "none":
        yield f"baseline=none: loss_type={loss} needs a baseline; use loss_type=no_baseline std_norm=none"
    if baseline == "none" and std_norm in ("group_std", "batch_std"):
        rule = "without a baseline, equal rewards are divided by nothing but advantage_eps"
        yield f"std_norm={std_norm} with baseline=none: {rule}; set std_norm=none or baseline=mean"
    negative = [f"{key}={value}" for key, value in _MAY_GO_NEGATIVE if s[key] == value]
    if std_norm == "group_mean" and negative:
        rule = "dividing by the mean needs rewards that are never negative"
        yield f"std_norm=group_mean with {' '.join(negative)}: {rule}; set that to none or std_norm=group_std"
    if std_norm != "none" and s["advantage_eps"] <= 0:
        yield f"advantage_eps={s['advantage_eps']}: equal rewards would give 0 / 0; use 1e-6"


def _check_aggregation(s: Settings) -> Iterator[str]:
    if s["loss_type"] == "gspo" and s["length_norm"] == "token":
        rule = "one ratio per sequence needs a weight per sequence, not one that grows with its length"
        yield f"length_norm=token with loss_type=gspo: {rule}; set length_norm=masked_mean"
    if s["length_norm"] == "constant" and s["constant"] is not None and s["constant"] <= 0:
        yield f"constant={s['constant']}: length_norm=constant divides by it; null takes the longest response"


def _check_extra_terms(s: Settings) -> Iterator[str]:
    placement, coef = s["kl_placement"], s["kl_coef"]
    if placement == "none" and coef:
        yield f"kl_coef={coef}: kl_placement=none has no KL term; set kl_coef=0 or kl_placement=loss"
    if placement != "none" and (coef is None or coef <= 0):
        yield f"kl_coef={coef}: kl_placement={placement} needs one above 0; give it or kl_placement=none"
    if placement == "loss" and s["kl_estimator"] == "k1":
        rule = "as a loss its gradient is 0 on average, so it would pull towards nothing"
        yield f"kl_estimator=k1 with kl_placement=loss: {rule}; use k2 or k3, or kl_placement=reward"
    if s["entropy_coef"] < 0:
        yield f"entropy_coef={s['entropy_coef']}: a positive number rewards entropy; give 0 or more"


def _check_data(s: Settings) -> Iterator[str]:
    if s["zero_variance"] == "skip" and s["baseline"] == "none":
        rule = "without a baseline a group of equal rewards still teaches"
        yield f"zero_variance=skip with baseline=none: {rule}; set zero_variance=keep"
    mismatch, cap = s["mismatch"], s["mismatch_cap"]
    if mismatch == "none" and cap is not None:
        yield f"mismatch_cap={cap}: mismatch=none has no weights; set it to null or mismatch=truncate"
    if mismatch != "none" and (cap is None or cap < 1):
        yield f"mismatch_cap={cap}: mismatch={mismatch} needs the largest weight, 1 or more; 2.0 is usual"
    if s["epochs_per_rollout"] < 1:
        yield f"epochs_per_rollout={s['epochs_per_rollout']}: a rollout batch is used at least once; give 1"
    if s["on_policy"] and s["epochs_per_rollout"] > 1:
        rule = "from the second pass on, the samples are of an older policy"
        yield f"epochs_per_rollout={s['epochs_per_rollout']} with on_policy=true: {rule}; set on_policy=false"
