"""A preallocated key-value cache of sequences that end at one column, so that a decoded token is written in place.

transformers' dynamic cache concatenates: each decoded token copies everything before it. Here a sequence begins in
the column that makes it end with the others, whatever its length, so that one slice takes the newest token of each
and sequences of any age run in one batch.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

HEADROOM = 64  # steps between two compactions at most; each copies the cache, which costs about one step


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, each (rows, kv_heads, columns, head_dim); `length` columns are in use."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest keys and values (rows, kv_heads, new, head_dim) in place; return all of them so far."""
        assert self.keys is not None
        assert self.values is not None
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    @property
    def full(self) -> bool:
        """Whether no column is left for another token."""
        assert self.keys is not None
        return self.length == self.keys.shape[2]

    def compact_and_admit(self, kept: Tensor, width: int, packed: DynamicLayer | None, columns: Tensor) -> None:
        """Keep the last `width` columns of these rows; add a row for each row of `columns`, read from `packed`."""
        keys, values = (packed.keys, packed.values) if packed else (None, None)
        like = self.values if values is None else values
        assert like is not None  # its dtype is that of the products; rotary embeddings make float32 of keys
        self.keys = _reallocated(self.keys, self.length, kept, width, keys, columns, like)
        self.values = _reallocated(self.values, self.length, kept, width, values, columns, like)
        self.length = width

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length


def _reallocated(
    old: Tensor | None, length: int, kept: Tensor, width: int, fresh: Tensor | None, columns: Tensor, like: Tensor
) -> Tensor:
    new = like.new_empty(len(kept) + len(columns), like.shape[1], width + HEADROOM, like.shape[3])
    if old is not None:
        used = min(width, length)
        new[: len(kept), :, : width - used] = 0  # masked, but still multiplied: it must be finite
        here = new[: len(kept), :, width - used : width]
        torch.index_select(old[:, :, length - used : length], 0, kept, out=here)
    if fresh is not None:
        new[len(kept) :, :, :width] = fresh[0][:, columns].transpose(0, 1)
    return new


class PreallocatedCache(Cache):
    """Preallocated layers for a model. It begins without rows: `compact_and_admit` brings them in and makes room."""

    def __init__(self) -> None:
        self.preallocated: list[PreallocatedLayer] = []
        super().__init__(layers=self.preallocated)  # type: ignore[arg-type]  # two names for one list, to know its type

    @property
    def full(self) -> bool:
        """Whether no column is left for another token."""
        return all(layer.full for layer in self.preallocated)

    def compact_and_admit(self, kept: Tensor, width: int, packed: DynamicCache | None, columns: Tensor) -> None:
        """Drop all rows but `kept` and add new ones: row i reads the columns `columns[i]` (width) of `packed`.

        `packed` is what the model cached of one row of packed sequences. One layer at a time, so that the old and
        the new tensors of only one layer exist at once.
        """
        while packed is not None and len(self.preallocated) < len(packed.layers):
            self.preallocated.append(PreallocatedLayer())
        for i, layer in enumerate(self.preallocated):
            source = packed.layers[i] if packed is not None else None
            assert source is None or isinstance(source, DynamicLayer)
            layer.compact_and_admit(kept, width, source, columns)
