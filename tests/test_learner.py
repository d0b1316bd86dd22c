"""The optimizer step: how it is cut changes nothing, the ratio is 1 first and then moves, every term does its own."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import random_pairs

from rlreason.config.training import OptimizationConfig
from rlreason.engines.rollouts import score_samples
from rlreason.health.watch import Monitors
from rlreason.model.log_probs import chunked_log_probs
from rlreason.model.packing import within_budget
from rlreason.model.parameters import build_model
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.objectives.objective import LengthNormConfig, LossConfig, Objective, own_loss_config
from rlreason.training.algorithms import with_advantages
from rlreason.training.learner import Learner
from rlreason.training.progress import averaged
from rlreason.types import Grade, Response, Sample

RIGHT = Grade(1.0, 1.0, 1.0, "correct")


def make_samples(policy, count=12, seed=0, old=False):
    pairs = random_pairs(len(policy.tokenizer), count, seed)
    scores = LogProbScorer(policy, 512).log_probs(pairs)
    g = torch.Generator().manual_seed(seed)
    advantages = torch.randn(count, generator=g).tolist()
    return [
        Sample(Response(f"p{i // 4}", p, r, lp, "", "stop"), RIGHT, advantage=a, old_log_probs=lp if old else None)
        for i, ((p, r), lp, a) in enumerate(zip(pairs, scores, advantages, strict=True))
    ]


def flat(parts):
    """All numbers of these tensors in a copy."""
    return torch.cat([part.detach().flatten() for part in parts])


def gradient_of(learner, samples):
    """The gradient that one update sees, before clipping."""
    return flat(learner.gradient(samples).parameters)


OBJECTIVES = [
    Objective(),
    Objective(length_norm=LengthNormConfig("constant", 20.0)),
    Objective(length_norm=LengthNormConfig("token")),
    Objective(LossConfig("grpo_clip", cliprange=0.2)),
    Objective(LossConfig("grpo_no_clip")),
]


def test_the_gradient_is_the_updates_and_leaves_everything_as_it_was(policy):
    samples = make_samples(policy, old=True)
    learner = Learner(policy, Objective(LossConfig("grpo_no_clip")), OptimizationConfig(1e-2))
    before = flat(learner.parameters)
    found = learner.gradient(samples)
    assert torch.equal(flat(learner.parameters), before)
    assert all(p.grad is None for p in learner.parameters)
    assert not learner.optimizer.state
    for s, g in zip(samples, found.tokens, strict=True):  # ratio 1: -A / (length x samples)
        torch.testing.assert_close(g, torch.full_like(g, -s.advantage / (len(g) * len(samples))), atol=1e-6, rtol=1e-4)
    step = learner.update(samples)
    assert flat(found.parameters).norm() == pytest.approx(step["train/grad_norm"], rel=1e-5)
    assert found.loss == pytest.approx(step["train/loss"], rel=1e-6)


def test_samples_without_credit_are_measured_but_cost_no_backward_pass(policy, tokenizer):
    """The same gradient and metrics as when everything is differentiated, which a vanishing entropy term forces."""
    samples = make_samples(policy, old=True)
    samples[::2] = [replace(s, advantage=0.0) for s in samples[::2]]
    clip = LossConfig("grpo_clip", cliprange=0.2)
    short, whole = (
        Learner(policy, Objective(clip, entropy_coef=coef), OptimizationConfig(1e-3), micro_batch_tokens=64)
        for coef in (0.0, 1e-30)
    )
    torch.testing.assert_close(gradient_of(short, samples), gradient_of(whole, samples), atol=1e-7, rtol=1e-4)
    first, second = short.update(samples), whole.update(make_samples(policy, old=True))
    assert first.keys() == second.keys()
    needing = {i for needs_gradient, rows in short.step_micro_batches(samples) if needs_gradient for i in rows}
    assert needing == set(range(1, len(samples), 2))


@pytest.mark.parametrize("shares", [True, False])
def test_as_many_passes_as_there_are_ranks_to_take_them(policy, monkeypatch, shares):
    """Bug: one rank computes a small batch while the others wait."""
    monkeypatch.setattr(policy, "shares_prompts", shares)
    prompt = list(range(3, 43))
    samples = [Sample(Response(f"p{i // 8}", [i // 8, *prompt], [5] * 9, [], "", "stop"), RIGHT) for i in range(32)]
    learner = Learner(policy, Objective(), OptimizationConfig(1e-3), micro_batch_tokens=8192)
    assert len(learner.micro_batches(samples)) == 1
    learner.sharers = 2
    assert len(learner.micro_batches(samples)) == 2


def pull(advantages, policy_log_probs):
    """-(A + 1) log pi"""
    return -(advantages + 1) * policy_log_probs


def test_a_loss_of_ones_own_has_its_gradient_where_the_advantage_is_0(policy):
    """Bug: a term that does not depend on the advantage is measured, and teaches nothing."""
    samples = [replace(s, advantage=0.0) for s in make_samples(policy)]
    learner = Learner(policy, Objective(own_loss_config("test_learner:pull")), OptimizationConfig(1e-3))
    assert all(part.abs().min() > 0 for part in learner.gradient(samples).tokens)


def test_a_step_without_any_credit_follows_adams_momentum_and_one_that_is_not_finite_is_counted(policy):
    samples = make_samples(policy)
    learner = Learner(policy, Objective(), OptimizationConfig(1e-2))
    learner.update(samples)
    before = flat(learner.parameters)
    metrics = learner.update([replace(s, advantage=0.0) for s in samples])
    after = flat(learner.parameters)
    assert metrics["train/grad_norm"] == 0
    assert metrics["train/entropy"] > 0
    assert not torch.equal(before, after)
    samples[0] = replace(samples[0], advantage=float("inf"))
    assert learner.update(samples)["train/skipped_updates"] == 1
    assert torch.equal(flat(learner.parameters), after)
    assert learner.weights_are_finite()
    learner.parameters[1].data.view(-1)[0] = torch.inf
    assert not learner.weights_are_finite()


def test_float16_learns_by_a_scaled_loss_and_an_overflow_is_left_out_counted_and_said(policy):
    """A scale that stays in the gradient, an overflow that moves weights or ends the run, a silent skip."""
    half, samples, said = policy.copy(), make_samples(policy, old=True), list[str]()
    half.compute_dtype = torch.float16
    exact, rounded = (Learner(p, Objective(), OptimizationConfig(1e-3)).gradient(samples) for p in (policy, half))
    for one, other in ((exact.parameters, rounded.parameters), (exact.tokens, rounded.tokens)):
        assert (flat(one) - flat(other)).norm() < 0.02 * flat(one).norm()
    learner = Learner(half, Objective(), OptimizationConfig(1e-3))
    learner.scaler.load_state_dict(learner.scaler.state_dict() | {"scale": 2.0**40})
    before, metrics = flat(learner.parameters), learner.update(samples)
    assert torch.equal(flat(learner.parameters), before)
    assert [metrics[f"train/{name}"] for name in ("skipped_updates", "overflows", "loss_scale")] == [1, 1, 2.0**40]
    assert learner.scaler.get_scale() == 2.0**39
    monitors = Monitors(4, said.append)
    monitors.check(1, metrics)
    assert monitors.reason_to_stop() is None
    assert "float16" in said[0]
    while metrics["train/overflows"]:
        metrics = learner.update(samples)
    assert metrics["train/grad_norm"] == pytest.approx(flat(exact.parameters).norm().item(), rel=0.02)
    assert not torch.equal(flat(learner.parameters), before)


# The terms: KL, entropy, skipping, masks, weights for the gap between engine and trainer

COUNT, GROUP = 16, 4
CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.2}


@pytest.fixture
def reference(tokenizer) -> Policy:
    """Another policy over the same tokens."""
    return Policy(build_model(len(tokenizer), width=32, init_scale=0.3, seed=2), tokenizer)


def grouped_samples(policy, rewards=None, reference=None, noise=0.0):
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


def gradient(policy, samples, objective):
    return gradient_of(Learner(policy, objective, OptimizationConfig(1e-3)), samples)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


DEAD = [1.0, 0.0, 1.0, 0.0] + [1.0] * 4 + [0.0, 0.0, 1.0, 0.0] + [0.0] * 4  # the second and fourth group are equal


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_adds_its_own_gradient_and_nothing_at_the_reference(policy, reference, estimator):
    terms = {"kl_placement": "loss", "kl_estimator": estimator}
    samples = compared(grouped_samples(policy, reference=reference))
    without = gradient(policy, samples, Objective())
    low, high = (gradient(policy, samples, Objective(kl_coef=c, **terms)) for c in (0.1, 0.2))
    assert (low - without).norm() > 0.1 * without.norm()
    close(high - without, 2 * (low - without))  # linear in the coefficient
    samples = compared(grouped_samples(policy, reference=policy))
    at_reference = gradient(policy, samples, Objective(kl_coef=0.5, **terms))
    torch.testing.assert_close(at_reference, without, atol=1e-4, rtol=1e-3)


class Ahead(Objective):
    """What GRPO is with rollout.async_level=1."""

    samples_ahead = True


def test_kl_of_samples_drawn_ahead_is_weighted_by_their_sampler(policy, reference):
    """Bug: a loss without a ratio takes the KL of an older policy's samples for that of the policy."""
    terms = {"kl_placement": "loss", "kl_estimator": "k3", "mismatch": "truncate", "mismatch_cap": 100.0}
    samples = compared(grouped_samples(policy, reference=reference, noise=0.3))
    samples = [replace(s, old_log_probs=None) for s in samples]
    low, high = (gradient(policy, samples, Ahead(kl_coef=c, **terms)) for c in (0.1, 0.2))
    as_kept = [replace(s, old_log_probs=s.response.log_probs) for s in samples]  # by the laboratory
    close(gradient(policy, as_kept, Ahead(kl_coef=0.1, **terms)), low)
    scored = [replace(s, old_log_probs=s.response.log_probs) for s in samples]
    without, wanted = (gradient(policy, scored, Objective(kl_coef=c, **terms)) for c in (0.1, 0.2))
    close(high - low, wanted - without)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_in_the_reward_is_zero_at_the_reference_and_leaves_it_to_rewards_which_groups_are_dead(
    policy, reference, estimator
):
    """However the engine rounds: dead groups stay dead, and the others get the advantages they get without KL."""
    kl = {"kl_placement": "reward", "kl_estimator": estimator, "kl_coef": 0.5}
    samples = score_samples(grouped_samples(policy, DEAD, policy, noise=0.1), LogProbScorer(policy, 512))
    plain, shaped = (compared(samples, zero_variance="skip", **terms) for terms in ({}, kl))
    assert [(s.advantage, s.has_loss) for s in shaped] == [(s.advantage, s.has_loss) for s in plain]
    assert 0 < sum(s.has_loss for s in shaped) < COUNT
    samples = score_samples(grouped_samples(policy, DEAD, reference), LogProbScorer(policy, 512))
    terms = {"std_norm": "none", "kl_placement": "reward", "kl_estimator": "k1", "kl_coef": 0.1}
    plain, alive = with_advantages(samples, Objective(std_norm="none"))
    shaped, signalling = with_advantages(samples, Objective(zero_variance="skip", **terms))
    kl = [sum(a - b for a, b in zip(s.log_probs, s.reference_log_probs, strict=True)) for s in samples]
    for i, (one, other) in enumerate(zip(plain, shaped, strict=True)):
        group = kl[i // GROUP * GROUP :][:GROUP]
        moved = -0.1 * (kl[i] - sum(group) / GROUP)  # farther from the reference: a lower advantage
        assert other.advantage - one.advantage == pytest.approx(moved, abs=1e-4)
    assert any(abs(a.advantage - b.advantage) > 0.1 for a, b in zip(plain, shaped, strict=True))
    assert all(s.advantage != 0 for s in shaped)
    assert signalling == alive == {"p0", "p2"} == {s.group for s in shaped if s.has_loss}


def test_the_entropy_bonus_raises_entropy(policy):
    learner, samples = Learner(policy, Objective(entropy_coef=0.5), OptimizationConfig(1e-3)), grouped_samples(policy)
    entropy = [learner.update(samples)["train/entropy"] for _ in range(4)]  # without advantages
    assert all(after > before for before, after in itertools.pairwise(entropy))


def test_gradients_through_chunks_are_those_of_full_logits(monkeypatch):
    monkeypatch.setattr("rlreason.model.log_probs.CHUNK", 8)
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 16, generator=g).requires_grad_() for n in (37, 50)]
    labels, (a, b) = torch.randint(50, (37,), generator=g), torch.randn(2, 37, generator=g)
    full = (inputs[0] @ inputs[1].T / 0.7).log_softmax(-1)
    expected = torch.autograd.grad((a * full[range(37), labels] - b * (full.exp() * full).sum(-1)).sum(), inputs)
    log_probs, entropy = chunked_log_probs(*inputs, labels, 0.7)
    found = torch.autograd.grad((a * log_probs + b * entropy).sum(), inputs)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", ["constant", "masked_mean", "token"])
