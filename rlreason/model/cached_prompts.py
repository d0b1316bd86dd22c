"""Attention of one new token per row, to its prompt, cached once for all samples, and to its own response.

Scores over both stand side by side, so that one softmax takes them; what differs from a row of its own keys is only
that a prompt's products are those of all its rows at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CachedPrompts:
    """The prompts of a batch that decodes, and which rows have them: the rows of a prompt follow each other."""

    keys: list[Tensor]  # layer by layer (prompts, kv_heads, columns, head_dim); shorter prompts end in the last column
    values: list[Tensor]
    rows: Tensor  # (prompts * most,) the rows of each prompt, filled up with any row; `most` rows have one prompt
    place: Tensor  # (rows,) where each row stands in `rows`


def single_query(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, prompts: CachedPrompts | None, layer: int
) -> Tensor:
    """softmax(scale q K^T + mask) V for one query a row, where K and V are a prompt's and then the row's own.

    q (rows, heads, 1, head_dim); k, v (rows, kv_heads, columns, head_dim); mask (rows, 1, 1, prompt columns + columns),
    0 or -inf (or bool). Returns (rows, 1, heads, head_dim). A general kernel would copy keys once per query head.
    """
    rows, heads, _, width = q.shape
    kv_heads = k.shape[1]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width)
    scores = grouped @ k.transpose(-1, -2)
    if prompts is not None:
        scores = torch.cat([_product(grouped, prompts.keys[layer].transpose(-1, -2), prompts), scores], -1)
    # One pass scales, masks and makes float32 of the products: each pass costs as much as the softmax.
    scores = torch.add(mask, scores, alpha=scale if scale is not None else width**-0.5)
    weights = scores.softmax(-1).to(v.dtype)
    before = weights.shape[-1] - k.shape[-2]  # columns of the prompt
    out = weights[..., before:] @ v
    if prompts is not None:
        out = out + _product(weights[..., :before], prompts.values[layer], prompts)
    return out.reshape(rows, 1, heads, width)


def _product(x: Tensor, shared: Tensor, prompts: CachedPrompts) -> Tensor:
    """x (rows, kv_heads, group, n) times its prompt's matrix: shared (prompts, kv_heads, n, m) -> (.., group, m)."""
    count, group = len(shared), x.shape[2]
    most = len(prompts.rows) // count
    if most == 1:
        return x @ shared
    asked = x.flatten(1).index_select(0, prompts.rows).view(count, most, *x.shape[1:])
    found = asked.transpose(1, 2).flatten(2, 3) @ shared  # (prompts, kv_heads, most * group, m)
    by_row: Tensor = found.unflatten(2, (most, group)).transpose(1, 2).flatten(0, 1)
    return by_row.flatten(1).index_select(0, prompts.place).view(len(x), x.shape[1], group, -1)
