"""Rules between settings, named objectives, and the card that explains them."""

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


#: What the text of each named objective's card must say.
CARD_SAYS = {
    "grpo": ["A = (r - mean(group)) / (std(group) + 1e-06)", "clip(rho, 0.8, 1.2)", "GRPO without KL"],
    "grpo_constant": ["(std(group) + 1e-06)", "sum of l / (C x number of sequences)"],
    "dr_grpo": [
        "A = r - mean(group)",
        "clip(rho, 0.8, 1.2)",
        "sum of l / (C x",
        "Dr. GRPO (arXiv 2503.20783)",
    ],
    "rloo": ["A = r - mean(others of the group)", "l = -A log pi", "G/(G-1) times the mean form"],
    "rft": ["A = r\n", "l = -A log pi", "no ratio, no clip"],
    "maxrl": ["A = (r - mean(group)) / (mean(group) + 1e-06)", "2602.02710"],
    "dapo": [
        "clip(rho, 0.8, 1.28)",
        "sum of l / number of tokens",
        "soft length penalty",
        "groups of equal rewards",
    ],
    "gspo": ["clip(s, 0.9997, 1.0004)", "s = exp(mean over response tokens", "3e-4 below and 4e-4 above"],
    "cispo": ["-sg(min(rho, 5)) A log pi", "absolute cap 5", "sum of l / number of tokens"],
    "reinforce": ["A = r - mean(group)", "l = -A log pi", "Williams 1992"],
}


@pytest.mark.parametrize("name", NAMED_OBJECTIVES)
def test_card_of_every_named_objective(name):
    card = objective_card(NAMED_OBJECTIVES[name])
    for phrase in CARD_SAYS[name]:
        assert phrase in card.text, phrase
    assert [
        other for other in NAMED_OBJECTIVES if f"objective={other};" in f"{card.text.replace(chr(10), ';')};"
    ] == [name]
    assert card.markdown.count("$$") % 2 == 0
    assert r"\ell_t" in card.markdown


def test_card_names_every_term_that_is_switched_on():
    on = {
        "dual_clip": 3.0,
        "constant": 512,
        "length_norm": "constant",
        "kl_placement": "loss",
        "kl_coef": 0.04,
        "entropy_coef": 0.01,
        "overlong": "mask",
        "zero_variance": "skip",
        "mismatch": "truncate",
        "mismatch_cap": 2.0,
        "epochs_per_rollout": 4,
        "on_policy": False,
        "advantage_eps": 1e-4,
    }
    card = objective_card({**GRPO, **on})
    for phrase in (
        "+ 0.0001)",
        "3 A if A < 0",
        "C = 512",
        "l + 0.04 (exp(-x) - 1 + x)",
        "KL(ref || pi), the other direction",
        "l - 0.01 H(pi)",
        "truncated responses carry no loss",
        "the policy gradient is unchanged; the KL and entropy terms",
        "l x min(w, 2), w = pi_old / pi_engine",
        "epochs_per_rollout=4",
        "no named or published objective",
    ):
        assert phrase in " ".join(card.text.split()), phrase
    for phrase in (r"\min(w_t, 2)", "0.04", r"\frac{1}{C N}", r"0.01\, H(\pi_\theta)", "+ 0.0001"):
        assert phrase in card.markdown, phrase


def test_card_orders_a_reward_term_before_the_advantage_and_weighs_only_the_policy_term():
    settings = {**GRPO, "kl_placement": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}
    text = objective_card(settings).text
    assert text.index("r - 0.1 sum over tokens of (x)") < text.index("Advantage")
    settings = {**GRPO, "kl_placement": "loss", "kl_coef": 0.1, "mismatch": "mask", "mismatch_cap": 2.0}
    text = objective_card(settings).text
    assert text.index("l x (w if w <= 2 else 0)") < text.index("l + 0.1 (")


@pytest.mark.parametrize(
    ("settings", "phrase"),
    [
        ({**GRPO, "std_norm": "none"}, "length_norm=constant for all of it"),
        (NAMED_OBJECTIVES["grpo_constant"], "Dr. GRPO drops the std as well"),
        (NAMED_OBJECTIVES["dr_grpo"], "changes only the length norm"),
        ({**GRPO, "length_norm": "token"}, "samples further prompts"),
        ({**GRPO, "kl_placement": "loss", "kl_coef": 0.04}, "GRPO with its KL term"),
        ({**GRPO, "baseline": "leave_one_out"}, "RLOO does not divide by a normaliser"),
        ({**NAMED_OBJECTIVES["gspo"], "length_norm": "constant"}, "a sequence weighs by its length"),
        (NAMED_OBJECTIVES["cispo"], "its cap is 1 + eps"),
        ({**REINFORCE, "on_policy": False}, "its gradient is biased"),
        ({**GRPO, "on_policy": True}, "no clip or cap acts"),
        ({**GRPO, "zero_variance": "skip"}, "the gradient grows by all / live"),
    ],
)
def test_card_says_where_a_shared_name_differs(settings, phrase):
    card = objective_card(settings)
    assert phrase in " ".join(card.text.split())
    assert phrase in card.markdown


def test_clip_higher_is_not_called_grpo():
    assert "GRPO without KL" not in objective_card({**GRPO, "cliprange_high": 0.28}).text
