"""Checks of a model before it is used, and whether an update changed its weights."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES
from rlreason.model.log_probs import without_padding
from rlreason.model.packing import pack
from rlreason.runtime.text import first_line

if TYPE_CHECKING:
    from rlreason.model.policy import Policy


@torch.no_grad()
def check_model(policy: "Policy") -> None:
    """Switch the model to packed attention; `ConfigError` if that changes its log-probabilities.

    They are compared with the model's own forward pass, in float32 and on short sequences. A model is refused
    whose logits are capped or shifted after the output head, or whose attention has caps or sinks. One with recurrent
    layers is scored a sequence at a time, and refused if sampling from its cache gives other numbers.
    """
    policy.model.set_attn_implementation("eager")
    states = ", ".join(_recurrent_layers(policy))
    if states:
        policy.packs = policy.shares_prompts = False
    theirs = _model_log_probs(policy)
    if states:
        policy.attention, policy.why_attention = "sdpa" if policy.model._supports_sdpa else "eager", "the model's own"
        policy.remarks.append(f"one sequence to a pass, which is slower ({states}: a state goes from token to token)")
    policy.model.set_attn_implementation(NAMES[policy.attention] if policy.packs else policy.attention)
    types = policy.compute_dtype, policy.head_dtype
    policy.compute_dtype = policy.head_dtype = torch.float32
    ours = _packed_log_probs(policy)
    shares = policy.shares_prompts and ours.device.type == "cpu"  # on a GPU in half precision: `check_sharing`
    if shares and not (apart := (_packed_log_probs(policy, share=True) - ours).abs().max().item()) < 1e-3:
        policy.stop_sharing(f"log-probabilities differ by {apart:.2g}")
    policy.compute_dtype, policy.head_dtype = types
    worst, where, why = (ours - theirs).abs().max().item(), "in its own forward pass", "caps, scales or attention sinks"
    if math.isnan(worst):
        raise ConfigError(
            f"model {type(policy.model).__name__} gives log-probabilities that are no numbers, as weights do that a "
            "diverged run has left: give another model"
        )
    if states and worst < 1e-3:
        where, why = "where it samples from its cache", f"layers that carry a state from token to token, {states}"
        try:
            worst = (ours - _model_log_probs(policy, by_token=True)).abs().max().item()
        except Exception as error:  # a model with a cache of its own kind
            worst, why = math.inf, f"{why} ({first_line(error)})"
    if not worst < 1e-3:  # float32 rounding stays below a tenth of this
        raise ConfigError(
            f"model {type(policy.model).__name__} gives other log-probabilities here than {where} (by up to "
            f"{worst:.3g} nats), because of {why}: choose a model without them, such as Qwen2, Qwen3, Llama, OLMo 2 or "
            "SmolLM2"
        )


def _model_log_probs(policy: "Policy", by_token: bool = False) -> Tensor:
    """Log-probabilities of the short sequences by the model itself: all at once, or token by token from its cache."""
    found = list[Tensor]()
    for prompt, response in _short_pairs(policy):
        parts = [prompt, *([token] for token in response)] if by_token else [[*prompt, *response]]
        ids = [torch.tensor([part], device=policy.head.device) for part in parts]
        cache = {"past_key_values": DynamicCache(config=policy.model.config)} if by_token else {"use_cache": False}
        logits = torch.cat([policy.model(part, **cache).logits[0].float() for part in ids])
        log_probs = without_padding(logits, policy.padded_from).log_softmax(-1)
        found += [log_probs[len(prompt) + t - 1, token] for t, token in enumerate(response)]
    return torch.stack(found)


def _recurrent_layers(policy: "Policy") -> list[str]:
    """List the kinds of layers with a convolution over tokens (short ones, state spaces), or else linear attention."""
    layers = policy.model.modules()
    parents = (layer for layer in layers if any(isinstance(child, nn.Conv1d) for child in layer.children()))
    linear = {"linear_attention"}.intersection(getattr(policy.model.config, "layer_types", None) or ())
    return sorted({type(layer).__name__ for layer in parents} or linear)


def _packed_log_probs(policy: "Policy", share: bool = False) -> Tensor:
    """Log-probabilities of the short sequences, in one row, or in a row each if the policy scores that way."""
    pairs = _short_pairs(policy)
    rows = [pairs] if policy.packs else [[pair] for pair in pairs]
    return torch.cat([policy.log_probs(pack(row, policy.head.device, share))[0] for row in rows])


def _short_pairs(policy: "Policy") -> list[tuple[list[int], list[int]]]:
    """Short sequences that every model can read, two with the same prompt; a longer one, where a state may drift."""
    size = policy.padded_from or policy.head.shape[0]
    pairs = [([3, 5, 7], [11, 13, 2]), ([3, 5, 7], [6, 8, 12, 10]), ([4], [9, 9, 9])]
    pairs += [] if policy.packs else [([5, 7, 11], [(17 * i) % 97 + 3 for i in range(40)])]
    return [([i % size for i in prompt], [i % size for i in response]) for prompt, response in pairs]


@torch.no_grad()
def check_kernel(policy: "Policy") -> None:
    """Raise `ConfigError` if the policy's kernel gives other log-probabilities than one causal call per sequence.

    Both are computed in the policy's own dtype.
    """
    ours = _packed_log_probs(policy)
    policy.model.set_attn_implementation(NAMES["sdpa"])
    plain = _packed_log_probs(policy)
    policy.model.set_attn_implementation(NAMES[policy.attention])
    worst = (ours - plain).abs().max().item()
    if not worst < 0.5:  # nats by which half precision may change a token, as between engine and trainer
        raise ConfigError(
            f"model.attention={policy.attention} gives other log-probabilities here than one call per sequence (by "
            f"up to {worst:.3g} nats): choose model.attention=sdpa"
        )


def check_head(policy: "Policy") -> None:
    """Raise `ConfigError` if the output head in its number type gives other log-probabilities or gradients than in
    float32, or cannot be computed here.
    """
    head, why = policy.head_dtype, ""
    try:
        (ours, slope), policy.head_dtype = _input_gradient(policy, share=False), torch.float32
        plain, expected = _input_gradient(policy, share=False)
        worst, apart = (ours - plain).abs().max().item(), ((slope - expected).norm() / expected.norm()).item()
        if not (worst < 0.5 and apart < 0.1):  # rounding stays below a tenth of both
            why = f"log-probabilities differ by up to {worst:.2g} nats from those in float32, gradients by {apart:.2g}"
    except RuntimeError as error:  # this GPU or torch lacks the product
        why = first_line(error)
    finally:
        policy.head_dtype = head
    if why:
        name = str(head).removeprefix("torch.")
        raise ConfigError(f"the output head cannot multiply in {name} here ({why}): set model.head=float32")


def check_sharing(policy: "Policy") -> None:
    """Stop sharing prompts if that changes log-probabilities or gradients, or cannot be computed.

    Both are computed in the policy's own dtype.
    """
    why = None
    try:
        (shared, slope), (plain, expected) = (_input_gradient(policy, share) for share in (True, False))
        apart = (slope - expected).norm() / expected.norm()
        if not ((shared - plain).abs().max() < 0.5 and apart < 0.1):  # half precision rounds each part's output
            why = f"gradients differ by {apart.item():.2g}"
    except (RuntimeError, AttributeError, TypeError) as error:  # this torch or GPU has another kernel, or none
        why = first_line(error)
    if why is not None:
        policy.stop_sharing(why)


def _input_gradient(policy: "Policy", share: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of short sequences, and the gradient of their sum by the input embeddings, in float32."""
    weight = policy.model.get_input_embeddings().weight
    is_trained = weight.requires_grad
    weight.requires_grad_(True)  # even for a frozen reference model
    try:
        found = _packed_log_probs(policy, share)
        (gradient,) = torch.autograd.grad(found.sum(), [weight])
    finally:
        weight.requires_grad_(is_trained)
    return found.detach(), gradient.float()


