"""OPO (arXiv 2505.23585): A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, l the response lengths in tokens."""

import pytest
import torch

from rlreason.objectives.advantages import assign_advantages, compute_group_advantages
from rlreason.objectives.card import objective_card
from rlreason.objectives.objective import Objective

OPO = Objective(baseline="opo", std_norm="none")


def test_equals_a_loop_over_groups_in_float64():
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        n = int(torch.randint(2, 20, (), generator=generator))
        rewards = torch.rand(n, generator=generator, dtype=torch.float64)
        ids = torch.randint(-3, 3, (n,), generator=generator)
        lengths = torch.randint(1, 60, (n,), generator=generator)
        expected = []
        for reward, own in zip(rewards.tolist(), ids.tolist(), strict=True):
            weighted = total = 0.0
            for r, group, length in zip(rewards.tolist(), ids.tolist(), lengths.tolist(), strict=True):
                if group == own:
                    weighted, total = weighted + length * r, total + length
            expected.append(reward - weighted / total)
        found, kept, _ = assign_advantages(rewards, ids, lengths, torch.zeros(n).bool(), OPO)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
        assert kept.all()


def test_equal_lengths_give_the_mean_and_the_weighted_advantages_add_up_to_zero():
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    alike = compute_group_advantages(rewards, ids, baseline="opo", std_norm="none", lengths=torch.full((4,), 7))
    assert alike.tolist() == [0.5, -0.5, -0.5, 0.5]
    lengths = torch.tensor([10, 30, 40, 20])
    found = compute_group_advantages(rewards, ids, baseline="opo", std_norm="none", lengths=lengths)
    assert found.tolist() == pytest.approx([0.7, -0.3, -0.3, 0.7])  # the long responses are wrong: a low baseline
    assert (found * lengths).sum().item() == pytest.approx(0.0, abs=1e-12)


def test_equal_rewards_give_exactly_zero_and_a_group_without_tokens_is_finite():
    lengths = torch.tensor([3, 11, 7, 0, 0])
    rewards, ids = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    found = compute_group_advantages(rewards, ids, baseline="opo", lengths=lengths)
    assert found[:3].tolist() == [0.0] * 3
    assert found.isfinite().all()


def test_without_lengths_there_is_no_such_baseline():
    with pytest.raises(ValueError, match="baseline=opo weighs responses by their lengths"):
        compute_group_advantages(torch.ones(2), torch.zeros(2).long(), baseline="opo")


def test_the_card_shows_the_weighted_mean():
    assert "A = r - sum(length x r) / sum(length) of the group" in objective_card(OPO).text
