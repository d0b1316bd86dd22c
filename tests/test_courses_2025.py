"""CS336 2025 (and PKU homework 3): losses, advantages and train steps of the handout against loops."""

import math
import statistics

import pytest
import torch

from rlreason.courses import cs336_2025 as course
from rlreason.courses import pku_hw3


def test_masked_mean_of_an_empty_slice_is_nan_in_the_course():
    values, mask = torch.ones(2, 3), torch.tensor([[True, False, False], [True, False, True]])
    assert course.masked_mean(tensor=values, mask=mask, dim=0).isnan().tolist() == [False, True, False]
    assert course.masked_mean(values, mask).item() == 1.0
    normalized = course.masked_normalize(tensor=values, mask=mask, normalize_constant=4.0, dim=1)
    assert normalized.tolist() == [0.25, 0.5]
    assert course.masked_normalize(values, mask, 4.0).item() == 0.75


@pytest.fixture
def micro_batch():
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(3, 6, generator=generator, dtype=torch.float64).requires_grad_()
    policy = policy.detach().requires_grad_()
    old = policy.detach() + 0.4 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]]).bool()
    rewards = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64)
    advantages = torch.tensor([[0.7], [-1.3], [0.2]], dtype=torch.float64)
    return {"policy": policy, "old": old, "mask": mask, "rewards": rewards, "advantages": advantages}


@pytest.mark.parametrize("constant", [1.0, 10.0])
def test_sft_step_goes_backward_in_place(micro_batch, constant):
    policy, mask = micro_batch["policy"], micro_batch["mask"]
    for times in (1, 2, 3):  # gradients are never cleared: they accumulate
        loss, metadata = course.sft_microbatch_train_step(
            policy_log_probs=policy,
            response_mask=mask,
            gradient_accumulation_steps=2,
            normalize_constant=constant,
        )
        expected = -sum(policy[mask].tolist()) / constant / 3 / 2
        assert loss.item() == pytest.approx(expected)
        torch.testing.assert_close(policy.grad, -mask.double() * times / (3 * 2 * constant))
    assert loss.shape == ()
    assert isinstance(metadata, dict)


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_group_normalized_rewards_take_consecutive_groups_and_the_unbiased_std(normalize_by_std):
    values = [0.2, 0.9, 0.4, 0.1, 0.1, 0.7]
    advantages, raw, metadata = course.compute_group_normalized_rewards(
        reward_fn=lambda response, truth: {
            "reward": values[int(response)] * float(truth),
            "format_reward": 1.0,
        },
        rollout_responses=[str(i) for i in range(6)],
        repeated_ground_truths=["1"] * 6,
        group_size=3,
        advantage_eps=0.01,
        normalize_by_std=normalize_by_std,
    )
    assert raw.tolist() == pytest.approx(values)
    expected = []
    for start in (0, 3):
        group = values[start : start + 3]
        divisor = statistics.stdev(group) + 0.01 if normalize_by_std else 1.0
        expected += [(value - statistics.fmean(group)) / divisor for value in group]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert metadata["mean_reward"] == pytest.approx(statistics.fmean(values))
    assert metadata["mean_format_reward"] == 1.0


def test_incomplete_groups_and_unpaired_truths_are_refused():
    arguments = {"advantage_eps": 1e-6, "normalize_by_std": True}

    def reward_fn(response, truth):
        return {"reward": 1.0}

    with pytest.raises(ValueError, match="group_size=2"):
        course.compute_group_normalized_rewards(reward_fn, ["a"] * 3, ["b"] * 3, 2, **arguments)
    with pytest.raises(ValueError, match="3 responses and 2 ground truths"):
        course.compute_group_normalized_rewards(reward_fn, ["a"] * 3, ["b"] * 2, 1, **arguments)


def token_loss(loss_type, reward, advantage, policy, old, cliprange):
    ratio = math.exp(policy - old)
    return {
        "no_baseline": -reward * policy,
        "reinforce_with_baseline": -advantage * policy,
        "grpo_no_clip": -advantage * ratio,
        "grpo_clip": -min(ratio * advantage, min(max(ratio, 1 - cliprange), 1 + cliprange) * advantage),
    }[loss_type]


