"""How many processors this process may use: its affinity and its container's quota, not what the machine has."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

Read = Callable[[str], str | None]  # path of a small file -> its text; None where there is none

#: Where the files of version 1's cpu controller may be.
V1_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def usable_processors() -> int:
    """Processors that this process may keep busy, at least 1: its affinity, or fewer where a cgroup limits its time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(_text("/proc/self/cgroup") or "", _text)
    return max(1, math.ceil(min(allowed, quota)))  # a quota of 1.5 keeps two threads busy most of the time


def default_threads(of_torch: int) -> int:
    """Threads for numerical work where none are set: `of_torch`, but no more than this process's processors.

    `of_torch` is torch's own choice, which counts cores and reads OMP_NUM_THREADS.
    """
    return min(of_torch, usable_processors())


def shares(processors: Sequence[int], parts: int) -> list[list[int]]:
    """Processors, by their numbers, divided among `parts` that run side by side; the rest goes to the last ones.

    Where there are fewer processors than parts, each part gets all of them: the system divides the time.

    >>> shares([0, 1, 2, 5, 7], 2), shares([0], 2)
    ([[0, 1], [2, 5, 7]], [[0], [0]])
    """
    n = len(processors)
    if n < parts:
        return [list(processors)] * parts
    return [list(processors[k * n // parts : (k + 1) * n // parts]) for k in range(parts)]


@contextmanager
def children_on(processors: Collection[int] | None) -> Iterator[None]:
    """Processes that this thread starts in the block run on these processors; None: on those of this thread."""
    if processors is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cgroup_quota(memberships: str, read: Read) -> float:
    """Processors' worth of time that the control groups allow, infinity where they set no limit.

    `memberships` is the text of /proc/self/cgroup. Version 2 states "quota period" in cpu.max, version 1 in two files;
    the limits of all groups above one hold for it, too.

    >>> cgroup_quota("0::/job", {"/sys/fs/cgroup/job/cpu.max": "150000 100000"}.get)
    1.5
    >>> cgroup_quota("0::/", {"/sys/fs/cgroup/cpu.max": "max 100000"}.get)
    inf
    """
    quotas = [math.inf]
    for line in memberships.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            quotas += [_quota(*(read(f"{folder}/cpu.max") or "").split()[:2]) for folder in _folders("", path)]
        elif "cpu" in controllers.split(","):
            for folder in (f for mount in V1_MOUNTS for f in _folders(f"/{mount}", path)):
                quotas.append(_quota(read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")))
    return min(quotas)


def _folders(mount: str, path: str) -> Iterator[str]:
    """The folders of a group and of all above it. In a container the path may be the host's: only the top is there."""
    for group in (PurePosixPath("/", path), *PurePosixPath("/", path).parents):
        yield f"/sys/fs/cgroup{mount}{group}".rstrip("/")


def _quota(time: str | None = None, period: str | None = None) -> float:
    """Time over period, both in microseconds; infinity where there is no limit ("max", -1) or no number."""
    try:
        allowed, every = float(time or "max"), float(period or 0)
    except ValueError:
        return math.inf
    return allowed / every if allowed > 0 and every > 0 else math.inf


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
