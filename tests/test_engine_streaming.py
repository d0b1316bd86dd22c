"""Rows join and leave a running batch: nobody's sample changes, nobody waits for the longest, memory stays bounded."""

import random
import tracemalloc

import pytest
import torch
from conftest import random_pairs
from torch.utils._python_dispatch import TorchDispatchMode

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.decoding import HEADROOM, PreallocatedCache
from rlreason.engines.hf.engine import HFEngine
from rlreason.model.policy import LogProbScorer, Policy

STOPS = ("a", "=")


def ragged_prompts(policy, count=14, longest=90):
    """Prompts of 1 to `longest` tokens in mixed order."""
    rng, vocab = random.Random(0), policy.head.shape[0]
    sizes = [1, longest] + [rng.randint(1, longest) for _ in range(count - 2)]
    return [Prompt(str(i), [rng.randrange(2, vocab) for _ in range(size)], seed=i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("n", "sampling"),
    [
        (2, Sampling(1.0, 0, 40, STOPS)),
        (3, Sampling(1.3, 5, 24, STOPS)),
        (2, Sampling(0.6, 0, 24, STOPS)),
        (1, Sampling(1.0, 0, 150, ("</answer>", "</think>"))),
    ],
    ids=["scattered", "held back", "cold", "beyond the headroom"],
)
def test_samples_of_a_running_batch_are_those_of_a_large_one(policy, n, sampling):
    prompts = ragged_prompts(policy)
    small = HFEngine(policy, max_rows=4).generate(prompts, sampling, n)
    large = HFEngine(policy, max_rows=256).generate(prompts, sampling, n)
    assert len({len(r.token_ids) for r in large}) > 3  # rows did end at different times
    assert [r.problem_id for r in small] == [p.problem_id for p in prompts for _ in range(n)]
    assert len({tuple(r.token_ids) for r in small if len(r.token_ids) > 9}) == sum(len(r.token_ids) > 9 for r in small)
    assert [r.token_ids for r in HFEngine(policy).generate(prompts[-1:], sampling, n)] == [
        r.token_ids for r in small[-n:]
    ]
    scores = LogProbScorer(policy, 1024, sampling.temperature).log_probs([(r.prompt_ids, r.token_ids) for r in small])
    for a, b, score in zip(small, large, scores, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert max(abs(x - y) for x, y in zip(a.log_probs, b.log_probs, strict=True)) < 2e-5  # rounding: 1e-5
        if not sampling.min_tokens:  # which takes the end tokens out of the distribution
            assert max(abs(x - y) for x, y in zip(a.log_probs, score, strict=True)) < 5e-5


def test_prompts_that_wait_do_not_wait_for_the_longest_response(policy):
    prompts, order = ragged_prompts(policy, 24), []
    HFEngine(policy, max_rows=6).generate(
        prompts, Sampling(1.0, 0, 60, STOPS), 1, finished=lambda place, response: order.append(place)
    )
    first = {i for i, _ in sorted(enumerate(prompts), key=lambda p: len(p[1].token_ids))[:6]}
    last_of_first = max(at for at, place in enumerate(order) if place in first)
    assert last_of_first > 6  # later prompts ended before the first six had all ended


def test_memory_and_positions_stay_within_the_rows_and_the_longest_sequence(policy):
    prompts, max_tokens = ragged_prompts(policy, 28, longest=1), 2 * HEADROOM
    longest = 1 + max_tokens
    rows, rooms, positions = [], [], []

    def watch(module, args, kwargs):
        cache = kwargs["past_key_values"]
        positions.append(int(kwargs["position_ids"].max()))
        if isinstance(cache, PreallocatedCache):
            rows.append(cache.preallocated[0].keys.shape[0])
            rooms.append(cache.preallocated[0].keys.shape[2])

    handle = policy.backbone.register_forward_pre_hook(watch, with_kwargs=True)
    HFEngine(policy, max_rows=11).generate(prompts, Sampling(1.0, HEADROOM, max_tokens, ("=",)), 2)
    handle.remove()
    assert len(rows) > 2 * longest  # the columns written are many more than the room
    assert max(rows) <= 11
    assert max(rooms) <= longest + HEADROOM
    assert max(positions) < longest


def test_samples_that_wait_take_no_memory(policy):
    """Of 800 samples 32 run at a time; the random numbers of all would be 10 times those of 80."""
    ends = tuple("abcdefghijklmnopqrstuvwxyz0123456789 ,.=+-?!:<")  # within a few tokens
    anything = Sampling(1.0, 0, 4096, ends)
    peaks = []
    for count in (10, 100):
        prompts = [Prompt(str(i), [5 + i % 200], seed=i) for i in range(count)]
        tracemalloc.start()
        responses = HFEngine(policy, max_rows=32).generate(prompts, anything, 8)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len({tuple(r.token_ids) for r in responses}) > 200
    assert peaks[1] < 4 * peaks[0], peaks


class CastsOf(TorchDispatchMode):
    """Counts casts of tensors of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


def test_half_precision_weights_are_cast_once_a_call(policy, tokenizer):
    half = Policy(policy.model, tokenizer, torch.bfloat16)
    shape = next(w.shape for name, w in half.backbone.named_parameters() if name.endswith("down_proj.weight"))
    prompts = [Prompt(str(i), prompt, seed=i) for i, (prompt, _) in enumerate(random_pairs(half.head.shape[0], 6))]
    with CastsOf(shape) as casts:
        HFEngine(half, max_rows=4).generate(prompts, Sampling(1.0, 8, 12), 2)
    assert casts.count == sum(w.shape == shape for w in half.backbone.parameters())
