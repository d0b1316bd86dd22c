"""The rules between the settings of an objective, and published objectives: which of them an objective equals.

A combination that cannot work is refused before anything runs. An objective equals a published one if both compute the
same gradient, given the same samples.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from rlreason.objectives.advantages import BASELINES, STD_NORMS
from rlreason.objectives.aggregation import AGGREGATIONS
from rlreason.objectives.losses import LOSSES, REQUIRED, loss_named
from rlreason.objectives.objective import LengthNormConfig, LossConfig, Objective, own_loss_config
from rlreason.objectives.terms import KL_ESTIMATORS

#: Setting -> its choices.
OPTIONS: dict[str, Collection[str]] = {
    "loss_type": LOSSES,
    "length_norm": AGGREGATIONS,
    "baseline": BASELINES,
    "std_norm": STD_NORMS,
    "kl_estimator": KL_ESTIMATORS,
    "kl_placement": ("none", "loss", "reward"),
    "overlong": ("none", "mask", "penalty"),
    "zero_variance": ("keep", "skip"),
    "mismatch": ("none", "truncate", "mask"),
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
    return list(_broken_rules(o))


def _broken_rules(o: Objective) -> Iterator[str]:
    loss, numbers, baseline, std_norm = o.loss.loss_type, o.loss.numbers(), o.baseline, o.std_norm
    entry = loss_named(loss)
    missing = [key for key, default in entry.numbers.items() if default is REQUIRED and key not in numbers]
    for key in missing:
        yield f"loss.{key}=null: loss={loss} needs a number; give one, or leave this out"
    # config/rules.py checks typed values; a side of the clip range may take its number from loss.cliprange.
    broken = {key: rule for key, value in numbers.items() if (rule := entry.ranges[key].broken_by(value))}
    for key, rule in broken.items():
        yield f"loss.{key}={numbers[key]} {rule}: {entry.ranges[key].cure}"
    if not missing and not broken:
        yield from (f"loss.{line}" for line in entry.problems(**numbers))
    if loss == "no_baseline" and (baseline, std_norm) != ("none", "none"):
        rule = "it weighs tokens by the raw reward"
        cure = "set baseline=none std_norm=none, or use loss_type=reinforce_with_baseline"
        yield f"loss_type=no_baseline with baseline={baseline} std_norm={std_norm}: {rule}; {cure}"
    if loss == "reinforce_with_baseline" and baseline == "none":
        yield f"baseline=none: loss_type={loss} needs a baseline; use loss=no_baseline std_norm=none"
    if baseline == "none" and std_norm in ("group_std", "batch_std"):
        rule = "without a baseline, equal rewards are divided by nothing but advantage_eps"
        yield f"std_norm={std_norm} with baseline=none: {rule}; set std_norm=none or baseline=mean"
    negative = [f"{key}={value}" for key, value in _MAY_GO_NEGATIVE if getattr(o, key) == value]
    if std_norm == "group_mean" and negative:
        rule = "dividing by the mean needs rewards that are never negative"
        yield f"std_norm=group_mean with {' '.join(negative)}: {rule}; set that to none or std_norm=group_std"
    if std_norm != "none" and o.advantage_eps <= 0:
        yield f"advantage_eps={o.advantage_eps}: equal rewards would give 0 / 0; use 1e-6"
    if o.zero_variance == "skip" and baseline == "none":
        rule = "without a baseline a group of equal rewards still teaches"
        yield f"zero_variance=skip with baseline=none: {rule}; set zero_variance=keep"
    placement, coef = o.kl_placement, o.kl_coef
    if placement == "none" and coef:
        yield f"kl_coef={coef}: kl_placement=none has no KL term; set kl_coef=0 or kl_placement=loss"
    if placement != "none" and (coef is None or coef <= 0):
        yield f"kl_coef={coef}: kl_placement={placement} needs one above 0; give it or kl_placement=none"
    if placement == "loss" and o.kl_estimator == "k1":
        rule = "as a loss its gradient is 0 on average, so it would pull towards nothing"
        yield f"kl_estimator=k1 with kl_placement=loss: {rule}; use k2 or k3, or kl_placement=reward"
    mismatch, cap = o.mismatch, o.mismatch_cap
    if mismatch == "none" and cap is not None:
        yield f"mismatch_cap={cap}: mismatch=none has no weights; set it to null or mismatch=truncate"
    if mismatch != "none" and cap is None:
        yield f"mismatch_cap={cap}: mismatch={mismatch} needs the largest weight, 1 or more; 2.0 is usual"


AnyObjective = TypeVar("AnyObjective", bound=Objective)


class Published(NamedTuple):
    """A published objective: its name and source, the record, and `conf/objective/NAME.yaml` if it has one."""

    title: str  # "" if only its own option has this name
    objective: Objective
    name: str = ""
    exact: bool = False  # its title applies with its numbers only


CONSTANT, TOKEN = LengthNormConfig("constant"), LengthNormConfig("token")
GRPO = Objective(loss=LossConfig("grpo_clip", cliprange_low=0.2, cliprange_high=0.2))
REINFORCE = Objective(length_norm=CONSTANT, std_norm="none")
DAPO_CLIP = LossConfig("grpo_clip", cliprange_low=0.2, cliprange_high=0.28)
GSPO, CISPO = LossConfig("gspo", cliprange_low=3e-4, cliprange_high=4e-4), LossConfig("cispo", ratio_cap=5.0)
BY_CONSTANT = "its sum over tokens divided by a constant"


def _like(base: Objective, title: str, name: str = "", **axes: Any) -> Published:
    return Published(title, replace(base, **axes), name)


def _titled(name: str) -> list[Published]:
    """Return the objectives that a loss was published in: GRPO's with this loss, its numbers and axes."""
    loss, published = loss_named(name), []
    config = LossConfig(name) if name in LOSSES else own_loss_config(name)
    for title, settings in loss.published.items():
        axes = {key: value for key, value in settings.items() if key not in loss.numbers}
        if kind := axes.pop("length_norm", None):
            axes["length_norm"] = LengthNormConfig(kind)
        numbers = {key: settings[key] for key in settings if key in loss.numbers}
        published.append(Published(title, replace(GRPO, loss=replace(config, **numbers), **axes), exact=True))
    return published


