"""Lay sequences end to end within a token budget, and bring per-token numbers back into rows.

A packed batch holds no padding: every position is a real token, and only the positions that predict
a response token are scored. Neighbours with the same prompt may share it: it stands in the row once, before
the responses of all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch
from torch import Tensor

from rlreason.model.free_space import FreeSpace
from rlreason.model.on_device import lists_on_device
from rlreason.model.shared_prompts import Cut, Layout, SharedPrompts

Pair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Several (prompt, response) pairs in one row. Position `score_at[k]` predicts token `labels[k]`."""

    input_ids: Tensor  # (1, total)
    position_ids: Tensor  # (1, total): place in the sequence, behind a shared prompt too
    layout: Layout  # which positions attend to which
    score_at: Tensor  # (scored,) every response token of every sequence, in order
    labels: Tensor  # (scored,)
    lengths: Tensor  # (sequences,) response lengths
    response_mask: Tensor  # (sequences, longest response) bool: made from lengths, never from token values
    row_at: Tensor  # (scored,) where each response token stands in the mask, row after row

    @property
    def bounds(self) -> Tensor:
        """(parts + 1,) int32, where each part of the row begins and ends."""
        return self.layout.parts.query_bounds

    def to_rows(self, flat: Tensor) -> Tensor:
        """(scored,) -> (sequences, longest response), zero where a row has ended. Differentiable."""
        rows = flat.new_zeros(self.response_mask.numel())
        return rows.scatter(0, self.row_at, flat).view(self.response_mask.shape)  # through a mask backward would wait


