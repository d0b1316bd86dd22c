"""Checks of a model before it is used: packed sequences must get the log-probabilities of its own forward pass."""

import math
from typing import TYPE_CHECKING

import torch

from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES
from rlreason.model.packing import pack

if TYPE_CHECKING:
    from rlreason.model.policy import Policy


@torch.no_grad()
def check_model(policy: "Policy") -> None:
    """Switch the model to packed attention; `ConfigError` where that changes its log-probabilities.

    They are compared with the model's own forward pass, in float32 and on two short sequences. A model is refused
    whose logits are capped, scaled or shifted after the output head, or whose attention has caps or sinks.
    """
    here, pairs = policy.head.device, _short_pairs(policy)
    policy.model.set_attn_implementation("eager")
    plain = [torch.tensor([[*p, *r]], device=here) for p, r in pairs]
    logits = [policy.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1) for ids in plain]
    theirs = [lp[len(p) + t - 1, y] for lp, (p, r) in zip(logits, pairs, strict=True) for t, y in enumerate(r)]
    policy.model.set_attn_implementation(NAMES[policy.attention])
    dtype, policy.compute_dtype = policy.compute_dtype, torch.float32
    ours, _ = policy.log_probs(pack(pairs, here))
    policy.compute_dtype = dtype
    worst = (ours - torch.stack(theirs)).abs().max().item()
    if math.isnan(worst):
        raise ConfigError(
            f"model {type(policy.model).__name__} gives log-probabilities that are no numbers, as weights do that a "
            "diverged run has left: give another model"
        )
    if not worst < 1e-3:  # float32 rounding stays below a tenth of this
        raise ConfigError(
            f"model {type(policy.model).__name__} gives other log-probabilities here than in its own forward pass "
            f"(by up to {worst:.3g} nats), because of caps, scales or attention sinks: choose a model without "
            "them, such as Qwen2, Qwen3, Llama, OLMo 2 or SmolLM2"
        )


def _short_pairs(policy: "Policy") -> list[tuple[list[int], list[int]]]:
    """Two short sequences that every model can read."""
    size = policy.head.shape[0]
    return [([3 % size, 5 % size, 7 % size], [11 % size, 13 % size, 2 % size]), ([4 % size], [9 % size] * 3)]


@torch.no_grad()
def check_kernel(policy: "Policy") -> None:
    """`ConfigError` where the policy's kernel gives other log-probabilities than one causal call per sequence does.

    Both are computed in the policy's own dtype.
    """
    pairs = _short_pairs(policy)
    ours, _ = policy.log_probs(pack(pairs, policy.device))
    policy.model.set_attn_implementation(NAMES["sdpa"])
    plain, _ = policy.log_probs(pack(pairs, policy.device))
    policy.model.set_attn_implementation(NAMES[policy.attention])
    worst = (ours - plain).abs().max().item()
    if not worst < 0.5:  # what rounding in half precision may do to a token, as between engine and trainer
        raise ConfigError(
            f"model.attention={policy.attention} gives other log-probabilities here than one call per sequence (by "
            f"up to {worst:.3g} nats): choose model.attention=sdpa"
        )
