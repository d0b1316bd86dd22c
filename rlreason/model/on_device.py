"""Numbers of the processor, brought to the device in copies for which nobody waits; and its memory, given back.

A copy out of ordinary memory waits for everything that the GPU still has to do; one out of pinned memory takes its
turn there, so that the next micro-batch is laid out while the GPU computes the one before.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def lists_on_device(
    lists: Sequence[Sequence[float]], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> list[Tensor]:
    """A tensor (length,) on the device for each list of numbers; they share one memory, so change none in place.

    >>> [part.tolist() for part in lists_on_device([[1, 2], [], [3]], "cpu")]
    [[1, 2], [], [3]]
    """
    together = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
    return list(on_device(together, device).split([len(one) for one in lists]))


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the processor on the device; work that is asked for later finds it there."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def give_back(device: torch.device) -> None:
    """What torch has kept of a GPU's memory for itself, to whoever else needs it there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