LOSS_TYPES = ["no_baseline", "reinforce_with_baseline", "grpo_no_clip", "grpo_clip"]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_policy_gradient_losses_equal_a_loop_at_every_position(micro_batch, loss_type):
    m = micro_batch
    loss, metadata = course.compute_policy_gradient_loss(
        policy_log_probs=m["policy"],
        loss_type=loss_type,
        raw_rewards=m["rewards"],
        advantages=m["advantages"],
        old_log_probs=m["old"],
        cliprange=0.2,
    )
    assert isinstance(metadata, dict)
    for row in range(3):
        reward, advantage = m["rewards"][row].item(), m["advantages"][row].item()
        for t in range(6):
            policy, old = m["policy"][row, t].item(), m["old"][row, t].item()
            expected = token_loss(loss_type, reward, advantage, policy, old, 0.2)
            assert loss[row, t].item() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_micro_batch_step_averages_per_row_and_accumulates(micro_batch, loss_type):
    m = micro_batch
    policy, mask = m["policy"], m["mask"]
    arguments = {
        "response_mask": mask,
        "gradient_accumulation_steps": 4,
        "loss_type": loss_type,
        "raw_rewards": m["rewards"],
        "advantages": m["advantages"],
        "old_log_probs": m["old"],
        "cliprange": 0.2,
    }
    loss, metadata = course.grpo_microbatch_train_step(policy_log_probs=policy, **arguments)
    first = policy.grad.clone()
    rows = []
    for row in range(3):
        pair = m["rewards"][row].item(), m["advantages"][row].item()
        tokens = [t for t in range(6) if mask[row, t]]
        losses = [token_loss(loss_type, *pair, policy[row, t].item(), m["old"][row, t].item(), 0.2) for t in tokens]
        rows.append(statistics.fmean(losses))
    assert loss.item() == pytest.approx(statistics.fmean(rows) / 4)
    assert not first[~mask].any()
    course.grpo_microbatch_train_step(policy_log_probs=policy, **arguments)
    torch.testing.assert_close(policy.grad, 2 * first)
    assert all(value.shape == () for value in metadata.values())


def test_clip_metadata_and_naive_loss(micro_batch):
    m = micro_batch
    loss, metadata = course.compute_grpo_clip_loss(m["advantages"], m["policy"], m["old"], 0.2)
    ratio = (m["policy"] - m["old"]).exp().detach()
    gone = ((m["advantages"] > 0) & (ratio > 1.2)) | ((m["advantages"] < 0) & (ratio < 0.8))
    assert torch.equal(metadata["clipped"], gone.double())
    assert 0 < gone.sum() < gone.numel()
    assert loss.shape == (3, 6)
    naive = course.compute_naive_policy_gradient_loss(
        raw_rewards_or_advantages=m["advantages"], policy_log_probs=m["policy"]
    )
    torch.testing.assert_close(naive, -m["advantages"] * m["policy"])


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
        ("grpo_no_clip", "old_log_probs"),
        ("grpo_clip", "cliprange"),
    ],
)
def test_a_missing_argument_is_named(micro_batch, loss_type, missing):
    m = micro_batch
    given = {
        "raw_rewards": m["rewards"],
        "advantages": m["advantages"],
        "old_log_probs": m["old"],
        "cliprange": 0.2,
    }
    with pytest.raises(ValueError, match=f"{missing}=None"):
        course.compute_policy_gradient_loss(m["policy"], loss_type, **{**given, missing: None})
    with pytest.raises(ValueError, match="choose one of"):
        course.compute_policy_gradient_loss(m["policy"], "ppo", **given)


def test_pku_homework_has_the_same_functions():
    assert pku_hw3.__all__ == course.__all__
    assert all(getattr(pku_hw3, name) is getattr(course, name) for name in course.__all__)
