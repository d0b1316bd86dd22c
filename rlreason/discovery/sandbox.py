"""Run untrusted programs in a sandbox: by bwrap, else by util-linux's unshare, else within limits and Landlock alone.

In the first two a program sees the system's libraries, this Python and its packages, all read-only, and a folder in
memory; it has no network, and its processes are those of a namespace. `warden` and `inside` are scripts of its side.
"""

import ctypes
import json
import os
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlreason.config.algorithms import ScoreConfig
from rlreason.discovery.inside import DEVICES, REFUSED_CALLS, STARTED, landlock_version
from rlreason.discovery.warden import TOO_MANY, descendants, signal_all
from rlreason.errors import ConfigError
from rlreason.runtime.signals import temporary_folder

INSIDE, WARDEN = (str(Path(__file__).with_name(name)) for name in ("inside.py", "warden.py"))
#: The best first; the second where a container hides parts of /proc, and so allows no new one.
SANDBOXES = ("bwrap", "bwrap without /proc", "unshare", "limits")
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/alternatives", "/sys/devices/system/cpu",
)  # fmt: skip
#: Does as bwrap does, in the namespaces of unshare: `sh -c ENTER sh DISK_MB COMMAND...` mounts all that the file `view`
#: lists below a root, enters it, and runs the command.
ENTER = """
set -e
umask 022
mkdir root
mount -t tmpfs -o size=4m,mode=0755 sandbox root
cd root
mkdir -p tmp proc dev/shm
for place in tmp dev/shm; do mount -t tmpfs -o "size=$1m,nr_inodes=20000,nosuid,nodev" sandbox $place; done
shift
mount -t proc -o ro,nosuid,nodev,noexec proc proc
while IFS='	' read -r kind path how source; do
    case $kind in
    device) : > ".$path"; mount --bind "$path" ".$path" ;;
    link) ln -s "$how" ".$path" ;;
    bind)
        if [ -d "$source" ]; then mkdir -p ".$path"; else mkdir -p ".${path%/*}"; [ -e ".$path" ] || : > ".$path"; fi
        mount -o "rbind,$how" "$source" ".$path" ;;
    again) mount -o "remount,bind,$how" ".$path" ;;
    esac
done < ../view
pivot_root . .
PATH=/usr/bin:/bin:/usr/sbin:/sbin
umount -l .
mount -o remount,bind,ro /
cd /tmp
code=0
"$@" || code=$?
exit $code
"""
DISK_MB = 256  # each file, and all files together if the scratch folder is in memory
OUTPUT_MB, CHANNEL_MB = 64, 16  # printed; of the set as text
PROCESSES = 256  # of a program at one time
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
class Command:
    """What `inside.py` does in the sandbox, where `source` is a private file."""

    arguments: Sequence[str]
    timeout_s: float
    source: bytes = b""
    readable: Sequence[str] = ()  # more paths that may be read


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    stopped: str | None  # timeout, memory, output, size, processes, stopped; broken: it never began
    exit: int | None  # code, or minus the signal
    channel: bytes  # what came through
    tail: str  # the end of what it printed
    seconds: float
    peak_mb: float


