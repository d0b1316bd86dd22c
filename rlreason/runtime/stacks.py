"""What every process of a run does at this moment, written into its folder: for a wait that has gone on for too long.

    RUN/stacks.txt    a line for each process (id, state, what it waits for in the kernel, command), and below it the
                      Python stacks of its threads, where it can write them

A run, its grading workers and vLLM's worker write their stacks when they get SIGUSR1, also where they hang in C. So
`kill -USR1 PID` of any of them shows what it does; `write_stacks` asks all of them. Other processes, which the signal
would end, only get a line.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rlreason.runtime.environment import STACKS_VARIABLE
from rlreason.runtime.secrets import redacted
from rlreason.runtime.signals import before_leaving, below
from rlreason.runtime.text import shorten

NAME = "stacks.txt"
LIMIT_S = 2.0  # for all processes together
EACH_S = 0.5  # for one: a process that is stopped, or waits in the kernel for a disk, does not answer
POLL_S = 0.02
COMMAND_CHARS = 150

_listening: list[IO[bytes]] = []  # faulthandler writes into the last one


def listen() -> None:
    """Let SIGUSR1 write this process's stacks into the file that the environment names, as long as it lives."""
    if path := os.environ.get(STACKS_VARIABLE):
        with suppress(OSError, AttributeError):  # no such place any more; no such signal
            _register(Path(path).open("ab", buffering=0))  # noqa: SIM115  # as long as the process lives


@contextmanager
def stacks_in(folder: Path) -> Iterator[Path]:
    """In this block SIGUSR1 writes this process's stacks into the folder's `stacks.txt`, which is yielded.

    The processes that it starts do the same, if they `listen`. An empty file is removed in the end.
    """
    path = Path(os.path.abspath(folder)) / NAME
    before = os.environ.get(STACKS_VARIABLE)
    file = None
    with suppress(OSError):  # a full disk is said by whoever has to write
        file = path.open("ab", buffering=0)
        _register(file)
    os.environ[STACKS_VARIABLE] = str(path)
    try:
        with before_leaving(lambda: _tidy(path)):
            yield path
    finally:
        if before is None:
            os.environ.pop(STACKS_VARIABLE, None)
        else:
            os.environ[STACKS_VARIABLE] = before
        if file is not None:
            _unregister(file)
        _tidy(path)


def write_stacks(path: Path, why: str, process: int | None = None) -> str:
    """Add the stacks of a process, this one by default, and of all below it to a file; takes up to about 2 s.

    Returns where they are, as the end of a sentence; empty where the file cannot be written. The other processes
    write into the file that they were told of, which is this one in a run.
    """
    top = os.getpid() if process is None else process
    until = time.monotonic() + LIMIT_S
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n".encode())
            for one in [top, *below(top)]:
                file.write(f"\n-- {described(one)}\n".encode())
                if one == os.getpid():
                    faulthandler.dump_traceback(file, all_threads=True)
                else:
                    _ask(one, file, until)
            file.write(b"\n")
    except OSError:
        return ""
    return f"; what every process did then is in {path}"


def dump(why: str) -> str:
    """`write_stacks` of this process into the file of the run that is under way; nothing outside a run."""
    path = os.environ.get(STACKS_VARIABLE)
    return write_stacks(Path(path), why) if path else ""


def described(process: int) -> str:
    """One line on a process: `process 12, sleeping in futex_wait: python -m rlreason ...`."""
    place = Path(f"/proc/{process}")
    state = _status(place).get("State", "?").partition("(")[2].strip(")") or "gone"
    where = _text(place / "wchan").strip()
    words = shorten(redacted(_text(place / "cmdline").replace("\0", " ")), COMMAND_CHARS)
    return f"process {process}, {state}{f' in {where}' * (where not in ('', '0'))}: {words}"


def listens(process: int) -> bool:
    """Whether the process has a handler for SIGUSR1, which would end it otherwise."""
    with suppress(ValueError):
        return bool(int(_status(Path(f"/proc/{process}")).get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def _ask(process: int, file: IO[bytes], until: float) -> None:
    """Let another process add its stacks, and wait until it has; a note where it does not."""
    if not listens(process):
        file.write(b"(it writes no stacks)\n")
        return
    size = os.fstat(file.fileno()).st_size
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGUSR1)
    until, grew = min(until, time.monotonic() + EACH_S), False
    while time.monotonic() < until:
        time.sleep(POLL_S)
        now = os.fstat(file.fileno()).st_size
        if grew and now == size:
            return
        grew, size = now > size, now
    file.write(b"(no answer: it is stopped, waits in the kernel, or writes elsewhere)\n")


def _register(file: IO[bytes]) -> None:
    _listening.append(file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)


def _unregister(file: IO[bytes]) -> None:
    _listening.remove(file)
    if _listening:
        faulthandler.register(signal.SIGUSR1, file=_listening[-1], all_threads=True, chain=False)
    else:
        faulthandler.unregister(signal.SIGUSR1)
    file.close()


def _tidy(path: Path) -> None:
    with suppress(OSError):
        if not path.stat().st_size:
            path.unlink()


def _status(place: Path) -> dict[str, str]:
    """The lines of a process's /proc/PID/status by their names; {} where there is no such file."""
    pairs = (line.partition(":") for line in _text(place / "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
