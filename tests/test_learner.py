"""The optimizer step: how it is cut into micro-batches changes nothing; the ratio is 1 first and then moves."""

from dataclasses import replace

import pytest
import torch
from conftest import random_pairs

from rlreason.config.training import OptimizationConfig
from rlreason.model.parameters import build_model
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.objectives.objective import LengthNormConfig, LossConfig, Objective
from rlreason.training.learner import Learner
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


def gradient_of(learner, samples):
    """The gradient that one update sees, before clipping."""
    return torch.cat([part.flatten() for part in learner.gradient(samples).parameters])


OBJECTIVES = [
    Objective(),
    Objective(length_norm=LengthNormConfig("constant", 20.0)),
    Objective(length_norm=LengthNormConfig("token")),
    Objective(LossConfig("grpo_clip", cliprange=0.2)),
    Objective(LossConfig("grpo_no_clip")),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.loss.loss_type}-{o.length_norm.kind}")
def test_any_split_into_micro_batches_gives_the_same_gradient(policy, objective):
    samples = make_samples(policy, old=True)
    whole = gradient_of(Learner(policy, objective, OptimizationConfig(1e-3), micro_batch_tokens=10_000), samples)
    assert whole.norm() > 0
    for tokens, size in ((64, None), (40, None), (10_000, 5), (10_000, 1)):
        split = Learner(policy, objective, OptimizationConfig(1e-3, micro_batch_size=size), micro_batch_tokens=tokens)
        assert len(split.micro_batches(samples)) > 1
        torch.testing.assert_close(gradient_of(split, samples), whole, atol=1e-6, rtol=1e-4)


def test_ratio_is_one_on_the_first_pass_and_not_on_the_second(policy):
    samples = make_samples(policy, old=True)
    learner = Learner(policy, Objective(LossConfig("grpo_clip", cliprange=0.2)), OptimizationConfig(1e-2))
    first, second = learner.update(samples), learner.update(samples)
    assert first["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert first["train/clip_fraction"] == 0
    assert abs(second["train/ratio"] - 1) > 1e-3
    assert second["train/approx_kl"] > 1e-4
    assert second["train/clip_fraction"] > 0


def test_old_log_probs_equal_to_todays_give_the_same_step_as_none(policy, tokenizer):
    """On-policy, the ratio's gradient is the policy gradient: with and without fixed old log-probabilities."""
    parameters = []
    for loss, old in (("grpo_no_clip", True), ("grpo_no_clip", False), ("reinforce_with_baseline", False)):
        fresh = Policy(build_model(len(tokenizer), width=32, init_scale=0.3, seed=1), tokenizer)
        Learner(fresh, Objective(LossConfig(loss)), OptimizationConfig(1e-3)).update(make_samples(fresh, old=old))
        parameters.append(torch.cat([p.detach().flatten() for p in fresh.model.parameters()]))
    for other in parameters[1:]:
        torch.testing.assert_close(other, parameters[0], atol=1e-5, rtol=1e-4)


def test_a_step_and_its_metrics_do_not_depend_on_the_split(policy, tokenizer):
    rows, weights = [], []
    for size in (None, 2):
        fresh = Policy(build_model(len(tokenizer), width=32, init_scale=0.3, seed=1), tokenizer)
        learner = Learner(fresh, Objective(), OptimizationConfig(1e-2, max_grad_norm=1e-3, micro_batch_size=size))
        rows.append(learner.update(make_samples(fresh)))
        assert rows[-1]["train/grad_norm"] > 1e-3  # it was clipped
        assert all(p.grad is None for p in learner.parameters)
        weights.append(torch.cat([p.detach().flatten() for p in learner.parameters]))
    for name in ("train/loss", "train/entropy", "train/log_prob", "train/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4, abs=1e-6), name
    # Adam divides by the gradient's own size, so tiny entries amplify rounding: compare within one step's length.
    torch.testing.assert_close(*weights, atol=2e-4, rtol=0)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone_and_is_counted(policy):
    samples = make_samples(policy)
    samples[0] = replace(samples[0], advantage=float("inf"))
    learner = Learner(policy, Objective(), OptimizationConfig(1e-2))
    before = [p.detach().clone() for p in learner.parameters]
    assert learner.update(samples)["train/skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))


def test_the_gap_ignores_tokens_sampled_under_the_ban_on_ending(policy):
    samples, learner = make_samples(policy), Learner(policy, Objective(), OptimizationConfig(0.0))
    for s in samples:
        s.response.log_probs[0] += 1.0  # as if renormalised without the end token
    assert learner.update(samples, mismatch_from=0)["rollout/mismatch_max"] == pytest.approx(1.0, abs=1e-3)
    assert learner.update(samples, mismatch_from=1)["rollout/mismatch_max"] < 1e-4


def test_the_gradient_is_the_updates_and_leaves_everything_as_it_was(policy):
    samples = make_samples(policy, old=True)
    learner = Learner(policy, Objective(LossConfig("grpo_no_clip")), OptimizationConfig(1e-2))
    before = [p.detach().clone() for p in learner.parameters]
    found = learner.gradient(samples)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))
    assert all(p.grad is None for p in learner.parameters)
    assert not learner.optimizer.state
    for s, g in zip(samples, found.tokens, strict=True):  # ratio 1: -A / (length x samples)
        torch.testing.assert_close(g, torch.full_like(g, -s.advantage / (len(g) * len(samples))), atol=1e-6, rtol=1e-4)
    step = learner.update(samples)
    assert torch.cat([p.flatten() for p in found.parameters]).norm() == pytest.approx(step["train/grad_norm"], rel=1e-5)
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


def test_a_step_without_any_credit_still_follows_adams_momentum(policy):
    samples = make_samples(policy)
    learner = Learner(policy, Objective(), OptimizationConfig(1e-2))
    learner.update(samples)
    samples = [replace(s, advantage=0.0) for s in samples]
    before = torch.cat([p.detach().flatten().clone() for p in learner.parameters])
    metrics = learner.update(samples)
    after = torch.cat([p.detach().flatten() for p in learner.parameters])
    assert learner.weights_are_finite()
    assert metrics["train/grad_norm"] == 0
    assert metrics["train/entropy"] > 0
    assert not torch.equal(before, after)
    learner.parameters[1].data.view(-1)[0] = torch.inf
    assert not learner.weights_are_finite()
