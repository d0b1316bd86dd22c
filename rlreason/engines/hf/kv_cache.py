"""A preallocated key-value cache of responses that end at one column, so that a decoded token is written in place.

transformers' dynamic cache concatenates: each decoded token copies everything before it. Here a response begins in
the column that makes it end with the others, whatever its length, so that one column takes the newest token of each
and responses of any age run in one batch. Their prompts are kept apart, each once for all responses to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

HEADROOM = 64  # free columns after a compaction, at most, or a quarter of those in use where that is more


@dataclass(frozen=True, slots=True)
class Move:
    """What a cache becomes: which rows and prompts stay, and which come."""

    rows: Tensor  # those kept
    new_rows: int  # that begin
    width: int  # columns in use of the longest response
    needed: int  # columns that are still written, at most
    prompts: Tensor  # those kept
    columns: Tensor  # (new prompts, columns of the longest prompt) where to read them in `packed`
    packed: Sequence[DynamicCache]  # what the model cached of rows of packed sequences, counted as one


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

        In a cache that is read whole, the columns that are still free come with them: the mask leaves them out.
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
        """Drop all rows and prompts but those kept; add the new ones; `room` columns are free then."""
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
        # What is masked is still multiplied: it must be finite.
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
    """Fill `new` from its last column on with these rows of `old`, each (rows, heads, columns, head_dim)."""
    width = min(new.shape[2], old.shape[2])
    first = new.shape[2] - width
    new[:, :, :first] = 0
    new[:, :, first:] = old[:, :, old.shape[2] - width :].index_select(0, rows)


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
        """Make the move, one layer at a time, so that only one tensor exists twice at once."""
        while move.packed and len(self.preallocated) < len(move.packed[0].layers):
            self.preallocated.append(PreallocatedLayer(self.at if self.whole else None, self.dtype))
        room = min(move.needed, max(HEADROOM, move.width // 4))
        for i, layer in enumerate(self.preallocated):
            layer.compact_and_admit(move, room, [_dynamic(cache.layers[i]) for cache in move.packed])
            for cache in move.packed:
                cache.layers[i] = DynamicLayer()  # read once: its memory is the next layer's
        self.length, self.room = move.width, move.width + room
        self.at.fill_(move.width)
