"""What sampling costs, in counts rather than seconds: passes, prompts read, memory moved, waits for the device."""

import pytest
import torch
from conftest import random_pairs
from torch.utils._python_dispatch import TorchDispatchMode

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.decoding import BLOCK, PROMPT_TOKENS, draw
from rlreason.engines.hf.engine import HFEngine
from rlreason.model.policy import Policy

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,  # and whatever else has a shape that depends on values
    aten.masked_select.default,
    aten.masked_scatter_backward.default,
}


class Waits(TorchDispatchMode):
    """Counts operations whose result a processor waits for, on a device of its own."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in WAITS
        return func(*args, **(kwargs or {}))


def test_a_step_is_one_forward_pass_and_one_small_read(policy):
    prompts = [Prompt(str(i), ids, seed=i) for i, (ids, _) in enumerate(random_pairs(policy.head.shape[0], 6))]
    shapes = []
    handle = policy.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine, steps = HFEngine(policy), 100
    with Waits() as few:
        engine.generate(prompts, Sampling(1.0, 8, 9), n=8)
    shapes.clear()
    with Waits() as waits:
        engine.generate(prompts, Sampling(1.0, steps, steps), n=8)
    handle.remove()
    assert shapes[0] == (1, sum(len(p.token_ids) for p in prompts))  # each group's prompt once, in one pass
    assert shapes[1:] == [(48, 1)] * (steps - 1)  # the last token is not read
    counts = engine.counts
    assert (counts.steps, counts.prompts, counts.prompt_tokens) == (steps - 1, 1, shapes[0][1])
    assert counts.host_reads == steps + 2  # which rows may have ended, each step; tokens and log-probabilities once
    assert waits.count == few.count  # none of them in a step
    assert counts.reallocations == 2  # the first gives 64 columns


def test_many_prompts_are_read_in_rows_of_bounded_length(policy):
    """Whichever row a prompt was read in, its samples are those that it has when it is read with few others."""
    g = torch.Generator().manual_seed(1)
    sizes = torch.randint(200, 400, (40,), generator=g).tolist()
    ids = [torch.randint(5, policy.head.shape[0], (size,), generator=g).tolist() for size in sizes]
    prompts = [Prompt(str(i), one, seed=i) for i, one in enumerate(ids)]
    rows = []
    handle = policy.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    together, apart = HFEngine(policy), HFEngine(policy, max_rows=4)
    several, few = (engine.generate(prompts, Sampling(1.0, 0, 8), 2) for engine in (together, apart))
    handle.remove()
    assert [r.token_ids for r in several] == [r.token_ids for r in few]
    for one, other in zip(several, few, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-4, rtol=0)
    assert together.counts.prompts == 2 < apart.counts.prompts
    assert max(rows) <= PROMPT_TOKENS < sum(sizes) == together.counts.prompt_tokens


def test_ended_rows_cost_reads_of_their_own_only(policy):
    """Text is looked at after tokens that can close a stop string; every other step reads which rows drew one."""
    prompts = [Prompt(str(i), [5, 6, 7], seed=i) for i in range(8)]
    engine = HFEngine(policy)
    responses = engine.generate(prompts, Sampling(1.0, 0, 60, ("=",)), n=2)
    looks = sum(r.text.count("=") for r in responses) + len(responses)
    assert engine.counts.host_reads <= engine.counts.steps + 1 + 2 * looks
    assert engine.counts.steps == max(len(r.token_ids) for r in responses) - 1


@pytest.mark.parametrize("vocab", [5, 8 * BLOCK + 1, 40 * BLOCK, 151_936])
def test_draws_follow_the_cumulative_distribution_whatever_the_vocabulary(vocab):
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(64, vocab, generator=g) * 3
    logits[torch.rand(64, vocab, generator=g) < 0.3] = float("-inf")
    logits[:, vocab // 2] = 1.0
    uniforms = torch.rand(64, generator=g, dtype=torch.float64)
    uniforms[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    ids, log_probs = draw(logits, uniforms, 0.7)
    exact = (logits.double() / 0.7).softmax(-1)
    above = exact.cumsum(-1).gather(1, ids[:, None])[:, 0]
    mass = exact.gather(1, ids[:, None])[:, 0]
    assert bool((mass > 0).all())
    assert bool((above > uniforms - 2e-6).all() and (above - mass < uniforms + 2e-6).all())
    # softmax adds its terms in float32, eight or sixteen side by side: with AVX2 151,936 of them are 3e-5 off.
    torch.testing.assert_close(log_probs.double(), mass.log(), atol=2e-5 if vocab < 50_000 else 1e-4, rtol=0)


def test_a_cache_in_half_precision_has_nothing_left_to_cast(policy, tokenizer):
    """Rotary embeddings make float32 of keys; a cache of them would be cast as a whole at each step."""
    half, seen = Policy(policy.model, tokenizer, torch.bfloat16), set()

    def watch(module, args, kwargs):
        if kwargs["input_ids"].shape[0] > 1:  # a step, not the prompts
            seen.update(x.dtype for layer in kwargs["past_key_values"].layers for x in (layer.keys, layer.values))

    handle = half.backbone.register_forward_pre_hook(watch, with_kwargs=True)
    HFEngine(half).generate([Prompt("p", [5, 6, 7], 0)], Sampling(1.0, 3, 3), n=4)
    handle.remove()
    assert seen == {torch.bfloat16}


@pytest.mark.long
def test_a_compiled_step_survives_changing_rows_and_lengths(policy):
    prompts = [Prompt(str(i), ids, seed=i) for i, (ids, _) in enumerate(random_pairs(policy.head.shape[0], 12))]
    said: list[str] = []
    plain, compiled = HFEngine(policy, max_rows=8), HFEngine(policy, max_rows=8, compile=True, say=said.append)
    for sampling in (Sampling(1.0, 0, 40, ("=", "a")), Sampling(0.8, 5, 150, ("e",)), Sampling(1.0, 0, 70)):
        ours, theirs = compiled.generate(prompts, sampling, 3), plain.generate(prompts, sampling, 3)
        assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert not said
    assert compiled.compiled is not None
