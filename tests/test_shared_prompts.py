"""A prompt that several responses share is computed once, and gives what repeated prompts give."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import OBJECTIVES, RIGHT, gradient_of
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rlreason.config.training import OptimizationConfig
from rlreason.model.packing import CPU, attention_by_layout, divide, pack
from rlreason.model.policy import LogProbScorer, check_kernel
from rlreason.training.learner import Learner
from rlreason.types import Response, Sample


def groups(vocab: int, sizes=(3, 1, 8, 2), seed=0) -> list[tuple[list[int], list[int]]]:
    """Pairs in groups of these sizes, each with one prompt; some responses are a single token."""
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(2, vocab) for _ in range(rng.randint(low, high))]

    return [(prompt, ids(1, 9)) for size in sizes for prompt in [ids(1, 12)] for _ in range(size)]


def samples_of(policy, pairs, old=False) -> list[Sample]:
    rng = random.Random(1)
    scores = LogProbScorer(policy, 512).log_probs(pairs)
    return [
        Sample(
            Response(str(p), p, r, lp, "", "stop"), RIGHT, advantage=rng.gauss(0, 1), old_log_probs=lp if old else None
        )
        for (p, r), lp in zip(pairs, scores, strict=True)
    ]


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_outputs_and_gradients_equal_those_of_repeated_prompts_to_ten_digits(kv_heads):
    """In float64, over groups of several sizes, one response of a single token, and a sequence alone."""
    torch.manual_seed(0)
    pairs = [([1] * 5, [2] * n) for n in (4, 1, 7)] + [([3] * 2, [2] * 3)] + [([4] * 6, [2] * n) for n in (3, 2)]
    layout = pack(pairs, share_prompts=True).layout
    lay = [(0, 5, (3, 0, 6)), (14, 2, (2,)), (18, 6, (2, 1))]  # first token, prompt, responses without their last token
    tokens = sum(layout.parts.queries)
    assert tokens == 27
    q, k, v = (torch.randn(tokens, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, kv_heads, kv_heads))
    ours = attention_by_layout(q, k, v, layout, CPU, 8**-0.5)
    weights = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    loss = torch.zeros((), dtype=torch.float64)
    for first, prompt, responses in lay:  # each pair attends alone, its prompt written out before it
        at = first + prompt
        for number, size in enumerate(responses):
            rows = [*range(first, first + prompt), *range(at, at + size)]
            heads = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(out, ours[rows], atol=1e-10, rtol=0)
            new = slice(prompt if number else 0, None)  # the prompt counts once
            loss = loss + (out[new] * weights[rows][new]).sum()
            at += size
    theirs = torch.autograd.grad(loss, (q, k, v))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=5),
    st.integers(5, 60),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_pair_is_in_one_bin_within_the_budget_and_a_whole_group_in_one_where_it_fits(sizes, budget, max_rows):
    pairs = [([g] * prompt, [0] * n) for g, (prompt, responses) in enumerate(sizes, 100) for n in responses]
    bins = divide(pairs, budget, max_rows, share_prompts=True)
    assert sorted(i for rows in bins for i in rows) == list(range(len(pairs)))
    for rows in bins:
        prompts = {tuple(pairs[i][0]) for i in rows}
        tokens = sum(map(len, prompts)) + sum(len(pairs[i][1]) for i in rows)
        assert len(rows) == 1 or (tokens <= budget and len(rows) <= (max_rows or len(rows)))
        order = [pairs[i][0] for i in rows]
        assert sum(a != b for a, b in pairwise(order)) == len(prompts) - 1  # neighbours
    for g, (prompt, responses) in enumerate(sizes, 100):
        if prompt + sum(responses) <= budget and len(responses) <= (max_rows or len(responses)):
            assert sum(any(pairs[i][0][0] == g for i in rows) for rows in bins) == 1


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.loss.loss_type}-{o.length_norm.kind}")
def test_a_step_on_groups_has_the_gradient_of_repeated_prompts_however_it_is_cut(policy, objective):
    samples = samples_of(policy, groups(len(policy.tokenizer)), old=True)
    random.Random(0).shuffle(samples)
    assert policy.shares_prompts

    def gradient(budget, rows=None):
        config = OptimizationConfig(1e-3, micro_batch_size=rows)
        return gradient_of(Learner(policy, objective, config, micro_batch_tokens=budget), samples)

    found = [gradient(*cut) for cut in ((10_000,), (64,), (30,), (10_000, 3), (10_000, 1))]
    policy.shares_prompts = False
    expected = gradient(10_000)
    assert expected.norm() > 0
    for one in found:
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-4)


def test_a_group_is_trained_and_scored_with_its_prompt_once(policy):
    """Counted at the model's embeddings: forward tokens of an update, of old log-probabilities, of a cut group."""
    fed = Counter()
    policy.model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.update(n=args[0].numel()))
    pairs = groups(len(policy.tokenizer), sizes=(8, 8))
    once = sum(len(pairs[i][0]) for i in (0, 8)) + sum(len(r) - 1 for _, r in pairs)
    samples = samples_of(policy, pairs)
    assert fed["n"] == once  # they were scored
    fed.clear()
    Learner(policy, OBJECTIVES[0], OptimizationConfig(1e-3)).update(samples)
    assert fed["n"] == once
    fed.clear()
    Learner(policy, OBJECTIVES[0], OptimizationConfig(1e-3, micro_batch_size=4)).update(samples)
    assert fed["n"] == once + sum(len(pairs[i][0]) for i in (0, 8))  # each group is cut in two
    fed.clear()
    policy.shares_prompts = False
    Learner(policy, OBJECTIVES[0], OptimizationConfig(1e-3)).update(samples)
    assert fed["n"] == sum(len(p) + len(r) - 1 for p, r in pairs)


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero", "masked_select")


class Reads(TorchFunctionMode):
    """Counts what waits for a device: numbers that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.count.update([name] if name in READS else [])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("objective", [OBJECTIVES[0], replace(OBJECTIVES[3], entropy_coef=0.01)], ids=["plain", "clip"])
def test_numbers_are_read_once_a_step_however_many_micro_batches_it_has(policy, objective):
    samples = samples_of(policy, groups(len(policy.tokenizer), sizes=(4,) * 6), old=True)
    counts = []
    for budget in (10_000, 40):
        learner = Learner(policy, objective, OptimizationConfig(1e-3), micro_batch_tokens=budget)
        with Reads() as reads:
            metrics = learner.update(samples)
        counts.append((metrics["train/micro_batches"], reads.count))
    (few, once), (many, again) = counts
    assert few == 1 < 5 < many
    assert once == again
    assert once["tolist"] == 1


def test_sharing_is_given_up_where_it_computes_something_else(policy, monkeypatch):
    check_kernel(policy)
    assert (policy.shares_prompts, policy.remarks) == (True, [])
    monkeypatch.setattr("rlreason.model.packing.merged", lambda one, other: one)  # without the prompt
    check_kernel(policy)
    assert not policy.shares_prompts
    assert policy.remarks[0] in policy.describe()
