"""The objective's extra terms through the real learner: KL, entropy, skipping, masks, weights."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import random_pairs
from torch.nn import functional as F

from rlreason.config.training import OptimizationConfig
from rlreason.engines.rollouts import score_samples
from rlreason.model.log_probs import chunked_log_probs
from rlreason.model.parameters import build_model
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.objectives.objective import LengthNormConfig, LossConfig, Objective
from rlreason.training.algorithms import with_advantages
from rlreason.training.learner import Learner
from rlreason.training.progress import averaged
from rlreason.types import Grade, Response, Sample

COUNT, GROUP = 16, 4
CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.2}


@pytest.fixture
def reference(tokenizer) -> Policy:
    """Another policy over the same tokens."""
    return Policy(build_model(len(tokenizer), width=32, init_scale=0.3, seed=2), tokenizer)


def scores_of(policy):
    return LogProbScorer(policy, 512)


def make_samples(policy, rewards=None, reference=None, noise=0.0):
    """Ragged responses in groups of four; the engine's log-probabilities are today's, plus noise."""
    rng = random.Random(5)
    pairs = random_pairs(len(policy.tokenizer), COUNT, seed=3)
    rewards = rewards or [float(rng.random() < 0.5) for _ in pairs]
    samples = []
    for i, ((p, r), score) in enumerate(zip(pairs, LogProbScorer(policy, 512).log_probs(pairs), strict=True)):
        engine = [lp + rng.gauss(0, noise) for lp in score]
        grade = Grade(1.0, rewards[i], rewards[i], "correct" if rewards[i] else "wrong")
        finish = "length" if len(r) > 15 else "stop"
        samples.append(Sample(Response(f"p{i // GROUP}", p, r, engine, "", finish), grade, old_log_probs=score))
    if reference is not None:
        scores = LogProbScorer(reference, 512).log_probs(pairs)
        return [replace(s, reference_log_probs=score) for s, score in zip(samples, scores, strict=True)]
    return samples


def compared(samples, **settings):
    return with_advantages(samples, Objective(**settings))[0]


def gradient(policy, samples, objective, **settings):
    parts = Learner(policy, objective, OptimizationConfig(1e-3), **settings).gradient(samples).parameters
    return torch.cat([p.flatten() for p in parts])


def weights(policy):
    return torch.cat([p.detach().flatten().clone() for p in policy.model.parameters()])


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


# --- KL ---


def test_kl_in_the_loss_adds_its_own_gradient(policy, reference):
    samples = compared(make_samples(policy, reference=reference))
    without = gradient(policy, samples, Objective())
    low, high = (gradient(policy, samples, Objective(kl_placement="loss", kl_coef=c)) for c in (0.1, 0.2))
    assert (low - without).norm() > 0.1 * without.norm()
    close(high - without, 2 * (low - without))  # linear in the coefficient


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_is_without_value_and_gradient_at_the_reference(policy, estimator):
    samples = make_samples(policy, reference=policy)
    found = Learner(
        policy, Objective(kl_placement="loss", kl_estimator=estimator, kl_coef=1.0), OptimizationConfig(1e-3)
    ).gradient(samples)
    assert found.loss == pytest.approx(0.0, abs=1e-6)
    assert all(p.abs().max() < 1e-4 for p in found.parameters)
    plain = compared(make_samples(policy))
    with_kl = compared(make_samples(policy, reference=policy))
    for objective in (Objective(), Objective(LossConfig("grpo_clip", **CLIP))):
        with_term = replace(objective, kl_placement="loss", kl_coef=0.5, kl_estimator=estimator)
        torch.testing.assert_close(
            gradient(policy, with_kl, with_term), gradient(policy, plain, objective), atol=1e-4, rtol=1e-3
        )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_in_the_reward_is_exactly_zero_while_the_policy_is_its_reference(policy, estimator):
    """However the engine rounds: dead groups stay dead, and the others get the advantages they get without KL."""
    samples = score_samples(make_samples(policy, DEAD, policy, noise=0.1), scores_of(policy))
    kl = {"kl_placement": "reward", "kl_estimator": estimator, "kl_coef": 0.5}
    plain, shaped = (compared(samples, zero_variance="skip", **terms) for terms in ({}, kl))
    assert [(s.advantage, s.has_loss) for s in shaped] == [(s.advantage, s.has_loss) for s in plain]
    assert 0 < sum(s.has_loss for s in shaped) < COUNT


def test_kl_in_the_reward_moves_advantages_towards_the_reference(policy, reference):
    samples = score_samples(make_samples(policy, DEAD, reference), scores_of(policy))
    plain = compared(samples, std_norm="none")
    shaped = compared(samples, std_norm="none", kl_placement="reward", kl_estimator="k1", kl_coef=0.1)
    kl = [sum(a - b for a, b in zip(s.log_probs, s.reference_log_probs, strict=True)) for s in samples]
    for i, (one, other) in enumerate(zip(plain, shaped, strict=True)):
        group = kl[i // GROUP * GROUP :][:GROUP]
        moved = -0.1 * (kl[i] - sum(group) / GROUP)  # farther from the reference: a lower advantage
        assert other.advantage - one.advantage == pytest.approx(moved, abs=1e-4)
    assert any(abs(a.advantage - b.advantage) > 0.1 for a, b in zip(plain, shaped, strict=True))


def test_groups_are_dead_or_alive_by_their_rewards_whatever_the_kl_term_adds(policy, reference):
    samples = score_samples(make_samples(policy, DEAD, reference), scores_of(policy))
    _, plain = with_advantages(samples, Objective())
    given, signalling = with_advantages(samples, Objective(kl_placement="reward", kl_coef=0.1, zero_variance="skip"))
    assert all(s.advantage != 0 for s in given)
    assert signalling == plain == {"p0", "p2"} == {s.group for s in given if s.has_loss}


# --- entropy ---


def test_the_entropy_bonus_raises_entropy(policy):
    samples = make_samples(policy)  # no advantages
    learner = Learner(policy, Objective(entropy_coef=0.5), OptimizationConfig(1e-3))
    entropy = [learner.update(samples)["train/entropy"] for _ in range(6)]
    assert all(after > before for before, after in itertools.pairwise(entropy))
    still = Learner(policy, Objective(), OptimizationConfig(1e-3))
    before = weights(policy)
    still.update(samples)
    assert torch.equal(weights(policy), before)  # without the bonus nothing pulls


def test_gradients_through_chunks_are_those_of_full_logits_in_float64():
    g = torch.Generator().manual_seed(0)
    exact = [torch.randn(n, 16, generator=g, dtype=torch.float64, requires_grad=True) for n in (37, 50)]
    labels = torch.randint(50, (37,), generator=g)
    a, b = torch.randn(2, 37, generator=g, dtype=torch.float64)  # what flows back into log-probs and entropies
    full = (F.linear(*exact) / 0.7).log_softmax(-1)
    entropy = -(full.exp() * full).sum(-1)
    ours = [t.detach().float().requires_grad_() for t in exact]
    log_probs, chunked_entropy = chunked_log_probs(*ours, labels, 0.7, chunk=8)
    torch.testing.assert_close(chunked_entropy.double(), entropy, atol=5e-5, rtol=1e-5)
    expected = torch.autograd.grad((a * full[range(37), labels] + b * entropy).sum(), exact)
    found = torch.autograd.grad((a.float() * log_probs + b.float() * chunked_entropy).sum(), ours)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.double(), e, atol=2e-5, rtol=1e-4)


# --- which samples carry loss ---

DEAD = [1.0, 0.0, 1.0, 0.0] + [1.0] * 4 + [0.0, 0.0, 1.0, 0.0] + [0.0] * 4  # the second and fourth group are equal


@pytest.mark.parametrize("norm", ["constant", "masked_mean", "token"])
def test_skipping_dead_groups_changes_the_divisor_and_nothing_else(policy, norm):
    objective = Objective(LossConfig("grpo_clip", **CLIP), length_norm=LengthNormConfig(norm, 20.0))
    keep = compared(make_samples(policy, DEAD), zero_variance="keep")
    skip = compared(make_samples(policy, DEAD), zero_variance="skip")
    assert [s.has_loss for s in skip] == [bool(i // GROUP in (0, 2)) for i in range(COUNT)]
    sizes = [len(s.response.token_ids) for s in skip]
    live_tokens = sum(n for n, s in zip(sizes, skip, strict=True) if s.has_loss)
    factor = {"constant": 1.0, "masked_mean": COUNT / (COUNT / 2), "token": sum(sizes) / live_tokens}[norm]
    kept_gradient = gradient(policy, keep, objective)
    assert kept_gradient.norm() > 0
    close(gradient(policy, skip, objective), factor * kept_gradient)


@pytest.mark.parametrize("norm", ["constant", "masked_mean", "token"])
def test_masked_overlong_responses_carry_no_loss(policy, norm):
    objective = Objective(length_norm=LengthNormConfig(norm, 20.0))
    samples = compared(make_samples(policy, DEAD), overlong="mask")
    whole = compared(make_samples(policy, DEAD))
    cut = [s.response.truncated for s in samples]
    assert 0 < sum(cut) < COUNT
    assert [s.has_loss for s in samples] == [not c for c in cut]
    assert [s.advantage for s in samples] == [s.advantage for s in whole]  # they still count in their group
    learner = Learner(policy, objective, OptimizationConfig(1e-3))
    found, everything = learner.gradient(samples), learner.gradient(whole)
    for s, g, full in zip(samples, found.tokens, everything.tokens, strict=True):
        assert g.any() == (s.has_loss and s.advantage != 0)
        assert full.any() == (s.advantage != 0)
    whole = [replace(s, advantage=0.0) if s.response.truncated else s for s in whole]
    silent = gradient(policy, whole, objective)  # their loss is 0, but they are still divided by
    n, tokens = COUNT - sum(cut), sum(len(s.response.token_ids) for s in samples)
    live = sum(len(s.response.token_ids) for s in samples if s.has_loss)
    factor = {"constant": 1.0, "masked_mean": COUNT / n, "token": tokens / live}[norm]
    close(torch.cat([p.flatten() for p in found.parameters]), factor * silent)


@pytest.mark.parametrize("norm", ["constant", "masked_mean", "token"])
def test_a_step_where_nothing_is_kept_is_no_step(policy, norm):
    objective = Objective(LossConfig("grpo_clip", **CLIP), length_norm=LengthNormConfig(norm, 20.0), entropy_coef=0.1)
    learner = Learner(policy, objective, OptimizationConfig(1e-2, weight_decay=0.1))
    moving = compared(make_samples(policy, DEAD))
    learner.update(moving)  # Adam now remembers a gradient, and would move on its own
    before = weights(policy)
    metrics = learner.update(compared(make_samples(policy, [1.0] * COUNT), zero_variance="skip"))
    assert torch.equal(weights(policy), before)
    assert metrics["train/empty_updates"] == 1
    assert metrics["train/skipped_updates"] == 0
    assert "train/loss" not in metrics  # a 0 would be weighed with the losses of other updates
    both = averaged([metrics, learner.update(moving)])
    assert both["train/loss"] != 0
    assert both["train/empty_updates"] == 1
    assert learner.update(moving)["train/empty_updates"] == 0
    assert not torch.equal(weights(policy), before)


# --- weights for the gap between engine and trainer ---


def shifted(samples, by):
    """As if the engine had given every token a probability e^by times the trainer's."""
    for s in samples:
        s.response.log_probs[:] = [lp + by for lp in s.old_log_probs]
    return samples


