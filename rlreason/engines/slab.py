"""A key-value cache that writes new tokens in place instead of copying itself at every step.

transformers' dynamic cache concatenates, so each decoded token copies everything before it. This one
doubles its room when it is full and can drop rows. It must not know sampling or prompts.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

HEADROOM = 64  # tokens of room to begin with; doubling from there wastes at most half


class SlabLayer(DynamicLayer):
    """One layer's keys and values in two slabs (rows, kv_heads, room, head_dim); `length` positions are in use."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        rows, heads, seq, width = value_states.shape
        self.keys = value_states.new_empty(rows, heads, seq + HEADROOM, width)
        self.values = value_states.new_empty(rows, heads, seq + HEADROOM, width)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys, self.values = (_grown(slab, 2 * end) for slab in (self.keys, self.values))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        super().reset()
        self.length = 0


def _grown(slab: Tensor, room: int) -> Tensor:
    rows, heads, used, width = slab.shape
    larger = slab.new_empty(rows, heads, room, width)
    larger[:, :, :used] = slab
    return larger


def slab_cache() -> Cache:
    return Cache(layer_class_to_replicate=SlabLayer)


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep these rows, in this order; a row may be named several times."""
    for layer in cache.layers:
        assert isinstance(layer, SlabLayer)
        assert layer.keys is not None
        assert layer.values is not None
        layer.keys, layer.values = (slab.index_select(0, rows) for slab in (layer.keys, layer.values))
