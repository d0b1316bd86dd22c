"""Aggregation: one divisor per optimizer step, whatever the split, the padding or the empty rows."""

import math

import pytest
import torch
from test_objectives_losses import NUMBERS, ragged_case

from rlreason.objectives.aggregation import AGGREGATIONS, aggregate_loss, masked_mean, masked_normalize, step_divisors
from rlreason.objectives.losses import LOSSES

CONSTANT = 13.0


def counts(mask):
    """The divisors of a step that consists of these rows, all of them counted."""
    return {"n_sequences": len(mask), "n_tokens": int(mask.sum()), "constant": CONSTANT}


def loss_and_gradient(name, norm, case, divisors):
    advantages, policy, old, mask = case
    policy = policy.detach().requires_grad_()
    per_token, _ = LOSSES[name](advantages, policy, old, mask, **NUMBERS[name])
    loss = aggregate_loss(per_token, mask, norm, **divisors)
    return loss.detach(), torch.autograd.grad(loss, policy)[0]


@pytest.mark.parametrize("norm", AGGREGATIONS)
def test_equals_a_loop_over_rows_and_tokens(norm):
    for seed in range(50):
        _, values, _, mask = ragged_case(seed)
        rows = [
            [v for v, m in zip(*pair, strict=True) if m] for pair in zip(values.tolist(), mask.tolist(), strict=True)
        ]
        expected = {
            "masked_mean": sum(sum(row) / len(row) for row in rows if row) / len(rows),
            "constant": sum(sum(row) for row in rows) / (CONSTANT * len(rows)),
            "token": sum(sum(row) for row in rows) / max(sum(len(row) for row in rows), 1),
        }[norm]
        assert aggregate_loss(values, mask, norm, **counts(mask)).item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("norm", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(name, norm):
    for seed in range(20):
        case = ragged_case(seed, rows=6)
        divisors = counts(case[3])
        whole_loss, whole_gradient = loss_and_gradient(name, norm, case, divisors)
        generator = torch.Generator().manual_seed(seed)
        part_of = torch.randint(0, 4, (6,), generator=generator)
        loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole_gradient)
        for part in part_of.unique():
            rows = (part_of == part).nonzero().flatten()
            micro = tuple(tensor[rows] for tensor in case)
            share, slope = loss_and_gradient(name, norm, micro, divisors)
            loss += share
            gradient[rows] += slope
        torch.testing.assert_close(loss, whole_loss, rtol=0, atol=1e-10)
        torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_columns_of_padding_change_nothing_and_a_step_of_padding_alone_is_a_finite_zero(name, norm):
    for seed in range(10):
        case = ragged_case(seed)
        wide = (case[0], *(torch.nn.functional.pad(tensor, (2, 5)) for tensor in case[1:]))
        loss, gradient = loss_and_gradient(name, norm, case, counts(case[3]))
        wide_loss, wide_gradient = loss_and_gradient(name, norm, wide, counts(wide[3]))
        torch.testing.assert_close(wide_loss, loss, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(wide_gradient[:, 2:-5], gradient, rtol=1e-13, atol=1e-13)
        assert not wide_gradient[:, :2].any()
        assert not wide_gradient[:, -5:].any()
    empty = (*case[:3], torch.zeros_like(case[3]))
    loss, gradient = loss_and_gradient(name, norm, empty, {"n_sequences": 0, "n_tokens": 0, "constant": CONSTANT})
    assert loss.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("constant", [None, 0])
def test_constant_norm_asks_for_its_constant(constant):
    values, mask = torch.ones(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match=f"constant={constant}"):
        aggregate_loss(values, mask, "constant", n_sequences=1, n_tokens=2, constant=constant)


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_masked_mean_and_normalize_along_any_dimension(dim):
    for seed in range(20):
        _, values, _, mask = ragged_case(seed)
        values = values.detach()
        total = (values * mask).sum() if dim is None else (values * mask).sum(dim)
        count = mask.sum() if dim is None else mask.sum(dim)
        mean = masked_mean(values, mask, dim)
        torch.testing.assert_close(mean, total / count, equal_nan=True)
        assert torch.equal(mean.isnan(), count == 0)
        torch.testing.assert_close(masked_mean(values, mask, dim, empty="zero"), mean.nan_to_num(0.0))
        torch.testing.assert_close(masked_normalize(values, mask, 3.5, dim), total / 3.5)
        dirty = values.masked_fill(~mask, math.nan)  # what is masked out may be anything
        torch.testing.assert_close(masked_mean(dirty, mask.long(), dim), mean, equal_nan=True)
        torch.testing.assert_close(masked_normalize(dirty, mask, 3.5, dim), total / 3.5)


def test_step_divisors_of_sequences_without_loss():
    lengths, kept = torch.tensor([4, 7, 0, 5]), torch.tensor([True, False, True, True])
    assert [step_divisors(lengths, kept, norm) for norm in ("constant", "masked_mean", "token")] == [
        (4, 9), (2, 9), (2, 9)
    ]  # fmt: skip
