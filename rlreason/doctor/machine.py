"""What of the machine a run needs besides its GPUs: processors, memory, shared memory, disk."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlreason.doctor.finding import FAIL, OK, WARN, Finding
from rlreason.memory.machine import processor, size
from rlreason.runtime.processors import usable_processors

SHARED = 1 << 30  # bytes of /dev/shm below which vLLM's workers and NCCL get into trouble: docker gives 64 MB
SPARE = 2 << 30  # bytes of disk that should stay free


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts; None where nobody can tell."""

    processors: int
    memory: tuple[int | None, int | None]  # bytes free, bytes in all; of the container where it has a limit
    shared: tuple[int, int] | None  # bytes free and in all of /dev/shm


def read_machine() -> Machine:
    """The facts of this machine, in milliseconds."""
    there = processor()
    return Machine(usable_processors(), (there.free, there.total), _shared())


def _shared() -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.free, usage.total


def machine_findings(machine: Machine, uses_vllm: bool) -> list[Finding]:
    """Processors, memory and shared memory. `uses_vllm`: its processes share memory."""
    free, total = machine.memory
    memory = f", {size(free)} of {size(total)} memory free" if free is not None and total is not None else ""
    found = [Finding("processors", OK, f"{machine.processors} for this process{memory}")]
    if machine.shared is not None:
        shared = f"{size(machine.shared[0])} of {size(machine.shared[1])} free in /dev/shm"
        if machine.shared[0] >= SHARED:
            found.append(Finding("shared memory", OK, shared))
        else:
            needed = "vLLM's workers and NCCL need 1 GiB" if uses_vllm else "rollout=vllm would need 1 GiB"
            cure = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8G /dev/shm"
            found.append(Finding("shared memory", WARN, f"{shared}: {needed}", cure))
    return found


def disk_findings(
    runs: Path,
    writes: tuple[int, int],
    cache: Path,
    downloads: int,
    free_of: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
    may_write: Callable[[Path], bool] = lambda place: os.access(place, os.W_OK),
) -> list[Finding]:
    """Whether what a run writes to `runs`, surely and at most, and downloads to `cache`, in bytes, has room there."""
    surely, most = writes
    of_runs = "free some space, choose another hydra.run.dir, or set checkpoint.keep=1 or save_rollouts_every=10"
    found = [
        _room("disk", runs, surely, most, f"a run writes {size(surely)} to {size(most)}", of_runs, free_of, may_write)
    ]
    if downloads:
        of_cache = "free some space, or set HF_HOME to a folder on another disk"
        does = f"the model is a download of {size(downloads)}"
        found.append(_room("model cache", cache, downloads, downloads, does, of_cache, free_of, may_write))
    return found


def _room(
    name: str,
    place: Path,
    surely: int,
    most: int,
    does: str,
    cure: str,
    free_of: Callable[[Path], int],
    may_write: Callable[[Path], bool],
) -> Finding:
    there = _existing(place)
    if not may_write(there):
        own = f"chmod u+w {there} if it is yours, or {cure.partition(', ')[2].removeprefix('or ')}"
        return Finding(name, FAIL, f"{there} cannot be written to", own)
    free = free_of(there)
    words = f"{size(free)} free in {there}; {does}"
    if free < surely:
        return Finding(name, FAIL, words, cure)
    return Finding(name, WARN, words, cure) if free < most + SPARE else Finding(name, OK, words)


def _existing(place: Path) -> Path:
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
