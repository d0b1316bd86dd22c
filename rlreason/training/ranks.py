"""The processes that train together: how they meet, and how rank 0 orders the others to act."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from rlreason.errors import ConfigError, EngineError
from rlreason.runtime import signals
from rlreason.runtime.files import alive
from rlreason.runtime.machine import ADDRESS, NAMES, VISIBLE, Place, own_gpu, place_of
from rlreason.runtime.signals import held
from rlreason.runtime.text import first_line

FOREVER = timedelta(days=365)  # rank 0 may load, sample and evaluate for any length of time
NCCL_LATER = timedelta(minutes=5)
BUCKET = 1 << 26  # numbers that are summed in one call: 256 MiB of float32
ERROR = "error"  # keys of the store, followed by the rank
GONE = ("Connection closed", "Connection reset", "Timed out", "timed out", "NCCL", "Broken pipe", "gloo")


class RankError(EngineError):
    """Another rank has ended or hangs. The run ends; rank 0 keeps its records."""


class PartedError(ConfigError):
    """The weights of the ranks have diverged: nothing of them is kept."""

    exit_code = 1


class Ranks:
    """One process's connection to all ranks. `limit_s`: seconds to wait for a rank in a collective call."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device, limit_s: float) -> None:
        self.store, self.rank, self.world, self.device = store, rank, world, device
        self.limit = timedelta(seconds=limit_s)
        self.ended: Callable[[], str] = str  # describes ranks that have ended; "" if none has
        self.broken = ""  # what broke off a collective call; the other ranks still wait in it and cannot be reached
        self._lock = threading.RLock()
        if dist.is_initialized():
            raise ConfigError(
                f"gpus={world} needs torch's default process group, and something in this process has made one: start "
                "the run by the command line"
            )
        self._check_kinds()
        backend, later = ("gloo", timedelta()) if device.type == "cpu" else ("cpu:gloo,cuda:nccl", NCCL_LATER)
        dist.init_process_group(
            backend,
            store=PrefixStore("default", store),
            rank=rank,
            world_size=world,
            timeout=self.limit + later,  # NCCL's would end the process before our own, better message
        )
        self._orders = dist.new_group(backend="gloo", timeout=FOREVER)
        self._objects = dist.new_group(backend="gloo", timeout=self.limit)

    def _check_kinds(self) -> None:
        """`ConfigError` where some ranks have a GPU and others none: they could not sum anything."""
        keys = [f"kind{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], self.device.type)
        self.store.wait(keys, FOREVER)  # here they meet, once each has loaded its libraries
        kinds = [self.store.get(key).decode() for key in keys]
        if len(set(kinds)) > 1:
            without = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind != "cuda")
            raise ConfigError(f"gpus={self.world}: no GPU is left for rank {without}: start as many ranks as GPUs")

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Run this block on all ranks: rank 0 makes the others do `name` with these arguments at the same time.

        One such block at a time, in whichever thread; no signal interrupts it, because the others would wait.
        `RankError` if one of them is lost in it.
        """
        if self.rank:
            yield
            return
        with self._lock, held(), self.naming_lost_ranks(name):
            if self.broken:
                raise RankError(f"training on {self.world} ranks is over: {self.broken}")
            alive()
            try:
                self._broadcast((name, arguments), self._orders)
                yield
            except BaseException as error:
                self.broken = self.broken or f"{name} ended with {type(error).__name__}"
                raise
            alive()

    def next_order(self) -> tuple[str, tuple[Any, ...]]:
        """Wait, without a limit, for rank 0's next order. `RuntimeError` if rank 0 has gone."""
        name, arguments = self._broadcast(None, self._orders)
        if name == "end":
            dist.destroy_process_group()
        return name, arguments

    def end(self) -> None:
        """End the other ranks, unless they wait in a broken call, where no message reaches them."""
        with self._lock:
            if not self.broken:
                self._broadcast(("end", ()), self._orders)

    @contextmanager
    def naming_lost_ranks(self, name: str) -> Iterator[None]:
        """Turn an error that only says that a connection is gone into one that says which rank, and why."""
        try:
            yield
        except RuntimeError as error:
            why = error_in_store(self.store, self.world, self.rank) or self.ended()
            if not why and not is_gone(error):
                raise
            limit = f"waits.run_s={self.limit.total_seconds():g} s"
            cause = why or f"a rank has gone, or has not answered within {limit} ({first_line(error)})"
            lost = f"training on {self.world} ranks ended in {name}: {cause}"
            raise RankError(f"{lost}; resume=RUN goes on from the last checkpoint") from error

    def leave_error(self, error: str) -> None:
        """Store the error that ends this rank, for rank 0 to report."""
        self.store.set(f"{ERROR}{self.rank}", error)

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank: anything that can be pickled."""
        return self._broadcast(value, self._objects)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank: anything that can be pickled."""
        found = [None] * self.world
        dist.all_gather_object(found, value, self._objects)
        return found

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every rank's tensors with those of rank 0."""
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in float32, about 64 million numbers per call."""
        for bucket in buckets([t.numel() for t in tensors], BUCKET):
            parts = [tensors[i] for i in bucket]
            flat = torch.cat([part.reshape(-1).float() for part in parts])
            dist.all_reduce(flat)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))

    def _broadcast(self, value: Any, group: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
        return box[0]


def error_in_store(store: Any, world: int, rank: int = 0) -> str:
    """Return the error that another rank has left in the store; "" if there is none."""
    for other in range(world):
        if other != rank and store.check([f"{ERROR}{other}"]):
            return f"rank {other} failed: {store.get(f'{ERROR}{other}').decode()}"
    return ""


def is_gone(error: RuntimeError) -> bool:
    """Return whether an error only says that the connection to another rank is closed, or that it does not answer."""
    return any(word in str(error) for word in GONE)


def buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Group consecutive tensors of these sizes, by number: at most `most` elements per group, or a single tensor.

    >>> buckets([3, 4, 9, 1], 7)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size > room or not groups:
            groups.append([])
            room = most
        groups[-1].append(i)
        room -= size
    return groups


BEGIN = "begin"  # a key of the store; rank 0 writes a limit in seconds there,
NOTHING = b"nothing"  # or that no run begins
STORE = timedelta(seconds=60)  # to wait for torchrun's store
LIMIT_S = 3600.0  # to wait for a rank in a collective call, if waits.run_s sets none
ENDING_S = 10.0  # for a rank to end
LOOK_S = 0.2
GRACE_S = 4.0  # for rank 0 to notice by itself that another rank has ended
OURS = "RLREASON_STORE"  # environment: the port where rank 0 waits for the processes it has started


class Group:
    """The other ranks' processes, started by rank 0 or by torchrun; `Ranks` communicates with them."""

    def __init__(self, world: int, limit_s: float | None, log: Path, note: Callable[[str], object]) -> None:
        """`limit_s`: seconds to wait for a rank in a collective call; `log`: output of processes started here.

        `note`: called with the reason if another rank's end ends this process.
        """
        self.world, self.limit_s, self.log, self.note = world, limit_s or LIMIT_S, log, note
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        if (place := place_of()) is not None:
            self.store: Any = store_of(place)
            self.store.set(BEGIN, str(self.limit_s))
            self._start_watch()
            return
        if sys.platform == "linux":  # all ranks are on this machine: no one else may reach them
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.store = TCPStore(ADDRESS, 0, None, True, wait_for_workers=False)
        self.store.set(BEGIN, str(self.limit_s))
        command = [sys.executable, "-m", "rlreason"]
        with log.open("ab") as out:
            for rank in range(1, world):
                values = (rank, world, rank, world, ADDRESS, self.store.port)
                of_rank = {name: str(value) for name, value in zip(NAMES, values, strict=True)}
                environment = os.environ | of_rank | {OURS: str(self.store.port)}
                self.children[rank] = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
        self._start_watch()

    def _start_watch(self) -> None:
        if signals.owns_process():  # never end the process of a user's script or notebook
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def join(self, device: torch.device) -> Ranks:
        """Meet the others once they have loaded their libraries."""
        ranks = Ranks(self.store, 0, self.world, device, self.limit_s)
        ranks.ended = self.ended
        return ranks

    def ended(self) -> str:
        """Describe which of the started processes have ended, and how; "" if all live."""
        time.sleep(LOOK_S)  # a connection closes before its process ends
        if gone := self._gone():
            self._over.set()
        return gone

    def _gone(self) -> str:
        codes = {rank: child.poll() for rank, child in self.children.items()}
        return ", ".join(f"rank {rank} ended with {_named(code)}" for rank, code in codes.items() if code is not None)

    def close(self, at_once: bool = False) -> None:
        """Wait for the others to end, and kill those that do not; `at_once`: at once, since they hang in a call."""
        self._over.set()
        until = time.monotonic() + (0.0 if at_once else ENDING_S)
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
            child.kill()
            child.wait()
        with suppress(OSError):
            if not self.log.stat().st_size:
                self.log.unlink()

    def _watch(self) -> None:
        """End this process if another rank has ended and nothing here notices, as in a call of NCCL."""
        while not self._over.wait(LOOK_S):
            ended = self._gone()
            with suppress(RuntimeError):  # torchrun's store may be gone
                ended = error_in_store(self.store, self.world) or ended
            if not ended or self._over.wait(GRACE_S):
                continue
            log = f" (see {self.log})" if self.children else ""
            why = f"training on {self.world} ranks: {ended}{log}"
            with suppress(Exception):  # such as a full disk, which must not prevent the end
                self.note(why)
            signals.leave_at_once(f"ended: {why}; resume=RUN goes on from the last checkpoint", 1)


def _named(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def store_of(place: Place) -> Any:
    """Return the store where the processes of torchrun, or those of rank 0, meet."""
    if port := os.environ.get(OURS):
        return TCPStore(ADDRESS, int(port), None, False)
    store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=STORE))
    return store


def release_torchrun_ranks() -> None:
    """Tell the processes started by torchrun that this command does not need them."""
    if (place := place_of()) is not None and place.rank == 0:
        store = store_of(place)
        if not store.check([BEGIN]):
            store.set(BEGIN, NOTHING)


def wait_for_limit(store: Any) -> float | None:
    """Wait for rank 0; return the limit in seconds for collective calls, None if no run begins."""
    store.wait([BEGIN], FOREVER)
    return None if (limit := store.get(BEGIN)) == NOTHING else float(limit)


def own_gpu_only(place: Place) -> None:
    """Hide all GPUs but its own from this process; call it before CUDA is initialised."""
    os.environ[VISIBLE] = own_gpu(os.environ.get(VISIBLE), place.local)
