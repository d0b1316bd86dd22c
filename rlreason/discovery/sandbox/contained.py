"""Run untrusted programs in a sandbox: by bwrap, else by util-linux's unshare, else within limits and Landlock alone.

In the first two a program sees the system's libraries, this Python and its packages, all read-only, and a folder in
memory; it has no network, and its processes are those of a namespace. Which one works here is found by a trial of each.
"""

import ctypes
import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rlreason.discovery.sandbox.commands import SANDBOXES, SandboxPlace, command_line, landlock_paths
from rlreason.discovery.sandbox.restrict import REFUSED_CALLS, STARTED, landlock_version
from rlreason.discovery.sandbox.run_program import LONGEST_ROW, LONGEST_TEXT
from rlreason.discovery.sandbox.warden import TOO_MANY, descendants, signal_all
from rlreason.errors import ConfigError
from rlreason.runtime.signals import temporary_folder

FOLDER = Path(__file__).parent
WARDEN, RESTRICT, RUN_PROGRAM, RUN_CHECK = (
    str(FOLDER / name) for name in ("warden.py", "restrict.py", "run_program.py", "run_check.py")
)
PREFIX = "rlreason-program-"  # of scratch folders; their owner's process id follows
TAIL = 4000  # bytes of the output that are kept
LOOK_EVERY_S = 0.02  # between two checks of what all processes use
ENDING_S = 10.0  # for the warden to end all processes
STARTING_S = 60.0  # for a sandbox to begin
MORE_PROCESSES = 2  # of the sandbox itself: bwrap and the first process of its namespace, or unshare and its shell
MOST_READ = 64  # processes whose maps are read at each look
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20
MB = 2**20
PR_SET_DUMPABLE = 4


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
    sandbox: str = ""  # bwrap, unshare or limits, instead of the best that works here
    landlock: bool = True  # false: as on a system without it


@dataclass(slots=True)
class Outcome:
    """How a contained command ended."""

    stopped: str | None = None  # timeout, memory, output, channel, processes, stopped; broken: it never began
    exit: int | None = None  # code, or minus the signal
    channel: bytes = b""
    tail: bytes = b""  # the end of what it printed
    printed: int = 0  # bytes in all
    seconds: float = 0.0
    peak_mb: float = 0.0
    left_behind: bool = False  # processes that could not be ended
    seen: dict[int, str] = field(default_factory=dict)  # its processes, and when they began


@dataclass(frozen=True, slots=True)
class Command:
    """What this Python runs in the sandbox, and what it is given.

    An argument `{program}` becomes the path of `source`, which is the file `program.py` of a private folder.
    """

    arguments: Sequence[str]
    timeout_s: float
    source: bytes = b""
    stdin: bytes = b""
    readable: Sequence[str] = ()  # more paths that may be read


def run_contained(
    command: Command, limits: Limits, stop: Callable[[], bool] = lambda: False, sandbox: str = ""
) -> Outcome:
    """Run a command in the best sandbox that works here, or this one.

    The processes that it starts have all ended when this returns. An interruption ends them too, and so does `stop`
    once it is true.
    """
    sandbox = sandbox or sandbox_here(limits.sandbox, limits.landlock)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(f"{PREFIX}{os.getpid()}-"))
        place = SandboxPlace(folder, limits.disk_mb, (str(FOLDER), *command.readable))
        Path(folder, "program.py").write_bytes(command.source)
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(command.stdin)
        given.seek(0)
        channel, far_end = map(above_standard_streams, os.pipe())
        stack.callback(os.close, channel)
        options = {"channel": far_end, "cpus": limits.cpus, "limits": resource_limits(limits, command.timeout_s)}
        options["alone"] = sandbox == "limits"
        if limits.landlock and landlock_version():
            options["landlock"] = landlock_paths(sandbox, place)
        program = f"{folder if sandbox == 'limits' else '/tmp'}/program.py"
        python = [sys.executable, "-I", "-B"]
        inner = [*python, "-S", RESTRICT, json.dumps(options), *python]
        inner += [program if word == "{program}" else word for word in command.arguments]
        most = limits.processes + MORE_PROCESSES
        try:
            warden = subprocess.Popen(
                [*python, "-S", WARDEN, str(os.getpid()), str(most), *command_line(sandbox, place, inner)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[far_end],
                env={"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"},
                cwd=folder,
                start_new_session=True,
            )
        finally:
            os.close(far_end)
        outcome = Outcome()
        with warden:
            try:
                watch(warden, channel, outcome, limits, command.timeout_s, stop)
            finally:
                end(warden, outcome)
        if sandbox == "limits":  # a program may have made its folder too deep for Python
            subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)
        return outcome


