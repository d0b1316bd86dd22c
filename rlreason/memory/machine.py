"""The memory of the device that a run will use, read without loading torch."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from rlreason.runtime.gpus import torch_has_gpus

FIELDS = "name,memory.total,memory.free,compute_cap,driver_version"
QUERY = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
PATIENCE_S = 5.0  # that the driver may take to answer
BF16_SINCE = (8, 0)  # compute capability

Read = Callable[[str], str | None]  # path of a small file -> its text; None where there is none


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run computes; bytes of its memory, None where nobody can tell."""

    kind: str  # cuda | cpu
    name: str = ""
    free: int | None = None
    total: int | None = None
    bf16: bool = True  # computes bfloat16 natively
    second_free: int | None = None  # on the second GPU, which only rollout.placement=second_gpu uses


@dataclass(frozen=True, slots=True)
class Driver:
    """The GPUs that nvidia-smi lists, the driver's version, and why it lists none where it does not answer."""

    gpus: list[Device] = field(default_factory=list)
    version: str = ""
    failure: str = ""


def size(number: float) -> str:
    """Bytes in binary units.

    >>> size(3 << 30), size(5 << 20), size(200), size(20 << 30)
    ('3.0 GiB', '5.0 MiB', '0.0 MiB', '20 GiB')
    """
    amount, unit = (number / 2**30, "GiB") if number >= 2**30 else (number / 2**20, "MiB")
    return f"{amount:.0f} {unit}" if amount >= 9.95 else f"{amount:.1f} {unit}"


def decimal_size(number: float) -> str:
    """Bytes of files in decimal units, as disks are sold.

    >>> decimal_size(300_000), decimal_size(2_755_072), decimal_size(6.2e9)
    ('0.3 MB', '2.8 MB', '6.2 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def read_text(path: str) -> str | None:
    """The text of a small file; None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def processor(read: Read = read_text) -> Device:
    """The processor's memory: the machine's, or less where a control group limits it."""
    info = {
        line.partition(":")[0]: line.partition(":")[2].split() for line in (read("/proc/meminfo") or "").splitlines()
    }
    free, total = (int(info[key][0]) * 1024 if info.get(key) else None for key in ("MemAvailable", "MemTotal"))
    if total is None and hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in group_limits(read):
        total = limit if total is None else min(total, limit)
        free = limit - used if free is None else min(free, max(0, limit - used))
    return Device("cpu", "the processor", free, total)


def group_limits(read: Read) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of the control groups that hold for this process, of version 1 or 2.

    What is used for caches of files counts as free.

    >>> files = {"/proc/self/cgroup": "0::/job", "/sys/fs/cgroup/job/memory.max": "1000"}
    >>> files |= {"/sys/fs/cgroup/job/memory.current": "300", "/sys/fs/cgroup/job/memory.stat": "inactive_file 100"}
    >>> list(group_limits(files.get))
    [(1000, 200)]
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        second = number == "0" and not controllers
        if not second and "memory" not in controllers.split(","):
            continue
        mount = "" if second else "/memory"
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for group in (PurePosixPath("/", path), *PurePosixPath("/", path).parents):
            folder = f"/sys/fs/cgroup{mount}{group}".rstrip("/")
            limit, used = (_number(read(f"{folder}/{name}")) for name in names)
            if limit is not None and limit < 1 << 60:
                cached = dict(
                    pair for row in (read(f"{folder}/memory.stat") or "").splitlines() if len(pair := row.split()) == 2
                )
                yield limit, max(0, (used or 0) - (_number(cached.get("inactive_file")) or 0))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdecimal() else None


def believed_device() -> Device:
    """Where torch will compute, as far as can be told without it: the first GPU that is visible, else the processor."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch_has_gpus() or visible in ("", "-1"):
        return processor()
    gpus = asked_driver().gpus
    numbers = [int(n) for n in (visible or "").split(",") if n.strip().isdecimal() and int(n) < len(gpus)]
    return with_second([gpus[n] for n in numbers] or gpus) if gpus else processor()


def with_second(gpus: list[Device]) -> Device:
    """The first of some GPUs, which knows what is free on the second one."""
    return replace(gpus[0], second_free=gpus[1].free) if len(gpus) > 1 else gpus[0]


def asked_driver(patience_s: float = PATIENCE_S) -> Driver:
    """What nvidia-smi says; nothing where it is missing. One that hangs is ended, with all that it has started."""
    if shutil.which(QUERY[0]) is None:
        return Driver()
    try:
        asked = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        return Driver(failure=f"nvidia-smi cannot be started ({error.strerror})")
    try:
        told = asked.communicate(timeout=patience_s)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(asked.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # what the driver holds may never go
            asked.communicate(timeout=1.0)
        return Driver(failure=f"nvidia-smi has not answered within {patience_s:g} s")
    first = "".join(c for c in told.strip().partition("\n")[0] if c.isprintable())[:200]
    if asked.returncode:
        return Driver(failure=f"nvidia-smi fails (exit code {asked.returncode}): {first or 'it says nothing'}")
    gpus = parsed_gpus(told)
    version = first.split(",")[4].strip() if gpus and first.count(",") == 4 else ""
    failure = f"nvidia-smi answers what cannot be read: {first}" if first and not gpus else ""
    return Driver(gpus, version, failure)


def parsed_gpus(table: str) -> list[Device]:
    """nvidia-smi's lines of name, total and free memory in MiB, compute capability, and the driver's version.

    Memory that the processor shares is not told ([N/A]).

    >>> parsed_gpus("NVIDIA A100-SXM4-80GB, 81920, 80000, 8.0, 550.54.15")[0].total // 2**20
    81920
    >>> parsed_gpus("NVIDIA GB10, [N/A], [N/A], 12.1, 580.95")[0].free is None
    True
    """
    found = []
    for line in table.splitlines():
        fields = [part.strip() for part in line.split(",")]
        sizes = [_mebibytes(part) for part in fields[1:3]]
        if len(fields) in (4, 5) and len(sizes) == 2 and all(part.isdecimal() or "N/A" in part for part in fields[1:3]):
            major, _, minor = fields[3].partition(".")
            known = major.isdecimal() and minor.isdecimal()
            half = not known or (int(major), int(minor)) >= BF16_SINCE
            found.append(Device("cuda", fields[0], sizes[1], sizes[0], half))
    return found


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdecimal() else None
