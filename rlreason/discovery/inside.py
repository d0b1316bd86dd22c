"""In the sandbox: restrict this process, then run a program for its set, or a verifier on rows.

    python -I -B inside.py OPTIONS program MOST_ROWS MOST_DIGITS    # OPTIONS, of JSON, have the `source`: the program,
    python -I -B inside.py OPTIONS check VERIFIER                   # or JSON: {"rows": [[1, 2]], "options": {...}}

The channel gets `STARTED`, then JSON: what `verify` returns, or of a program {"rows": its set}, or why there is none:
{"kind": "exception", "error": text}.

What is checked here helps a person to find a mistake and is believed by nobody: the program shares this process, and
only the integers count, as `read_set` in score.py finds them on the other side.
"""

import ctypes
import errno
import itertools
import json
import os
import resource
import runpy
import struct
import sys
import types
from contextlib import suppress
from os import _exit as leave
from os import write
from typing import Any

CHANNEL = 3  # the file descriptor that results are written to, which this process gets as its standard input
STARTED = b"started\n"  # the first line there: from now on it is the program that runs
LONGEST_ROW, LONGEST_TEXT = 1000, 4000
BITS = 3.33  # of a decimal digit
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
    """Restrict this process, then run what the arguments say."""
    options, mode, arguments = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
    home = os.getcwd()
    os.umask(0o077)
    os.nice(5)  # what watches comes first
    processors = sorted(os.sched_getaffinity(0), key=lambda _: os.urandom(4))
    os.sched_setaffinity(0, processors[: options["cpus"]])
    for name, limit in options["limits"].items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (value, value))
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))  # every capability, for good
    if "landlock" in options:
        landlock(**options["landlock"])
    if os.uname().machine in ARCHITECTURES:
        refuse_system_calls(os.uname().machine, options["alone"])  # the system's sockets have names
    os.dup2(0, CHANNEL)
    os.closerange(CHANNEL + 1, 4096)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ |= {"HOME": home, "TMPDIR": home, "PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    # One thread for libraries: threads that wait for each other on few processors take ten times as long.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    write(CHANNEL, STARTED)
    if mode == "program":
        run_program(options["source"], *map(int, arguments))
    elif mode == "check":  # of rows: trusted, but within limits of its own
        sys.set_int_max_str_digits(0)
        with open(options["source"], "rb") as file:
            request = json.load(file)
        send(runpy.run_path(arguments[0])["verify"](request["rows"], **request["options"]))


def send(result: dict[str, Any]) -> None:
    """Write all of this to the channel."""
    data = json.dumps(result, separators=(",", ":")).encode()
    while data:
        data = data[write(CHANNEL, data) :]


def checked(result: int) -> int:
    """Return the result of a call of the C library; `OSError` if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_version() -> int:
    """Return the kernel's version of Landlock, 0 if it has none or it is switched off."""
    version: int = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(version, 0)


def landlock(readable: list[str], writable: list[str]) -> None:
    """Refuse this process and its children all other files; from version 4 on TCP too, from 6 on signals to others."""
    version = landlock_version()
    handled = (1 << {1: 13, 2: 14}.get(version, 15)) - 1  # the rights that this version knows
    scopes = [handled, *[3] * (version >= 4), *[3] * (version >= 6)]  # files; TCP; abstract sockets and signals
    attributes = struct.pack(f"{len(scopes)}Q", *scopes)
    rules = checked(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)))
    rights = dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE) | dict.fromkeys(readable, EXECUTE | READ_FILE | READ_DIR)
    rights |= dict.fromkeys(writable, handled)
    for path in filter(os.path.exists, rights):
        of_a_file = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
        allowed = rights[path] & (handled if os.path.isdir(path) else handled & of_a_file)
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, place)
        checked(libc.syscall(LANDLOCK_ADD, rules, ctypes.c_uint(1), rule, ctypes.c_uint(0)))
        os.close(place)
    checked(libc.syscall(LANDLOCK_RESTRICT, rules, ctypes.c_uint(0)))
    os.close(rules)


