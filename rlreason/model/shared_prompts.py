"""Attention of several responses to one prompt that is laid out, and computed, once.

A row holds a prompt and then its responses: P, R_1, R_2, ... Each part attends to itself, causally; the responses of a
group attend to their prompt as well, all in one call. The two outputs of a response's token are merged through their
log-sum-exp. The backward pass is written here: a kernel's own drops the gradient of its log-sum-exp, while each call's
backward pass is right as soon as it is given the *merged* output and log-sum-exp, since softmax weights and the inner
product of output and gradient are all that it takes from them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Where queries and keys of a call are cut: the i-th stretch of queries attends to the i-th stretch of keys."""

    queries: tuple[int, ...]  # tokens of each stretch
    keys: tuple[int, ...]
    query_bounds: Tensor  # (stretches + 1,) int32, where each begins and ends, on the device
    key_bounds: Tensor


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Which parts of a row have their prompt in another part."""

    across: Cut  # the responses of each group, end to end, and their prompt
    response_at: Tensor  # (tokens of `across.queries`,) where they stand in the row
    prompt_at: Tensor  # (tokens of `across.keys`,)


@dataclass(frozen=True, slots=True)
class Layout:
    """How packed sequences lie in a row."""

    parts: Cut  # of the whole row: sequences that share nothing, prompts, responses; each attends to itself
    longest: int  # tokens of the longest sequence
    shared: SharedPrompts | None = None  # None: each part is a sequence of its own


class Attended(NamedTuple):
    """What attention gives: outputs (tokens, heads, head_dim), and log-sum-exps of scores (heads, tokens) float."""

    out: Tensor
    lse: Tensor


class Kernel(NamedTuple):
    """Attention there and back: queries (tokens, heads, head_dim), keys and values (tokens, kv_heads, head_dim).

    `forward(q, k, v, cut, causal, scale)`, and `backward(grad, q, k, v, attended, cut, causal, scale)` -> gradients of
    q, k and v.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Cut, bool, float], Attended]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Attended, Cut, bool, float], tuple[Tensor, Tensor, Tensor]]


def merged(one: Attended, other: Attended) -> Attended:
    """Attention over two sets of keys, from that over each.

        lse = log(exp(lse_1) + exp(lse_2)),    out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

    >>> one = Attended(torch.tensor([[[1.0]]]), torch.tensor([[0.0]]))
    >>> [round(x.item(), 4) for x in merged(one, Attended(torch.tensor([[[4.0]]]), torch.tensor([[2.0]]).log()))]
    [3.0, 1.0986]
    """
    lse = torch.logaddexp(one.lse, other.lse)
    weights = [(part.lse - lse).exp().t()[..., None] for part in (one, other)]
    out = weights[0] * one.out + weights[1] * other.out
    return Attended(out.to(one.out.dtype), lse)


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, kernel: Kernel, scale: float) -> Tensor:
        out, lse = kernel.forward(q, k, v, layout.parts, True, scale)
        if (shared := layout.shared) is not None:
            rows, prompts = shared.response_at, shared.prompt_at
            own = Attended(out[rows], lse[:, rows])
            both = merged(own, kernel.forward(q[rows], k[prompts], v[prompts], shared.across, False, scale))
            out[rows], lse[:, rows] = both.out, both.lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.kernel, ctx.scale = layout, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, scale, backward = ctx.layout, ctx.scale, ctx.kernel.backward
        grad = grads[0]
        dq, dk, dv = backward(grad, q, k, v, Attended(out, lse), layout.parts, True, scale)
        if (shared := layout.shared) is not None:
            rows, prompts = shared.response_at, shared.prompt_at
            both = Attended(out[rows], lse[:, rows])
            across = backward(grad[rows], q[rows], k[prompts], v[prompts], both, shared.across, False, scale)
            for whole, at, more in zip((dq, dk, dv), (rows, prompts, prompts), across, strict=True):
                whole[at] += more  # no position stands twice in either
        return dq, dk, dv, None, None, None


def attention_by_layout(q: Tensor, k: Tensor, v: Tensor, layout: Layout, kernel: Kernel, scale: float) -> Tensor:
    """(tokens, heads, head_dim) of a row in this layout; keys may have fewer heads than queries. Differentiable."""
    found: Tensor = _SharedPromptAttention.apply(q, k, v, layout, kernel, scale)
    return found


def _heads_first(x: Tensor) -> Tensor:
    """(tokens, heads, ...) -> (1, heads, tokens, ...)"""
    return x.transpose(0, 1)[None]


def _stretches(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """(tokens, heads, ...) cut into parts (1, heads, size, ...) for the processor's kernel.

    In bfloat16 it takes half as long again for its backward pass as in float32, which is therefore the least.
    """
    parts: tuple[Tensor, ...] = _heads_first(x.to(torch.promote_types(x.dtype, torch.float32))).split(sizes, 2)
    return parts


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, cut: Cut, causal: bool, scale: float) -> Attended:
    """A call for each stretch, written into one tensor."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    heads = _stretches(q, cut.queries), _stretches(k, cut.keys), _stretches(v, cut.keys)
    into = _heads_first(out).split(cut.queries, 2), lse[None].split(cut.queries, 2)
    for one, keys, values, to, norm_to in zip(*heads, *into, strict=True):
        found, norm = attend(one, keys, values, 0.0, causal, scale=scale)
        to.copy_(found)
        norm_to.copy_(norm)
    return Attended(out, lse)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, cut: Cut, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    by_query = [_stretches(x, cut.queries) for x in (grad, q, attended.out, attended.lse.t())]
    by_key = [_stretches(x, cut.keys) for x in (k, v)]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for g, one, out, norm, keys, values in zip(*by_query, *by_key, strict=True):
        found.append(differentiate(g, one, keys, values, out, norm, 0.0, causal, scale=scale))
    dq, dk, dv = (torch.cat(parts, 2)[0].transpose(0, 1).to(q.dtype) for parts in zip(*found, strict=True))
    return dq, dk, dv


def _gpu_forward(q: Tensor, k: Tensor, v: Tensor, cut: Cut, causal: bool, scale: float) -> Attended:
    """One variable-length flash call."""
    longest = max(cut.queries), max(cut.keys)
    bounds = cut.query_bounds, cut.key_bounds
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.contiguous(), k.contiguous(), v.contiguous(), *bounds, *longest, 0.0, causal, False, scale=scale
    )
    return Attended(out, lse)


def _gpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, cut: Cut, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(cut.queries), max(cut.keys)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    given = [x.contiguous() for x in (grad, q, k, v, *attended)]
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *given, cut.query_bounds, cut.key_bounds, *longest, 0.0, causal, *no_dropout, scale=scale
    )
    return dq, dk, dv


CPU = Kernel(_cpu_forward, _cpu_backward)
GPU = Kernel(_gpu_forward, _gpu_backward)
