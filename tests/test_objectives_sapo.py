"""SAPO (arXiv 2511.20347): -f(rho) A per token, f(rho) = 4 / tau * sigmoid(tau (rho - 1)), tau by the sign of A."""

import math
from dataclasses import replace

import pytest
import torch
from test_objectives_losses import ragged_case

from rlreason.objectives.card import objective_card
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.objective import LossConfig
from rlreason.objectives.published import OF_LOSSES


def test_equals_a_loop_over_tokens_in_float64():
    for seed in range(60):
        advantages, policy, old, mask = ragged_case(seed)
        loss, stats = LOSSES["sapo"](advantages, policy, old, mask, tau_pos=1.0, tau_neg=1.7)
        for i, t in mask.nonzero().tolist():
            advantage, ratio = advantages[i].item(), math.exp(policy[i, t].item() - old[i, t].item())
            tau = 1.0 if advantage > 0 else 1.7
            gate = 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
            assert loss[i, t].item() == pytest.approx(-gate * advantage, rel=1e-12)
            assert stats["ratio"][i, t].item() == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0])
def test_the_gradient_is_the_papers_weight_and_that_of_the_ratio_on_policy(advantage, tau, ratio):
    """d loss / d log pi = -4 p (1 - p) rho A with p = sigmoid(tau (rho - 1)), which is -A at rho = 1."""
    log_prob = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.ones(1, 1).bool()
    given = torch.tensor([[advantage]], dtype=torch.float64)
    loss, _ = LOSSES["sapo"](given, log_prob, old, mask, tau_pos=1.0, tau_neg=1.05)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert gradient.item() == pytest.approx(-4 * p * (1 - p) * ratio * advantage, rel=1e-12)
    if ratio == 1.0:
        assert gradient.item() == pytest.approx(-advantage, rel=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_has_no_gradient_and_is_no_nan(advantage):
    log_prob = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old, mask = torch.tensor([[-200.0, -1.0]]), torch.ones(1, 2).bool()
    loss, _ = LOSSES["sapo"](torch.tensor([[advantage]]), log_prob, old, mask, tau_pos=1e-3, tau_neg=1e3)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert loss.isfinite().all()
    assert gradient.tolist() == [[0.0, pytest.approx(-advantage)]]


def test_the_card_names_the_paper_and_both_temperatures():
    text = " ".join(objective_card(OF_LOSSES["sapo"]).text.split())
    assert "tau = 1 if A > 0 else 1.05" in text
    assert "Equals SAPO (arXiv 2511.20347) Note" in text
    other = replace(OF_LOSSES["sapo"], loss=LossConfig("sapo", tau_pos=1.0, tau_neg=2.0))
    assert "Equals SAPO (arXiv 2511.20347) with other numbers" in " ".join(objective_card(other).text.split())
