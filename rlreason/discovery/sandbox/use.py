"""What a tree of processes takes, read from /proc."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


def processes_below(pid: int, most: int = 100_000) -> list[int]:
    """Every process below one, wherever in the tree; about `most` of them, where there are more."""
    found, unread = list[int](), [pid]
    while unread and len(found) <= most:
        parent = unread.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    children = list(map(int, file.read().split()))
                found += children
                unread += children
    return found


def used_mb(pids: Sequence[int], precise_above_mb: float) -> float:
    """Megabytes of memory that processes hold together.

    Pages that they share count once for each, which takes little time; where that comes to more than
    `precise_above_mb`, they are shared out as the kernel does (PSS).
    """
    resident = 0.0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
    if resident <= precise_above_mb:
        return resident
    return sum(map(_proportional_mb, pids))


def _proportional_mb(pid: int) -> float:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
    return 0.0
