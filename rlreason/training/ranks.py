"""The processes that train together: how they meet, and how rank 0 has the others act with it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from rlreason.errors import ConfigError, EngineError
from rlreason.model.parameters import pick_device
from rlreason.records.files import RANKS_LOG
from rlreason.records.reader import write_status
from rlreason.runtime import signals
from rlreason.runtime.files import alive
from rlreason.runtime.machine import ADDRESS, NAMES, Place, place_of
from rlreason.runtime.text import first_line

FOREVER = timedelta(days=365)  # rank 0 may load, sample and evaluate for any length of time
NCCL_LATER = timedelta(minutes=5)  # its own limit would end the process before our better message


class Ranks:
    """One process's connection to all ranks, in torch's default group. Its collective calls are made by all at once.

    `limit_s`: seconds to wait for a rank in one of them.
    """

    def __init__(self, store: Any, rank: int, world: int, device: torch.device, limit_s: float) -> None:
        self.store, self.rank, self.world, self.device = store, rank, world, device
        keys = [f"device{number}" for number in range(world)]
        store.set(keys[rank], device.type)
        while not store.check(keys):  # until every rank has loaded its libraries
            if lost := self.lost():
                raise EngineError(f"training on {world} ranks ended before it began: {lost}")
            time.sleep(LOOK_S)
        kinds = [store.get(key).decode() for key in keys]
        if len(set(kinds)) > 1:
            raise ConfigError(f"gpus={world}: the ranks have {', '.join(kinds)}: start as many ranks as GPUs")
        limit = timedelta(seconds=0.8 * limit_s)  # before this process is ended for hanging, without a word
        backend, later = ("gloo", timedelta()) if device.type == "cpu" else ("cpu:gloo,cuda:nccl", NCCL_LATER)
        own = PrefixStore("default", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=limit + later)
        self._orders = dist.new_group(backend="gloo", timeout=FOREVER if rank else limit)  # rank 0 never waits for one
        self._objects = dist.new_group(backend="gloo", timeout=limit)

    def lost(self) -> str:
        """Return nothing: rank 0 alone looks after the others."""
        return ""

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Run this block on all ranks: when rank 0 comes to it, the others call the method `name` with `arguments`."""
        yield

    def orders(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield what rank 0 comes to next, waiting without a limit; `RuntimeError` if it has gone."""
        while (order := _broadcast(None, self._orders)) is not None:
            yield order
        dist.destroy_process_group()

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank: anything that can be pickled."""
        return _broadcast(value, self._objects)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank: anything that can be pickled."""
        found = [None] * self.world
        dist.all_gather_object(found, value, self._objects)
        return found


def _broadcast(value: Any, group: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


Method = TypeVar("Method", bound=Callable[..., Any])


def on_all_ranks(method: Method) -> Method:
    """Run a method on all ranks at once: when rank 0 calls it, the others do, with the same arguments."""

    @wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        with self.ranks.together(method.__name__, *arguments):
            return method(self, *arguments)

    return cast(Method, call)


BEGIN = "begin"  # a key of the store; rank 0 writes a limit in seconds there,
NOTHING = b"nothing"  # or that no run begins
ERROR = "error"  # followed by its rank: what has ended another rank
STORE = timedelta(seconds=60)  # to wait for torchrun's store
ENDING_S = 10.0  # for a rank to end
LOOK_S = 0.2
GRACE_S = 4.0  # for rank 0 to notice by itself that another rank has ended
GONE = ("connection closed", "connection reset", "timed out")  # of a rank that is not a child of this process
RESUME = "resume=RUN goes on from the last checkpoint"


class LeadingRank(Ranks):
    """Rank 0: it starts the other ranks, or finds those of torchrun, orders what they do, and ends with any of them.

    A lost rank is found by the error of a collective call (`together`), or by a thread that looks for it (`_watch`),
    since a call of NCCL never ends.
    """

    def __init__(self, world: int, device: torch.device, limit_s: float, folder: Path) -> None:
        """`folder`: of the run, for the output of the processes started here, and the reason if one ends this one."""
        self.folder, self.log, self.limit_s = folder, folder / RANKS_LOG, limit_s
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.broken = False  # a collective call was broken off: the others wait in it, and cannot be reached
        self._lock, self._over = threading.RLock(), threading.Event()
        place = place_of()
        store = store_of(place) if place else TCPStore(ADDRESS, 0, None, True, wait_for_workers=False)
        store.set(BEGIN, str(limit_s))
        if place is None:
            if sys.platform == "linux":  # all ranks are on this machine: no one else may reach them
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            with self.log.open("ab") as out:
                for rank in range(1, world):
                    values = map(str, (rank, world, rank, world, ADDRESS, store.port))
                    env, nothing = os.environ | dict(zip(NAMES, values, strict=True)), subprocess.DEVNULL
                    command = [sys.executable, "-m", "rlreason"]
                    self.children[rank] = subprocess.Popen(command, env=env, stdin=nothing, stdout=out, stderr=out)
        self.world = world
        # A client of its own: the other one is locked while it waits for a rank.
        self._errors = store_of(place) if place else TCPStore(ADDRESS, store.port, None, False)
        if signals.owns_process():  # never end the process of a user's script or notebook
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        try:
            super().__init__(store, 0, world, device, limit_s)
        except BaseException:
            self.close(at_once=True)
            raise

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Run this block on all ranks.

        One such block at a time, in whichever thread; no signal interrupts it, because the others would wait. An error
        that follows from another rank's end becomes an `EngineError`, which says which rank is lost, and why.
        """
        with self._lock, signals.held():
            if self.broken:
                raise EngineError(f"training on {self.world} ranks is over")
            try:
                alive()
                _broadcast((name, arguments), self._orders)
                yield
                alive()
            except BaseException as error:
                self.broken = True
                if not isinstance(error, RuntimeError):
                    raise
                time.sleep(LOOK_S)  # a connection closes before its process ends
                if not (lost := self.lost()):
                    if not any(sign in str(error).lower() for sign in GONE):
                        raise
                    lost = f"one has gone, or not answered within waits.run_s={self.limit_s:g} s ({first_line(error)})"
                self._over.set()
                raise EngineError(f"training on {self.world} ranks ended in {name}: {lost}; {RESUME}") from error

    def lost(self) -> str:
        """Say which ranks have ended with which error, signal or exit code; "" if all live."""
        lost = []
        for rank in range(1, self.world):
            code = self.children[rank].poll() if rank in self.children else None
            if self._errors.check([f"{ERROR}{rank}"]):
                lost.append(f"rank {rank} failed: {self._errors.get(f'{ERROR}{rank}').decode()}")
            elif code is not None:
                lost.append(f"rank {rank} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
        return ", ".join(lost)

    def _watch(self) -> None:
        """End this process if another rank has ended and nothing here notices."""
        while not self._over.wait(LOOK_S):
            lost = ""
            with suppress(RuntimeError):  # torchrun's store may be gone
                lost = self.lost()
            if lost and not self._over.wait(GRACE_S):
                why = f"training on {self.world} ranks: {lost}{f' (see {self.log})' if self.children else ''}"
                with suppress(Exception):  # such as a full disk, which must not prevent the end
                    write_status(self.folder, "failed", why)
                signals.leave_at_once(f"ended: {why}; {RESUME}", 1)

    def close(self, at_once: bool = False) -> None:
        """End the other ranks; those that do not end are killed, `at_once` those that hang in a broken call."""
        at_once = at_once or self.broken
        if not at_once:
            with suppress(RuntimeError), self._lock:
                _broadcast(None, self._orders)
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
        if dist.is_initialized():
            dist.destroy_process_group()


def store_of(place: Place) -> Any:
    """Return the store where the processes of torchrun, or those of rank 0, meet."""
    store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=STORE))
    return store


def join(place: Place) -> Ranks | None:
    """Meet rank 0; None if it begins no run."""
    store = store_of(place)
    store.wait([BEGIN], FOREVER)
    limit = store.get(BEGIN)
    return None if limit == NOTHING else Ranks(store, place.rank, place.world, pick_device(), float(limit))


def release_torchrun_ranks() -> None:
    """Tell the processes started by torchrun that this command does not need them, unless a run has begun."""
    if (place := place_of()) is not None and place.rank == 0:
        store = store_of(place)
        if not store.check([BEGIN]):
            store.set(BEGIN, NOTHING)