def above_standard_streams(descriptor: int) -> int:
    """Move a file to a number above those of the standard streams, some of which may be closed in this process."""
    raised = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return raised


def resource_limits(limits: Limits, timeout_s: float) -> dict[str, int]:
    """Return the limits of each process, by the name that follows RLIMIT_; the total is watched by `exceeded`."""
    threads = 0  # of this user's, which count too, except in a namespace of newer kernels
    for task in Path("/proc").glob("[0-9]*/task") if os.getuid() else ():
        with suppress(OSError):
            threads += len(os.listdir(task)) if task.stat().st_uid == os.getuid() else 0
    return {
        "DATA": limits.memory_mb * MB,
        "AS": (limits.memory_mb + 4096) * MB,  # libraries map more than they use
        "CPU": int(timeout_s * limits.cpus) + 5,
        "FSIZE": limits.disk_mb * MB,
        "NOFILE": 256,
        "CORE": 0,
        "MEMLOCK": 64 * 1024,
        "MSGQUEUE": 0,
        "NPROC": threads + limits.processes,
    }


def watch(
    warden: "subprocess.Popen[bytes]", channel: int, outcome: Outcome, limits: Limits, timeout_s: float,
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Read until the warden has ended, or a limit is exceeded."""
    assert warden.stdout is not None
    sent, began, looked, started = bytearray(), time.monotonic(), 0.0, False
    with selectors.DefaultSelector() as selector:
        for pipe in (channel, warden.stdout.fileno()):
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and outcome.stopped is None:
            ready = selector.select(LOOK_EVERY_S)
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fd)
                elif key.fd == channel:
                    sent += part
                else:
                    outcome.printed += len(part)
                    outcome.tail = (outcome.tail + part)[-TAIL:]
            now = time.monotonic()
            if not started and sent.startswith(STARTED):
                began, started = now, True
            outcome.seconds = now - began
            if now - looked >= LOOK_EVERY_S or not selector.get_map():
                looked = now
                longest = timeout_s if started else STARTING_S
                outcome.stopped = "stopped" if stop() else exceeded(warden.pid, len(sent), outcome, limits, longest)
            if not ready and warden.poll() is not None:  # what it left behind may hold the output
                break
    outcome.channel = bytes(sent).removeprefix(STARTED)
    if not started and outcome.stopped != "stopped":
        outcome.stopped = "broken"
    if outcome.stopped is None:
        with suppress(subprocess.TimeoutExpired):
            code = warden.wait(ENDING_S)
            outcome.exit = 128 - code if code > 128 else code
            outcome.stopped = "processes" if code == -TOO_MANY else None


def exceeded(warden: int, sent: int, outcome: Outcome, limits: Limits, timeout_s: float) -> str | None:
    """Return the limit that is currently exceeded, or None."""
    pids = descendants(warden, limits.processes)
    outcome.seen.update({pid: start_time(pid) for pid in pids if pid not in outcome.seen})
    used = used_mb(pids, limits.memory_mb) + unmapped_mb(pids)
    outcome.peak_mb = max(outcome.peak_mb, used)
    over = {
        "timeout": outcome.seconds > timeout_s,
        "memory": used > limits.memory_mb,
        "output": outcome.printed > limits.output_mb * MB,
        "channel": sent > limits.channel_mb * MB,
    }
    return next((name for name, is_over in over.items() if is_over), None)


def used_mb(pids: Sequence[int], precise_above_mb: float) -> float:
    """Return the megabytes of memory of their own that processes hold together, without files.

    Pages that processes share count once for each, which is fast; above `precise_above_mb` they are divided as the
    kernel does (PSS), which waits for a process that forks.
    """
    held = dict.fromkeys(pids, 0.0)
    for pid in pids:
        with suppress(OSError, ValueError):
            _, whole, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
            held[pid] = (int(whole) - int(shared)) * PAGE_MB
    for pid in pids if sum(held.values()) > precise_above_mb else ():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            held[pid] = sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss_Anon:"))
    return sum(held.values())


def unmapped_mb(pids: Sequence[int]) -> float:
    """Return the megabytes that the processes of a sandbox hold in its files in memory and in memory they share.

    What is shared without a file counts by its size, since it may be written and let go.
    """
    used, sizes = 0.0, dict[bytes, int]()
    for pid in pids[:MOST_READ]:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
                if line.endswith(b"/dev/zero (deleted)"):
                    begin, _, end = line.partition(b" ")[0].partition(b"-")
                    inode = line.split()[4]
                    sizes[inode] = max(sizes.get(inode, 0), int(end, 16) - int(begin, 16))
    for place in ("/tmp", "/dev/shm"):
        for pid in pids[:4]:  # the first ones may not have entered the sandbox
            with suppress(OSError):
                inside = f"/proc/{pid}/root{place}"
                if os.stat(inside).st_dev != os.stat(place).st_dev:
                    space = os.statvfs(inside)
                    used += (space.f_blocks - space.f_bfree) * space.f_frsize / MB
                    used += (space.f_files - space.f_ffree) / 1024  # each takes about a kilobyte, however short
                    break
    return used + sum(sizes.values()) / MB


def start_time(pid: int) -> str:
    """Return when a process began, which no other process of this id has in common; empty once it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        return "" if state in "ZX" else fields[18]
    return ""


def end(warden: "subprocess.Popen[bytes]", outcome: Outcome) -> None:
    """Have the warden end everything below it; end what was seen of it, in case the program has ended the warden."""
    warden.terminate()
    try:
        warden.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        outcome.seen.update({pid: start_time(pid) for pid in descendants(warden.pid)})
        warden.kill()
    until = time.monotonic() + ENDING_S
    while left := [pid for pid, began in outcome.seen.items() if began and start_time(pid) == began]:
        if time.monotonic() > until:
            outcome.left_behind = True
            return
        signal_all(left, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


@cache
def sandbox_here(wanted: str, landlock: bool) -> str:
    """Return the best of `SANDBOXES` that works here, by a trial of each; `ConfigError` if none does.

    If a program shares this process's view of processes, only root can read this process's memory and environment from
    now on, which may hold keys.
    """
    remove_leftovers()
    for sandbox in SANDBOXES:
        if wanted and not sandbox.startswith(wanted):
            continue
        trial = run_contained(Command(["-c", "pass"], STARTING_S), Limits(landlock=landlock), sandbox=sandbox)
        if trial.exit == 0:
            if sandbox == "limits":
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            return sandbox
    why = trial.tail.decode("utf-8", "replace").strip().rpartition("\n")[2]
    raise ConfigError(f"no program can be held back here ({why[-300:]}): install bubblewrap, and try again")


def remove_leftovers() -> None:
    """Remove the scratch folders of processes that were killed before they could."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def protections(limits: Limits) -> dict[str, str]:
    """Return the protections active here, by name; `ConfigError` if no program can be held back."""
    sandbox, active = sandbox_here(limits.sandbox, limits.landlock), dict[str, str]()
    if sandbox != "limits":
        active[sandbox.split()[0]] = "processes and files of its own, no network"
    if limits.landlock and (version := landlock_version()):
        active["Landlock"] = f"version {version}"
    if calls := REFUSED_CALLS.get(os.uname().machine):
        active["seccomp"] = f"no network, {len(calls)} system calls refused"
    return active | {"limits": "memory, processor time, file size, open files"}


def missing(active: Mapping[str, str]) -> list[str]:
    """Return what a program could do here that a better system would prevent, one clause each.

    >>> missing({"bwrap": "processes and files of its own, no network"})
    []
    >>> missing({"Landlock": "version 5", "seccomp": "no network"})
    ['see and signal other processes of its user', 'fill the disk with many files']
    """
    if {"bwrap", "unshare"} & {*active}:
        return []
    version = int(active.get("Landlock", "version 0").split()[1])
    clauses = [] if version else ["read and write every file that its user may"]
    clauses.append(f"{'see' if version >= 6 else 'see and signal'} other processes of its user")
    clauses.append("fill the disk with many files")
    if "seccomp" not in active:
        clauses.append("use the network" + (" but for TCP" if version >= 4 else ""))
    return clauses


def protections_text(active: Mapping[str, str], briefly: bool = False) -> str:
    """Return in words what is active, only by name if `briefly`, and what is not prevented."""
    has = "; ".join(name if briefly else f"{name} ({what})" for name, what in active.items())
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
