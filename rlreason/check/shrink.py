"""The smallest inputs on which a difference still shows: fewer rows, fewer columns, simpler numbers."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlreason.check.subject import Case, Inputs, Seen, Subject

SECONDS, CALLS = 0.7, 120
Pair = tuple[Seen, Seen]  # what ours gives, what the user's gives


def shrunk(subject: Subject, case: Case, seen: Pair, still: Callable[[Case], Pair | None]) -> tuple[Case, Pair]:
    """A case as small as it gets while `still` answers, and its answer. Bounded in time and calls."""
    until, left = time.monotonic() + SECONDS, CALLS
    moved = True
    while moved:
        moved = False
        for inputs in subject.smaller(case.inputs):
            if left == 0 or time.monotonic() > until:
                return case, seen
            left -= 1
            smaller = replace(case, inputs=inputs)
            try:
                found = still(smaller)
            except Exception:  # ours refuses it, say
                found = None
            if found is not None:
                case, seen, moved = smaller, found, True
                break
    return case, seen


def without(inputs: Inputs, names: Collection[str], places: Sequence[int], dim: int) -> Inputs:
    """The inputs without these places along a dimension of the tensors (or items of the lists) called `names`."""
    out = dict(inputs)
    for name in names:
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] > 1:
            out[name] = value.index_select(dim, torch.tensor([i for i in range(value.shape[dim]) if i not in places]))
        elif isinstance(value, list) and dim == 0:
            out[name] = [item for i, item in enumerate(value) if i not in places]
    return out


def simpler_numbers(inputs: Inputs, names: Collection[str]) -> Iterator[Inputs]:
    """Each tensor of numbers rounded to integers, to halves, to one decimal."""
    for name in names:
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            for step in (1.0, 2.0, 10.0):
                rounded = (value * step).round() / step
                if not torch.equal(rounded, value):
                    yield {**inputs, name: rounded}
                else:
                    break
        elif isinstance(value, float):
            for rounded_number in (float(round(value)), round(value, 1)):
                if rounded_number not in (value, 0.0):
                    yield {**inputs, name: rounded_number}


def smaller_tensors(
    inputs: Inputs, rows: Collection[str], columns: Collection[str], numbers: Collection[str], group: int = 1
) -> Iterator[Inputs]:
    """Without a group of rows, without a column, with simpler numbers: one change at a time."""
    n_rows = next((len(inputs[name]) for name in rows if inputs.get(name) is not None), 0)
    for first in range(n_rows - group, -1, -group):
        if n_rows > group:
            yield without(inputs, rows, range(first, first + group), 0)
    n_columns = next((inputs[n].shape[1] for n in columns if isinstance(inputs.get(n), Tensor)), 0)
    for column in range(n_columns - 1, -1, -1):
        if n_columns > 1:
            yield without(inputs, columns, [column], 1)
    yield from simpler_numbers(inputs, numbers)
