"""A decoding batch keeps each prompt once, and attends to it as to a row's own keys."""

import pytest
import torch

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.engine import HFEngine
from rlreason.model.attention import CachedPrompts, single_query


@pytest.mark.parametrize("counts", [[3, 1, 2], [1, 1, 1], [4]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_to_a_shared_prompt_is_that_to_a_copy(counts, kv_heads):
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows, most, before, columns = sum(counts), max(counts), 7, 5
    asked = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    place = torch.cat([i * most + torch.arange(n) for i, n in enumerate(counts)])
    filled = torch.zeros(len(counts) * most, dtype=torch.int64)
    filled[place] = torch.arange(rows)
    q, k, v = random(rows, 4, 1, 8), random(rows, kv_heads, columns, 8), random(rows, kv_heads, columns, 8)
    keys, values = random(len(counts), kv_heads, before, 8), random(len(counts), kv_heads, before, 8)
    attends = torch.rand(rows, 1, 1, before + columns, generator=g) < 0.6
    attends[..., -1] = True
    mask = torch.zeros(attends.shape, dtype=torch.float64).masked_fill_(~attends, float("-inf"))
    shared = single_query(q, k, v, mask, 0.3, CachedPrompts([keys], [values], filled, place), 0)
    copied = torch.cat([keys[asked], k], 2), torch.cat([values[asked], v], 2)
    exact = torch.nn.functional.scaled_dot_product_attention(q, *copied, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(shared, exact.transpose(1, 2), atol=1e-12, rtol=0)


def test_samples_of_a_prompt_keep_it_once(policy):
    prompts = [Prompt(str(i), list(range(5, 15 + 3 * i)), seed=i) for i in range(4)]
    seen: list[tuple[int, ...]] = []

    def watch(module, args, kwargs):
        if "prompts" in kwargs:
            (layer, *_), shared = kwargs["past_key_values"].layers, kwargs["prompts"]
            assert len(shared.place) == len(kwargs["input_ids"]) == len(layer.keys)
            seen.append((layer.prompt_keys.shape[0], layer.prompt_keys.shape[2], layer.keys.shape[0]))

    handle = policy.backbone.register_forward_pre_hook(watch, with_kwargs=True)
    HFEngine(policy, max_rows=16).generate(prompts, Sampling(1.0, 0, 40, ("=", "a")), n=8)
    handle.remove()
    assert seen[0] == (2, 13, 16)  # two prompts at a time, as many columns as the longer has tokens
    assert any(0 < count < rows < 16 for count, _, rows in seen)  # groups of which some have ended
