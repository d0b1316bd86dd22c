"""What surrounds vLLM and runs without it: the memory plan, and how stacked weights are compared."""

from collections.abc import Iterable

import pytest
from torch import Tensor, nn

from rlreason.engines.vllm.engine import plan_memory
from rlreason.engines.vllm.server import Digest, differing_tensors
from rlreason.errors import ConfigError


def digests(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Digest]:
    """Digest all weights."""
    return {name: Digest.of(weight) for name, weight in weights}


def test_stacked_layers_are_compared_part_by_part():
    """What a GPU keeps unpacked, in a model made by hand: q, k and v in one matrix, and a padded vocabulary."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(8, 4), "attn": nn.ModuleDict({"qkv_proj": nn.Linear(4, 8, bias=False)})}
    )
    stacked, table = model["attn"]["qkv_proj"].weight.detach(), model["embed"].weight.detach()
    weights = {
        "embed.weight": table[:5],
        "attn.q_proj.weight": stacked[:4],
        "attn.k_proj.weight": stacked[4:6].clone(),
        "attn.v_proj.weight": stacked[6:],
        "elsewhere.weight": table,
    }
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    held = digests(model.named_parameters())
    assert differing_tensors(held, digests(weights.items()), fused) == (4, ())
    weights["attn.k_proj.weight"][1, 2] += 1e-3
    assert differing_tensors(held, digests(weights.items()), fused) == (4, ("attn.k_proj.weight",))


def test_memory_is_planned_before_anything_is_loaded(policy):
    plan = plan_memory(policy, policy.device, max_len=100, max_rows=8, cache_gb=None)
    token = 2 * 2 * 4 * 8 * 4  # keys and values, layers, heads, head_dim, bytes
    assert plan.cache == token * (100 + 128) * 8
    assert plan.weights == 4 * sum(p.numel() for p in policy.model.parameters())
    with pytest.raises(ConfigError, match=r"rollout.kv_cache_gb"):
        plan_memory(policy, policy.device, max_len=100, max_rows=8, cache_gb=0.0001)
    with pytest.raises(ConfigError, match=r"rollout.max_rows"):
        plan_memory(policy, policy.device, max_len=100, max_rows=8, cache_gb=1e6)
