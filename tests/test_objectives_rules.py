"""Rules between settings, the named objectives, and the card: right formula, right numbers, right relatives."""

from dataclasses import replace

import pytest

from rlreason.objectives.card import imitation_card, objective_card
from rlreason.objectives.objective import LengthNormConfig, LossConfig
from rlreason.objectives.published import NAMED, OF_LOSSES, PUBLISHED, check_objective
from tests.run_settings import settings

GRPO = NAMED["grpo"]
REINFORCE = NAMED["reinforce"]


def test_every_published_objective_breaks_no_rule():
    """Bug: an option file that cannot run."""
    assert len(NAMED) == 10
    assert all(check_objective(published.objective) == [] for published in PUBLISHED)


#: (objective, changes that break one rule, how the one line starts, a cure it names)
VIOLATIONS = [
    (GRPO, {"loss_type": "ppo"}, "loss_type=ppo: no such option", "grpo_clip"),
    (GRPO, {"cliprange_low": None}, "loss.cliprange_low=null: loss=grpo_clip needs", "leave this out"),
    (GRPO, {"cliprange_low": 1.2}, "loss.cliprange_low=1.2", "at most 1"),
    (NAMED["rft"], {"baseline": "mean"}, "loss_type=no_baseline with baseline=mean", "baseline=none"),
    (REINFORCE, {"baseline": "none"}, "baseline=none: loss_type=reinforce_with_baseline", "no_baseline"),
    (GRPO, {"baseline": "none"}, "std_norm=group_std with baseline=none", "baseline=mean"),
    (NAMED["maxrl"], {"overlong": "penalty"}, "std_norm=group_mean with overlong=penalty", "none"),
    (NAMED["maxrl"], {"kl_placement": "reward", "kl_coef": 0.1}, "std_norm=group_mean with kl_placement=", "group_std"),
    (GRPO, {"kl_coef": 0.04}, "kl_coef=0.04: kl_placement=none", "kl_placement=loss"),
    (GRPO, {"kl_placement": "loss"}, "kl_coef=0.0: kl_placement=loss", "kl_placement=none"),
    (GRPO, {"kl_placement": "loss", "kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1", "k2"),
    (NAMED["rft"], {"zero_variance": "skip"}, "zero_variance=skip with baseline=none", "keep"),
    (GRPO, {"mismatch_cap": 2.0}, "mismatch_cap=2.0: mismatch=none", "mismatch=truncate"),
    (GRPO, {"mismatch": "truncate"}, "mismatch_cap=None: mismatch=truncate", "2.0"),
]  # fmt: skip


def changed(objective, changes):
    """The objective with settings replaced, those of its loss and its length norm under their own names."""
    loss, norm = dict(vars(objective.loss)), dict(vars(objective.length_norm))
    rest = {}
    for key, value in changes.items():
        if key == "length_norm":
            norm["kind"] = value
        else:
            (loss if key in loss else norm if key in norm else rest)[key] = value
    return replace(objective, loss=LossConfig(**loss), length_norm=LengthNormConfig(**norm), **rest)


@pytest.mark.parametrize(("objective", "changes", "start", "cure"), VIOLATIONS)
def test_every_rule_names_setting_value_and_cure_in_one_line(objective, changes, start, cure):
    """Bug: a combination that trains towards nothing."""
    (line,) = check_objective(changed(objective, changes))
    assert line.startswith(start)
    assert cure in line.removeprefix(start)
    assert "\n" not in line


# The card

#: What the text of each named objective's card must say.
CARD_SAYS = {
    "grpo": ["A = (r - mean(group)) / (std(group) + 1e-06)", "clip(rho, 0.8, 1.2)", "GRPO without KL"],
    "grpo_constant": ["(std(group) + 1e-06)", "sum of l / (C x number of sequences)"],
    "dr_grpo": ["A = r - mean(group)", "clip(rho, 0.8, 1.2)", "sum of l / (C x", "Dr. GRPO (arXiv 2503.20783)"],
    "rloo": ["A = r - mean(others of the group)", "l = -A log pi", "G/(G-1) times the mean form"],
    "rft": ["A = r\n", "l = -A log pi", "no ratio, no clip"],
    "maxrl": ["A = (r - mean(group)) / (mean(group) + 1e-06)", "2602.02710"],
    "dapo": ["clip(rho, 0.8, 1.28)", "sum of l / number of tokens", "soft length penalty", "groups of equal rewards"],
    "gspo": ["clip(s, 0.9997, 1.0004)", "s = exp(mean over response tokens", "3e-4 below and 4e-4 above"],
    "cispo": ["-sg(min(rho, 5)) A log pi", "absolute cap 5", "sum of l / number of tokens"],
    "reinforce": ["A = r - mean(group)", "l = -A log pi", "Williams 1992"],
}


@pytest.mark.parametrize("name", NAMED)
def test_card_of_every_named_objective(name):
    """Bug: a card that shows another formula than is computed."""
    card = objective_card(NAMED[name])
    text = card.fitted()
    for phrase in CARD_SAYS[name]:
        assert phrase in text, phrase
    assert [other for other in NAMED if f"objective={other}" in card.equal] == [name]
    assert card.markdown.count("$$") % 2 == 0
    assert r"\ell_t" in card.markdown
    assert max(map(len, card.fitted(60).splitlines())) <= 60


CAPPED = {"mismatch_cap": 2.0}


def test_card_names_every_term_that_is_switched_on():
    """Bug: a term that is on and not shown."""
    on = CAPPED | {
        "dual_clip": 3.0, "constant": 512, "length_norm": "constant", "kl_placement": "loss", "kl_coef": 0.04,
        "entropy_coef": 0.01, "overlong": "mask", "zero_variance": "skip", "mismatch": "truncate",
        "epochs_per_rollout": 4, "advantage_eps": 1e-4,
    }  # fmt: skip
    card = objective_card(changed(GRPO, on))
    for phrase in (
        "+ 0.0001)", "3 A if A < 0", "C = 512", "l + 0.04 (exp(-x) - 1 + x)", "KL(ref || pi), the other direction",
        "l - 0.01 H(pi)", "truncated responses carry no loss", "the policy gradient is unchanged; KL and entropy terms",
        "l x min(w, 2), w = pi_old / pi_engine", "epochs_per_rollout=4", "no named or published objective",
    ):  # fmt: skip
        assert phrase in " ".join(card.fitted().split()), phrase
    assert all(phrase in card.markdown for phrase in (r"\min(w_t, 2)", r"\frac{1}{C N}", r"0.01\, H(\pi_\theta)"))
    shaped = changed(
        GRPO, {"kl_placement": "reward", "kl_coef": 0.1, "kl_estimator": "k1", "mismatch": "mask"} | CAPPED
    )
    text = objective_card(shaped).fitted()
    assert (
        text.index("r - 0.1 sum over tokens of (x)") < text.index("Advantage") < text.index("l x (w if w <= 2 else 0)")
    )


@pytest.mark.parametrize(
    ("objective", "phrase"),
    [
        (NAMED["dr_grpo"], "TRL"),
        (changed(GRPO, {"length_norm": "token"}), "max_resampling_rounds"),
        (changed(GRPO, {"kl_placement": "loss", "kl_coef": 0.04}), "GRPO with its KL term"),
        (changed(REINFORCE, {"baseline": "opo"}), "OPO (arXiv 2505.23585), its sum over tokens divided"),
        (changed(REINFORCE, {"epochs_per_rollout": 2}), "biased"),
        (GRPO, "no clip or cap acts"),
        (changed(GRPO, {"zero_variance": "skip"}), "the gradient grows by all / live"),
        (changed(OF_LOSSES["sapo"], {"tau_neg": 2.0}), "SAPO (arXiv 2511.20347) with other numbers"),
    ],
)
def test_card_says_where_a_shared_name_differs(objective, phrase):
    """Bug: a name of a paper without its difference."""
    card = objective_card(objective)
    assert phrase in " ".join(card.fitted().split())
    assert phrase in card.markdown


def test_card_of_samples_drawn_ahead():
    """Bug: samples of an older policy are called on policy, and a clip that acts is said not to."""
    ahead = ("rollout=vllm", "rollout.async_level=1", "rollout.sleep=false")
    text = " ".join(objective_card(settings("objective=grpo", *ahead)).fitted().split())
    assert "off policy, drawn an update ahead" in text
    assert "no clip or cap acts" not in text
    assert "not corrected" not in text
    weighted = settings("objective=reinforce", *ahead, "mismatch=truncate", "mismatch_cap=2")
    assert "biased" not in objective_card(weighted).fitted()
    assert "objective=reinforce with mismatch weights" in objective_card(weighted).equal


def test_what_only_looks_like_a_published_objective_is_not_called_by_its_name():
    """Bug: asymmetric clipping, or given responses, under another's name."""
    assert "GRPO without KL" not in objective_card(changed(GRPO, {"cliprange_high": 0.28})).fitted()
    assert "RFT" in imitation_card(LengthNormConfig("token"), sampled=True).equal[0]
    assert "RFT" not in imitation_card(LengthNormConfig("token"), sampled=False).fitted()
