"""The objective card: right formula, right numbers, right relatives, for every named objective and every switch."""

import pytest
from test_objectives_rules import GRPO, REINFORCE, changed

from rlreason.objectives.card import imitation_card, objective_card
from rlreason.objectives.objective import LengthNormConfig
from rlreason.objectives.published import NAMED, OF_LOSSES

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
    card = objective_card(NAMED[name])
    text = card.fitted()
    for phrase in CARD_SAYS[name]:
        assert phrase in text, phrase
    assert [other for other in NAMED if f"objective={other}" in card.equal] == [name]
    assert card.markdown.count("$$") % 2 == 0
    assert r"\ell_t" in card.markdown
    assert max(map(len, card.fitted(60).splitlines())) <= 60


def test_card_names_every_term_that_is_switched_on():
    on = {
        "dual_clip": 3.0, "constant": 512, "length_norm": "constant", "kl_placement": "loss", "kl_coef": 0.04,
        "entropy_coef": 0.01, "overlong": "mask", "zero_variance": "skip", "mismatch": "truncate", "mismatch_cap": 2.0,
        "epochs_per_rollout": 4, "advantage_eps": 1e-4,
    }  # fmt: skip
    card = objective_card(changed(GRPO, on))
    for phrase in (
        "+ 0.0001)", "3 A if A < 0", "C = 512", "l + 0.04 (exp(-x) - 1 + x)", "KL(ref || pi), the other direction",
        "l - 0.01 H(pi)", "truncated responses carry no loss", "the policy gradient is unchanged; KL and entropy terms",
        "l x min(w, 2), w = pi_old / pi_engine", "epochs_per_rollout=4", "no named or published objective",
    ):  # fmt: skip
        assert phrase in " ".join(card.fitted().split()), phrase
    for phrase in (r"\min(w_t, 2)", "0.04", r"\frac{1}{C N}", r"0.01\, H(\pi_\theta)", "+ 0.0001"):
        assert phrase in card.markdown, phrase


def test_card_orders_a_reward_term_before_the_advantage_and_weighs_only_the_policy_term():
    settings = changed(GRPO, {"kl_placement": "reward", "kl_coef": 0.1, "kl_estimator": "k1"})
    text = objective_card(settings).fitted()
    assert text.index("r - 0.1 sum over tokens of (x)") < text.index("Advantage")
    settings = changed(GRPO, {"kl_placement": "loss", "kl_coef": 0.1, "mismatch": "mask", "mismatch_cap": 2.0})
    text = objective_card(settings).fitted()
    assert text.index("l x (w if w <= 2 else 0)") < text.index("l + 0.1 (")


@pytest.mark.parametrize(
    ("settings", "phrase"),
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
def test_card_says_where_a_shared_name_differs(settings, phrase):
    card = objective_card(settings)
    assert phrase in " ".join(card.fitted().split())
    assert phrase in card.markdown


def test_what_only_looks_like_a_published_objective_is_not_called_by_its_name():
    assert "GRPO without KL" not in objective_card(changed(GRPO, {"cliprange_high": 0.28})).fitted()
    assert "RFT" in imitation_card(LengthNormConfig("token"), sampled=True).equal[0]
    assert "RFT" not in imitation_card(LengthNormConfig("token"), sampled=False).fitted()