def test_what_carries_no_loss_changes_the_divisor_and_nothing_else(policy, norm):
    """Dead groups that are skipped, and truncated responses that are masked and still count in their group."""
    learner = Learner(policy, Objective(length_norm=LengthNormConfig(norm, 20.0)), OptimizationConfig(1e-3))
    whole = compared(grouped_samples(policy, DEAD))
    tokens = sum(len(s.response.token_ids) for s in whole)
    for rule, carries in (
        ({"zero_variance": "skip"}, [i // GROUP in (0, 2) for i in range(COUNT)]),
        ({"overlong": "mask"}, [not s.response.truncated for s in whole]),
    ):
        samples = compared(grouped_samples(policy, DEAD), **rule)
        assert [s.has_loss for s in samples] == carries
        assert 0 < sum(carries) < COUNT
        assert [s.advantage for s in samples] == [s.advantage for s in whole]
        found = learner.gradient(samples)
        for s, g in zip(samples, found.tokens, strict=True):
            assert g.any() == (s.has_loss and s.advantage != 0)
        silent = [replace(s, advantage=s.advantage * has) for s, has in zip(whole, carries, strict=True)]
        live = sum(len(s.response.token_ids) for s in samples if s.has_loss)
        factor = {"constant": 1.0, "masked_mean": COUNT / sum(carries), "token": tokens / live}[norm]
        expected = gradient_of(learner, silent)  # where their loss is 0, but they are still divided by
        assert expected.norm() > 0
        close(flat(found.parameters), factor * expected)


def test_a_step_where_nothing_is_kept_is_no_step(policy):
    learner = Learner(policy, Objective(entropy_coef=0.1), OptimizationConfig(1e-2, weight_decay=0.1))
    moving = compared(grouped_samples(policy, DEAD))
    learner.update(moving)  # Adam now remembers a gradient, and would move on its own
    before = flat(learner.parameters)
    metrics = learner.update(compared(grouped_samples(policy, [1.0] * COUNT), zero_variance="skip"))
    assert torch.equal(flat(learner.parameters), before)
    assert metrics["train/empty_updates"] == 1
    assert metrics["train/skipped_updates"] == 0
    assert "train/loss" not in metrics  # a 0 would be weighed with the losses of other updates
    both = averaged([metrics, learner.update(moving)])
    assert both["train/loss"] != 0
    assert both["train/empty_updates"] == 1
    assert learner.update(moving)["train/empty_updates"] == 0
    assert not torch.equal(flat(learner.parameters), before)


def test_the_gap_to_the_engine_weighs_tokens_up_to_its_cap(policy):
    plain = gradient(policy, compared(grouped_samples(policy)), Objective(LossConfig("grpo_clip", **CLIP)))
    for w, mismatch, cap, factor in (
        (1, "truncate", 2.0, 1.0), (1, "mask", 2.0, 1.0), (4, "truncate", 2.0, 2.0), (4, "truncate", 5.0, 4.0),
        (4, "mask", 2.0, 0.0), (4, "mask", 5.0, 4.0),
    ):  # fmt: skip
        samples = compared(grouped_samples(policy))
        for s in samples:  # as if the engine had given every token a w-th of the trainer's probability
            s.response.log_probs[:] = [lp - math.log(w) for lp in s.old_log_probs]
        objective = Objective(LossConfig("grpo_clip", **CLIP), mismatch=mismatch, mismatch_cap=cap)
        close(gradient(policy, samples, objective), factor * plain)
        metrics = Learner(policy, objective, OptimizationConfig(0.0)).update(samples)
        assert metrics["train/mismatch_ratio"] == pytest.approx(w, rel=1e-4)
        assert metrics["train/mismatch_capped"] == (w > cap)


@pytest.mark.parametrize("norm", ["constant", "masked_mean", "token"])
@pytest.mark.parametrize("loss", ["grpo_clip", "gspo", "cispo"])
def test_any_split_gives_the_same_gradient_with_every_term_on(policy, reference, loss, norm):
    narrow = {"cliprange_low": 0.02, "cliprange_high": 0.02}  # one ratio per response stays near 1
    numbers = {"ratio_cap": 1.1} if loss == "cispo" else narrow if loss == "gspo" else CLIP
    terms = {"kl_placement": "loss", "kl_coef": 0.1, "entropy_coef": 0.02, "mismatch": "truncate", "mismatch_cap": 1.1}
    objective = Objective(LossConfig(loss, **numbers), LengthNormConfig(norm, 20.0), **terms)
    samples = grouped_samples(policy, DEAD, reference, noise=0.2)
    rng = random.Random(0)
    samples = [replace(s, old_log_probs=[lp + rng.gauss(0, 0.2) for lp in s.old_log_probs]) for s in samples]
    samples = compared(samples, zero_variance="skip", overlong="mask")
    assert 0 < sum(s.has_loss for s in samples) < COUNT
    whole = Learner(policy, objective, OptimizationConfig(1e-3), micro_batch_tokens=10_000).gradient(samples)
    assert whole.clipped > 0
    for tokens, size in ((40, None), (10_000, 3)):
        optimization = OptimizationConfig(1e-3, micro_batch_size=size)
        split = Learner(policy, objective, optimization, micro_batch_tokens=tokens).gradient(samples)
        assert split.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)
        assert split.clipped == whole.clipped
        close(flat(split.parameters), flat(whole.parameters))
        close(flat(split.tokens), flat(whole.tokens))


def first_fit(sizes: list[int], budget: int, max_rows: int | None, rows: list[int]) -> list[list[int]]:
    """First fit decreasing, looking at every bin."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for held in bins:
            fits = sum(sizes[i] for i in held) + sizes[index] <= budget
            if fits and (max_rows is None or sum(rows[i] for i in held) + rows[index] <= max_rows):
                held.append(index)
                break
        else:
            bins.append([index])
    return bins


@pytest.mark.parametrize("seed", range(20))
def test_bins_are_those_of_plain_first_fit(seed):
    source = random.Random(seed)
    count, most = source.choice((0, 1, 2, 17, 64, 65, 150)), source.choice((3, 50, 130))
    sizes = [source.randint(0, most) for _ in range(count)]
    rows = [source.randint(1, 4) for _ in sizes]
    for budget, max_rows in ((100, None), (source.randint(-5, 120), source.choice((0, 1, 2, 5)))):
        assert within_budget(sizes, budget, max_rows) == first_fit(sizes, budget, max_rows, [1] * count)
        assert within_budget(sizes, budget, max_rows, rows) == first_fit(sizes, budget, max_rows, rows)
