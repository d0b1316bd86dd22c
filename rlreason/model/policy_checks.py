"""Checks of a model before it is used: packed sequences must get the log-probabilities of its own forward pass."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES
from rlreason.model.logprobs import without_padding
from rlreason.model.packing import pack
from rlreason.runtime.text import first_line

if TYPE_CHECKING:
    from rlreason.model.policy import Policy


@torch.no_grad()
def check_model(policy: "Policy") -> None:
    """Switch the model to packed attention; `ConfigError` where that changes its log-probabilities.

    They are compared with the model's own forward pass, in float32 and on short sequences. A model is refused
    whose logits are capped, scaled or shifted after the output head, or whose attention has caps or sinks.
    """
    if states := _carried(policy.model):
        raise ConfigError(
            f"model {type(policy.model).__name__} has layers that carry a state from token to token "
            f"({', '.join(states)}), which would go on from one sequence to the next in the rows that are scored here: "
            "choose a model whose layers all attend, such as Qwen2, Qwen3, Llama, OLMo 2 or SmolLM2"
        )
    here, pairs = policy.head.device, _short_pairs(policy)
    policy.model.set_attn_implementation("eager")
    plain = [torch.tensor([[*p, *r]], device=here) for p, r in pairs]
    logits = [policy.model(input_ids=ids, use_cache=False).logits[0].float() for ids in plain]
    logits = [without_padding(rows, policy.padded_from).log_softmax(-1) for rows in logits]
    theirs = [lp[len(p) + t - 1, y] for lp, (p, r) in zip(logits, pairs, strict=True) for t, y in enumerate(r)]
    policy.model.set_attn_implementation(NAMES[policy.attention])
    types = policy.compute_dtype, policy.head_dtype
    policy.compute_dtype = policy.head_dtype = torch.float32
    ours, _ = policy.log_probs(pack(pairs, here))
    if policy.shares_prompts and here.type == "cpu":  # on a GPU in half precision: `check_sharing`
        shared, _ = policy.log_probs(pack(pairs, here, share_prompts=True))
        if not (apart := (shared - ours).abs().max().item()) < 1e-3:
            policy.stop_sharing(f"log-probabilities differ by {apart:.2g}")
    policy.compute_dtype, policy.head_dtype = types
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


def _carried(model: nn.Module) -> list[str]:
    """The kinds of layers with a convolution over tokens: short ones, linear attention, state spaces."""
    parents = (layer for layer in model.modules() if any(isinstance(child, nn.Conv1d) for child in layer.children()))
    return sorted({type(layer).__name__ for layer in parents})


def _short_pairs(policy: "Policy") -> list[tuple[list[int], list[int]]]:
    """Short sequences that every model can read, two with one prompt."""
    size = policy.padded_from or policy.head.shape[0]
    pairs = [([3, 5, 7], [11, 13, 2]), ([3, 5, 7], [6, 8, 12, 10]), ([4], [9, 9, 9])]
    return [([i % size for i in prompt], [i % size for i in response]) for prompt, response in pairs]


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


def check_head(policy: "Policy") -> None:
    """`ConfigError` where the output head in its own number type gives other log-probabilities or gradients than in
    float32, or cannot be computed here.
    """
    head, why = policy.head_dtype, ""
    try:
        (ours, slope), policy.head_dtype = _slope(policy, share=False), torch.float32
        plain, expected = _slope(policy, share=False)
        worst, apart = (ours - plain).abs().max().item(), ((slope - expected).norm() / expected.norm()).item()
        if not (worst < 0.5 and apart < 0.1):  # rounding stays below a tenth of both
            why = f"log-probabilities differ by up to {worst:.2g} nats from those in float32, gradients by {apart:.2g}"
    except RuntimeError as error:  # this GPU or this torch has no such product
        why = first_line(error)
    finally:
        policy.head_dtype = head
    if why:
        name = str(head).removeprefix("torch.")
        raise ConfigError(f"the output head cannot multiply in {name} here ({why}): set model.head=float32")


def check_sharing(policy: "Policy") -> None:
    """Have prompts repeated where a prompt that responses share gives other log-probabilities or gradients than that.

    Both are computed in the policy's own dtype. They are repeated, too, where sharing cannot be computed.
    """
    why = None
    try:
        (shared, slope), (plain, expected) = (_slope(policy, share) for share in (True, False))
        apart = (slope - expected).norm() / expected.norm()
        if not ((shared - plain).abs().max() < 0.5 and apart < 0.1):  # half precision rounds each part's output
            why = f"gradients differ by {apart.item():.2g}"
    except (RuntimeError, AttributeError, TypeError) as error:  # this torch or this GPU has another kernel, or none
        why = first_line(error)
    if why is not None:
        policy.stop_sharing(why)


def _slope(policy: "Policy", share: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of short sequences, and the gradient of their sum by the input embeddings, in float32."""
    weight = policy.model.get_input_embeddings().weight
    is_trained = weight.requires_grad
    weight.requires_grad_(True)  # also of a reference model, which is frozen
    try:
        found, _ = policy.log_probs(pack(_short_pairs(policy), policy.device, share))
        (gradient,) = torch.autograd.grad(found.sum(), [weight])
    finally:
        weight.requires_grad_(is_trained)
    return found.detach(), gradient.float()
