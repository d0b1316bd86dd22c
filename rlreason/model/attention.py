"""One attention function for training on packed sequences and for sampling with a cache.

Packed sequences lie end to end in one row; each attends to itself only, so no token is padding and
no sample can see another. On a GPU in half precision a variable-length flash kernel does it, torch's own
or the flash-attn package's (kernels.py); elsewhere one causal call per sequence gives the same numbers.
Responses that share a prompt attend to it as well (shared_prompts.py).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlreason.model.cached_prompts import CachedPrompts, single_query
from rlreason.model.kernels import HALF, KERNELS, end_to_end
from rlreason.model.shared_prompts import CPU, GPU, Layout, attention_by_layout

#: Kernel -> its name in transformers, which gives a meaning of its own to some words in a name, such as flash.
NAMES = {"sdpa": "rlreason_packed", "varlen": "rlreason_packed_varlen", "flash_attention_2": "rlreason_packed_fa2"}


def packed_attention(
    module: nn.Module,
    query: Tensor,  # (batch, heads, seq, head_dim)
    key: Tensor,  # (batch, kv_heads, seq, head_dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,  # of packed sequences
    prompts: CachedPrompts | None = None,  # of sequences that are decoded
    sliding_window: int | None = None,
    kernel: str = "sdpa",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence -> (batch, seq, heads, head_dim); no attention weights.

    `kernel` computes it where numbers are in half precision. Without a `layout` it is ordinary attention.
    """
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings promote queries and keys to float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if layout is None:
        if query.shape[2] == 1 and attention_mask is not None:
            layer: Any = module.layer_idx
            return single_query(query, key, value, attention_mask, scaling, prompts, layer), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if sliding_window is not None and layout.longest > sliding_window:
        raise ValueError(
            f"sequences of {layout.longest} tokens exceed the model's sliding window of {sliding_window}, which packed "
            "training does not implement: lower sampling.max_tokens, or choose a model with full attention"
        )
    if layout.shared is not None or not query.is_cuda:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (tokens, heads, head_dim)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attention_by_layout(q, k, v, layout, GPU if q.is_cuda else CPU, scale).unsqueeze(0), None
    if kernel != "sdpa" and query.dtype in HALF:  # a check in float32 asks for the numbers, not for the kernel
        bounds = layout.parts.query_bounds
        return end_to_end(KERNELS[kernel], query, key, value, bounds, layout.longest, scaling), None
    # torch's kernel for float32 on a GPU takes no grouped heads, and without it all scores would be kept for backward
    return one_by_one(query, key, value, list(layout.parts.queries), scaling, repeat=query.dtype not in HALF), None


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, sizes: list[int], scale: float | None, repeat: bool = False
) -> Tensor:
    """One causal call per sequence: (1, heads, tokens, head_dim) -> (1, tokens, heads, head_dim).

    `sizes` are the sequences' lengths in tokens; `repeat` gives every query head its own copy of the keys.
    """
    if repeat and (times := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    gqa = query.shape[1] != key.shape[1]
    parts = [  # of splits, not slices: the gradient of a slice is as large as the whole row, once per sequence
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        for q, k, v in zip(*(x.split(sizes, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """None for packed rows, whose bounds are enough; the usual mask for anything else."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)


for _kernel, _name in NAMES.items():
    AttentionInterface.register(_name, partial(packed_attention, kernel=_kernel))
    AttentionMaskInterface.register(_name, _mask)
