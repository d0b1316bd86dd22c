"""Pack sequences end to end within a token budget, sharing prompts, and map per-token numbers back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from rlreason.model.parameters import lists_on_device


@dataclass(frozen=True, slots=True)
class Cut:
    """Stretches of queries and keys in one call: the i-th stretch of queries attends to the i-th stretch of keys."""

    queries: tuple[int, ...]  # tokens of each stretch
    keys: tuple[int, ...]
    query_bounds: Tensor  # (stretches + 1,) int32, where each begins and ends, on the device
    key_bounds: Tensor

    def limits(self) -> tuple[Tensor, Tensor, int, int]:
        """Return bounds and longest stretches of queries and keys, as flash kernels take them."""
        return self.query_bounds, self.key_bounds, max(self.queries), max(self.keys)


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Parts of a row whose prompt is in another part."""

    across: Cut  # the responses of each group, end to end, and their prompt
    response_at: Tensor  # (tokens of `across.queries`,) their positions in the row
    prompt_at: Tensor  # (tokens of `across.keys`,)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where packed sequences are in a row."""

    parts: Cut  # of the whole row: sequences that share nothing, prompts, responses; each attends to itself
    shared: SharedPrompts | None = None  # None: each part is a separate sequence


#: Results of attention: outputs (tokens, heads, head_dim), and log-sum-exps of scores (heads, tokens) float.
Attended = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


def merged(one: Attended, other: Attended) -> Attended:
    """Combine attention over two sets of keys, given that over each.

        lse = log(exp(lse_1) + exp(lse_2)),    out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

    >>> one = torch.tensor([[[1.0]]]), torch.tensor([[0.0]])
    >>> [round(x.item(), 4) for x in merged(one, (torch.tensor([[[4.0]]]), torch.tensor([[2.0]]).log()))]
    [3.0, 1.0986]
    """
    (out_1, lse_1), (out_2, lse_2) = one, other
    lse = torch.logaddexp(lse_1, lse_2)
    weight_1, weight_2 = ((part - lse).exp().t()[..., None] for part in (lse_1, lse_2))
    return (weight_1 * out_1 + weight_2 * out_2).to(out_1.dtype), lse


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        out, lse = _attend(q, k, v, layout.parts, True, scale)
        if (shared := layout.shared) is not None:
            rows, prompts = shared.response_at, shared.prompt_at
            across = _attend(q[rows], k[prompts], v[prompts], shared.across, False, scale)
            out[rows], lse[:, rows] = merged((out[rows], lse[:, rows]), across)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, scale, grad = ctx.layout, ctx.scale, grads[0]
        dq, dk, dv = _differentiate(grad, q, k, v, (out, lse), layout.parts, True, scale)
        if (shared := layout.shared) is not None:
            rows, prompts = shared.response_at, shared.prompt_at
            both = out[rows], lse[:, rows]
            more = _differentiate(grad[rows], q[rows], k[prompts], v[prompts], both, shared.across, False, scale)
            dq[rows] += more[0]  # no position occurs twice in either
            dk[prompts] += more[1]
            dv[prompts] += more[2]
        return dq, dk, dv, None, None


