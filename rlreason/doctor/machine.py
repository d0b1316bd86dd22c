"""What of the machine a run needs besides its GPUs: shared memory, limits of files and processes, memory, disk."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlreason.doctor.finding import FAIL, OK, WARN, Finding
from rlreason.memory.machine import processor, size
from rlreason.runtime.processors import usable_processors

SHARED = 1 << 30  # bytes of /dev/shm below which vLLM's workers and NCCL get into trouble: docker gives 64 MB
FILES = 1024  # open files that a run with loggers, graders and vLLM may come near
PROCESSES = 512
UNLIMITED = 1 << 60
TEMPORARY = 64 << 20  # bytes that vLLM and torch may write to the temporary folder
SPARE = 2 << 30  # bytes of disk that should stay free


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts; None where nobody can tell."""

    processors: int
    memory: tuple[int | None, int | None]  # bytes free, bytes in all; of the container where it has a limit
    shared: tuple[int, int] | None  # bytes free and in all of /dev/shm
    files: int | None  # how many a process may open
    processes: int | None


def read_machine() -> Machine:
    """The facts of this machine, in milliseconds."""
    there = processor()
    return Machine(usable_processors(), (there.free, there.total), _shared(), _limit("NOFILE"), _limit("NPROC"))


def _shared() -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.free, usage.total


def _limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:
        return None
    kind = getattr(resource, f"RLIMIT_{name}", None)
    if kind is None:
        return None
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY or soft > UNLIMITED else soft


def machine_findings(machine: Machine, uses_vllm: bool) -> list[Finding]:
    """Processors, memory, shared memory and limits. `uses_vllm`: its processes share memory."""
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
    found.append(limit_finding("open files", machine.files, FILES, "ulimit -n 65536 before the run"))
    found.append(limit_finding("processes", machine.processes, PROCESSES, "ulimit -u 4096 before the run"))
    return found


def limit_finding(name: str, limit: int | None, least: int, cure: str) -> Finding:
    """Whether a limit of this process leaves room.

    >>> limit_finding("open files", 256, 1024, "ulimit -n 65536").state
    'warn'
    """
    if limit is None:
        return Finding(name, OK, "no limit")
    if limit >= least:
        return Finding(name, OK, f"at most {limit}")
    return Finding(name, WARN, f"at most {limit}, and a run may need {least}", cure)


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


def temporary_finding(folder: Path, uses_vllm: bool, free_of: Callable[[Path], int] | None = None) -> Finding:
    """Whether TMPDIR, or what stands in for it, is there and has room: vLLM's sockets and model folder go there."""
    name, asked = "TMPDIR", os.environ.get("TMPDIR")
    needs = "vLLM's sockets and its model folder go" if uses_vllm else "temporary files go"
    if asked and not os.access(asked, os.W_OK | os.X_OK):
        words = f"TMPDIR={asked} is missing or cannot be written to, and {needs} to {folder}"
        return Finding(name, WARN, words, f"mkdir -p {asked}, or unset TMPDIR")
    free = free_of(folder) if free_of else shutil.disk_usage(folder).free
    words = f"{size(free)} free in {folder}"
    if free < TEMPORARY:
        cure = f"free some space in {folder}, or set TMPDIR to a folder on another disk"
        return Finding(name, FAIL if uses_vllm else WARN, f"{words}, where {needs}", cure)
    return Finding(name, OK, words)


def _existing(place: Path) -> Path:
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
