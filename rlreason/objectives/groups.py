"""Groups of responses to one problem, found by id: a batch may be interleaved, blocked, filtered or shuffled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # so that the card and the rules need no torch
    from torch import Tensor


class Groups(NamedTuple):
    """Which group each sample belongs to. `group_of` (n,) int64 in [0, g), `sizes` (g,) int64."""

    group_of: Tensor
    sizes: Tensor


def group_by_id(group_ids: Tensor) -> Groups:
    """Number the groups 0..g-1 and count their members; ids (n,) may be any integers in any order."""
    _, group_of, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    return Groups(group_of, sizes)


def sums(values: Tensor, groups: Groups) -> Tensor:
    """Sum of each group. (n,) -> (g,)"""
    return values.new_zeros(len(groups.sizes)).index_add(0, groups.group_of, values)
