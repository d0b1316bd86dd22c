"""Which published objectives a set of settings equals, and where it differs from those that share a name with
it.

Knows settings only; must not import torch. A variant is a set of axes: settings that have all of them compute
the same gradient, given the same samples, as the source says.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlreason.objectives.rules import NAMED_OBJECTIVES, Settings


class Variant(NamedTuple):
    """A published objective: its name and source, and the axes that make it."""

    title: str
    axes: dict[str, Any]


_PLAIN = {"kl_placement": "none", "entropy_coef": 0.0, "mismatch": "none", "dual_clip": None}
_PER_SEQUENCE = {"length_norm": "masked_mean"}
_KEPT = {"overlong": "none", "zero_variance": "keep"}
_GRPO = {"loss_type": "grpo_clip", "baseline": "mean", "std_norm": "group_std", **_KEPT}
_REWARDS_ONLY = {"loss_type": "no_baseline", "baseline": "none", "std_norm": "none"}
_WITHOUT_RATIO = ("no_baseline", "reinforce_with_baseline")
_REINFORCE = {"loss_type": "reinforce_with_baseline", **_KEPT}

VARIANTS: tuple[Variant, ...] = (
    Variant(
        "GRPO with its KL term (DeepSeekMath, arXiv 2402.03300; there kl_coef=0.04)",
        {**_PLAIN, **_GRPO, **_PER_SEQUENCE, "kl_placement": "loss", "kl_estimator": "k3"},
    ),
    Variant("GRPO without KL (CS336's GRPO)", {**_PLAIN, **_GRPO, **_PER_SEQUENCE}),
    Variant(
        "CS336's default, loss_type=reinforce_with_baseline: on policy, the gradient of GRPO without KL",
        {**_PLAIN, **_GRPO, "loss_type": "reinforce_with_baseline", **_PER_SEQUENCE},
    ),
    Variant("CS336's GRPO with constant length normalisation", {**_PLAIN, **_GRPO, "length_norm": "constant"}),
    Variant(
        "CS336's GRPO-No-Clip",
        {**_PLAIN, **_GRPO, "loss_type": "grpo_no_clip", **_PER_SEQUENCE},
    ),
    Variant(
        "Dr. GRPO (arXiv 2503.20783)",
        {**_PLAIN, **_GRPO, "std_norm": "none", "length_norm": "constant"},
    ),
    Variant(
        "RLOO (arXiv 2402.14740) without its KL in the reward, its sum over tokens divided by a constant",
        {**_PLAIN, **_REINFORCE, "baseline": "leave_one_out", "std_norm": "none", "length_norm": "constant"},
    ),
    Variant(
        "RFT: with rewards 0 and 1, maximum likelihood on the correct samples",
        {**_PLAIN, **_REWARDS_ONLY, **_KEPT, "length_norm": "constant"},
    ),
    Variant(
        "MaxRL (arXiv 2602.02710), its sum over tokens divided by a constant",
        {**_PLAIN, **_REINFORCE, "baseline": "mean", "std_norm": "group_mean", "length_norm": "constant"},
    ),
    Variant(
        "GSPO (arXiv 2507.18071)",
        {**_PLAIN, **_GRPO, "loss_type": "gspo", **_PER_SEQUENCE},
    ),
    Variant("CISPO (arXiv 2506.13585)", {**_PLAIN, **_GRPO, "loss_type": "cispo", "length_norm": "token"}),
    Variant(
        "REINFORCE with the group's mean reward as baseline (Williams 1992)",
        {**_PLAIN, **_REINFORCE, "baseline": "mean", "std_norm": "none", "length_norm": "constant"},
    ),
)


def equal_variants(s: Settings) -> list[str]:
    """The named objective that sets these axes, and the titles of the variants whose axes all hold."""
    named = [
        f"objective={name}"
        for name, axes in NAMED_OBJECTIVES.items()
        if all(s[key] == value for key, value in axes.items())
    ]
    if _clips(s) and s["cliprange_low"] != s["cliprange_high"]:
        return named  # the variants above that clip tokens do so symmetrically
    return named + [v.title for v in VARIANTS if all(s[key] == value for key, value in v.axes.items())]


def _clips(s: Settings) -> bool:
    return bool(s["loss_type"] == "grpo_clip")


#: (when it applies, what a reader who knows a paper or library of that name should be told)
_DIFFERENCES: tuple[tuple[Callable[[Settings], bool], str], ...] = (
    (
        lambda s: _clips(s) and s["std_norm"] == "none" and s["length_norm"] == "constant",
        "Dr. GRPO: the paper drops both the std and the length of each sequence, as here. TRL's "
        'loss_type="dr_grpo" changes only the length norm: the std stays unless scale_rewards says '
        "otherwise. The constant here is fixed; dividing by the padded width of a batch is another "
        "objective.",
    ),
    (
        lambda s: _clips(s) and s["std_norm"] == "none" and s["length_norm"] != "constant",
        "Dr. GRPO drops the std, as here, and the length of each sequence too, which stays here: "
        "length_norm=constant for all of it.",
    ),
    (
        lambda s: _clips(s) and s["std_norm"] == "group_std" and s["length_norm"] == "constant",
        'Dr. GRPO drops the std as well. TRL\'s loss_type="dr_grpo" under its default reward scaling '
        "keeps it, as here.",
    ),
    (
        lambda s: _clips(s) and s["std_norm"] == "group_std" and s["length_norm"] == "masked_mean",
        "GRPO: the paper adds a KL term to the loss (k3, coefficient 0.04). Libraries of that name "
        "may average over all tokens instead of sequences (DAPO's norm is TRL's default) and use "
        "another eps (TRL 1e-4).",
    ),
    (
        lambda s: _clips(s) and s["length_norm"] == "token" and not s["refill_rounds"],
        "DAPO: the paper samples further prompts until the batch is full of live groups; here dead "
        "groups are kept or skipped, not replaced: refill_rounds replaces them.",
    ),
    (
        lambda s: _clips(s) and s["length_norm"] == "token" and s["refill_rounds"] > 0,
        "DAPO: the paper samples further prompts until the batch is full of live groups; here dead "
        "groups are replaced too, in at most refill_rounds further rounds. What is dead after these is "
        "kept or skipped as zero_variance says.",
    ),
    (
        lambda s: _clips(s) and s["length_norm"] == "token",
        "DAPO: its clip range is 0.2 and 0.28. Its rewards are -1 and 1: beside rewards of 0 and 1 the same "
        "length penalty weighs twice as much.",
    ),
    (
        lambda s: s["baseline"] == "leave_one_out",
        "RLOO: leave-one-out is G/(G-1) times the mean form, so with groups of one size it differs "
        "from baseline=mean by a constant factor. The paper adds KL to the reward.",
    ),
    (
        lambda s: s["baseline"] == "leave_one_out" and s["std_norm"] != "none",
        "RLOO does not divide by a normaliser; here std_norm does.",
    ),
    (
        lambda s: s["std_norm"] == "group_mean",
        "MaxRL: eps is added to the mean here, so a group without any reward gives 0.",
    ),
    (
        lambda s: s["loss_type"] == "gspo",
        "GSPO: the paper clips at 3e-4 below and 4e-4 above, CS336 at 3e-4 on both sides; token-level "
        "ranges such as 0.2 practically never act on a mean over tokens.",
    ),
    (
        lambda s: s["loss_type"] == "gspo" and s["length_norm"] == "constant",
        "GSPO averages over sequences; under length_norm=constant a sequence weighs by its length.",
    ),
    (
        lambda s: s["loss_type"] == "cispo",
        "CISPO: ratio_cap is the largest weight itself, as in TRL; where a library asks for an eps, "
        "its cap is 1 + eps.",
    ),
    (
        lambda s: s["loss_type"] == "no_baseline",
        "RFT: equal to fine-tuning on correct samples only for rewards of 0 and 1; a negative reward pushes away.",
    ),
    (
        lambda s: not s["on_policy"] and s["loss_type"] in _WITHOUT_RATIO,
        "The samples may be of an older policy and this loss has no ratio to correct for it: its gradient is biased.",
    ),
    (
        lambda s: s["on_policy"] and s["loss_type"] not in _WITHOUT_RATIO,
        "With one optimizer step per rollout batch the ratio is 1, so no clip or cap acts: the "
        "gradient is that of -A log pi.",
    ),
)


def differences(s: Settings) -> Iterator[str]:
    """Sentences on where these settings leave a paper or library that shares their name."""
    for applies, sentence in _DIFFERENCES:
        if applies(s):
            yield sentence
