"""Measure what processes use together, read from /proc."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MOST_READ = 64  # processes whose maps are read at each look
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


def used_mb(pids: Sequence[int], precise_above_mb: float) -> float:
    """Return the megabytes of memory of their own that processes hold together, without files.

    Shared pages count once for each process, which is fast; above `precise_above_mb` they are divided as the kernel
    does (PSS).
    """
    resident = 0.0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            _, whole, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
            resident += (int(whole) - int(shared)) * PAGE_MB
    if resident <= precise_above_mb:
        return resident
    return sum(map(_proportional_mb, pids))


def _proportional_mb(pid: int) -> float:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) / 1024
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
    return 0.0


def unmapped_mb(pids: Sequence[int], folder: str) -> float:
    """Return the megabytes that the processes of a sandbox hold outside their mapped memory.

    Files of its two file systems in memory, `folder` and /dev/shm, as the first process sees them, if it has its own;
    and shared memory without a file, which may be written and unmapped: by its size.
    """
    found, sizes = 0.0, dict[str, int]()
    for pid in pids[:MOST_READ]:
        with suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if line.endswith("/dev/zero (deleted)"):
                    begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
                    inode = line.split()[4]
                    sizes[inode] = max(sizes.get(inode, 0), end - begin)
    for place in (folder, "/dev/shm") if pids else ():
        with suppress(OSError):
            inside, here = f"/proc/{pids[0]}/root{place}", os.stat(place)
            if os.stat(inside).st_dev != here.st_dev:
                told = os.statvfs(inside)
                found += (told.f_blocks - told.f_bfree) * told.f_frsize / 2**20
    return found + sum(sizes.values()) / 2**20
