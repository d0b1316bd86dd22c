"""The memory of the device that a run will use, read without loading torch."""

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
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


def size(number: float) -> str:
    """Bytes in binary units.

    >>> size(3 << 30), size(5 << 20), size(200), size(20 << 30)
    ('3.0 GiB', '5.0 MiB', '0.0 MiB', '20 GiB')
    """
    amount, unit = (number / 2**30, "GiB") if number >= 2**30 else (number / 2**20, "MiB")
    return f"{amount:.0f} {unit}" if amount >= 9.95 else f"{amount:.1f} {unit}"


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
    try:
        build = importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        build = "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if build == "cpu" or visible in ("", "-1"):
        return processor()
    gpus = driver_gpus()
    if not gpus:
        return processor()
    first = (visible or "0").split(",")[0]
    return gpus[int(first)] if first.isdecimal() and int(first) < len(gpus) else gpus[0]


def driver_gpus(patience_s: float = PATIENCE_S) -> list[Device]:
    """The GPUs that the driver knows, by nvidia-smi; none where it is missing, fails or does not answer."""
    if shutil.which(QUERY[0]) is None:
        return []
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=patience_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parsed_gpus(done.stdout)


def parsed_gpus(table: str) -> list[Device]:
    """nvidia-smi's lines of name, total and free memory in MiB, and compute capability.

    >>> parsed_gpus("NVIDIA A100-SXM4-80GB, 81920, 80000, 8.0")[0].total // 2**20
    81920
    """
    found = []
    for line in table.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 4 and fields[1].isdecimal() and fields[2].isdecimal():
            major, _, minor = fields[3].partition(".")
            known = major.isdecimal() and minor.isdecimal()
            half = not known or (int(major), int(minor)) >= BF16_SINCE
            found.append(Device("cuda", fields[0], int(fields[2]) << 20, int(fields[1]) << 20, half))
    return found