PUBLISHED: tuple[Published, ...] = (
    _like(
        GRPO, "GRPO with its KL term (DeepSeekMath, arXiv 2402.03300; there kl_coef=0.04)", kl_placement="loss",
        kl_coef=0.04,
    ),
    _like(GRPO, "GRPO without KL (CS336's GRPO)", "grpo"),
    Published(
        "CS336's default, loss_type=reinforce_with_baseline: on policy, the gradient of GRPO without KL", Objective()
    ),
    _like(GRPO, "CS336's GRPO with constant length normalisation", "grpo_constant", length_norm=CONSTANT),
    Published("CS336's GRPO-No-Clip", Objective(loss=LossConfig("grpo_no_clip"))),
    _like(GRPO, "Dr. GRPO (arXiv 2503.20783)", "dr_grpo", length_norm=CONSTANT, std_norm="none"),
    _like(
        REINFORCE, f"RLOO (arXiv 2402.14740) without its KL in the reward, {BY_CONSTANT}", "rloo",
        baseline="leave_one_out",
    ),
    _like(
        REINFORCE, "RFT: with rewards 0 and 1, maximum likelihood on the correct samples", "rft",
        loss=LossConfig("no_baseline"), baseline="none",
    ),
    _like(REINFORCE, f"OPO (arXiv 2505.23585), {BY_CONSTANT}", baseline="opo"),
    _like(REINFORCE, f"MaxRL (arXiv 2602.02710), {BY_CONSTANT}", "maxrl", std_norm="group_mean"),
    _like(GRPO, "", "dapo", loss=DAPO_CLIP, length_norm=TOKEN, overlong="penalty", zero_variance="skip"),
    _like(GRPO, "GSPO (arXiv 2507.18071)", "gspo", loss=GSPO),
    _like(GRPO, "CISPO (arXiv 2506.13585)", "cispo", loss=CISPO, length_norm=TOKEN),
    _like(REINFORCE, "REINFORCE with the group's mean reward as baseline (Williams 1992)", "reinforce"),
    *(published for name in LOSSES for published in _titled(name)),
)  # fmt: skip
#: The objectives with an option file, by its name.
NAMED: dict[str, Objective] = {p.name: p.objective for p in PUBLISHED if p.name}
#: The objectives that losses were published in, by the loss.
OF_LOSSES: dict[str, Objective] = {name: p.objective for name in LOSSES for p in _titled(name)}