def test_the_gap_to_the_engine_weighs_tokens_up_to_its_cap(policy):
    plain = gradient(policy, compared(make_samples(policy)), Objective(LossConfig("grpo_clip", **CLIP)))
    for w, mismatch, cap, factor in (
        (1, "truncate", 2.0, 1.0), (1, "mask", 2.0, 1.0), (4, "truncate", 2.0, 2.0), (4, "truncate", 5.0, 4.0),
        (4, "mask", 2.0, 0.0), (4, "mask", 5.0, 4.0),
    ):  # fmt: skip
        samples = shifted(compared(make_samples(policy)), -math.log(w))
        objective = Objective(LossConfig("grpo_clip", **CLIP), mismatch=mismatch, mismatch_cap=cap)
        close(gradient(policy, samples, objective), factor * plain)
        metrics = Learner(policy, objective, OptimizationConfig(0.0)).update(samples)
        assert metrics["train/mismatch_ratio"] == pytest.approx(w, rel=1e-4)
        assert metrics["train/mismatch_capped"] == (w > cap)


# --- all of it at once ---


@pytest.mark.parametrize("norm", ["constant", "masked_mean", "token"])
@pytest.mark.parametrize("loss", ["grpo_clip", "gspo", "cispo"])
def test_any_split_gives_the_same_gradient_with_every_term_on(policy, reference, loss, norm):
    narrow = {"cliprange_low": 0.02, "cliprange_high": 0.02}  # one ratio per response stays near 1
    numbers = {"ratio_cap": 1.1} if loss == "cispo" else narrow if loss == "gspo" else CLIP
    terms = {"kl_placement": "loss", "kl_coef": 0.1, "entropy_coef": 0.02, "mismatch": "truncate", "mismatch_cap": 1.1}
    objective = Objective(LossConfig(loss, **numbers), LengthNormConfig(norm, 20.0), **terms)
    samples = make_samples(policy, DEAD, reference, noise=0.2)
    rng = random.Random(0)
    samples = [replace(s, old_log_probs=[lp + rng.gauss(0, 0.2) for lp in s.old_log_probs]) for s in samples]
    samples = compared(samples, zero_variance="skip", overlong="mask")
    assert 0 < sum(s.has_loss for s in samples) < COUNT
    whole = Learner(policy, objective, OptimizationConfig(1e-3), micro_batch_tokens=10_000).gradient(samples)
    assert whole.clipped > 0
    for tokens, size in ((40, None), (10_000, 1), (10_000, 3)):
        optimization = OptimizationConfig(1e-3, micro_batch_size=size)
        learner = Learner(policy, objective, optimization, micro_batch_tokens=tokens)
        assert len(learner.micro_batches([s for s in samples if s.has_loss])) > 1
        split = learner.gradient(samples)
        assert split.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)
        assert split.clipped == whole.clipped
        for a, b in zip(split.parameters, whole.parameters, strict=True):
            close(a, b)
        for a, b in zip(split.tokens, whole.tokens, strict=True):
            close(a, b)
