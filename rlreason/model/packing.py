"""Lay sequences end to end within a token budget, and bring per-token numbers back into rows.

A packed batch holds no padding: every position is a real token, and only the positions that predict
a response token are scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rlreason.model.free_space import FULL, FreeSpace


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Several (prompt, response) pairs in one row. Position `score_at[k]` predicts token `labels[k]`."""

    input_ids: Tensor  # (1, total)
    position_ids: Tensor  # (1, total), restarting at 0 with each sequence
    bounds: Tensor  # (sequences + 1,) int32, where each sequence begins and ends
    longest: int  # tokens of the longest sequence
    score_at: Tensor  # (scored,) every response token of every sequence, in order
    labels: Tensor  # (scored,)
    lengths: Tensor  # (sequences,) response lengths
    response_mask: Tensor  # (sequences, longest response) bool: made from lengths, never from token values

    def to_rows(self, flat: Tensor) -> Tensor:
        """(scored,) -> (sequences, longest response), zero where a row has ended. Differentiable."""
        return flat.new_zeros(self.response_mask.shape).masked_scatter(self.response_mask, flat)


def pack(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack (prompt ids, response ids) pairs. The last token of a sequence predicts nothing and is left out.

    `ValueError` for a prompt without tokens: no position would predict the first response token.

    >>> batch = pack([([1, 2], [3, 4]), ([5], [6])])
    >>> batch.input_ids.tolist(), batch.score_at.tolist(), batch.labels.tolist()
    ([[1, 2, 3, 5]], [1, 2, 3], [3, 4, 6])
    """
    ids: list[int] = []
    positions: list[int] = []
    score_at: list[int] = []
    labels: list[int] = []
    sizes: list[int] = []
    for prompt, response in pairs:
        if not prompt:
            raise ValueError("a prompt without tokens has no position that predicts the first response token")
        sequence = [*prompt, *response][:-1] if response else [*prompt]
        first = len(ids) + len(prompt) - 1
        score_at.extend(range(first, first + len(response)))
        labels.extend(response)
        ids.extend(sequence)
        positions.extend(range(len(sequence)))
        sizes.append(len(sequence))

    def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    lengths = [len(response) for _, response in pairs]
    response_lengths = tensor(lengths)
    return PackedBatch(
        input_ids=tensor(ids)[None],
        position_ids=tensor(positions)[None],
        bounds=tensor([0, *accumulate(sizes)], torch.int32),
        longest=max(sizes, default=0),
        score_at=tensor(score_at),
        labels=tensor(labels),
        lengths=response_lengths,
        response_mask=torch.arange(max(lengths, default=0), device=device) < response_lengths[:, None],
    )


def within_budget(sizes: Sequence[int], budget: int, max_rows: int | None = None) -> list[list[int]]:
    """Divide items into bins of at most `budget` tokens (and `max_rows` items), longest first, first bin that fits.

    An item larger than the budget gets a bin of its own. Every index appears exactly once; the result depends
    on the sizes only, so a rerun makes the same micro-batches.

    >>> within_budget([5, 3, 4, 2], budget=8)
    [[0, 1], [2, 3]]
    """
    bins: list[list[int]] = []
    free = FreeSpace(len(sizes))
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        slot = free.first(sizes[index])
        if slot is None:
            slot, left = len(bins), budget
            bins.append([])
        else:
            left = free.of(slot)
        bins[slot].append(index)
        full = max_rows is not None and len(bins[slot]) >= max_rows
        free.put(slot, FULL if full else left - sizes[index])
    return bins
