"""A preallocated key-value cache of responses aligned at their ends, so that a decoded token is written in place.

transformers' dynamic cache concatenates: each decoded token copies everything before it. Here all responses end in
the same column, whatever their length, so that one column takes the newest token of each and responses of any age run
in one batch. Their prompts are stored separately, each once for all responses to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

HEADROOM = 64  # most free columns after a compaction, or a quarter of those in use where that is more


@dataclass(frozen=True, slots=True)
class Move:
    """A change of the cache: which rows and prompts stay, and which are added."""

    rows: Tensor  # indices of the rows to keep
    new_rows: int  # rows to add
    width: int  # columns in use of the longest response
    needed: int  # most columns that are still to be written
    prompts: Tensor  # indices of the prompts to keep
    columns: Tensor  # (new prompts, columns of the longest prompt) where to read them in `packed`
    packed: Sequence[DynamicCache]  # the model's caches of packed rows of prompts; `columns` numbers them as one


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, each (rows, kv_heads, columns, head_dim); `length` columns are in use.

    Those of the prompts are (prompts, kv_heads, columns, head_dim), every column in use.
    """

    def __init__(self, at: Tensor | None, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at, self.dtype = at, dtype
        self.length = 0
        self.prompt_keys: Tensor | None = None
        self.prompt_values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest keys and values (rows, kv_heads, 1, head_dim) in place; return all of them so far.

        A cache that is read whole returns its free columns too; the mask hides them.
        """
        assert self.keys is not None
        assert self.values is not None
        if self.at is not None:
            self.keys.index_copy_(2, self.at, key_states.to(self.dtype))
            self.values.index_copy_(2, self.at, value_states.to(self.dtype))
            return self.keys, self.values
        end = self.length + 1
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def compact_and_admit(self, move: Move, room: int, packed: Sequence[DynamicLayer]) -> None:
        """Keep the rows and prompts of the move, add the new ones, and leave `room` columns free."""
        read = [(layer.keys, layer.values) for layer in packed]
        keys, values = (torch.cat(parts, 2) for parts in zip(*read, strict=True)) if read else (None, None)
        self.prompt_keys = self._prompts(self.prompt_keys, keys, move)
        self.prompt_values = self._prompts(self.prompt_values, values, move)
        self.keys = self._responses(self.keys, self.prompt_keys, move, room)
        self.values = self._responses(self.values, self.prompt_values, move, room)
        self.length = move.width

    def _prompts(self, old: Tensor | None, fresh: Tensor | None, move: Move) -> Tensor:
        source, kept, width = old if fresh is None else fresh, len(move.prompts), move.columns.shape[1]
        assert source is not None
        count = kept + len(move.columns)
        new = source.new_empty(count, source.shape[1], width, source.shape[3], dtype=self.dtype)
        if old is not None:
            _end_with(new[:kept], old, move.prompts)
        if fresh is not None:
            new[kept:] = fresh[0][:, move.columns].transpose(0, 1)
        return new

    def _responses(self, old: Tensor | None, prompts: Tensor, move: Move, room: int) -> Tensor:
        kept, width = len(move.rows), move.width
        heads, head_dim = prompts.shape[1], prompts.shape[3]
        new = prompts.new_empty(kept + move.new_rows, heads, width + room, head_dim)
        # Masked values are still multiplied: they must be finite.
        new[kept:, :, :width] = 0
        if self.at is not None:
            new[:, :, width:] = 0
        if old is not None:
            _end_with(new[:kept, :, :width], old[:, :, : self.length], move.rows)
        return new

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length


def _dynamic(layer: object) -> DynamicLayer:
    assert isinstance(layer, DynamicLayer)
    return layer


def _end_with(new: Tensor, old: Tensor, rows: Tensor) -> None:
    """Copy these rows of `old` into `new`, aligned at the last column; each is (rows, heads, columns, head_dim)."""
    width = min(new.shape[2], old.shape[2])
    first = new.shape[2] - width
    new[:, :, :first] = 0
    new[:, :, first:] = old[:, :, old.shape[2] - width :].index_select(0, rows)


class PreallocatedCache(Cache):
    """Preallocated layers for a model. It starts without rows: `compact_and_admit` adds them and makes room.

    `whole`: attention reads every column, also free ones, which keeps shapes constant between compactions. Kernels
    in half precision would copy a slice; in float32 a slice costs nothing and is less to read.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, whole: bool = False) -> None:
        """`dtype`: that of the matrix products, so that no step has to cast; new keys may be in float32."""
        self.preallocated: list[PreallocatedLayer] = []
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the next column, on the device
        self.dtype, self.whole = dtype, whole or dtype != torch.float32
        self.length = 0  # columns in use
        self.room = 0  # columns allocated
        super().__init__(layers=self.preallocated)  # type: ignore[arg-type]  # two names for one list, to know its type

    @property
    def full(self) -> bool:
        """Whether no column is left for another token."""
        return self.length == self.room

    @property
    def seen(self) -> int:
        """Columns that the next token's attention reads."""
        return self.room if self.whole else self.length + 1

    @property
    def prompts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the prompts, layer by layer (prompts, kv_heads, columns, head_dim)."""
        pairs = [(layer.prompt_keys, layer.prompt_values) for layer in self.preallocated]
        return [k for k, _ in pairs if k is not None], [v for _, v in pairs if v is not None]

    def advance(self) -> None:
        """Count the column that every layer has written."""
        self.length += 1
        self.at.add_(1)
        for layer in self.preallocated:
            layer.length = self.length

    def compact_and_admit(self, move: Move) -> None:
        """Apply the move one layer at a time, so that only one tensor exists twice at once."""
        while move.packed and len(self.preallocated) < len(move.packed[0].layers):
            self.preallocated.append(PreallocatedLayer(self.at if self.whole else None, self.dtype))
        room = min(move.needed, max(HEADROOM, move.width // 4))
        for i, layer in enumerate(self.preallocated):
            layer.compact_and_admit(move, room, [_dynamic(cache.layers[i]) for cache in move.packed])
            for cache in move.packed:
                cache.layers[i] = DynamicLayer()  # free its memory for the next layer
        self.length, self.room = move.width, move.width + room
        self.at.fill_(move.width)