def run_contained(
    command: Command, limits: ScoreConfig, stop: Callable[[], bool] = lambda: False, sandbox: str = ""
) -> Outcome:
    """Run a command in this sandbox, or the best that works here; end all its processes, at the latest by `stop`."""
    sandbox = sandbox or sandbox_here()
    sent, started, most = bytearray(), False, CHANNEL_MB * MB
    stopped, code, seconds, used, peak_mb = None, None, 0.0, 0.0, 0.0
    seen: dict[int, str] = {}  # its processes, and when they began
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("rlreason-program-"))
        printed = stack.enter_context(tempfile.TemporaryFile()).fileno()
        Path(folder, "program.py").write_bytes(command.source)
        channel, writable = os.pipe()
        stack.callback(os.close, channel)
        warden = stack.enter_context(
            subprocess.Popen(
                command_line(command, limits, sandbox, folder),
                stdin=writable,
                stdout=printed,
                stderr=printed,
                env={"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"},
                cwd=folder,
                start_new_session=True,
            )
        )
        os.close(writable)
        began = looked = time.monotonic()
        os.set_blocking(channel, False)
        try:
            while stopped is None and code is None:
                code = warden.poll()  # before the last look at the channel
                with suppress(BlockingIOError):
                    while len(sent) <= most and (part := os.read(channel, 1 << 20)):
                        sent += part
                if not started and sent.startswith(STARTED):
                    began, started = looked, True  # at the latest: a program may have ended with this look
                looked = time.monotonic()
                seconds = looked - began
                pids = descendants(warden.pid, PROCESSES)
                seen.update({pid: start_time(pid) for pid in pids if pid not in seen})
                # The smaller of two looks: a process that is read while it starts or ends may seem to hold anything.
                before, used = used, held_mb(pids, limits.memory_mb)
                peak_mb = max(peak_mb, min(before, used))
                if stop():
                    stopped = "stopped"
                elif len(sent) > most:
                    stopped = "size"
                elif seconds > (command.timeout_s if started else STARTING_S):
                    stopped = "timeout" if started else "broken"
                elif peak_mb > limits.memory_mb:
                    stopped = "memory"
                elif os.fstat(printed).st_size > OUTPUT_MB * MB:
                    stopped = "output"
                elif code == -TOO_MANY and started:
                    stopped = "processes"
                elif code is None:
                    time.sleep(LOOK_EVERY_S)
                elif not started:
                    stopped = "broken"
        finally:
            end(warden, seen)
        tail = os.pread(printed, TAIL, max(0, os.fstat(printed).st_size - TAIL)).decode("utf-8", "backslashreplace")
        if sandbox == "limits":  # a program may have made its folder too deep for Python
            subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)
    code = 128 - code if code and code > 128 else code
    return Outcome(stopped, code, bytes(sent).removeprefix(STARTED), tail, seconds, peak_mb)


def command_line(command: Command, limits: ScoreConfig, sandbox: str, folder: str) -> list[str]:
    """Return the warden's command: it runs in /tmp, or without a namespace in the private `folder` of program.py."""
    is_alone, readable = sandbox == "limits", [INSIDE, *command.readable]
    threads = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])  # of all: the user's others count too
    of_each = {  # process, by the name that follows RLIMIT_; the total is watched
        "DATA": limits.memory_mb * MB,
        "AS": (limits.memory_mb + 4096) * MB,  # libraries map more than they use
        "CPU": int(command.timeout_s * limits.cpus) + 5,
        "FSIZE": DISK_MB * MB,
        "NOFILE": 256,
        "CORE": 0,
        "MEMLOCK": 64 * 1024,
        "MSGQUEUE": 0,
        "NPROC": threads + PROCESSES,
    }
    source = f"{folder if is_alone else '/tmp'}/program.py"
    options: dict[str, Any] = {"cpus": limits.cpus, "limits": of_each, "alone": is_alone, "source": source}
    if landlock_version():
        # In the system's own /proc and /dev/shm are processes, sockets and files of others.
        proc = ["/proc/cpuinfo", "/proc/meminfo", "/proc/stat"] if is_alone else ["/proc"]
        writable = [folder] if is_alone else ["/tmp", "/dev/shm"]
        options["landlock"] = {"readable": [*view(), *readable, *proc], "writable": writable}
    inner = [sys.executable, "-I", "-B", INSIDE, json.dumps(options), *command.arguments]
    warden = [sys.executable, "-I", "-B", "-S", WARDEN, str(os.getpid()), str(PROCESSES + MORE_PROCESSES)]
    if is_alone:
        return [*warden, *inner]
    shown = view() | dict.fromkeys(readable, "")
    if sandbox == "unshare":
        spaces = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"]
        lines = [f"device\t{device}" for device in DEVICES]
        lines += [f"link\t{path}\t{target}" for path, target in shown.items() if target]
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        bound = {path: path for path, link in shown.items() if not link} | {f"{folder}/program.py": "/tmp/program.py"}
        for place, target in bound.items():
            lines.append(f"bind\t{target}\t{_flags(place)}\t{place}")
            for path in sorted({path for path in mounted if path.startswith(f"{place}/")}):  # not read-only by that
                lines.append(f"again\t{target}{path.removeprefix(place)}\t{_flags(path)}")
        Path(folder, "view").write_text("\n".join([*lines, ""]))
        enter = ["sh", "-c", ENTER, "sh", str(DISK_MB)]
        return [*warden, "unshare", *spaces, "--fork", "--kill-child", *enter, *inner]
    size = ["--size", str(DISK_MB * MB), "--tmpfs"]
    outer = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    outer += ["--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev", *size, "/tmp"]
    # Read-only: as root, a program without any privilege could still write the kernel's settings.
    outer += ["--proc" if sandbox == "bwrap" else "--tmpfs", "/proc", "--remount-ro", "/proc"]
    for path, target in shown.items():
        outer += ["--symlink", target, path] if target else ["--ro-bind", path, path]
    outer += ["--remount-ro", "/", "--ro-bind", f"{folder}/program.py", "/tmp/program.py", "--chdir", "/tmp"]
    return [*warden, *outer, "--", *inner]


