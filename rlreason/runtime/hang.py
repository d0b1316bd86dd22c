"""Detect and end a run that hangs: watch for signs of life, and write the stacks of its processes."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rlreason.runtime import files, signals
from rlreason.runtime.machine import STACKS_VARIABLE
from rlreason.runtime.signals import before_leaving, below
from rlreason.runtime.text import redacted, shorten

NAME = "stacks.txt"
LIMIT_S = 2.0  # for all processes together
EACH_S = 0.5  # for one, since a process that is stopped or waits for a disk in the kernel does not answer
POLL_S = 0.02
COMMAND_CHARS = 150

_listening: list[IO[bytes]] = []  # faulthandler writes into the last one


def listen() -> None:
    """Let SIGUSR1 write this process's stacks into the file named by the environment, until the process ends."""
    if path := os.environ.get(STACKS_VARIABLE):
        with suppress(OSError, AttributeError):  # the folder is gone; there is no such signal
            _register(Path(path).open("ab", buffering=0))  # noqa: SIM115  # open until the process ends


@contextmanager
def stacks_in(folder: Path) -> Iterator[Path]:
    """Let SIGUSR1 write this process's stacks into the folder's `stacks.txt` in this block; yield its path.

    Processes started in the block do the same if they `listen`. An empty file is removed at the end.
    """
    path = Path(os.path.abspath(folder)) / NAME
    before = os.environ.get(STACKS_VARIABLE)
    file = None
    with suppress(OSError):  # a full disk is reported by others that write
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
    """Append the stacks of a process, this one by default, and of all its descendants to a file, within about 2 s.

    Return where they are, as the end of a sentence; empty where the file cannot be written. Other processes write into
    the file named by their environment, which is this one in a run.
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
    """Call `write_stacks` for this process with the file of the current run; do nothing outside a run."""
    path = os.environ.get(STACKS_VARIABLE)
    return write_stacks(Path(path), why) if path else ""


def described(process: int) -> str:
    """Describe a process in one line: `process 12, sleeping in futex_wait: python -m rlreason ...`."""
    place = Path(f"/proc/{process}")
    state = _status(place).get("State", "?").partition("(")[2].strip(")") or "gone"
    where = _text(place / "wchan").strip()
    words = shorten(redacted(_text(place / "cmdline").replace("\0", " ")), COMMAND_CHARS)
    return f"process {process}, {state}{f' in {where}' * (where not in ('', '0'))}: {words}"


def listens(process: int) -> bool:
    """Whether the process has a handler for SIGUSR1; without one the signal would end it."""
    with suppress(ValueError):
        return bool(int(_status(Path(f"/proc/{process}")).get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def _ask(process: int, file: IO[bytes], until: float) -> None:
    """Have another process append its stacks, and wait for it; write a note where it does not."""
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
    """Return the lines of a process's /proc/PID/status by their names; {} where there is no such file."""
    pairs = (line.partition(":") for line in _text(place / "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


CODE = 1  # exit code, that of a run that failed
TICK_S = 1.0


class Silence:
    """Measures how long a value has not changed, in seconds of this process's running time.

    A suspended machine, a stopped process (Ctrl-Z) and a changed clock do not count: each look adds at most `most_s`.
    """

    def __init__(self, most_s: float = 3 * TICK_S) -> None:
        self.most_s, self.seconds = most_s, 0.0
        self._seen: object = None
        self._at = time.monotonic()

    def look(self, now: object) -> float:
        """Return the seconds without a change, 0 where `now` differs from the last look."""
        before, self._at = self._at, time.monotonic()
        self.seconds = self.seconds + min(self._at - before, self.most_s) if now == self._seen else 0.0
        self._seen = now
        return self.seconds


def silent_for(limit_s: float) -> str:
    """Return the message for a run without a sign of life for this long.

    >>> silent_for(60)
    'no sign of life (a token, a response, an update, a new phase) within waits.run_s=60 s'
    """
    return f"no sign of life (a token, a response, an update, a new phase) within waits.run_s={limit_s:g} s"


@contextmanager
def ended_when_silent(limit_s: float | None, note: Callable[[str], object]) -> Iterator[None]:
    """End the process in this block, with exit code 1, when `files.alive` was not called for `limit_s`; None: never.

    First its stacks are written and `note` is called with the reason; its children are killed. A process that a
    signal is stopping has that stop's own limit.
    """
    if limit_s is None:
        yield
        return
    over = threading.Event()
    threading.Thread(target=_watch, args=(limit_s, note, over), name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(limit_s: float, note: Callable[[str], object], over: threading.Event) -> None:
    silence, process = Silence(), os.getpid()
    while not over.wait(min(TICK_S, limit_s / 4)):
        if silence.look(files.last_sign()) <= limit_s or signals.stop_signal() or os.getpid() != process:
            continue
        why = silent_for(limit_s)
        text = f"{why}: it hangs, or needs more{dump(why)}"
        if over.is_set():
            return
        with suppress(Exception):  # such as a full disk, which must not prevent the end
            note(text)
        signals.leave_at_once(f"ended: {text}", CODE)