@dataclass(slots=True)
class _Row:
    """A row that grows by a group of pairs with one prompt at a time."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    score_at: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)  # tokens of each
    groups: list[tuple[int, int, int]] = field(default_factory=list)  # first token, of the prompt, of all responses
    longest: int = 0

    def add(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Put the prompt down, then each response without its last token, which predicts nothing."""
        first, size = len(self.ids), len(prompt)
        self._put(prompt, 0)
        parts = [size]
        for response in responses:
            at, shown = len(self.ids), response[:-1]
            self.score_at += [first + size - 1, *range(at, at + len(shown))][: len(response)]
            self._put(shown, size)
            parts.append(len(shown))
            self.longest = max(self.longest, size + len(shown))
        if len(responses) == 1:  # one sequence
            parts = [sum(parts)]
        elif any(parts[1:]):
            self.groups.append((first, size, sum(parts[1:])))
        self.parts += [part for part in parts if part]

    def _put(self, ids: Sequence[int], position: int) -> None:
        self.ids.extend(ids)
        self.positions.extend(range(position, position + len(ids)))

    @property
    def stretches(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens of each part, of all responses of each group, and of each group's prompt."""
        return self.parts, [more for *_, more in self.groups], [size for _, size, _ in self.groups]

    def shared_places(self) -> tuple[list[int], list[int]]:
        """Where the tokens of responses stand that have their prompt in another part, and those of such prompts."""
        responses = [token for first, size, more in self.groups for token in range(first + size, first + size + more)]
        prompts = [token for first, size, _ in self.groups for token in range(first, first + size)]
        return responses, prompts


def pack(pairs: Sequence[Pair], device: torch.device | str = "cpu", share_prompts: bool = False) -> PackedBatch:
    """Pack (prompt ids, response ids) pairs. The last token of a sequence predicts nothing and is left out.

    `share_prompts`: whether neighbours with the same prompt have it once. `ValueError` for a prompt without tokens: no
    position would predict the first response token.

    >>> batch = pack([([1, 2], [3, 4]), ([5], [6])])
    >>> batch.input_ids.tolist(), batch.score_at.tolist(), batch.labels.tolist()
    ([[1, 2, 3, 5]], [1, 2, 3], [3, 4, 6])
    >>> batch = pack([([1, 2], [3, 4]), ([1, 2], [6, 7, 8])], share_prompts=True)
    >>> batch.input_ids.tolist(), batch.position_ids.tolist(), batch.score_at.tolist()
    ([[1, 2, 3, 6, 7]], [[0, 1, 2, 2, 3]], [1, 2, 1, 3, 4])
    """
    row = _Row()
    for prompt, responses in _neighbours(pairs) if share_prompts else ((p, [r]) for p, r in pairs):
        if not prompt:
            raise ValueError("a prompt without tokens has no position that predicts the first response token")
        row.add(prompt, responses)

    lengths = [len(response) for _, response in pairs]
    labels = [token for _, response in pairs for token in response]
    bounds = [[0, *accumulate(sizes)] for sizes in row.stretches]
    longest = max(lengths, default=0)
    row_at = [i * longest + place for i, length in enumerate(lengths) for place in range(length)]
    tensors = lists_on_device([row.ids, row.positions, row.score_at, labels, lengths, row_at, *bounds], device)
    ids, positions, score_at, targets, response_lengths, places, *ends = tensors
    part_bounds, response_bounds, prompt_bounds = (x.to(torch.int32) for x in ends)
    parts, of_group, of_prompt = (tuple(several) for several in row.stretches)
    shared = None
    if row.groups:
        across = Cut(of_group, of_prompt, response_bounds, prompt_bounds)
        shared = SharedPrompts(across, *lists_on_device(row.shared_places(), device))
    return PackedBatch(
        input_ids=ids[None],
        position_ids=positions[None],
        layout=Layout(Cut(parts, parts, part_bounds, part_bounds), row.longest, shared),
        score_at=score_at,
        labels=targets,
        lengths=response_lengths,
        response_mask=torch.arange(longest, device=device) < response_lengths[:, None],
        row_at=places,
    )


def _neighbours(pairs: Sequence[Pair]) -> Iterator[tuple[Sequence[int], list[Sequence[int]]]]:
    """Prompts with the responses of neighbours that have the same."""
    for _, members in groupby(pairs, key=lambda pair: list(pair[0])):
        several = list(members)
        yield several[0][0], [response for _, response in several]


def divide(pairs: Sequence[Pair], budget: int, max_rows: int | None, share_prompts: bool) -> list[list[int]]:
    """The pairs, by number, in bins of at most `budget` tokens (and `max_rows` pairs), those of one prompt together.

    With `share_prompts` a prompt counts once for its neighbours; a group that does not fit into a bin is cut, and its
    prompt counts again. A pair larger than the budget gets a bin of its own. The result depends on prompts and sizes
    only, so a rerun makes the same bins.

    >>> pairs = [([1, 2], [3] * 4), ([5], [6] * 3), ([1, 2], [4] * 4)]
    >>> divide(pairs, 10, None, share_prompts=True), divide(pairs, 10, None, share_prompts=False)
    ([[0, 2], [1]], [[0, 1], [2]])
    """
    if not share_prompts:
        return within_budget([len(p) + len(r) for p, r in pairs], budget, max_rows)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt), []).append(i)
    pieces: list[list[int]] = []
    sizes: list[int] = []
    for prompt, members in groups.items():
        lengths = [len(pairs[i][1]) for i in members]
        for piece in within_budget(lengths, budget - len(prompt), max_rows):
            pieces.append([members[j] for j in sorted(piece)])
            sizes.append(len(prompt) + sum(lengths[j] for j in piece))
    bins = within_budget(sizes, budget, max_rows, list(map(len, pieces)))
    return [[i for piece in bin_ for i in pieces[piece]] for bin_ in bins]


def within_budget(
    sizes: Sequence[int], budget: int, max_rows: int | None = None, rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Divide items into bins of at most `budget` tokens (and `max_rows` rows), longest first, first bin that fits.

    `rows`: of each item, one where it is not given. An item larger than the budget gets a bin of its own. Every index
    appears exactly once; the result depends on the sizes only, so a rerun makes the same micro-batches.

    >>> within_budget([5, 3, 4, 2], budget=8)
    [[0, 1], [2, 3]]
    """
    bins: list[list[int]] = []
    rows = rows or [1] * len(sizes)
    most, fewest = sum(rows) if max_rows is None else max_rows, min(rows, default=0)
    free = FreeSpace(len(sizes))
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = free.first(sizes[index], rows[index])
        tokens_left, rows_left = (budget, most) if place is None else free.of(place)
        if place is None:
            place = len(bins)
            bins.append([])
        bins[place].append(index)
        if (rows_left := rows_left - rows[index]) < fewest:
            free.close(place)
        else:
            free.put(place, tokens_left - sizes[index], rows_left)
    return bins