def _flags(path: str) -> str:
    """Return the options of a read-only mount; what the original forbids, a namespace of users may not allow."""
    return "ro,nosuid,nodev" + (",noexec" if os.statvfs(path).f_flag & os.ST_NOEXEC else "")


@cache
def view() -> dict[str, str]:
    """Return what every program may read: path -> "", or the target of a link of the system such as /bin."""
    paths = [sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    paths += map(os.path.realpath, [*paths, os.path.dirname(os.path.realpath(sys.executable))])
    shown = {}
    for path in filter(os.path.exists, SYSTEM):
        shown[path] = os.readlink(path) if os.path.islink(path) and os.path.isdir(path) else ""
    for path in sorted(path for path in set(paths) if path != "/" and os.path.isdir(path)):
        if not any(f"{path}/".startswith(f"{other}/") for other in shown):
            shown[path] = ""
    return shown


def end(warden: "subprocess.Popen[bytes]", seen: dict[int, str]) -> None:
    """Have the warden end everything below it; end what was seen of it, if the program has ended the warden."""
    warden.terminate()
    try:
        warden.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        seen |= {pid: start_time(pid) for pid in descendants(warden.pid)}
        warden.kill()
    until = time.monotonic() + ENDING_S
    while left := [pid for pid, began in seen.items() if began and start_time(pid) == began]:
        signal_all(left, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(LOOK_EVERY_S)


def held_mb(pids: Sequence[int], precise_above_mb: float) -> float:
    """Return the megabytes of memory that processes hold together, without files outside of the sandbox.

    Shared pages count once for each process, which is fast; where that makes more than `precise_above_mb`, they are
    divided as the kernel does. Files in memory, and memory shared without a file, count by their sizes.
    """
    held, used, sizes = dict.fromkeys(pids, 0.0), 0.0, dict[str, int]()
    for pid in pids:
        with suppress(OSError, ValueError):
            _, whole, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
            held[pid] = (int(whole) - int(shared)) * PAGE_MB
    for pid in pids if sum(held.values()) > precise_above_mb else ():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            held[pid] = sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss_Anon:"))
    for pid in pids[:MOST_READ]:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if line.endswith("/dev/zero (deleted)"):
                    addresses, _, _, _, inode, *_ = line.split()
                    first, last = addresses.split("-")
                    sizes[inode] = max(sizes.get(inode, 0), int(last, 16) - int(first, 16))
    for place in ("/tmp", "/dev/shm"):
        for pid in pids[:4]:  # the first ones may not have entered the sandbox
            with suppress(OSError):
                inside = f"/proc/{pid}/root{place}"
                if os.stat(inside).st_dev != os.stat(place).st_dev:
                    space = os.statvfs(inside)
                    used += (space.f_blocks - space.f_bfree) * space.f_frsize / MB
                    used += (space.f_files - space.f_ffree) / 1024  # each takes about a kilobyte, however short
                    break
    return sum(held.values()) + used + sum(sizes.values()) / MB


def start_time(pid: int) -> str:
    """Return when a process began, which no other process of this id has in common; empty once it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        return "" if state in "ZX" else fields[18]
    return ""


@cache
def sandbox_here() -> str:
    """Return the best of `SANDBOXES` that works here, by a trial of each; `ConfigError` if none does."""
    for sandbox in SANDBOXES:
        trial = run_contained(Command(["nothing"], STARTING_S), ScoreConfig(), sandbox=sandbox)
        if trial.exit == 0:
            if sandbox == "limits":  # a program sees this process, whose memory and environment may hold keys
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            return sandbox
    why = trial.tail.strip().rpartition("\n")[2]
    raise ConfigError(f"no program can be held back here ({why[-300:]}): use Linux, with bubblewrap")


def protections() -> dict[str, str]:
    """Return the protections active here, by name; `ConfigError` if no program can be held back."""
    sandbox, active = sandbox_here(), {"limits": "memory, processor time, file size, open files"}
    if sandbox == "limits":
        active["no namespaces"] = "it sees other processes, and could fill the disk"
    else:
        active[sandbox.split()[0]] = "processes and files of its own, no network"
    if version := landlock_version():
        active["Landlock"] = f"version {version}"
    if calls := REFUSED_CALLS.get(os.uname().machine):
        active["seccomp"] = f"no network, {len(calls)} system calls refused"
    return active
