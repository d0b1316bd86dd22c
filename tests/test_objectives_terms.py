"""KL, entropy, mismatch weights, overlong rules, live groups, scoring: each against enumeration or a loop."""

import doctest
import importlib
import math
import pkgutil

import pytest
import torch

import rlreason.objectives
from rlreason.objectives.advantages import assign_advantages, soft_overlong_penalty
from rlreason.objectives.objective import Objective
from rlreason.objectives.terms import (
    KL_ESTIMATORS,
    compute_entropy,
    entropy_bonus,
    gather_log_probs,
    kl_per_token,
    mismatch_weights,
    subtract_kl_from_rewards,
)

MODULES = [m.name for m in pkgutil.iter_modules(rlreason.objectives.__path__, "rlreason.objectives.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_the_docstrings_hold(name):
    """Bug: an example that no longer holds."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


THETA = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.6, 0.2, -1.2, 0.9], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([0.5, -0.6, 0.4, 0.3, -0.9], dtype=torch.float64).log_softmax(0)
ALL = torch.ones(1, 5, dtype=torch.bool)


@pytest.mark.parametrize("old", [None, OLD])
def test_expectations_and_gradients_of_the_estimators(old):
    """By enumeration, outcome i at position i: E over samples of each estimator, against KL by its definition."""
    theta = THETA.clone().requires_grad_()
    log_pi = theta.log_softmax(0)
    pi_ref = (log_pi.exp() * (log_pi - REFERENCE)).sum()
    ref_pi = (REFERENCE.exp() * (REFERENCE - log_pi)).sum()
    half_square = (log_pi.exp() * (log_pi - REFERENCE) ** 2).sum() / 2
    slopes = [torch.autograd.grad(kl, theta, retain_graph=True)[0] for kl in (pi_ref, ref_pi)]
    assert not torch.allclose(*slopes, rtol=0.1)
    sampled_from = (log_pi if old is None else old).exp().detach()
    for estimator, value, slope in (
        ("k1", pi_ref, torch.zeros(5).double()), ("k2", half_square, slopes[0]), ("k3", pi_ref, slopes[1]),
    ):  # fmt: skip
        kl = kl_per_token(log_pi[None], REFERENCE[None], ALL, estimator, None if old is None else old[None])
        found = (sampled_from * kl[0]).sum()
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-14)
        gradient = torch.autograd.grad(found, theta, retain_graph=True)[0]
        torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-14)


def test_kl_is_zero_at_the_reference_and_outside_the_response_and_k3_exact_near_zero():
    """Bug: exp(-x) - 1 + x, which loses small values; NaN of padding."""
    log_probs, mask = torch.tensor([[-1.0, math.nan, -2.0]]), torch.tensor([[True, False, True]])
    for estimator in KL_ESTIMATORS:
        assert kl_per_token(log_probs, log_probs, mask, estimator, log_probs).tolist() == [[0.0, 0.0, 0.0]]
    assert (KL_ESTIMATORS["k3"](torch.linspace(-4, 4, 1001, dtype=torch.float64)) >= 0).all()
    small = torch.tensor([1e-7], dtype=torch.float64)
    torch.testing.assert_close(KL_ESTIMATORS["k3"](small), small**2 / 2, rtol=1e-2, atol=0)


def test_kl_in_the_reward_is_a_sum_over_tokens_without_gradient():
    """Bug: a mean over tokens, or a gradient through the reward."""
    kl = torch.tensor([[0.5, 0.25, 0.0], [-0.5, 0.0, 0.0]], requires_grad=True)
    rewards = subtract_kl_from_rewards(torch.tensor([1.0, 0.0]), kl, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([0.925, 0.05]))
    assert not rewards.requires_grad


def test_the_entropy_bonus_is_paid_for_entropy_and_without_a_gradient_an_error():
    """Bug: a bonus for certainty, or one that does nothing."""
    entropy = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"entropy_coef=0\.5"):
        entropy_bonus(entropy, 0.5)
    assert entropy_bonus(entropy, 0.0).tolist() == [[0.0, 0.0]]
    assert entropy_bonus(entropy.requires_grad_(), 0.5).tolist() == [[-0.5, -0.5]]
    with torch.no_grad():
        assert entropy_bonus(torch.ones(1, 2), 0.5).tolist() == [[-0.5, -0.5]]


W = torch.tensor([[0.25, 1.0, 1.5, 2.0, 2.5]], dtype=torch.float64)


WEIGHTS = {"truncate": [0.25, 1.0, 1.5, 2.0, 2.0], "mask": [0.25, 1.0, 1.5, 2.0, 0.0]}


@pytest.mark.parametrize("mismatch", WEIGHTS)
def test_mismatch_weights_by_hand(mismatch):
    """Bug: weights turned upside down, or with a gradient."""
    engine = torch.full_like(W, -3.0, requires_grad=True)
    old = (W.log() - 3).requires_grad_()
    weights, stats = mismatch_weights(old, engine, ALL, mismatch, 2.0 + 1e-12)
    torch.testing.assert_close(weights, torch.tensor([WEIGHTS[mismatch]], dtype=torch.float64))
    torch.testing.assert_close(stats["mismatch_ratio"], W)
    assert stats["mismatch_capped"].tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0]]
    assert not weights.requires_grad
    assert not stats["mismatch_ratio"].requires_grad
    padded, mask = torch.tensor([[-0.5, -1.5, math.nan]]), torch.tensor([[True, True, False]])
    assert mismatch_weights(padded, padded, mask, mismatch, 2.0)[0].tolist() == [[1.0, 1.0, 1.0]]


LENGTHS = torch.tensor([10, 100])
TRUNCATED = torch.tensor([False, True])
LIMITS = {"max_length": 100, "cache_length": 20}


def test_soft_overlong_penalty_is_dapos_piecewise_formula():
    """Bug: the end of the penalty as its beginning."""
    expected = [0.0 if length <= 80 else -1.0 if length > 100 else (80 - length) / 20 for length in range(130)]
    assert soft_overlong_penalty(torch.arange(130), **LIMITS).tolist() == pytest.approx(expected)
    for cache_length in (0, 101):
        with pytest.raises(ValueError, match=f"cache_length={cache_length}"):
            soft_overlong_penalty(LENGTHS, max_length=100, cache_length=cache_length)


class Of100(Objective):
    """The plainest objective, of responses of at most 100 tokens."""

    longest_response = 100


@pytest.mark.parametrize(
    ("rule", "rewards", "kept"),
    [("none", [0.5, 1.0], [True, True]), ("mask", [0.5, 1.0], [True, False]), ("penalty", [0.5, 0.0], [True, True])],
)
def test_overlong_rules(rule, rewards, kept):
    """Bug: a mask of the responses that were not cut, or a penalty of those that were short."""
    given, ids = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([0, 1])
    objective = Of100(baseline="none", std_norm="none", overlong=rule)
    advantages, found_kept, _ = assign_advantages(given, ids, LENGTHS, TRUNCATED, objective)
    assert advantages.tolist() == rewards
    assert advantages.dtype == torch.float64
    assert found_kept.tolist() == kept


def test_live_groups_are_found_by_id_and_by_any_difference():
    """Bug: rewards that differ in the last bit alone count as equal, or ids as places."""
    just_above = torch.nextafter(torch.tensor(0.3), torch.tensor(1.0)).item()
    rewards = torch.tensor([1.0, 0.3, -1.0, 1.0, just_above, -1.0, 7.0])
    ids = torch.tensor([5, 2, 9, 5, 2, 9, 0])
    lengths, uncut = torch.full((7,), 5), torch.zeros(7).bool()
    for baseline, std_norm in (("mean", "group_std"), ("mean", "none"), ("leave_one_out", "none")):
        objective = Objective(baseline=baseline, std_norm=std_norm, zero_variance="skip")
        kept = assign_advantages(rewards, ids, lengths, uncut, objective)[1]
        assert kept.tolist() == [False, True, False, False, True, False, False]


def test_entropy_and_log_probs_equal_loops():
    """Bug: the label of the next position; a mean over the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (6,), generator=generator)
    for row, label, entropy, log_prob in zip(
        logits.tolist(), labels.tolist(), compute_entropy(logits), gather_log_probs(logits, labels), strict=True
    ):
        probs = [math.exp(x) / sum(map(math.exp, row)) for x in row]
        assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in probs))
        assert log_prob.item() == pytest.approx(math.log(probs[label]))


def test_scores_are_float32_for_any_model_dtype_and_survive_extreme_and_forbidden_tokens():
    """Bug: log-probs in bfloat16; 0 x -inf of a forbidden token."""
    logits = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    labels = torch.tensor([[3, 1, 4, 1]])
    assert torch.equal(compute_entropy(logits), compute_entropy(logits.float()))
    assert torch.equal(gather_log_probs(logits, labels), gather_log_probs(logits.float(), labels))
    extreme = torch.tensor([[0.0, 0.0, -math.inf], [900.0, -900.0, 0.0]], requires_grad=True)
    entropy = compute_entropy(extreme)
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0])
    entropy.sum().backward()
    assert extreme.grad.isfinite().all()
