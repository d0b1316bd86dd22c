"""Rules between settings, and the named objectives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlreason
from rlreason.objectives.advantages import BASELINES, STD_NORMS, compute_group_advantages
from rlreason.objectives.aggregation import AGGREGATIONS, aggregate_loss
from rlreason.objectives.card import objective_card
from rlreason.objectives.kl import KL_ESTIMATORS
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.mismatch import MISMATCH_WEIGHTS
from rlreason.objectives.overlong import OVERLONG
from rlreason.objectives.rules import DEFAULTS, NAMED_OBJECTIVES, OPTIONS, check_objective
from rlreason.objectives.zero_variance import ZERO_VARIANCE

GRPO = NAMED_OBJECTIVES["grpo"]
REINFORCE = NAMED_OBJECTIVES["reinforce"]


def test_options_are_the_keys_of_the_function_tables():
    tables = {
        "loss_type": LOSSES,
        "length_norm": AGGREGATIONS,
        "baseline": BASELINES,
        "std_norm": STD_NORMS,
        "kl_estimator": KL_ESTIMATORS,
        "overlong": OVERLONG,
        "zero_variance": ZERO_VARIANCE,
        "mismatch": MISMATCH_WEIGHTS,
    }
    assert {key: tuple(table) for key, table in tables.items()} | {
        "kl_placement": ("none", "loss", "reward")
    } == OPTIONS


def test_rules_and_card_are_readable_without_torch():
    program = "import rlreason.objectives.card, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(rlreason.__file__).parents[1])


def test_every_named_objective_sets_the_same_axes_and_breaks_no_rule():
    assert len(NAMED_OBJECTIVES) == 10
    for name, axes in NAMED_OBJECTIVES.items():
        assert set(axes) == set(GRPO), name
        assert set(axes) <= set(DEFAULTS)
        assert check_objective(axes) == [], name
    assert check_objective({}) == []


@pytest.mark.parametrize("name", NAMED_OBJECTIVES)
def test_every_named_objective_computes_a_finite_gradient(name):
    axes = NAMED_OBJECTIVES[name]
    policy = torch.full((4, 3), -0.7, dtype=torch.float64, requires_grad=True)
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 3).bool()
    advantages = compute_group_advantages(rewards, ids, baseline=axes["baseline"], std_norm=axes["std_norm"])
    numbers = {key: axes[key] for key in ("cliprange_low", "cliprange_high", "ratio_cap") if axes[key]}
    loss, _ = LOSSES[axes["loss_type"]](advantages[:, None], policy, policy.detach(), mask, **numbers)
    aggregate_loss(loss, mask, axes["length_norm"], n_sequences=4, n_tokens=12, constant=3).backward()
    assert policy.grad.isfinite().all()
    assert (policy.grad[0] < 0).all()  # the only success of its group is pulled up
    assert policy.grad[2:].any() == (name == "rft")  # equal rewards teach only without a baseline


def differing(name, other):
    return {key for key in GRPO if NAMED_OBJECTIVES[name][key] != NAMED_OBJECTIVES[other][key]}


def test_named_objectives_differ_in_exactly_the_axes_of_the_papers():
    assert differing("grpo", "grpo_constant") == {"length_norm"}
    assert differing("grpo_constant", "dr_grpo") == {"std_norm"}
    assert differing("grpo", "gspo") == {"loss_type", "cliprange_low", "cliprange_high"}
    assert differing("grpo", "dapo") == {"cliprange_high", "length_norm", "overlong", "zero_variance"}
    assert differing("reinforce", "rloo") == {"baseline"}
    assert differing("reinforce", "maxrl") == {"std_norm"}
    assert differing("reinforce", "rft") == {"baseline", "loss_type"}
    clip = {"cliprange_low", "cliprange_high"}
    assert differing("grpo", "cispo") == {"loss_type", "ratio_cap", "length_norm"} | clip
    assert differing("dr_grpo", "reinforce") == {"loss_type"} | clip


#: (settings, changes that break one rule, how the one line starts, a cure it names)
VIOLATIONS = [
    (GRPO, {"loss_type": "ppo"}, "loss_type=ppo: no such option", "grpo_clip"),
    (GRPO, {"length_norm": "mean"}, "length_norm=mean: no such option", "masked_mean"),
    (REINFORCE, {"cliprange_low": 0.2}, "cliprange_low=0.2: loss_type=reinforce_with_baseline", "null"),
    (REINFORCE, {"cliprange_high": 0.2}, "cliprange_high=0.2: loss_type=reinforce_with_baseline", "gspo"),
    (REINFORCE, {"dual_clip": 3.0}, "dual_clip=3.0: loss_type=reinforce_with_baseline", "grpo_clip"),
    (GRPO, {"ratio_cap": 5.0}, "ratio_cap=5.0: loss_type=grpo_clip", "cispo"),
    (GRPO, {"cliprange_low": None}, "cliprange_low=null: loss_type=grpo_clip needs it", "objective=grpo"),
    (NAMED_OBJECTIVES["gspo"], {"cliprange_high": None}, "cliprange_high=null", "objective=gspo"),
    (NAMED_OBJECTIVES["cispo"], {"ratio_cap": None}, "ratio_cap=null", "objective=cispo"),
    (NAMED_OBJECTIVES["cispo"], {"ratio_cap": 0.28}, "ratio_cap=0.28", "5.0"),
    (GRPO, {"cliprange_low": 0.0}, "cliprange_low=0.0", "(0, 1]"),
    (GRPO, {"cliprange_low": 1.2}, "cliprange_low=1.2", "(0, 1]"),
    (GRPO, {"cliprange_high": -0.2}, "cliprange_high=-0.2", "above 0"),
    (GRPO, {"dual_clip": 1.2}, "dual_clip=1.2", "3.0"),
    (
        NAMED_OBJECTIVES["rft"],
        {"baseline": "mean"},
        "loss_type=no_baseline with baseline=mean",
        "baseline=none",
    ),
    (NAMED_OBJECTIVES["rft"], {"std_norm": "group_mean"}, "loss_type=no_baseline with", "std_norm=none"),
    (REINFORCE, {"baseline": "none"}, "baseline=none: loss_type=reinforce_with_baseline", "no_baseline"),
    (GRPO, {"baseline": "none"}, "std_norm=group_std with baseline=none", "baseline=mean"),
    (
        GRPO,
        {"baseline": "none", "std_norm": "batch_std"},
        "std_norm=batch_std with baseline=none",
        "std_norm=none",
    ),
    (NAMED_OBJECTIVES["maxrl"], {"overlong": "penalty"}, "std_norm=group_mean with overlong=penalty", "none"),
    (
        NAMED_OBJECTIVES["maxrl"],
        {"kl_placement": "reward", "kl_coef": 0.1},
        "std_norm=group_mean with kl_placement=reward",
        "group_std",
    ),
    (GRPO, {"advantage_eps": 0.0}, "advantage_eps=0.0", "1e-6"),
    (
        NAMED_OBJECTIVES["gspo"],
        {"length_norm": "token"},
        "length_norm=token with loss_type=gspo",
        "masked_mean",
    ),
    (NAMED_OBJECTIVES["dr_grpo"], {"constant": 0}, "constant=0", "null"),
    (GRPO, {"kl_coef": 0.04}, "kl_coef=0.04: kl_placement=none", "kl_placement=loss"),
    (GRPO, {"kl_placement": "loss"}, "kl_coef=0.0: kl_placement=loss", "kl_placement=none"),
    (GRPO, {"kl_placement": "reward", "kl_coef": -1}, "kl_coef=-1: kl_placement=reward", "above 0"),
    (GRPO, {"kl_placement": "loss", "kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1", "k2"),
    (GRPO, {"entropy_coef": -0.01}, "entropy_coef=-0.01", "0 or more"),
    (NAMED_OBJECTIVES["rft"], {"zero_variance": "skip"}, "zero_variance=skip with baseline=none", "keep"),
    (GRPO, {"mismatch_cap": 2.0}, "mismatch_cap=2.0: mismatch=none", "mismatch=truncate"),
    (GRPO, {"mismatch": "truncate"}, "mismatch_cap=None: mismatch=truncate", "2.0"),
    (GRPO, {"mismatch": "mask", "mismatch_cap": 0.5}, "mismatch_cap=0.5: mismatch=mask", "1 or more"),
    (GRPO, {"epochs_per_rollout": 0}, "epochs_per_rollout=0", "give 1"),
    (GRPO, {"epochs_per_rollout": 2}, "epochs_per_rollout=2 with on_policy=true", "on_policy=false"),
]


@pytest.mark.parametrize(("settings", "changes", "start", "cure"), VIOLATIONS)
def test_every_rule_names_setting_value_and_cure_in_one_line(settings, changes, start, cure):
    (line,) = check_objective({**settings, **changes})
    assert line.startswith(start)
    assert cure in line.split(":", 1)[1]
    assert "\n" not in line
    with pytest.raises(ValueError, match="no card"):
        objective_card({**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"cliprange_low": 1.0, "cliprange_high": 3.0, "dual_clip": 4.5},
        {"kl_placement": "loss", "kl_coef": 0.04, "kl_estimator": "k2"},
        {"kl_placement": "reward", "kl_coef": 0.04, "kl_estimator": "k1"},
        {"mismatch": "truncate", "mismatch_cap": 1.0},
        {"std_norm": "none", "advantage_eps": 0.0},
        {"baseline": "none", "std_norm": "none"},
        {"epochs_per_rollout": 4, "on_policy": False},
        {"zero_variance": "skip", "overlong": "mask", "entropy_coef": 0.01, "constant": 512},
    ],
)
def test_sensible_overrides_of_grpo_are_allowed(changes):
    assert check_objective({**GRPO, **changes}) == []
