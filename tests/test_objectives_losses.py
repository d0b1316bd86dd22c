"""Losses and averages against loops over tokens; gradients by hand; padding and splits that must not matter."""

import itertools
import math

import pytest
import torch

from rlreason.objectives.aggregation import AGGREGATIONS, aggregate_loss, masked_mean, masked_normalize, step_divisors
from rlreason.objectives.losses import LOSSES

#: Every loss with numbers under which its bounds act.
NUMBERS = {
    "no_baseline": {},
    "reinforce_with_baseline": {},
    "grpo_clip": {"cliprange_low": 0.2, "cliprange_high": 0.3},
    "grpo_no_clip": {},
    "gspo": {"cliprange_low": 0.05, "cliprange_high": 0.08},
    "cispo": {"ratio_cap": 1.2},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.7},
}
WITH_RATIO = ["grpo_clip", "grpo_no_clip", "gspo", "cispo", "sapo"]


def ragged_case(seed, rows=None, empty_rows=True):
    """A random batch in float64 with the mask anywhere in the row: advantages, log-probs, old ones, mask."""
    generator = torch.Generator().manual_seed(seed)
    rows = rows or int(torch.randint(1, 7, (), generator=generator))
    width = int(torch.randint(3, 10, (), generator=generator))
    starts = torch.randint(0, 3, (rows, 1), generator=generator)
    lengths = torch.randint(0 if empty_rows else 1, width - 1, (rows, 1), generator=generator)
    position = torch.arange(width)[None]
    mask = (position >= starts) & (position < starts + lengths)
    if not empty_rows:
        mask[:, 2] = True
    policy = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    old = policy + 0.3 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return advantages, policy.requires_grad_(), old, mask


def loop_loss(name, advantage, policy, old, mask):
    """The losses of one row at its response tokens, token by token in Python floats."""
    tokens = [t for t in range(len(mask)) if mask[t]]
    numbers = NUMBERS[name]
    losses = {}
    for t in tokens:
        ratio = math.exp(policy[t] - old[t])
        if name == "gspo":
            ratio = math.exp(sum(policy[u] - old[u] for u in tokens) / len(tokens))
        if name in ("no_baseline", "reinforce_with_baseline"):
            losses[t] = -advantage * policy[t]
        elif name == "grpo_no_clip":
            losses[t] = -advantage * ratio
        elif name == "cispo":
            losses[t] = -advantage * min(ratio, numbers["ratio_cap"]) * policy[t]
        elif name == "sapo":
            tau = numbers["tau_pos" if advantage > 0 else "tau_neg"]
            losses[t] = -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
        else:
            low, high = 1 - numbers["cliprange_low"], 1 + numbers["cliprange_high"]
            losses[t] = -min(advantage * ratio, advantage * min(max(ratio, low), high))
    return losses


@pytest.mark.parametrize("name", LOSSES)
def test_equals_a_loop_over_tokens_on_300_ragged_cases(name):
    """With advantages by row or by token; the stats are detached values per token."""
    compared = 0
    for seed in range(300):
        advantages, policy, old, mask = ragged_case(seed)
        loss, stats = LOSSES[name](advantages, policy, old, mask, **NUMBERS[name])
        assert loss.shape == policy.shape
        assert all((v.shape, v.dtype, v.requires_grad) == (loss.shape, loss.dtype, False) for v in stats.values())
        by_token, _ = LOSSES[name](advantages.expand_as(policy), policy, old, mask, **NUMBERS[name])
        assert torch.equal(loss, by_token)
        for row in range(len(mask)):
            inputs = [tensor[row].tolist() for tensor in (policy, old, mask)]
            for t, value in loop_loss(name, advantages[row].item(), *inputs).items():
                assert loss[row, t].item() == pytest.approx(value, rel=1e-11, abs=1e-13)
                compared += 1
    assert compared > 2000


CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.3}
DUAL, CAP = CLIP | {"dual_clip": 3.0}, {"ratio_cap": 1.2}
#: (loss, numbers, advantage, ratio, d loss / d log pi, the stats that are 1)
SLOPES = [
    *[
        (name, CLIP, advantage, ratio, -advantage * ratio * (not lost), lost)
        for name in ("grpo_clip", "gspo")
        for advantage, ratio, *lost in (  # good and likelier already, or bad and rarer already: left alone
            (2.0, 1.4, "clipped", "clipped_high"), (-2.0, 0.7, "clipped", "clipped_low"), (2.0, 0.7), (2.0, 1.29),
            (-2.0, 0.81), (-2.0, 1.4), (0.0, 1.4), (0.0, 0.7),
        )
    ],
    ("grpo_clip", DUAL, -2.0, 2.9, 2.0 * 2.9, []),
    ("grpo_clip", DUAL, -2.0, 3.1, 0.0, ["clipped", "dual_clipped"]),  # beyond the bound a bad token stops pushing
    ("grpo_clip", DUAL, 2.0, 3.1, 0.0, ["clipped", "clipped_high"]),
    ("grpo_clip", DUAL, 2.0, 0.5, -2.0 * 0.5, []),
    ("cispo", CAP, -1.5, 1.1, 1.5 * 1.1, []),  # never through the weight
    ("cispo", CAP, -1.5, 2.5, 1.5 * 1.2, ["clipped"]),  # and above the cap too
]  # fmt: skip


