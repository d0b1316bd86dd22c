"""Restrict this process, then become a command: `python -I -S restrict.py OPTIONS COMMAND...`, OPTIONS being JSON.

Sets limits of memory, time and files, drops root's privileges, refuses sockets and calls whose memory no process shows
(seccomp) and, with `landlock` in the options, all other files. Runs inside the sandbox, before any program.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys

CHANNEL = 3  # the file descriptor that the command writes its result to
STARTED = b"started\n"  # the first line there: from now on it is the command that runs
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # system calls, the same on every architecture
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REFER, TRUNCATE = 1, 2, 4, 8, 1 << 13, 1 << 14
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: By architecture: its number for seccomp, the first number of another set of calls, and socket.
ARCHITECTURES = {"x86_64": (0xC000003E, 0x40000000, 41), "aarch64": (0xC00000B7, 0xFFFFFFFF, 198)}
#: memfd_create, memfd_secret, shmget, msgget, semget, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd,
#: io_uring_setup, mount, fsopen, ptrace, process_vm_readv, process_vm_writev: what takes memory that counts for no
#: process, outlives it, or reaches into the kernel and other processes.
REFUSED_CALLS = {
    "x86_64": (319, 447, 29, 68, 64, 248, 249, 250, 321, 298, 323, 425, 165, 430, 101, 310, 311),
    "aarch64": (279, 447, 194, 186, 190, 217, 218, 219, 280, 241, 282, 425, 40, 430, 117, 270, 271),
}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Restrict this process and execute the command."""
    options, command = json.loads(sys.argv[1]), sys.argv[2:]
    home = os.getcwd()
    os.umask(0o077)
    os.nice(5)  # what watches comes first
    allowed = sorted(os.sched_getaffinity(0), key=lambda _: os.urandom(4))
    os.sched_setaffinity(0, allowed[: options["cpus"]])
    for name, limit in options["limits"].items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (value, value))
    drop_privileges()
    if "landlock" in options:
        landlock(**options["landlock"])
    if (machine := os.uname().machine) in ARCHITECTURES:
        number, others, socket = ARCHITECTURES[machine]
        calls = REFUSED_CALLS[machine] + ((socket,) if options["alone"] else ())  # the system's sockets have names
        refuse_system_calls(calls, number, others, socket)
    os.dup2(options["channel"], CHANNEL)
    os.closerange(CHANNEL + 1, 4096)
    os.write(CHANNEL, STARTED)
    # One thread for libraries: threads that wait for each other on few processors take ten times as long.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = "/usr/local/bin:/usr/bin:/bin"
    os.execve(command[0], command, {"HOME": home, "TMPDIR": home, "PATH": path, "LC_ALL": "C.UTF-8", **threads})


def checked(result: int) -> int:
    """Return the result of a call of the C library; `OSError` if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def drop_privileges() -> None:
    """Drop every capability of this process, for good: what it executes cannot gain any."""
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))


def landlock_version() -> int:
    """Return the kernel's version of Landlock, 0 if it has none or it is switched off."""
    version: int = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(version, 0)


def landlock(readable: list[str], listable: list[str], writable: list[str]) -> None:
    """Refuse this process and its children all files but these; below the `listable` folders, only names are shown.

    They cannot trace a process outside either; from version 4 on use no TCP, from 6 on signal none. Missing paths are
    skipped.
    """
    version = landlock_version()
    handled = (1 << {1: 13, 2: 14}.get(version, 15)) - 1  # the rights that this version knows
    scopes = [handled, *[3] * (version >= 4), *[3] * (version >= 6)]  # files; TCP; abstract sockets and signals
    attributes = struct.pack(f"{len(scopes)}Q", *scopes)
    rules = checked(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)))
    rights = dict.fromkeys(listable, READ_DIR) | dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE)
    rights |= dict.fromkeys(readable, EXECUTE | READ_FILE | READ_DIR) | dict.fromkeys(writable, handled)
    for path, allowed in rights.items():
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            allowed &= EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE  # a file has no other rights
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed & handled, place)
        checked(libc.syscall(LANDLOCK_ADD, rules, ctypes.c_uint(1), rule, ctypes.c_uint(0)))
        os.close(place)
    checked(libc.syscall(LANDLOCK_RESTRICT, rules, ctypes.c_uint(0)))
    os.close(rules)


def refuse_system_calls(calls: tuple[int, ...], architecture: int, others: int, socket: int) -> None:
    """Refuse this process and its children these calls, sockets but AF_UNIX's, and other architectures' calls (EPERM).

    A filter of seccomp. A step is (code, steps to jump if true, if false, value).
    """
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse, af_unix = 0x7FFF0000, 0x00050000 | errno.EPERM, 1
    refusing = len(calls) + 8  # the place of the last step
    steps = [(load, 0, 0, 4), (equal, 0, refusing - 2, architecture), (load, 0, 0, 0)]
    steps += [(at_least, refusing - 4, 0, others)]
    steps += [(equal, refusing - place - 1, 0, number) for place, number in enumerate(calls, 4)]
    steps += [(equal, 0, 2, socket), (load, 0, 0, 16), (equal, 0, 1, af_unix)]
    steps += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    checked(libc.prctl(PR_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)), 0, 0))


if __name__ == "__main__":
    main()
