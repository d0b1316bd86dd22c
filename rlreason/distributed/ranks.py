"""The processes that train together: rank 0 says what comes next, and all of them do it.

Rank 0 has the run folder, the console, the grader, the order of the data and the engine. The others wait for its word.
Their groups are made apart from torch's default one, which vLLM in the process of rank 0 has for itself.
"""

import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from rlreason.errors import ConfigError, EngineError
from rlreason.runtime.lock import alive
from rlreason.runtime.signals import held
from rlreason.runtime.stacks import dump
from rlreason.runtime.text import first_line

FOREVER = timedelta(days=365)  # rank 0 samples and evaluates for as long as it takes
NCCL_LATER = timedelta(minutes=5)
BUCKET = 1 << 26  # numbers that are summed in one call: 256 MiB of float32
ERROR = "error"  # keys of the store, followed by the rank
GONE = ("Connection closed", "Connection reset", "Timed out", "timed out", "NCCL", "Broken pipe", "gloo")


class RankError(EngineError):
    """Another rank has ended or hangs. The run ends; rank 0 keeps its records."""


class PartedError(ConfigError):
    """Ranks that should have the same weights have not: nothing of them is kept."""

    exit_code = 1


class Ranks:
    """One process's view of all of them. `limit_s`: seconds that a rank is waited for in a common call."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device, limit_s: float) -> None:
        self.store, self.rank, self.world, self.device = store, rank, world, device
        self.limit = timedelta(seconds=limit_s)
        self.ended: Callable[[], str] = str  # what is known of ranks that have ended, in words; "" where none has
        self.broken = ""  # what has ended a common call; the other ranks wait in it, and hear nothing any more
        self._lock = threading.RLock()
        self._orders = self._gloo("orders", FOREVER)
        self._objects = self._gloo("objects", self.limit)
        self._same_kind()
        self._tensors = self._objects if device.type == "cpu" else self._nccl()

    def _gloo(self, name: str, limit: timedelta) -> Any:
        return dist.ProcessGroupGloo(PrefixStore(name, self.store), self.rank, self.world, limit)

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.limit + NCCL_LATER  # it ends the process, which has better words itself
        return dist.ProcessGroupNCCL(PrefixStore("tensors", self.store), self.rank, self.world, options)

    def _same_kind(self) -> None:
        """`ConfigError` where some ranks have a GPU and others none: they could not sum anything."""
        kinds = self.gathered(self.device.type)
        if len(set(kinds)) > 1:
            without = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind != "cuda")
            raise ConfigError(f"gpus={self.world}: no GPU is left for rank {without}: start as many ranks as GPUs")

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """On rank 0, the others do `name` with these arguments while this block does the same; elsewhere, the block.

        One such block at a time, whichever thread it is in; no signal interrupts it, because the others would wait.
        `RankError` where one of them is lost in it.
        """
        if self.rank:
            yield
            return
        with self._lock, held(), self.losses_named(name):
            if self.broken:
                raise RankError(f"training on {self.world} ranks is over: {self.broken}")
            alive()
            try:
                self._send(self._orders, (name, arguments))
                yield
            except BaseException as error:
                self.broken = self.broken or f"{name} ended with {type(error).__name__}"
                raise
            alive()

    def order(self) -> tuple[str, tuple[Any, ...]]:
        """What rank 0 asks for next; it may take for ever. `RuntimeError` where rank 0 has gone."""
        name, arguments = self._send(self._orders, None)
        return name, arguments

    def end(self) -> None:
        """The others are needed no more. Where they wait in a call that was broken off, nobody could tell them."""
        with self._lock:
            if not self.broken:
                self._send(self._orders, ("end", ()))

    @contextmanager
    def losses_named(self, name: str) -> Iterator[None]:
        """An error that only says that a connection is gone becomes one that says which rank, and why."""
        try:
            yield
        except RuntimeError as error:
            why = self.told() or self.ended()
            if not why and not is_gone(error):
                raise
            limit = f"waits.run_s={self.limit.total_seconds():g} s"
            cause = why or f"a rank has gone, or has not answered within {limit} ({first_line(error)})"
            lost = f"training on {self.world} ranks ended in {name}: {cause}"
            raise RankError(f"{lost}{dump(lost)}; resume=RUN goes on from the last checkpoint") from error

    def told(self) -> str:
        """What another rank has left as the error that ended it; "" where none has."""
        return told_in(self.store, self.world, self.rank)

    def tell(self, error: str) -> None:
        """Leave the error that ends this rank for rank 0 to say."""
        self.store.set(f"{ERROR}{self.rank}", error)

    def broadcast(self, value: Any = None) -> Any:
        """The value that rank 0 has, on every rank: anything that can be pickled."""
        return self._send(self._objects, value)

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on every rank: anything that can be pickled."""
        mine = _packed(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        self._objects.allgather([sizes], [torch.tensor([mine.numel()])]).wait()
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        self._objects.allgather([parts], [padded]).wait()
        return [_unpacked(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of every rank by those of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            group = self._tensors if whole.device == self.device or whole.is_cuda else self._objects
            group.broadcast([whole], options).wait()
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

    def summed(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in float32, some 64 million numbers at a time."""
        for bucket in buckets([t.numel() for t in tensors], BUCKET):
            parts = [tensors[i] for i in bucket]
            flat = torch.cat([part.reshape(-1).float() for part in parts])
            self._tensors.allreduce([flat]).wait()
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))

    def _send(self, group: Any, value: Any) -> Any:
        """The value of rank 0, by a broadcast of its size and one of its bytes."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        content = _packed(value) if self.rank == 0 else torch.zeros(0, dtype=torch.uint8)
        size = torch.tensor([content.numel()])
        group.broadcast([size], options).wait()
        if self.rank:
            content = torch.zeros(int(size), dtype=torch.uint8)
        group.broadcast([content], options).wait()
        return value if self.rank == 0 else _unpacked(content)


def told_in(store: Any, world: int, rank: int = 0) -> str:
    """What a rank besides this one has left in the store as the error that ended it; "" where none has."""
    for other in range(world):
        if other != rank and store.check([f"{ERROR}{other}"]):
            return f"rank {other} failed: {store.get(f'{ERROR}{other}').decode()}"
    return ""


def is_gone(error: RuntimeError) -> bool:
    """Whether an error only says that a connection to another rank has ended, or that it does not answer."""
    return any(word in str(error) for word in GONE)


def buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The numbers of tensors of these sizes, in their order, in groups of at most `most` numbers, or of one tensor.

    >>> buckets([3, 4, 9, 1], 7)
    [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size > room or not found:
            found.append([])
            room = most
        found[-1].append(i)
        room -= size
    return found


def _packed(value: Any) -> Tensor:
    """(bytes,) uint8"""
    return torch.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _unpacked(content: Tensor) -> Any:
    return pickle.load(io.BytesIO(content.numpy().tobytes()))  # of processes of this run alone