@pytest.mark.parametrize(("name", "numbers", "advantage", "ratio", "slope", "lost"), SLOPES)
def test_slope_and_stats_of_one_token_by_hand(name, numbers, advantage, ratio, slope, lost):
    log_prob = torch.tensor([[math.log(0.25 * ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.tensor([[math.log(0.25)]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss, stats = LOSSES[name](advantages, log_prob, old, mask, **numbers)
    assert torch.autograd.grad(loss.sum(), log_prob)[0].item() == pytest.approx(slope, abs=1e-12)
    assert stats.pop("ratio").item() == pytest.approx(ratio)
    assert {key for key, value in stats.items() if value.item() == 1.0} == set(lost)
    assert all(value.item() in (0.0, 1.0) for value in stats.values())


@pytest.mark.parametrize("name", WITH_RATIO)
def test_first_pass_has_ratio_one_and_the_gradient_of_reinforce(name):
    """Bug: a ratio that carries no gradient, or one of other tokens."""
    advantages, policy, _, mask = ragged_case(11, rows=5, empty_rows=False)
    loss, stats = LOSSES[name](advantages, policy, policy.detach().clone(), mask, **NUMBERS[name])
    plain, _ = LOSSES["reinforce_with_baseline"](advantages, policy, None, mask)
    slopes = [torch.autograd.grad(masked_mean(x, mask, dim=-1).sum(), policy)[0] for x in (loss, plain)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)
    assert slopes[0][mask].abs().min() > 0
    assert torch.equal(stats["ratio"][mask], torch.ones_like(stats["ratio"][mask]))
    assert "clipped" not in stats or not stats["clipped"][mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_padding_reaches_neither_value_nor_gradient(name):
    """Bug: inf or NaN of a masked position, as 0 x inf."""
    for seed, garbage in itertools.product(range(20), (math.nan, -math.inf, 800.0)):
        advantages, policy, old, mask = ragged_case(seed)
        dirty = policy.detach().masked_fill(~mask, garbage).requires_grad_()
        dirty_old = old.masked_fill(~mask, -garbage)
        clean, _ = LOSSES[name](advantages, policy, old, mask, **NUMBERS[name])
        loss, stats = LOSSES[name](advantages, dirty, dirty_old, mask, **NUMBERS[name])
        torch.testing.assert_close(loss[mask], clean[mask], rtol=0, atol=0)
        slope = torch.autograd.grad(masked_mean(loss, mask, empty="zero"), dirty)[0]
        expected = torch.autograd.grad(masked_mean(clean, mask, empty="zero"), policy)[0]
        torch.testing.assert_close(slope, expected, rtol=0, atol=0)
        assert all(value[mask].isfinite().all() for value in stats.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_has_no_gradient_in_sapo_and_is_no_nan(advantage):
    """Bug: a slope of 0 times an infinite ratio."""
    log_prob = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old, mask = torch.tensor([[-200.0, -1.0]]), torch.ones(1, 2).bool()
    loss, _ = LOSSES["sapo"](torch.tensor([[advantage]]), log_prob, old, mask, tau_pos=1e-3, tau_neg=1e3)
    (slope,) = torch.autograd.grad(loss.sum(), log_prob)
    assert loss.isfinite().all()
    assert slope.tolist() == [[0.0, pytest.approx(-advantage)]]


# Averages: one divisor per optimizer step, whatever the split, the padding or the empty rows

CONSTANT = 13.0


def counts(mask):
    """The divisors of a step that consists of these rows, all counted."""
    return {"n_sequences": len(mask), "n_tokens": int(mask.sum()), "constant": CONSTANT}


def loss_and_gradient(name, norm, case, divisors):
    advantages, policy, old, mask = case
    policy = policy.detach().requires_grad_()
    per_token, _ = LOSSES[name](advantages, policy, old, mask, **NUMBERS[name])
    loss = aggregate_loss(per_token, mask, norm, **divisors)
    return loss.detach(), torch.autograd.grad(loss, policy)[0]


@pytest.mark.parametrize("norm", AGGREGATIONS)
def test_equals_a_loop_over_rows_and_tokens(norm):
    """Bug: a divisor that counts padding, or rows without tokens differently."""
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
    """Bug: a divisor of the micro-batch instead of the step."""
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
    """Bug: the width of a batch in the loss; 0 / 0 where nothing counts."""
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
    """Bug: a division by nothing, or by 0."""
    values, mask = torch.ones(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match=f"constant={constant}"):
        aggregate_loss(values, mask, "constant", n_sequences=1, n_tokens=2, constant=constant)


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_masked_mean_and_normalize_along_any_dimension(dim):
    """Bug: `tensor * mask`, which keeps NaN; another dimension."""
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
    """Bug: skipped sequences in an average, or missing under a constant."""
    lengths, kept = torch.tensor([4, 7, 0, 5]), torch.tensor([True, False, True, True])
    assert [step_divisors(lengths, kept, norm) for norm in ("constant", "masked_mean", "token")] == [
        (4, 9), (2, 9), (2, 9)
    ]  # fmt: skip
