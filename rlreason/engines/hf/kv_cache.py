"""A preallocated key-value cache of sequences that end at one column, so that a decoded token is written in place.

transformers' dynamic cache concatenates: each decoded token copies everything before it. Here a sequence begins in
the column that makes it end with the others, whatever its length, so that one column takes the newest token of each
and sequences of any age run in one batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

HEADROOM = 64  # free columns after a compaction, at most, or a quarter of those in use where that is more


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, each (rows, kv_heads, columns, head_dim); `length` columns are in use."""

    def __init__(self, at: Tensor | None, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at, self.dtype = at, dtype
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest keys and values (rows, kv_heads, 1, head_dim) in place; return all of them so far.

        In a cache that is read whole, the columns that are still free come with them: the mask leaves them out.
        """
        keys, values = self._tensors()
        if self.at is not None:
            keys.index_copy_(2, self.at, key_states.to(keys.dtype))
            values.index_copy_(2, self.at, value_states.to(values.dtype))
            return keys, values
        end = self.length + 1
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def _tensors(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def compact_and_admit(
        self, kept: Tensor, width: int, room: int, packed: Sequence[DynamicLayer], columns: Tensor
    ) -> None:
        """Keep the last `width` columns of these rows; add a row for each row of `columns`, read from `packed`."""
        shape = (width, width + room)
        read = [(layer.keys, layer.values) for layer in packed]
        keys, values = (torch.cat(parts, 2) for parts in zip(*read, strict=True)) if read else (None, None)
        self.keys = self._reallocated(self.keys, kept, shape, keys, columns)
        self.values = self._reallocated(self.values, kept, shape, values, columns)
        self.length = width

    def _reallocated(
        self, old: Tensor | None, kept: Tensor, shape: tuple[int, int], fresh: Tensor | None, columns: Tensor
    ) -> Tensor:
        """A tensor of the kept rows of `old`, then of rows read from `fresh`; `shape`: columns in use, and of all."""
        width, room = shape
        source = old if fresh is None else fresh
        assert source is not None
        new = source.new_empty(len(kept) + len(columns), source.shape[1], room, source.shape[3], dtype=self.dtype)
        if self.at is not None:
            new[:, :, width:] = 0  # masked, but still multiplied: it must be finite
        if old is not None:
            used = min(width, self.length)
            new[: len(kept), :, : width - used] = 0
            newest = old[:, :, self.length - used : self.length]
            new[: len(kept), :, width - used : width] = newest.index_select(0, kept)
        if fresh is not None:
            new[len(kept) :, :, :width] = fresh[0][:, columns].transpose(0, 1)
        return new

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length


class PreallocatedCache(Cache):
    """Preallocated layers for a model. It begins without rows: `compact_and_admit` brings them in and makes room.

    `whole`: attention reads every column, those that are still free too, which keeps shapes from one compaction to
    the next. Kernels in half precision would copy a slice; in float32 a slice costs nothing and has less to read.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, whole: bool = False) -> None:
        """`dtype`: that of the products, in which nothing is left to cast at each step; keys may come in float32."""
        self.preallocated: list[PreallocatedLayer] = []
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the next column, as a program on a GPU reads it
        self.dtype, self.whole = dtype, whole or dtype != torch.float32
        self.length = 0  # columns in use
        self.room = 0  # columns of all
        self.reallocations = 0
        super().__init__(layers=self.preallocated)  # type: ignore[arg-type]  # two names for one list, to know its type

    @property
    def full(self) -> bool:
        """Whether no column is left for another token."""
        return self.length == self.room

    @property
    def seen(self) -> int:
        """Columns that the next token's attention reads."""
        return self.room if self.whole else self.length + 1

    def advance(self) -> None:
        """Count the column that every layer has written."""
        self.length += 1
        self.at.add_(1)
        for layer in self.preallocated:
            layer.length = self.length

    def compact_and_admit(
        self, kept: Tensor, width: int, needed: int, packed: Sequence[DynamicCache], columns: Tensor
    ) -> None:
        """Drop all rows but `kept` and add new ones: row i reads the columns `columns[i]` (width) of `packed`.

        `packed` is what the model cached of rows of packed sequences, counted as one; `needed` columns are the most
        that are still written. One layer at a time, so that only one tensor exists twice at once.
        """
        while packed and len(self.preallocated) < len(packed[0].layers):
            self.preallocated.append(PreallocatedLayer(self.at if self.whole else None, self.dtype))
        room = min(needed, max(HEADROOM, width // 4))
        for i, layer in enumerate(self.preallocated):
            read = [source for cache in packed if isinstance(source := cache.layers[i], DynamicLayer)]
            layer.compact_and_admit(kept, width, room, read, columns)
            for cache in packed:
                cache.layers[i] = DynamicLayer()  # read once: its memory is the next layer's
        self.length, self.room = width, width + room
        self.at.fill_(width)
        self.reallocations += 1
