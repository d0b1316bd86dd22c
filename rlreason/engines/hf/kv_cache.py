"""A key-value cache of rows that end at one common column, so that a decoded token is written in place.

transformers' dynamic cache concatenates: each decoded token copies everything before it. Here a row begins in
the column that makes it end with the others, whatever its length, so that one slice takes everybody's newest
token and rows of any age can run side by side. It must not know sampling or prompts.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

HEADROOM = 64  # steps between two renewals at most; a renewal copies the cache, which costs about one step


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values in two slabs (rows, kv_heads, room, head_dim); `length` columns are in use."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    @property
    def full(self) -> bool:
        assert self.keys is not None
        return self.length == self.keys.shape[2]

    def renew(self, kept: Tensor, width: int, packed: DynamicLayer | None, columns: Tensor) -> None:
        """Keep the last `width` columns of these rows; add a row for each row of `columns`, read from `packed`."""
        keys, values = (packed.keys, packed.values) if packed else (None, None)
        like = self.values if values is None else values
        assert like is not None  # its dtype is that of the products; rotary embeddings make float32 of keys
        self.keys = _renewed(self.keys, self.length, kept, width, keys, columns, like)
        self.values = _renewed(self.values, self.length, kept, width, values, columns, like)
        self.length = width

    def get_seq_length(self) -> int:
        return self.length


def _renewed(
    slab: Tensor | None, length: int, kept: Tensor, width: int, fresh: Tensor | None, columns: Tensor, like: Tensor
) -> Tensor:
    larger = like.new_empty(len(kept) + len(columns), like.shape[1], width + HEADROOM, like.shape[3])
    if slab is not None:
        used = min(width, length)
        larger[: len(kept), :, : width - used] = 0  # masked, but still multiplied: it must be finite
        here = larger[: len(kept), :, width - used : width]
        torch.index_select(slab[:, :, length - used : length], 0, kept, out=here)
    if fresh is not None:
        larger[len(kept) :, :, :width] = fresh[0][:, columns].transpose(0, 1)
    return larger


class PreallocatedCache(Cache):
    """Slabs for every layer of a model. It begins without rows: `renew` brings them in and makes the room."""

    def __init__(self) -> None:
        self.slabs: list[PreallocatedLayer] = []
        super().__init__(layers=self.slabs)  # type: ignore[arg-type]  # one list under two names, to know its type

    @property
    def full(self) -> bool:
        return all(layer.full for layer in self.slabs)

    def renew(self, kept: Tensor, width: int, packed: DynamicCache | None, columns: Tensor) -> None:
        """Drop all rows but `kept`, and let new ones join: row i reads the columns `columns[i]` (width) of `packed`.

        `packed` is what the model cached of one row of packed sequences. One layer at a time, so that the old and
        the new slabs of only one layer exist at once.
        """
        while packed is not None and len(self.slabs) < len(packed.layers):
            self.slabs.append(PreallocatedLayer())
        for i, slab in enumerate(self.slabs):
            source = packed.layers[i] if packed is not None else None
            assert source is None or isinstance(source, DynamicLayer)
            slab.renew(kept, width, source, columns)