ELEMENTS = 64  # of each tensor


@torch.no_grad()
def sampled_elements(tensors: Iterable[Tensor], most: int = ELEMENTS) -> list[Tensor]:
    """Copy up to `most` elements of each tensor, spread evenly over it; the same ones in every call."""
    here = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)  # this process's part
    return [t.detach().reshape(-1)[:: max(1, -(-t.numel() // most))].clone() for t in here]


@torch.no_grad()
def changed_share(before: Sequence[Tensor], after: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Share of the elements with a gradient that changed, averaged over the tensors that have any -> scalar.

    Rows of an embedding whose token did not occur have none. NaN if no element has a gradient.

    >>> ones = torch.ones(2)
    >>> changed_share([torch.zeros(2), torch.zeros(2)], [torch.tensor([0.0, 1.0]), torch.zeros(2)], [ones, 0 * ones])
    tensor(0.5000)
    """
    moved = [((a != b) & (g != 0)).sum() / (g != 0).sum() for a, b, g in zip(before, after, gradients, strict=True)]
    return torch.stack(moved).nanmean() if moved else torch.tensor(torch.nan)


@torch.no_grad()
def not_finite(states: Iterable[dict[str, Any]]) -> set[int]:
    """Return the indices of parameters with a floating-point moment that is not finite."""
    kept = [[t for t in state.values() if isinstance(t, Tensor) and t.is_floating_point()] for state in states]
    owners = [n for n, tensors in enumerate(kept) for _ in tensors]
    if not owners:
        return set()
    norms = torch._foreach_norm([t.detach() for tensors in kept for t in tensors], ord=torch.inf)
    finite = torch.isfinite(torch.stack([norm.float().cpu() for norm in norms])).tolist()
    return {owner for owner, good in zip(owners, finite, strict=True) if not good}
