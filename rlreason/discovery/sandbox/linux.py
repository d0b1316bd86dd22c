"""Thin wrappers of Linux calls that contain a process: namespaces, mounts, Landlock, privileges. No policy here.

Runs as a part of the script `warden.py` and imports only the standard library. Constants are those of the kernel's
headers. A refused call raises `OSError` with the kernel's number.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_RECURSIVE, AT_FDCWD = 1, 2, 0x8000, -100
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 28, 36
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECURE_NO_ROOT = 0x2F  # root's files are root's, root's privileges are not given; locked
#: Numbers of system calls that are the same on every architecture since 2019.
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446

#: Rights of Landlock on files, by the version that brought them.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
WRITE = sum(1 << bit for bit in (1, 4, 5, 7, 8, 9, 10, 12))  # no devices
ALL_OF_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
REFER, TRUNCATE = 1 << 13, 1 << 14
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | 1 << 15  # those that a single file can have
NET_TCP, SCOPED = 3, 3  # bind and connect; abstract sockets and signals

#: System calls that get at memory that counts for nobody, at what outlives a process, or far into the kernel, by
#: architecture: its number for seccomp, the first number of another set of calls, socket; memfd_create, memfd_secret,
#: shmget, msgget, semget, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup.
REFUSED = {
    "x86_64": (0xC000003E, 0x40000000, 41, (319, 447, 29, 68, 64, 248, 249, 250, 321, 298, 323, 425)),
    "aarch64": (0xC00000B7, 0xFFFFFFFF, 198, (279, 447, 194, 186, 190, 217, 218, 219, 280, 241, 282, 425)),
}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces (of processes: its children)."""
    _checked(_libc.unshare(flags))


def map_ids(uid: int, gid: int, inner: int) -> None:
    """In a new user namespace, map `inner` to the user and group that this process had outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{inner} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def prctl(option: int, *values: int) -> None:
    """Call prctl(2)."""
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *padded))


def mount(kind: str | None, target: str, flags: int = 0, data: str | None = None) -> None:
    """Mount a file system of a kind without a device, or change how a mount is shared."""
    texts = [None if text is None else os.fsencode(text) for text in (kind, target, kind, data)]
    source, place, file_system, options = texts
    _checked(_libc.mount(source, place, file_system, ctypes.c_ulong(flags), options))


def mount_tmpfs(target: str, megabytes: int) -> None:
    """Mount a file system in memory, of a bounded size."""
    mount("tmpfs", target, MS_NOSUID | MS_NODEV, f"size={megabytes}m,nr_inodes=20000,mode=0700")


def all_mounts_read_only() -> None:
    """Make every mount below / read-only, only in this mount namespace."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    _checked(
        _libc.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, b"/", ctypes.c_uint(AT_RECURSIVE), attributes, ctypes.c_size_t(len(attributes))
        )
    )


def landlock_version() -> int:
    """Return the kernel's version of Landlock; `OSError` if it has none, or it is switched off."""
    return _checked(_libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def landlock(readable: Iterable[str], listable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> int:
    """This process and its children may read and write these paths and no others; returns Landlock's version.

    `listable`: folders that may be listed, with those below them, and whose files may not be read. From version 4 on
    they may use no TCP, from 6 on signal no process outside. Paths that are not there are skipped.
    """
    version = landlock_version()
    handled = ALL_OF_VERSION[min(version, 5)]
    words = [handled, *[NET_TCP] * (version >= 4), *[SCOPED] * (version >= 6)]  # as long as the version knows it
    attributes = struct.pack(f"{len(words)}Q", *words)
    rules = _checked(_libc.syscall(SYS_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)))
    for paths, rights in (
        (readable, READ),
        (listable, READ_DIR),
        (writable, READ | WRITE | REFER | TRUNCATE),
        (devices, READ_FILE | 2),
    ):
        for path in paths:
            _allow(rules, path, rights & handled)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _checked(_libc.syscall(SYS_LANDLOCK_RESTRICT, rules, ctypes.c_uint(0)))
    os.close(rules)
    return version


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= FILE_RIGHTS
        rule = struct.pack("=Qi", rights, place)
        _checked(_libc.syscall(SYS_LANDLOCK_ADD, rules, ctypes.c_uint(1), rule, ctypes.c_uint(0)))
    finally:
        os.close(place)


def refuse_system_calls(numbers: Iterable[int], socket: int, architecture: int, refused_above: int) -> None:
    """This process and its children get EPERM for these system calls, for sockets of any family but AF_UNIX, and for
    calls of another architecture.

    A filter of seccomp, read from above: the architecture; the number, against each; of `socket`, its first argument.
    Privileges must not be gained any more (`PR_SET_NO_NEW_PRIVS`).
    """
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse, af_unix = 0x7FFF0000, 0x00050000 | errno.EPERM, 1
    wanted = sorted(numbers)
    refusing = len(wanted) + 8  # the place of the last step
    program = [(load, 0, 0, 4), (equal, 0, refusing - 2, architecture), (load, 0, 0, 0)]
    program.append((at_least, refusing - 4, 0, refused_above))
    program += [(equal, refusing - place - 1, 0, number) for place, number in enumerate(wanted, 4)]
    program += [(equal, 0, 2, socket), (load, 0, 0, 16), (equal, 0, 1, af_unix)]
    program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    steps = ctypes.create_string_buffer(code, len(code))
    whole = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(steps))
    told = ctypes.create_string_buffer(whole, len(whole))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(told))


def drop_privileges_of_root() -> None:
    """Drop every privilege that root has over others, for this process and all that it starts."""
    prctl(PR_SET_SECUREBITS, SECURE_NO_ROOT)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0)
    _checked(_libc.capset(header, none))
