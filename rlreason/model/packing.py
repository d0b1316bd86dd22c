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

    queries: list[int]  # tokens of each stretch
    keys: list[int]
    query_bounds: Tensor  # (stretches + 1,) int32, where each begins and ends, on the device
    key_bounds: Tensor
    causal: bool  # queries and keys are the same stretch; else a whole stretch of keys is before its queries

    def limits(self) -> tuple[Tensor, Tensor, int, int, float]:
        """Return bounds and longest stretches of queries and keys, and the dropout, as flash kernels take them."""
        return self.query_bounds, self.key_bounds, max(self.queries), max(self.keys), 0.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where packed sequences are in a row."""

    parts: Cut  # of the whole row: sequences that share nothing, prompts, responses; each attends to itself
    shared: Cut | None  # the responses of each group, end to end, and their prompt; None: parts are whole sequences
    response_at: Tensor  # (tokens of the shared queries,) their positions in the row
    prompt_at: Tensor  # (tokens of the shared keys,)


#: Results of attention: outputs (tokens, heads, head_dim), and log-sum-exps of scores (heads, tokens) float.
Attended = tuple[Tensor, Tensor]


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
        out, lse = _attend(q, k, v, layout.parts, scale)
        if layout.shared is not None:
            rows, prompts = layout.response_at, layout.prompt_at
            across = _attend(q[rows], k[prompts], v[prompts], layout.shared, scale)
            out[rows], lse[:, rows] = merged((out[rows], lse[:, rows]), across)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, by_query = ctx.layout, (*grads, q, out, lse.t())
        dq, dk, dv = _differentiate(by_query, k, v, layout.parts, ctx.scale)
        if layout.shared is not None:
            rows, prompts = layout.response_at, layout.prompt_at
            of_rows = tuple(x[rows] for x in by_query)
            more = _differentiate(of_rows, k[prompts], v[prompts], layout.shared, ctx.scale)
            dq[rows] += more[0]  # no position occurs twice in either
            dk[prompts] += more[1]
            dv[prompts] += more[2]
        return dq, dk, dv, None, None


def attention_by_layout(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention (tokens, heads, head_dim) of a row in this layout; keys may have fewer heads. Differentiable."""
    found: Tensor = _SharedPromptAttention.apply(q, k, v, layout, scale)
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor, cut: Cut, scale: float) -> Attended:
    """Compute one variable-length flash call on a GPU, else one call per stretch."""
    if q.is_cuda:
        tensors = q.contiguous(), k.contiguous(), v.contiguous()
        forward = torch.ops.aten._flash_attention_forward
        out, lse, *_ = forward(*tensors, *cut.limits(), cut.causal, False, scale=scale)
        return out, lse
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    stretches = _stretches(q, cut.queries), _stretches(k, cut.keys), _stretches(v, cut.keys)
    found = [attend(*one, 0.0, cut.causal, scale=scale) for one in zip(*stretches, strict=True)]
    outs, norms = zip(*found, strict=True)
    return torch.cat(outs, 2)[0].transpose(0, 1).to(q.dtype).contiguous(), torch.cat(norms, 2)[0]