#: The axes of an objective besides its loss, its length norm and its KL term.
AXES = ("baseline", "std_norm", "entropy_coef", "overlong", "zero_variance")


def with_axes_of(objective: AnyObjective, other: Objective) -> AnyObjective:
    """Replace every axis that a published objective sets; the rest stays."""
    length_norm = replace(objective.length_norm, kind=other.length_norm.kind)
    names = (*AXES, "loss", "kl_placement", "kl_coef")
    return replace(objective, length_norm=length_norm, **{name: getattr(other, name) for name in names})


def _axes(o: Objective) -> tuple[Any, ...]:
    """Return what two objectives share that compute the same gradient up to the numbers of the loss."""
    kl = (o.kl_placement, o.kl_estimator) if o.kl_placement != "none" else ()
    return (o.loss.loss_type, o.length_norm.kind, kl, *(getattr(o, name) for name in AXES))


def equal_objectives(o: Objective) -> list[str]:
    """Return `objective=NAME` if all its numbers hold too, and the titles of those whose axes all hold."""
    own = [] if o.loss.loss_type in LOSSES else _titled(o.loss.loss_type)
    alike = [p for p in (*PUBLISHED, *own) if _axes(p.objective) == _axes(o)]
    numbers = o.loss.numbers()
    named = [f"objective={p.name}" for p in alike if p.name and p.objective.loss.numbers() == numbers]
    uneven = o.loss.loss_type == "grpo_clip" and numbers["cliprange_low"] != numbers["cliprange_high"]
    if o.has_mismatch_weights:
        return [f"{one} with mismatch weights" for one in named]
    if uneven or "dual_clip" in numbers:
        return named  # the titled objectives that clip tokens do so symmetrically
    titled = [p for p in alike if p.title]
    return named + [
        p.title + " with other numbers" * (p.exact and p.objective.loss.numbers() != numbers) for p in titled
    ]


def differences(o: Objective) -> Iterator[str]:
    """Yield sentences on how these settings differ from a paper or library that shares their name."""
    clips, kind = o.loss.loss_type == "grpo_clip", o.length_norm.kind
    if clips and kind == "constant":
        yield (
            'Dr. GRPO drops the std and the length of each sequence. TRL\'s loss_type="dr_grpo" drops the length '
            "alone, unless scale_rewards says otherwise."
        )
    if clips and kind == "token":
        yield (
            "DAPO clips at 0.2 and 0.28, and samples further prompts until the rewards of every group differ, as "
            "max_resampling_rounds does. Its rewards are -1 and 1: next to rewards of 0 and 1 its length penalty "
            "weighs twice as much."
        )
    yield from BASELINES[o.baseline].notes
    yield from STD_NORMS[o.std_norm].notes
    if o.scores_old and not o.has_ratio:
        yield "The samples may be of an older policy, and this loss has no ratio: its gradient is biased."
    if o.ratio_is_one and o.has_ratio:
        yield "With one optimizer step per rollout batch no clip or cap acts: the gradient is that of -A log pi."
    yield from loss_named(o.loss.loss_type).notes
