"""Advantages: against a loop over groups, and the cases in which published systems went wrong."""

import itertools
import math
import statistics

import pytest
import torch

from rlreason.objectives.advantages import BASELINES, STD_NORMS, compute_group_advantages


def loop_reference(rewards, ids, lengths, baseline, std_norm, eps):
    """The definition, one sample at a time, in Python floats."""

    def std(values):
        return statistics.stdev(values) if len(values) > 1 else 0.0

    result = []
    for i, (reward, own) in enumerate(zip(rewards, ids, strict=True)):
        members = [j for j, group in enumerate(ids) if group == own]
        group, others = [rewards[j] for j in members], [rewards[j] for j in members if j != i]
        weighted, tokens = sum(lengths[j] * rewards[j] for j in members), sum(lengths[j] for j in members)
        above = {
            "mean": reward - statistics.fmean(group),
            "none": reward,
            "leave_one_out": reward - statistics.fmean(others) if others else 0.0,
            "opo": reward - weighted / tokens,
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
@pytest.mark.parametrize("baseline", BASELINES)
def test_equals_the_definition_on_ragged_interleaved_groups_and_in_any_order(baseline, std_norm):
    """Bug: a misplaced eps, a biased std, groups by place."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        n = int(torch.randint(2, 20, (), generator=generator))
        rewards = torch.rand(n, generator=generator, dtype=torch.float64)
        ids, lengths = (torch.randint(low, high, (n,), generator=generator) for low, high in ((-3, 3), (1, 60)))
        options = {"baseline": baseline, "std_norm": std_norm, "advantage_eps": 0.03}  # a misplaced eps is visible
        expected = loop_reference(rewards.tolist(), ids.tolist(), lengths.tolist(), *options.values())
        found = compute_group_advantages(rewards, ids, lengths=lengths, **options)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
        order = torch.randperm(n, generator=generator)
        shuffled = compute_group_advantages(rewards[order], ids[order] * 1000 - 7, lengths=lengths[order], **options)
        torch.testing.assert_close(shuffled, found[order], rtol=1e-12, atol=1e-12)


def test_default_is_grpo_with_unbiased_std_and_eps_1e_6_and_integer_or_no_rewards_are_accepted():
    """Bug: another eps, or integers that divide."""
    rewards, ids = torch.tensor([1e-6, 0.0], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    expected = 0.5e-6 / (1e-6 / math.sqrt(2) + 1e-6)
    assert compute_group_advantages(rewards, ids).tolist() == pytest.approx([expected, -expected])
    assert compute_group_advantages(torch.tensor([1, 0]), ids, std_norm="none").tolist() == [0.5, -0.5]
    assert compute_group_advantages(torch.zeros(0), ids[:0]).shape == (0,)


@pytest.mark.parametrize("std_norm", STD_NORMS)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "opo"])
def test_equal_rewards_give_exactly_zero(baseline, std_norm):
    """Also in a group of one, and in one without a token."""
    for dtype in (torch.float32, torch.float64):
        for value, size in itertools.product((0.0, 1.0, 0.1, 1 / 3, 1e-8, 12345.678), (1, 2, 3, 7, 8)):
            rewards, lengths = torch.full((size,), value, dtype=dtype), torch.arange(size)
            options = {"baseline": baseline, "std_norm": std_norm, "advantage_eps": 1e-12, "lengths": lengths}
            advantages = compute_group_advantages(rewards, torch.full((size,), 5), **options)
            assert advantages.tolist() == [0.0] * size, (value, size)


def test_a_group_without_success_or_without_tokens_is_finite():
    """Bug: 0 / 0 in a group without reward or without tokens."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    advantages = compute_group_advantages(rewards, ids, std_norm="group_mean", advantage_eps=1e-9)
    expected = torch.tensor([3.0, -1.0, -1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-7, atol=0)
    no_tokens = compute_group_advantages(rewards[:2], ids[:2], baseline="opo", lengths=torch.zeros(2).long())
    assert no_tokens.isfinite().all()


def test_what_does_not_fit_is_refused():
    """Bug: a column of rewards that is broadcast; lengths that nobody gave."""
    with pytest.raises(ValueError, match=r"rewards \(4, 1\) and group_ids \(4,\)"):
        compute_group_advantages(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="baseline=opo"):
        compute_group_advantages(torch.ones(2), torch.zeros(2).long(), baseline="opo")
