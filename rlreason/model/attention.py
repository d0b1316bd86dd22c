"""Attention for packed training and cached sampling, and the kernels that this machine can use."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlreason.errors import ConfigError
from rlreason.model.packing import Layout, attention_by_layout

HALF = (torch.float16, torch.bfloat16)
OLDEST_GPU = (8, 0)  # compute capability of Ampere, the first for which the flash kernels are written


def select_kernel(requested: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return (kernel, reason) on this device, for matrix products in `dtype`.

    `auto`: torch's variable-length kernel if it runs here, else `sdpa`. A kernel requested by name that cannot run is a
    `ConfigError`.
    """
    if requested == "sdpa":
        return "sdpa", "as asked"
    obstacle = ""
    if device.type != "cuda":
        obstacle = "no GPU"
    elif (capability := torch.cuda.get_device_capability(device)) < OLDEST_GPU:
        obstacle = "a GPU of compute capability {}.{}, below 8.0".format(*capability)
    elif dtype not in HALF:
        obstacle = f"products in {str(dtype).removeprefix('torch.')}"
    if requested == "auto":
        return ("sdpa", obstacle) if obstacle else ("varlen", "a GPU, in half precision")
    if not obstacle and requested == "flash_attention_2":
        try:
            from flash_attn import flash_attn_varlen_func  # noqa: F401
        except ImportError as error:  # not installed, or built for another torch
            obstacle = f"{error}; pip install --no-build-isolation 'rlreason[flash-attn]' builds it for this torch"
    if obstacle:
        raise ConfigError(
            f"model.attention={requested} cannot run here ({obstacle}): choose model.attention=auto, and for a GPU's "
            "kernels model.dtype=bfloat16"
        )
    return requested, "as asked"


@dataclass(frozen=True, slots=True)
class CachedPrompts:
    """The prompts of a batch being decoded, and their rows: rows with the same prompt are consecutive."""

    keys: list[Tensor]  # layer by layer (prompts, kv_heads, columns, head_dim); shorter prompts end in the last column
    values: list[Tensor]
    rows: Tensor  # (prompts * most,) the rows of each prompt, padded with any row; a prompt has up to `most` rows
    place: Tensor  # (rows,) the index of each row in `rows`

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """softmax(scale q K^T + mask) V for one query per row, where K and V are a prompt's, followed by the row's own.

        q (rows, heads, 1, head_dim); k, v (rows, kv_heads, columns, head_dim); mask (rows, 1, 1, prompt columns +
        columns), 0 or -inf. Returns (rows, 1, heads, head_dim). A general kernel would copy keys once per query head.
        """
        rows, heads, _, width = q.shape
        grouped = q.reshape(rows, k.shape[1], -1, width)
        of_prompt = self._times(grouped, self.keys[layer].mT)
        scores = torch.cat([of_prompt, grouped @ k.mT], -1)
        # One pass scales, masks and converts the products to float32: each pass costs as much as the softmax.
        weights = torch.add(mask, scores, alpha=scale).softmax(-1).to(v.dtype)
        before = of_prompt.shape[-1]  # columns of the prompt
        out = weights[..., before:] @ v + self._times(weights[..., :before], self.values[layer])
        return out.reshape(rows, 1, heads, width)

    def _times(self, x: Tensor, shared: Tensor) -> Tensor:
        """Multiply x (rows, kv_heads, group, n) by its prompt's matrix: (prompts, kv_heads, n, m) -> (.., group, m)."""
        most, group = len(self.rows) // len(shared), x.shape[2]
        if most == 1:
            return x @ shared
        asked = x.flatten(1).index_select(0, self.rows).view(len(shared), most, *x.shape[1:])
        found = asked.transpose(1, 2).flatten(2, 3) @ shared  # (prompts, kv_heads, most * group, m)
        by_row: Tensor = found.unflatten(2, (most, group)).transpose(1, 2).flatten(0, 1)
        return by_row.flatten(1).index_select(0, self.place).view(len(x), x.shape[1], group, -1)


#: Kernel -> its name in transformers, which interprets parts of a name, such as flash.
NAMES = {"sdpa": "rlreason_packed", "varlen": "rlreason_packed_varlen", "flash_attention_2": "rlreason_packed_fa2"}


def packed_attention(
    module: Any,  # an attention layer of transformers
    query: Tensor,  # (batch, heads, seq, head_dim)
    key: Tensor,  # (batch, kv_heads, seq, head_dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,  # of packed sequences
    prompts: CachedPrompts | None = None,  # of sequences being decoded
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence -> (batch, seq, heads, head_dim); no attention weights.

    The model's kernel computes it for numbers in half precision. Without a `layout` it is ordinary attention.
    """
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings promote queries and keys to float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if prompts is not None:
        assert attention_mask is not None
        return prompts.attend(module.layer_idx, query, key, value, attention_mask, scale), None
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **kwargs)
    half = query.dtype in HALF  # a check in float32 tests the numbers, not the kernel
    kernel = module.config._attn_implementation if half else ""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (tokens, heads, head_dim)
    if layout.shared is not None or query.device.type == "cpu" or kernel == NAMES["varlen"]:
        return attention_by_layout(q, k, v, layout, scale)[None], None
    if kernel == NAMES["flash_attention_2"]:
        from flash_attn import flash_attn_varlen_func

        tensors = q.contiguous(), k.contiguous(), v.contiguous()
        return flash_attn_varlen_func(*tensors, *layout.parts.limits(), softmax_scale=scale, causal=True)[None], None
    # Without a kernel all scores would be kept for backward, and only those for bfloat16 take grouped heads.
    return one_by_one(query, key, value, layout.parts.queries, scale, repeat=query.dtype != torch.bfloat16), None


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, sizes: list[int], scale: float | None, repeat: bool = False
) -> Tensor:
    """One causal call per sequence: (1, heads, tokens, head_dim) -> (1, tokens, heads, head_dim).

    `sizes` are the sequences' lengths in tokens; `repeat` gives every query head its own copy of the keys.
    """
    if repeat:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    gqa = query.shape[1] > key.shape[1]
    parts = [  # splits, not slices: the gradient of a slice is as large as the whole row, once per sequence
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        for q, k, v in zip(*(x.split(sizes, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return None for packed rows, whose bounds suffice; the usual mask otherwise."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)


for _name in NAMES.values():
    AttentionInterface.register(_name, packed_attention)
    AttentionMaskInterface.register(_name, _mask)
