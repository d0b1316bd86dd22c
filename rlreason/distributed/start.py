"""Rank 0 and the others find each other: started by torchrun, or by rank 0 itself."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from rlreason.distributed.place import ADDRESS, NAMES, Place, own_gpu, place_of
from rlreason.distributed.ranks import FOREVER, Ranks, told_in
from rlreason.runtime import signals
from rlreason.runtime.gpus import VISIBLE
from rlreason.runtime.stacks import dump

BEGIN, NOTHING = "begin", b"nothing"  # a key of the store; rank 0 says seconds there, or that no run begins
STORE = timedelta(seconds=60)  # that the store of torchrun is waited for
LIMIT_S = 3600.0  # for a rank in a common call, where waits.run_s sets none
ENDING_S = 10.0  # that a rank takes to end
LOOK_S = 0.2
GRACE_S = 4.0  # in which rank 0 may find out by itself that another rank has ended
OURS = "RLREASON_STORE"  # environment: the port at which rank 0 waits for those that it has started


class Group:
    """The other ranks as rank 0 has started them, or found them; `Ranks` is how it speaks to them."""

    def __init__(self, world: int, limit_s: float | None, log: Path, note: Callable[[str], object]) -> None:
        """`limit_s`: that a rank is waited for in a common call; `log`: what those print that are started here.

        `note`: called with what happened where one that has ended ends this process too.
        """
        self.world, self.limit_s, self.log, self.note = world, limit_s or LIMIT_S, log, note
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        if (place := place_of()) is not None:
            self.store: Any = store_of(place)
            self.store.set(BEGIN, str(self.limit_s))
            self._start_watch()
            return
        if sys.platform == "linux":  # all ranks are on this machine: nobody else is to reach them
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.store = TCPStore(ADDRESS, 0, None, True, wait_for_workers=False)
        self.store.set(BEGIN, str(self.limit_s))
        command = [sys.executable, "-m", "rlreason"]
        with log.open("ab") as out:
            for rank in range(1, world):
                self.children[rank] = subprocess.Popen(
                    command, env=self._environment(rank), stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
        self._start_watch()

    def _start_watch(self) -> None:
        if signals.owns_process():  # nothing ends the process of somebody's script or notebook
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _environment(self, rank: int) -> Mapping[str, str]:
        given = zip(NAMES, (rank, self.world, rank, self.world, ADDRESS, self.store.port), strict=True)
        return os.environ | {name: str(value) for name, value in given} | {OURS: str(self.store.port)}

    def join(self, device: torch.device) -> Ranks:
        """Meet the others, when they have loaded their libraries."""
        ranks = Ranks(self.store, 0, self.world, device, self.limit_s)
        ranks.ended = self.ended
        return ranks

    def ended(self) -> str:
        """Which of the started processes have ended, and how; "" where all live."""
        time.sleep(LOOK_S)  # a connection is closed before the process is gone
        if gone := self._gone():
            self._over.set()
        return gone

    def _gone(self) -> str:
        codes = {rank: child.poll() for rank, child in self.children.items()}
        return ", ".join(f"rank {rank} ended with {_named(code)}" for rank, code in codes.items() if code is not None)

    def close(self, at_once: bool = False) -> None:
        """Wait for the others to end, and end those that do not; `at_once`: those that wait in a call for ever."""
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
        """End this process where another rank has ended and nothing here finds that out, as in a call of NCCL."""
        while not self._over.wait(LOOK_S):
            ended = self._gone()
            with suppress(RuntimeError):  # the store of torchrun may have gone
                ended = told_in(self.store, self.world) or ended
            if not ended or self._over.wait(GRACE_S) or signals.asked():
                continue
            log = f" (see {self.log})" * bool(self.children)
            why = f"training on {self.world} ranks: {ended}{log}{dump(ended)}"
            with suppress(Exception):  # such as a full disk, which must not keep it from ending
                self.note(why)
            signals.leave_at_once(f"ended: {why}; resume=RUN goes on from the last checkpoint", 1)


def _named(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def store_of(place: Place) -> Any:
    """The store at which the processes of torchrun, or of rank 0, meet."""
    if port := os.environ.get(OURS):
        return TCPStore(ADDRESS, int(port), None, False)
    store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=STORE))
    return store


def nothing_begins() -> None:
    """Tell the processes that torchrun has started that this command has no use for them."""
    if (place := place_of()) is not None and place.rank == 0:
        store = store_of(place)
        if not store.check([BEGIN]):
            store.set(BEGIN, NOTHING)


def limit_told(store: Any) -> float | None:
    """Wait for rank 0 to begin; seconds that a rank is waited for in a common call, None where no run begins."""
    store.wait([BEGIN], FOREVER)
    return None if (told := store.get(BEGIN)) == NOTHING else float(told)


def own_gpu_only(place: Place) -> None:
    """Let this process see its own GPU alone; before CUDA is asked for anything."""
    os.environ[VISIBLE] = own_gpu(os.environ.get(VISIBLE), place.local)
