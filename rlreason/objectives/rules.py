"""The rules between the settings of an objective: a combination that cannot work is refused before anything runs.

The ranges of single numbers are in `config/fields.py`, those of a loss's numbers next to the loss.
"""

from collections.abc import Collection, Iterator

from rlreason.objectives.advantages import BASELINES, OVERLONG, STD_NORMS, ZERO_VARIANCE
from rlreason.objectives.aggregation import AGGREGATIONS
from rlreason.objectives.losses import LOSSES, loss_named
from rlreason.objectives.objective import Objective
from rlreason.objectives.terms import KL_ESTIMATORS, MISMATCH_WEIGHTS

#: Setting -> its choices.
OPTIONS: dict[str, Collection[str]] = {
    "loss_type": LOSSES,
    "length_norm": AGGREGATIONS,
    "baseline": BASELINES,
    "std_norm": STD_NORMS,
    "kl_estimator": KL_ESTIMATORS,
    "kl_placement": ("none", "loss", "reward"),
    "overlong": OVERLONG,
    "zero_variance": ZERO_VARIANCE,
    "mismatch": MISMATCH_WEIGHTS,
}

#: Settings under which a reward that starts at 0 or more may end below 0.
_MAY_GO_NEGATIVE = (("overlong", "penalty"), ("kl_placement", "reward"))


def check_objective(objective: Objective) -> list[str]:
    """Return every violated rule, one line each: setting, value, rule, cure.

    >>> check_objective(Objective())
    []
    >>> check_objective(Objective(kl_coef=0.1))
    ['kl_coef=0.1: kl_placement=none has no KL term; set kl_coef=0 or kl_placement=loss']
    """
    o = objective
    chosen = {key: getattr(o, key) for key in OPTIONS if key != "loss_type"}
    chosen |= {"loss_type": o.loss.loss_type, "length_norm": o.length_norm.kind}
    unknown = [
        f"{key}={chosen[key]}: no such option; choose one of {', '.join(names)}"
        for key, names in OPTIONS.items()
        if chosen[key] not in names and not (key == "loss_type" and ":" in chosen[key])
    ]
    if unknown:
        return unknown
    return [*_check_loss(o), *_check_advantage(o), *_check_aggregation(o), *_check_extra_terms(o), *_check_data(o)]


def _check_loss(o: Objective) -> Iterator[str]:
    loss, numbers = o.loss.loss_type, o.loss.numbers()
    entry = loss_named(loss)
    missing = [key for key, needed in entry.numbers.items() if needed and key not in numbers]
    for key in missing:
        yield f"loss.{key}=null: loss={loss} needs a number; give one, or leave this out"
    # config/fields.py checks typed values; a side of the clip range may take its number from loss.cliprange.
    broken = {key: rule for key, value in numbers.items() if (rule := entry.ranges[key].broken_by(value))}
    for key, rule in broken.items():
        yield f"loss.{key}={numbers[key]} {rule}: {entry.ranges[key].cure}"
    if not missing and not broken:
        yield from (f"loss.{line}" for line in entry.problems(**numbers))


def _check_advantage(o: Objective) -> Iterator[str]:
    loss, baseline, std_norm = o.loss.loss_type, o.baseline, o.std_norm
    if loss == "no_baseline" and (baseline, std_norm) != ("none", "none"):
        rule = "it weighs tokens by the raw reward"
        cure = "set baseline=none std_norm=none, or use loss_type=reinforce_with_baseline"
        yield f"loss_type=no_baseline with baseline={baseline} std_norm={std_norm}: {rule}; {cure}"
    if loss == "reinforce_with_baseline" and baseline == "none":
        yield f"baseline=none: loss_type={loss} needs a baseline; use loss_type=no_baseline std_norm=none"
    if baseline == "none" and std_norm in ("group_std", "batch_std"):
        rule = "without a baseline, equal rewards are divided by nothing but advantage_eps"
        yield f"std_norm={std_norm} with baseline=none: {rule}; set std_norm=none or baseline=mean"
    negative = [f"{key}={value}" for key, value in _MAY_GO_NEGATIVE if getattr(o, key) == value]
    if std_norm == "group_mean" and negative:
        rule = "dividing by the mean needs rewards that are never negative"
        yield f"std_norm=group_mean with {' '.join(negative)}: {rule}; set that to none or std_norm=group_std"
    if std_norm != "none" and o.advantage_eps <= 0:
        yield f"advantage_eps={o.advantage_eps}: equal rewards would give 0 / 0; use 1e-6"


def _check_aggregation(o: Objective) -> Iterator[str]:
    if o.loss.loss_type == "gspo" and o.length_norm.kind == "token":
        rule = "one ratio per sequence needs a weight per sequence, not one that grows with its length"
        yield f"length_norm=token with loss_type=gspo: {rule}; set length_norm=masked_mean"


def _check_extra_terms(o: Objective) -> Iterator[str]:
    placement, coef = o.kl_placement, o.kl_coef
    if placement == "none" and coef:
        yield f"kl_coef={coef}: kl_placement=none has no KL term; set kl_coef=0 or kl_placement=loss"
    if placement != "none" and (coef is None or coef <= 0):
        yield f"kl_coef={coef}: kl_placement={placement} needs one above 0; give it or kl_placement=none"
    if placement == "loss" and o.kl_estimator == "k1":
        rule = "as a loss its gradient is 0 on average, so it would pull towards nothing"
        yield f"kl_estimator=k1 with kl_placement=loss: {rule}; use k2 or k3, or kl_placement=reward"


def _check_data(o: Objective) -> Iterator[str]:
    if o.zero_variance == "skip" and o.baseline == "none":
        rule = "without a baseline a group of equal rewards still teaches"
        yield f"zero_variance=skip with baseline=none: {rule}; set zero_variance=keep"
    mismatch, cap = o.mismatch, o.mismatch_cap
    if mismatch == "none" and cap is not None:
        yield f"mismatch_cap={cap}: mismatch=none has no weights; set it to null or mismatch=truncate"
    if mismatch != "none" and cap is None:
        yield f"mismatch_cap={cap}: mismatch={mismatch} needs the largest weight, 1 or more; 2.0 is usual"