def refuse_system_calls(machine: str, all_sockets: bool) -> None:
    """Refuse this process and its children `REFUSED_CALLS`, sockets (all, or not AF_UNIX), other architectures' calls.

    A filter of seccomp; a step is (code, steps to jump if true, if false, value).
    """
    architecture, others, socket = ARCHITECTURES[machine]
    load, equal, at_least, answer, af_unix = 0x20, 0x15, 0x35, 0x06, 1
    allow, refuse = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | errno.EPERM)
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse, (load, 0, 0, 0), (at_least, 0, 1, others), refuse]
    for number in (*REFUSED_CALLS[machine], *([socket] if all_sockets else [])):
        steps += [(equal, 0, 1, number), refuse]
    steps += [(equal, 0, 3, socket), (load, 0, 0, 16), (equal, 1, 0, af_unix), refuse, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    checked(libc.prctl(PR_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)), 0, 0))


class Refused(Exception):  # noqa: N818  # a finding, not an error of this program
    """Why there is no set: its kind and a message."""


def run_program(path: str, most_rows: int, most_digits: int) -> None:
    """Run a program as a module, write its set, end. Its threads and exit functions do not run on.

    The set is that of the first of the interfaces that it has, without a dimension.
    """
    sys.argv[:] = [path]
    set_digits = sys.set_int_max_str_digits
    rows, kind, text = list[list[int]](), "", ""
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        module = sys.modules["program"] = types.ModuleType("program")
        module.__file__ = path
        sys.path.insert(0, os.path.dirname(path))
        names = module.__dict__
        exec(code, names)
        name = next((name for name in ("run_code", "get_centers", "points") if name in names), None)
        if name is None:
            raise Refused("no_points", "the program defines none of run_code(), get_centers() and points")
        given = names[name] if name == "points" else names[name]()
        if isinstance(given, tuple) and len(given) == 2 and not isinstance(plain(given[1]), (list, tuple)):
            given = given[0]  # without its dimension
        set_digits(0)
        rows = rows_of(given, most_rows, most_digits)
    except Refused as refused:
        kind, text = refused.args
    except MemoryError:
        kind, text = "memory", "MemoryError"
    except SystemExit as error:
        kind, text = "exit", f"the program called sys.exit({error.code!r:.100}) before it gave points"
    except BaseException as error:
        kind, text = "exception", error_text(error, path)[-LONGEST_TEXT:]
    with suppress(BaseException):  # replaced or closed by the program
        sys.stdout.flush()
    shown = text[:LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()
    send({"rows": rows} if not kind else {"kind": kind, "error": shown})
    leave(0)


def plain(value: Any) -> Any:
    """Return numbers, objects and arrays of these of numpy's as Python's; other values, as dates, unchanged."""
    return value.tolist() if type(value).__module__ == "numpy" and value.dtype.kind in "biufO" else value


def rows_of(given: Any, most_rows: int, most_digits: int) -> list[list[int]]:
    """Return the rows, at most one row and one number too many; `Refused` if something is no plain integer."""
    given = plain(given)
    if isinstance(given, dict) or not hasattr(type(given), "__iter__"):
        raise Refused("type", f"the points are of class {type(given).__name__}: give a list of lists of integers")
    rows = list(itertools.islice(given, most_rows + 1))  # whole, before the program can change it
    for number, row in enumerate(map(plain, rows)):
        if not isinstance(row, (list, tuple)):
            raise Refused("type", f"point {number} is of class {type(row).__name__}: a point is a list of integers")
        rows[number] = [plain(value) for value in itertools.islice(row, LONGEST_ROW + 1)]
        for value in rows[number]:
            if type(value) is not int:
                raise Refused("type", f"point {number} holds a value of class {type(value).__name__}: integers only")
            if value.bit_length() > most_digits * BITS:
                raise Refused("size", f"point {number} has an integer of more than {most_digits} digits")
    return rows


def error_text(error: BaseException, program: str) -> str:
    """Return the error with the lines of the program in its traceback, as Python prints it."""
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == program]
    lines = [*traceback.format_list(frames[-5:]), "".join(traceback.format_exception_only(error))[: LONGEST_TEXT // 2]]
    return "".join(lines).replace(f'"{program}"', '"program.py"').strip()


if __name__ == "__main__":
    main()
