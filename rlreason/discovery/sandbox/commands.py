"""The command lines of the sandboxes, and which files a program sees in them."""

import os
import shlex
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlreason.discovery.sandbox.restrict import DEVICES

#: The best first; the second where a container hides parts of /proc, and so allows no new one.
SANDBOXES = ("bwrap", "bwrap without /proc", "unshare", "limits")
PACKAGE = str(Path(__file__).resolve().parents[2])  # of which a program sees nothing: it holds the problems' examples
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/alternatives", "/sys/devices/system/cpu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SandboxPlace:
    """Where a program runs: its private `folder`, which holds program.py, and what it may read besides the view."""

    folder: str
    disk_mb: int  # of each of its file systems in memory
    readable: Sequence[str]


def command_line(sandbox: str, place: SandboxPlace, inner: Sequence[str]) -> list[str]:
    """Return the command that runs the `inner` one in this sandbox: in /tmp, or for `limits` in the folder as it is."""
    if sandbox == "limits":
        return list(inner)
    if sandbox == "unshare":
        spaces = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"]
        return ["unshare", *spaces, "--fork", "--kill-child", "sh", "-c", "\n".join(_mounts(place, inner))]
    size = ["--size", str(place.disk_mb * 2**20), "--tmpfs"]
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev", *size, "/tmp"]
    # Read-only: as root, a program without any privilege could still write the kernel's settings.
    command += ["--proc" if sandbox == "bwrap" else "--tmpfs", "/proc", "--remount-ro", "/proc"]
    for path in view():
        command += ["--symlink", os.readlink(path), path] if is_system_link(path) else ["--ro-bind", path, path]
    for path in hidden():
        command += ["--tmpfs", path]
    for path in place.readable:
        command += ["--ro-bind", path, path]
    for path in (*hidden(), "/"):
        command += ["--remount-ro", path]
    return [*command, "--ro-bind", f"{place.folder}/program.py", "/tmp/program.py", "--chdir", "/tmp", "--", *inner]


def _mounts(place: SandboxPlace, inner: Sequence[str]) -> list[str]:
    """Return the lines of a shell script that does what bwrap does: mounts all below a root, enters it, runs `inner`.

    The shell remains the first process of its namespace, which nothing inside can signal.
    """
    memory = f"mount -t tmpfs -o size={place.disk_mb}m,nr_inodes=20000,nosuid,nodev sandbox"
    lines = ["set -e", "umask 022", "mkdir root", "mount -t tmpfs -o size=4m,mode=0755 sandbox root", "cd root"]
    lines += ["mkdir -p tmp proc dev/shm", f"{memory} tmp", f"{memory} dev/shm"]
    lines += ["mount -t proc -o ro,nosuid,nodev,noexec proc proc"]
    lines += [f": > .{device}; mount --bind {device} .{device}" for device in DEVICES]
    for path in filter(is_system_link, view()):
        lines.append(f"ln -s {shlex.quote(os.readlink(path))} .{path}")
    lines += _shown((path, path) for path in view() if not is_system_link(path))
    lines += [f"mount -t tmpfs -o size=1m sandbox {shlex.quote(f'.{path}')}" for path in hidden()]
    lines += _shown((path, path) for path in place.readable)
    lines += _shown([(f"{place.folder}/program.py", "/tmp/program.py")])
    lines += [f"mount -o remount,bind,ro {shlex.quote(f'.{path}')}" for path in hidden()]
    lines += ["pivot_root . .", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", "umount -l .", "mount -o remount,bind,ro /"]
    lines += ["cd /tmp", f"code=0; {shlex.join(inner)} || code=$?", "exit $code"]
    return lines


def _shown(paths: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines that show (source, target) read-only below the new root, with what is mounted in the source."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    lines = []
    for source, target in paths:
        place, parent = shlex.quote(f".{target}"), shlex.quote(os.path.dirname(f".{target}"))
        folder = f"mkdir -p {place}" if os.path.isdir(source) else f"mkdir -p {parent}; : > {place}"
        lines.append(f"[ -e {place} ] || {{ {folder}; }}")
        lines.append(f"mount -o rbind,{_flags(source)} {shlex.quote(source)} {place}")
        for path in sorted({path for path in mounted if path.startswith(f"{source}/")}):
            below = shlex.quote(f".{target}{path.removeprefix(source)}")
            lines.append(f"mount -o remount,bind,{_flags(path)} {below}")
    return lines


def _flags(path: str) -> str:
    """Return the options of a read-only mount; what the original forbids, a namespace of users may not allow."""
    return "ro,nosuid,nodev" + (",noexec" if os.statvfs(path).f_flag & os.ST_NOEXEC else "")


def is_system_link(path: str) -> bool:
    """Return whether a path is one of the system's links, such as /bin, whose target is shown too."""
    return path in SYSTEM and os.path.islink(path) and os.path.isdir(path)


@cache
def view() -> list[str]:
    """Return what every program may read: the system, and this Python with its packages; each path once."""
    paths = [sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    paths += map(os.path.realpath, [*paths, os.path.dirname(os.path.realpath(sys.executable))])
    shown = [path for path in SYSTEM if os.path.exists(path)]
    for path in sorted(path for path in set(paths) if path != "/" and os.path.isdir(path)):
        if not any(f"{path}/".startswith(f"{other}/") for other in shown):
            shown.append(path)
    return shown


@cache
def hidden() -> list[str]:
    """Return the paths of the view at which this package is."""
    real = {path: os.path.realpath(path) for path in view() if not is_system_link(path)}
    return [path + PACKAGE.removeprefix(real[path]) for path in real if PACKAGE.startswith(f"{real[path]}/")]


def landlock_paths(sandbox: str, place: SandboxPlace) -> dict[str, list[str]]:
    """Return what Landlock allows: paths to read and to write with all below them, and folders to list.

    Its rules hold for all below a path, so this package is left out by naming everything next to it.
    """
    readable, listable, unread = list(place.readable), list[str](), view().copy()
    while unread:
        path = os.path.realpath(unread.pop())
        if PACKAGE.startswith(f"{path}/") and path not in listable:
            listable.append(path)
            unread += [os.path.join(path, name) for name in os.listdir(path)]
        elif path != PACKAGE and path not in listable:
            readable.append(path)
    if sandbox == "limits":  # in the system's own /proc and /dev/shm are processes, sockets and files of others
        readable += ["/proc/cpuinfo", "/proc/meminfo", "/proc/stat"]
        return {"readable": readable, "listable": listable, "writable": [place.folder]}
    return {"readable": [*readable, "/proc"], "listable": listable, "writable": ["/tmp", "/dev/shm"]}
