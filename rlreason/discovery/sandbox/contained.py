"""Start a command in the sandbox, read its output within bounds, and report which protections are active."""

import ctypes
import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.discovery.sandbox.ending import descendants
from rlreason.discovery.sandbox.run_program import LONGEST_ROW, LONGEST_TEXT
from rlreason.runtime.signals import temporary_folder

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


WARDEN, RUN_PROGRAM, RUN_CHECK = map(Path(__file__).with_name, ("warden.py", "run_program.py", "run_check.py"))
PACKAGE = str(Path(__file__).resolve().parents[2])  # of which a program sees nothing: it holds the problems' examples
PREFIX = "rlreason-program-"  # of scratch folders; their owner's process id follows
TAIL = 4000  # bytes of the output that are kept
LOOK_EVERY_S = 0.02  # between two checks of what all processes use
DRAINING_S = 1.0  # for output written before the program ended
ENDING_S = 10.0  # for the warden to end them
SYSTEM = (
    "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
    "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/sys/devices/system/cpu", "/sys/fs/cgroup",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program, some for all of its processes together."""

    timeout_s: float = 600.0  # wall clock, from the start of its Python
    memory_mb: int = 2048  # of all processes together, and of each
    check_timeout_s: float = 120.0  # wall clock for the check of what it gave
    disk_mb: int = 256  # each file, and all files together if the scratch folder is in memory
    output_mb: int = 64  # printed
    channel_mb: int = 16  # of the set as text
    processes: int = 256  # at one time
    cpus: int = 4  # processors that it may use, where there are more
    namespaces: bool = True  # false: as on a system that allows none
    landlock: bool = True  # false: as on a system without it


@dataclass(slots=True)
class Outcome:
    """How a contained command ended. `stopped`: the limit that ended it, or why it could not begin."""

    stopped: str | None = None  # timeout, memory, output, channel, processes, stopped, broken
    exit: int | None = None  # code, or minus the signal
    channel: bytes = b""
    tail: bytes = b""  # the end of what it printed
    printed: int = 0  # bytes in all
    seconds: float = 0.0
    peak_mb: float = 0.0
    protections: dict[str, str] = field(default_factory=dict)
    why: str = ""
    left_behind: bool = False  # processes that could not be ended


def run_contained(
    arguments: Sequence[str], source: bytes, limits: Limits, timeout_s: float, *, stdin: bytes | None = None,
    readable: Sequence[str] = (), stop: Callable[[], bool] = lambda: False,
) -> Outcome:  # fmt: skip
    """Run this Python with `arguments` in the sandbox, `source` being the file `program.py` of its scratch folder.

    An argument `{program}` becomes the path of that file. `readable`: more paths that may be read. The processes that
    it starts have all ended when this returns. An interruption ends them too, and so does `stop` once it is true.
    """
    # The program gets a /dev/shm of its own.
    place = Path("/tmp") if tempfile.gettempdir().startswith("/dev/shm") else None
    with temporary_folder(f"{PREFIX}{os.getpid()}-", place) as folder, ExitStack() as stack:
        program = Path(folder) / "program.py"
        program.write_bytes(source)
        command = [sys.executable, "-I", "-B", *(a.replace("{program}", str(program)) for a in arguments)]
        pipes = _Pipes(stack, stdin)
        may_read, may_list = pythons_but_this()
        options = {
            "folder": str(folder),
            "program": str(program),
            "command": command,
            "readable": [*SYSTEM, *may_read, *readable],
            "listable": may_list,
            "needed": [sys.executable, *may_read[:1], *readable],
            "channel": pipes.channel[1],
            "status": pipes.status[1],
            "leash": pipes.leash[0],
            "stdin": pipes.stdin,
            "timeout_s": timeout_s,
            "memory_mb": limits.memory_mb,
            "disk_mb": limits.disk_mb,
            "processes": limits.processes,
            "cpus": limits.cpus,
            "namespaces": limits.namespaces,
            "landlock": limits.landlock,
        }
        warden = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(WARDEN), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=pipes.output[1],
            stderr=pipes.output[1],
            pass_fds=[fd for fd in (pipes.channel[1], pipes.status[1], pipes.leash[0], pipes.stdin) if fd is not None],
            env={},
            start_new_session=True,
        )
        pipes.close_far_ends()
        outcome = Outcome()
        try:
            _watch(warden, pipes, limits, timeout_s, outcome, stop, str(folder))
        finally:
            pipes.let_go()
            _end(warden, outcome)
            if not outcome.protections.get("files"):  # a folder that a program made too deep for Python
                subprocess.run(["rm", "-rf", str(folder)], check=False, stderr=subprocess.DEVNULL)
        return outcome


def _pipe() -> tuple[int, ...]:
    return _raised(*os.pipe())


def _raised(*ends: int) -> tuple[int, ...]:
    """Duplicate files to numbers above those of standard streams, some of which may be closed in this process."""
    raised = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return raised


class _Pipes:
    """The pipes to the other side: [0] is read, [1] is written."""

    def __init__(self, stack: ExitStack, stdin: bytes | None) -> None:
        self.channel, self.status, self.output, self.leash = _pipe(), _pipe(), _pipe(), _pipe()
        self.stdin: int | None = None
        if stdin is not None:
            (self.stdin,) = _raised(os.memfd_create("stdin"))
            with open(os.dup(self.stdin), "wb") as file:
                file.write(stdin)
            os.lseek(self.stdin, 0, os.SEEK_SET)
        ends = (*self.channel, *self.status, *self.output, *self.leash, self.stdin)
        self._open = {end for end in ends if end is not None}
        stack.callback(self._close, *self._open)

    def close_far_ends(self) -> None:
        """Close the ends of the other side."""
        self._close(self.channel[1], self.status[1], self.output[1], self.leash[0], self.stdin)

    def let_go(self) -> None:
        """Release the leash: the warden ends everything."""
        self._close(self.leash[1])

    def _close(self, *ends: int | None) -> None:
        for end in ends:
            if end in self._open:
                self._open.discard(end)
                with suppress(OSError):
                    os.close(end)


def _watch(
    warden: subprocess.Popen[bytes],
    pipes: _Pipes,
    limits: Limits,
    timeout_s: float,
    outcome: Outcome,
    stop: Callable[[], bool],
    folder: str,
) -> None:
    """Read until the warden has ended, or a limit is exceeded."""
    status, channel, began = bytearray(), bytearray(), time.monotonic()
    started, ended = None, None  # when the program's Python began and had ended
    with selectors.DefaultSelector() as selector:
        for name, pipe in (("channel", pipes.channel), ("status", pipes.status), ("output", pipes.output)):
            os.set_blocking(pipe[0], False)
            selector.register(pipe[0], selectors.EVENT_READ, name)
        looked = 0.0
        while selector.get_map() and outcome.stopped is None:
            for key, _ in selector.select(LOOK_EVERY_S):
                with suppress(BlockingIOError):
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fd)
                    elif key.data == "channel":
                        channel += part
                    elif key.data == "status":
                        status += part
                    else:
                        outcome.printed += len(part)
                        outcome.tail = (outcome.tail + part)[-TAIL:]
            now = time.monotonic()
            if started is None and b"\n" in status:
                started = now
            if now - looked >= LOOK_EVERY_S:
                looked = now
                outcome.stopped = (
                    "stopped"
                    if stop()
                    else _over(warden.pid, limits, outcome, len(channel), now - (started or began), timeout_s, folder)
                )
            if ended is None and b'"exit"' in status and status.endswith(b"\n"):
                ended = now
            if ended is not None and now - ended > DRAINING_S:
                break
    if outcome.stopped is None and len(channel) > limits.channel_mb * 2**20:
        outcome.stopped = "channel"
    if outcome.stopped is None and outcome.printed > limits.output_mb * 2**20:
        outcome.stopped = "output"
    outcome.seconds = time.monotonic() - (started or began)
    outcome.channel = bytes(channel)
    _read_status(bytes(status), outcome)


def _over(
    pid: int, limits: Limits, outcome: Outcome, sent: int, seconds: float, timeout_s: float, folder: str
) -> str | None:
    """Return the limit that is currently exceeded, or None."""
    below = descendants(pid, limits.processes + 2)
    used = used_mb(below, limits.memory_mb) + unmapped_mb(below, folder)
    outcome.peak_mb = max(outcome.peak_mb, used)
    exceeded = {
        "timeout": seconds > timeout_s,
        "memory": used > limits.memory_mb,
        "output": outcome.printed > limits.output_mb * 2**20,
        "channel": sent > limits.channel_mb * 2**20,
        "processes": len(below) > limits.processes + 1,  # the first process is not the program's
    }
    return next((name for name, is_over in exceeded.items() if is_over), None)


def _read_status(status: bytes, outcome: Outcome) -> None:
    for line in status.splitlines():
        with suppress(ValueError):
            told: dict[str, Any] = json.loads(line)
            outcome.protections = told.get("protections", outcome.protections)
            if "exit" in told:
                outcome.exit = told["exit"]
                outcome.peak_mb = max(outcome.peak_mb, told["peak_kb"] / 1024)
            if "broken" in told:
                outcome.stopped, outcome.why = "broken", told["broken"]


def _end(warden: subprocess.Popen[bytes], outcome: Outcome) -> None:
    """Wait until the warden has ended everything below it."""
    try:
        outcome.left_behind = warden.wait(ENDING_S) != 0
    except subprocess.TimeoutExpired:
        below = descendants(warden.pid)
        for pid in (*below, warden.pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        warden.wait(ENDING_S)
        outcome.left_behind = True


def remove_leftovers() -> None:
    """Remove the scratch folders of processes that were killed before they could."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def without(roots: Sequence[str], hidden: str) -> tuple[list[str], list[str]]:
    """Return (all in these folders except the `hidden` one, the folders on the way to it)."""
    whole, opened, unread = list[str](), list[str](), list(roots)
    while unread:
        path = unread.pop()
        if hidden == path:
            continue
        if hidden.startswith(f"{path}/"):
            opened.append(path)
            unread += [os.path.join(path, name) for name in os.listdir(path)]
        else:
            whole.append(path)
    return whole, opened


@cache  # hundreds of packages, the same for every program
def pythons_but_this() -> tuple[list[str], list[str]]:
    """Return what a program may read of this Python: (all but this package, the folders on the way to it)."""
    return without(pythons_folders(), PACKAGE)


def pythons_folders() -> list[str]:
    """Return the folders of this Python, its standard library and its packages."""
    paths = [sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    real = {os.path.realpath(path) for path in (*paths, os.path.dirname(os.path.realpath(sys.executable)))}
    kept = sorted(path for path in {*paths, *real} if os.path.isdir(path) and path != "/")
    return [path for path in kept if not any(path.startswith(f"{other}/") for other in kept)]


PR_SET_DUMPABLE = 4


@cache
def protections(limits: Limits) -> dict[str, str]:
    """Return the protections active here, by name, from one trial; {} if no program can be started.

    If a program shares this process's view of processes, only root can read this process's memory and environment from
    now on, which may hold keys.
    """
    remove_leftovers()
    outcome = run_contained(["-c", "pass"], b"", limits, 20.0)
    if "processes" not in outcome.protections.get("namespaces", ""):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return outcome.protections


def missing(active: Mapping[str, str]) -> list[str]:
    """Return what a program could do here that a better system would prevent, one clause each.

    >>> missing({"namespaces": "files, processes, network", "files": "read-only", "Landlock": "version 7"})
    []
    >>> missing({"namespaces": "", "Landlock": "version 5"})
    ['see and signal other processes of its user', 'use the network but for TCP']
    """
    spaces, version = active.get("namespaces", ""), int(active.get("Landlock", "version 0").split()[1])
    found = []
    if not version:
        found.append("read every file that its user may read")
        if "read-only" not in active.get("files", ""):
            found.append("write every file that its user may write")
    if "processes" not in spaces:
        whom = "see" if version >= 6 else "see and signal"
        found.append(f"{whom} other processes of its user")
    if "network" not in spaces and "seccomp" not in active:
        found.append("use the network" + (" but for TCP" if version >= 4 else ""))
    return found


def protections_text(active: Mapping[str, str], briefly: bool = False) -> str:
    """Return in words what is active, only by name if `briefly`, and what is not prevented."""
    has = "; ".join(name if briefly else f"{name} ({what})" for name, what in active.items()) or "none"
    lacks = missing(active)
    return has + (f". Not held back on this system: it could {', and '.join(lacks)}" if lacks else "")


POINTS, END = b"points", re.compile(rb"end (0|[1-9]\d{0,8})")
ROW = re.compile(rb"(?:0|-?[1-9]\d*)(?: (?:0|-?[1-9]\d*))*")
ERROR = re.compile(rb"error (no_points|type|size|memory|exit|exception)")


class ProgramOutput(NamedTuple):
    """The rows that a program gave, or the kind of error and its text, which the program itself may have written.

    Kind "channel": something else was written there. None for both: nothing was.
    """

    rows: list[list[int]] | None = None
    kind: str | None = None
    text: str = ""


def read_channel(data: bytes, most_rows: int, most_digits: int) -> ProgramOutput:
    """Parse rows from the channel's bytes.

    >>> read_channel(b"points\\n1 -2\\n0 3\\nend 2\\n", 10, 10).rows
    [[1, -2], [0, 3]]
    >>> read_channel(b"points\\n1 02\\nend 1\\n", 10, 10).kind, read_channel(b"points\\n1 2\\n", 10, 10).kind
    ('channel', 'channel')
    """
    if not data:
        return ProgramOutput()
    first, _, rest = data.partition(b"\n")
    if named := ERROR.fullmatch(first):
        return ProgramOutput(kind=named[1].decode(), text=rest.decode("utf-8", "backslashreplace")[:LONGEST_TEXT])
    lines = rest.split(b"\n")
    if first != POINTS or len(lines) < 2 or lines[-1] or not (end := END.fullmatch(lines[-2])):
        return ProgramOutput(kind="channel", text="something else than rows of integers came from the program")
    rows = lines[:-2]
    if len(rows) != int(end[1]):
        return ProgramOutput(kind="channel", text="the number of rows is another than was said")
    if len(rows) > most_rows:
        return ProgramOutput(kind="size", text=f"more than {most_rows} points")
    found = []
    for row in rows:
        if row.count(b" ") >= LONGEST_ROW:
            return ProgramOutput(kind="size", text=f"a point has more than {LONGEST_ROW} coordinates")
        if row and not ROW.fullmatch(row):
            return ProgramOutput(kind="channel", text="a row holds something else than integers")
        words = row.split()
        if any(len(word) > most_digits + 1 for word in words):
            return ProgramOutput(kind="size", text=f"an integer has more than {most_digits} digits")
        found.append(list(map(int, words)))
    return ProgramOutput(found)
