"""Advantages: against a loop over groups, and the cases in which published systems went wrong."""

import math
import statistics

import pytest
import torch

from rlreason.objectives.advantages import BASELINES, STD_NORMS, compute_group_advantages


def loop_reference(rewards, ids, baseline, std_norm, eps):
    """The definition, one sample at a time, in Python floats."""

    def std(values):
        return statistics.stdev(values) if len(values) > 1 else 0.0

    result = []
    for i, (reward, own) in enumerate(zip(rewards, ids, strict=True)):
        group = [r for r, g in zip(rewards, ids, strict=True) if g == own]
        others = [r for j, (r, g) in enumerate(zip(rewards, ids, strict=True)) if g == own and j != i]
        above = {
            "mean": reward - statistics.fmean(group),
            "none": reward,
            "leave_one_out": reward - statistics.fmean(others) if others else 0.0,
        }[baseline]
        below = {
            "group_std": std(group) + eps,
            "none": 1.0,
            "batch_std": std(rewards) + eps,
            "group_mean": statistics.fmean(group) + eps,
        }[std_norm]
        result.append(above / below)
    return result


@pytest.mark.parametrize("std_norm", STD_NORMS)
@pytest.mark.parametrize("baseline", ["mean", "none", "leave_one_out"])
def test_equals_the_definition_on_ragged_interleaved_groups(baseline, std_norm):
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        n = int(torch.randint(2, 20, (), generator=generator))
        rewards = torch.rand(n, generator=generator, dtype=torch.float64)
        ids = torch.randint(-3, 3, (n,), generator=generator)
        eps = 0.03  # large, so that a misplaced eps is visible
        options = {"baseline": baseline, "std_norm": std_norm, "advantage_eps": eps}
        expected = loop_reference(rewards.tolist(), ids.tolist(), baseline, std_norm, eps)
        torch.testing.assert_close(
            compute_group_advantages(rewards, ids, **options),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-10,
            atol=1e-12,
        )


def test_default_is_grpo_with_unbiased_std_and_eps_1e_6():
    rewards = torch.tensor([1e-6, 0.0], dtype=torch.float64)
    expected = 0.5e-6 / (1e-6 / math.sqrt(2) + 1e-6)
    advantages = compute_group_advantages(rewards, torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(advantages, torch.tensor([expected, -expected], dtype=torch.float64))


@pytest.mark.parametrize("std_norm", STD_NORMS)
@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_follow_the_id_through_any_order(baseline, std_norm):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(24, generator=generator, dtype=torch.float64)
    blocked = torch.arange(24) // 8
    order = torch.randperm(24, generator=generator)
    lengths = torch.randint(0, 50, (24,), generator=generator)
    options = {"baseline": baseline, "std_norm": std_norm}
    straight = compute_group_advantages(rewards, blocked, lengths=lengths, **options)
    shuffled = compute_group_advantages(rewards[order], blocked[order] * 1000 - 7, lengths=lengths[order], **options)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std_norm", STD_NORMS)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(baseline, std_norm, dtype):
    for value in (0.0, 1.0, 0.1, 1 / 3, 1e-8, 12345.678):
        for size in (1, 2, 3, 7, 8):
            rewards = torch.full((size,), value, dtype=dtype)
            ids = torch.full((size,), 5)
            advantages = compute_group_advantages(
                rewards, ids, baseline=baseline, std_norm=std_norm, advantage_eps=1e-12
            )
            assert advantages.tolist() == [0.0] * size, (value, size)


def test_differences_of_one_rounding_step_stay_small():
    third = torch.tensor(1 / 3, dtype=torch.float32)
    rewards = torch.stack([third, torch.nextafter(third, torch.tensor(1.0)), third, third])
    advantages = compute_group_advantages(rewards, torch.zeros(4, dtype=torch.int64))
    assert 0 < advantages.abs().max() < 0.05


@pytest.mark.parametrize("std_norm", STD_NORMS)
@pytest.mark.parametrize("baseline", BASELINES)
def test_single_sample_groups_are_finite(baseline, std_norm):
    rewards = torch.tensor([1.0, 0.0, 1.0])
    options = {"baseline": baseline, "std_norm": std_norm, "lengths": torch.tensor([3, 0, 5])}
    advantages = compute_group_advantages(rewards, torch.arange(3), **options)
    assert advantages.isfinite().all()
    if baseline != "none":
        assert advantages.tolist() == [0.0] * 3


def test_leave_one_out_is_the_mean_form_scaled_once():
    rewards = torch.rand(6, dtype=torch.float64)
    ids = torch.zeros(6, dtype=torch.int64)
    by_mean = compute_group_advantages(rewards, ids, baseline="mean", std_norm="none")
    by_others = compute_group_advantages(rewards, ids, baseline="leave_one_out", std_norm="none")
    torch.testing.assert_close(by_others, by_mean * 6 / 5, rtol=1e-12, atol=1e-12)


def test_maxrl_divides_by_the_success_rate_and_survives_a_group_without_success():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    advantages = compute_group_advantages(rewards, ids, std_norm="group_mean", advantage_eps=1e-9)
    expected = torch.tensor([3.0, -1.0, -1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-7, atol=0)


def test_raw_rewards_pass_through_unchanged():
    rewards = torch.tensor([0.3, 0.7, 1.0])
    ids = torch.tensor([1, 1, 2])
    assert torch.equal(compute_group_advantages(rewards, ids, baseline="none", std_norm="none"), rewards)


def test_integer_rewards_and_an_empty_batch_are_accepted():
    assert compute_group_advantages(torch.tensor([1, 0]), torch.tensor([3, 3]), std_norm="none").tolist() == [
        0.5,
        -0.5,
    ]
    assert compute_group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"rewards \(4, 1\) and group_ids \(4,\)"):
        compute_group_advantages(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