def attention_by_layout(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention (tokens, heads, head_dim) of a row in this layout; keys may have fewer heads. Differentiable."""
    found: Tensor = _SharedPromptAttention.apply(q, k, v, layout, scale)
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor, cut: Cut, causal: bool, scale: float) -> Attended:
    """Compute one variable-length flash call on a GPU, else one call per stretch, written into one tensor."""
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q.contiguous(), k.contiguous(), v.contiguous(), *cut.limits(), 0.0, causal, False, scale=scale
        )
        return out, lse
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    heads = _stretches(q, cut.queries), _stretches(k, cut.keys), _stretches(v, cut.keys)
    into = out.transpose(0, 1)[None].split(cut.queries, 2), lse[None].split(cut.queries, 2)
    for one, keys, values, to, norm_to in zip(*heads, *into, strict=True):
        found, norm = attend(one, keys, values, 0.0, causal, scale=scale)
        to.copy_(found)
        norm_to.copy_(norm)
    return out, lse


def _differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, cut: Cut, causal: bool, scale: float
) -> Gradients:
    """Compute the backward pass of `_attend`."""
    out, lse = attended
    if q.is_cuda:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        tensors = [x.contiguous() for x in (grad, q, k, v, out, lse)]
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *tensors, *cut.limits(), 0.0, causal, *no_dropout, scale=scale
        )
        return dq, dk, dv
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    by_query = [_stretches(x, cut.queries) for x in (grad, q, out, lse.t())]
    by_key = [_stretches(x, cut.keys) for x in (k, v)]
    found: list[Gradients] = []
    for g, one, output, norm, keys, values in zip(*by_query, *by_key, strict=True):
        found.append(differentiate(g, one, keys, values, output, norm, 0.0, causal, scale=scale))
    dq, dk, dv = (torch.cat(parts, 2)[0].transpose(0, 1).to(q.dtype) for parts in zip(*found, strict=True))
    return dq, dk, dv


def _stretches(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Split (tokens, heads, ...) into parts (1, heads, size, ...) for the processor's kernel.

    In bfloat16 its backward pass takes half as long again as in float32, so that is the lowest precision.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    parts: tuple[Tensor, ...] = wide.transpose(0, 1)[None].split(sizes, 2)
    return parts


Pair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Several (prompt, response) pairs in one row. Position `score_at[k]` predicts token `labels[k]`."""

    input_ids: Tensor  # (1, total)
    position_ids: Tensor  # (1, total): position in the sequence, a shared prompt included
    layout: Layout  # which positions attend to which
    score_at: Tensor  # (scored,) every response token of every sequence, in order
    labels: Tensor  # (scored,)
    lengths: Tensor  # (sequences,) response lengths
    response_mask: Tensor  # (sequences, longest response) bool: from lengths, never from token values
    row_at: Tensor  # (scored,) index of each response token in the mask, row after row

    @property
    def bounds(self) -> Tensor:
        """Where each part of the row begins and ends: (parts + 1,) int32."""
        return self.layout.parts.query_bounds

    def to_rows(self, flat: Tensor) -> Tensor:
        """(scored,) -> (sequences, longest response), zero after a row's end. Differentiable."""
        rows = flat.new_zeros(self.response_mask.numel())
        return rows.scatter(0, self.row_at, flat).view(self.response_mask.shape)  # a mask would make backward wait


def pack(pairs: Sequence[Pair], device: torch.device | str = "cpu", share_prompts: bool = False) -> PackedBatch:
    """Pack (prompt ids, response ids) pairs. The last token of a sequence predicts nothing and is left out.

    `share_prompts`: neighbours with the same prompt share one copy. `ValueError` for a prompt without tokens: no
    position would predict the first response token.

    >>> batch = pack([([1, 2], [3, 4]), ([5], [6])])
    >>> batch.input_ids.tolist(), batch.score_at.tolist(), batch.labels.tolist()
    ([[1, 2, 3, 5]], [1, 2, 3], [3, 4, 6])
    >>> batch = pack([([1, 2], [3, 4]), ([1, 2], [6, 7, 8])], share_prompts=True)
    >>> batch.input_ids.tolist(), batch.position_ids.tolist(), batch.score_at.tolist()
    ([[1, 2, 3, 6, 7]], [[0, 1, 2, 2, 3]], [1, 2, 1, 3, 4])
    """
    ids, positions, score_at, parts = list[int](), list[int](), list[int](), list[int]()
    prompt_at, response_at, prompt_sizes, response_sizes = list[int](), list[int](), list[int](), list[int]()
    groups = [[pair] for pair in pairs]
    if share_prompts:
        groups = [list(neighbours) for _, neighbours in groupby(pairs, key=lambda pair: list(pair[0]))]
    for group in groups:
        prompt, responses = group[0][0], [response for _, response in group]
        first, size = len(ids), len(prompt)
        if not prompt:
            raise ValueError("a prompt without tokens has no position that predicts the first response token")
        ids += prompt
        positions += range(size)
        sizes = [size]
        for response in responses:
            at, tokens = len(ids), response[:-1]
            ids += tokens
            positions += range(size, size + len(tokens))
            score_at += [first + size - 1, *range(at, at + len(tokens))][: len(response)]
            sizes.append(len(tokens))
        if len(responses) == 1:  # one sequence
            sizes = [sum(sizes)]
        elif any(sizes[1:]):
            prompt_sizes.append(size)
            response_sizes.append(sum(sizes[1:]))
            prompt_at += range(first, first + size)
            response_at += range(first + size, len(ids))
        parts += [size for size in sizes if size]

    lengths = [len(response) for _, response in pairs]
    labels = [token for _, response in pairs for token in response]
    bounds = [[0, *accumulate(sizes)] for sizes in (parts, response_sizes, prompt_sizes)]
    width = max(lengths, default=0)
    row_at = [i * width + place for i, length in enumerate(lengths) for place in range(length)]
    tensors = lists_on_device([ids, positions, score_at, labels, lengths, row_at, *bounds], device)
    input_ids, position_ids, scored, targets, response_lengths, places, *ends = tensors
    part_bounds, response_bounds, prompt_bounds = (x.to(torch.int32) for x in ends)
    shared = None
    if prompt_sizes:
        across = Cut(tuple(response_sizes), tuple(prompt_sizes), response_bounds, prompt_bounds)
        shared = SharedPrompts(across, *lists_on_device([response_at, prompt_at], device))
    return PackedBatch(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        layout=Layout(Cut(tuple(parts), tuple(parts), part_bounds, part_bounds), shared),
        score_at=scored,
        labels=targets,
        lengths=response_lengths,
        response_mask=torch.arange(width, device=device) < response_lengths[:, None],
        row_at=places,
    )


def divide(pairs: Sequence[Pair], budget: int, max_rows: int | None, share_prompts: bool) -> list[list[int]]:
    """Divide pairs, by number, into bins of at most `budget` tokens (and `max_rows` pairs), keeping prompts together.

    With `share_prompts` a prompt counts once for its neighbours; a group that does not fit into a bin is split, and its
    prompt counts again. A pair larger than the budget gets its own bin. The result depends on prompts and sizes only,
    so a rerun makes the same bins.

    >>> pairs = [([1, 2], [3] * 4), ([5], [6] * 3), ([1, 2], [4] * 4)]
    >>> divide(pairs, 10, None, share_prompts=True), divide(pairs, 10, None, share_prompts=False)
    ([[0, 2], [1]], [[0, 1], [2]])
    """
    groups: dict[object, list[int]] = {}
    for i, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt) if share_prompts else i, []).append(i)
    pieces: list[list[int]] = []
    sizes: list[int] = []
    for members in groups.values():
        prompt_size, lengths = len(pairs[members[0]][0]), [len(pairs[i][1]) for i in members]
        for piece in within_budget(lengths, budget - prompt_size, max_rows):
            pieces.append([members[j] for j in sorted(piece)])
            sizes.append(prompt_size + sum(lengths[j] for j in piece))
    bins = within_budget(sizes, budget, max_rows, list(map(len, pieces)))
    return [[i for piece in bin_ for i in pieces[piece]] for bin_ in bins]


def within_budget(
    sizes: Sequence[int], budget: int, max_rows: int | None = None, rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Divide items into bins of at most `budget` tokens (and `max_rows` rows), longest first, first bin that fits.

    `rows`: of each item, by default one. An item larger than the budget gets its own bin.

    >>> within_budget([5, 3, 4, 2], budget=8)
    [[0, 1], [2, 3]]
    """
    rows = rows or [1] * len(sizes)
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens and rows left in each bin
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = (n for n, left in enumerate(free) if left[0] >= sizes[index] and left[1] >= rows[index])
        place = next(fits, len(bins))
        if place == len(bins):
            bins.append([])
            free.append((budget, sum(rows) if max_rows is None else max_rows))
        bins[place].append(index)
        tokens_left, rows_left = free[place]
        free[place] = tokens_left - sizes[index], rows_left - rows[index]
    return bins