def _differentiate(
    by_query: tuple[Tensor, ...], k: Tensor, v: Tensor, cut: Cut, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the backward pass of `_attend`: gradients of queries, keys and values.

    `by_query`: the gradient of the outputs, queries, outputs and log-sum-exps, each (tokens, heads, ...).
    """
    grad, q, out, lse = by_query
    if q.is_cuda:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        tensors = [x.contiguous() for x in (grad, q, k, v, out, lse.t())]
        backward = torch.ops.aten._flash_attention_backward
        dq, dk, dv = backward(*tensors, *cut.limits(), cut.causal, *no_dropout, scale=scale)
        return dq, dk, dv
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    sizes = (cut.queries, cut.queries, cut.keys, cut.keys, cut.queries, cut.queries)
    stretches = map(_stretches, (grad, q, k, v, out, lse), sizes)
    found = [differentiate(*one, 0.0, cut.causal, scale=scale) for one in zip(*stretches, strict=True)]
    dq, dk, dv = (torch.cat(parts, 2)[0].transpose(0, 1).to(q.dtype) for parts in zip(*found, strict=True))
    return dq, dk, dv


def _stretches(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
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
    prompt_at, prompt_sizes, response_at, response_sizes = list[int](), list[int](), list[int](), list[int]()
    groups = [[pair] for pair in pairs]
    if share_prompts:
        groups = [list(neighbours) for _, neighbours in groupby(pairs, key=lambda pair: list(pair[0]))]
    for group in groups:
        prompt, first = group[0][0], len(ids)
        if not prompt:
            raise ValueError("a prompt without tokens has no position that predicts the first response token")
        ids += prompt
        begin, sizes = len(ids), [len(prompt)]
        positions += range(len(prompt))
        for _, response in group:
            at = len(ids)
            ids += response[:-1]
            sizes.append(len(ids) - at)
            positions += range(len(prompt), len(prompt) + sizes[-1])
            score_at += [begin - 1, *range(at, len(ids))][: len(response)]
        if len(group) == 1:  # one sequence
            sizes = [sum(sizes)]
        elif len(ids) > begin:
            prompt_sizes.append(len(prompt))
            response_sizes.append(len(ids) - begin)
            prompt_at += range(first, begin)
            response_at += range(begin, len(ids))
        parts += [size for size in sizes if size]

    lengths = [len(response) for _, response in pairs]
    width = max(lengths, default=0)
    labels = [token for _, response in pairs for token in response]
    row_at = [i * width + place for i, length in enumerate(lengths) for place in range(length)]
    of_ids, of_positions, scored, of_labels, of_lengths, of_rows = lists_on_device(
        [ids, positions, score_at, labels, lengths, row_at], device
    )
    bounds = [[0, *accumulate(sizes)] for sizes in (parts, response_sizes, prompt_sizes)]
    responses, prompts, *ends = lists_on_device([response_at, prompt_at, *bounds], device)
    part_ends, response_ends, prompt_ends = (x.to(torch.int32) for x in ends)
    whole = Cut(parts, parts, part_ends, part_ends, causal=True)
    shared = Cut(response_sizes, prompt_sizes, response_ends, prompt_ends, causal=False) if prompt_sizes else None
    return PackedBatch(
        input_ids=of_ids[None],
        position_ids=of_positions[None],
        layout=Layout(whole, shared, responses, prompts),
        score_at=scored,
        labels=of_labels,
        lengths=of_lengths,
        response_mask=torch.arange(width, device=device) < of_lengths[:, None],
        row_at=of_rows,
    )


def divide(
    pairs: Sequence[Pair], budget: int, max_rows: int | None, share_prompts: bool, sharers: int = 1
) -> list[list[int]]:
    """Divide pairs, by number, into bins of at most `budget` tokens (and `max_rows` pairs), keeping prompts together.

    With `share_prompts` a prompt counts once for its neighbours; a group that does not fit into a bin is split, and its
    prompt counts again. A pair larger than the budget gets its own bin. A bin has at most an equal share of all tokens
    for each of the `sharers`. The result depends on prompts and sizes only,
    so a rerun makes the same bins.

    >>> pairs = [([1, 2], [3] * 4), ([5], [6] * 3), ([1, 2], [4] * 4)]
    >>> divide(pairs, 10, None, share_prompts=True), divide(pairs, 10, None, share_prompts=False)
    ([[0, 2], [1]], [[0, 1], [2]])
    """
    groups: dict[object, list[int]] = {}
    for i, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt) if share_prompts else i, []).append(i)
    tokens = sum(len(pairs[first][0]) for first, *_ in groups.values()) + sum(len(response) for _, response in pairs)
    budget = min(budget, -(-tokens // sharers))
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
    most = sum(rows) if max_rows is None else max_rows
    bins = list[tuple[list[int], list[int]]]()  # the items of each, and its [tokens, rows]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size, count = sizes[index], rows[index]
        fits = (one for one in bins if one[1][0] + size <= budget and one[1][1] + count <= most)
        chosen = next(fits, ([], [0, 0]))
        items, load = chosen
        if not items:
            bins.append(chosen)
        items.append(index)
        load[0] += size
        load[1] += count
    return [items for items, _ in bins]
