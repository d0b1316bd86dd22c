"""End a process on SIGINT, SIGTERM or SIGHUP: cleanly at the first, immediately at the second.

    while Python imports      `heed_signals`: one line, exit code 130
    in a command              `stoppable`: KeyboardInterrupt in the main thread, or where a `held` block ends
    in a user's own program   `stoppable(in_script=True)`: the same, for Ctrl-C alone
    a second signal           `leave_at_once`: child processes are killed, temporary folders are removed

A signal that was ignored when the process began stays ignored: SIGHUP under nohup, SIGINT after a script's `&`.
Imports nothing slow.
"""

import atexit
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rlreason.errors import ReaderGone

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CODE = 130  # as in records/reader.py
ONCE_S = 0.5  # signals less than this apart count as one: `timeout` and some launchers send theirs twice
PR_SET_PDEATHSIG = 1


@dataclass
class _Stop:
    """The state of a stop: the signal, and its progress."""

    patient: frozenset[int] = frozenset()  # signals that never count as a second one
    first: int | None = None  # the signal that requested the stop
    at: float = 0.0  # on the monotonic clock
    held: int = 0  # blocks that must not be interrupted, one inside the other
    raised: bool = False  # an interrupt was raised, or clean-up has begun: nothing is raised any more
    commands: bool = False  # the process runs a command of this program
    notice: str = ""  # printed at a signal in a `held` block that may take long
    pending: KeyboardInterrupt | None = None  # to be raised where the outermost held block ends


_stop = _Stop()
_callbacks: list[Callable[[], object]] = []  # called at an immediate end, when no child is left
_terminal = 2  # the file descriptor of the original standard error; streams.py redirects 2 during a run


def heed_signals() -> None:
    """Let a signal end the process with one line, until a command sets its own handlers; nothing is to be tidied yet.

    A signal that was ignored when the process began stays ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: end_with(f"stopped by {signal.Signals(number).name}"))


def print_to(terminal: int) -> None:
    """Print the lines of this module to another file descriptor."""
    global _terminal
    _terminal = terminal


def write_line(text: str) -> None:
    """Print a line to the terminal, without Python's streams: writing to one may be what was interrupted."""
    os.write(_terminal, f"{chr(10) * os.isatty(_terminal)}rlreason: {text}\n".encode())


def end_with(text: str, code: int = CODE) -> NoReturn:
    """Print a line and end the process with this exit code."""
    try:
        write_line(text)
    finally:
        os._exit(code)


@contextmanager
def stoppable(patient: tuple[int, ...] = (), in_script: bool = False) -> Iterator[None]:
    """Raise KeyboardInterrupt at the first signal in this block; end the process at the second.

    `patient`: signals that do not count as a second one, such as those that a sweep forwards. `in_script`: the process
    is a user's own program. Then Ctrl-C alone is handled, unless the program has a handler of its own; a second one
    raises there and then.
    """
    global _stop
    earlier, _stop = _stop, _Stop(frozenset(patient), commands=not in_script)
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    if in_script:
        heeded = [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
    if threading.current_thread() is not threading.main_thread():
        heeded = []
    before = {number: signal.signal(number, _on_signal) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if in_script:
            _stop = earlier


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _stop.first is None:
        _stop.first, _stop.at = number, time.monotonic()
        if _stop.held and _stop.notice:
            write_line(_stop.notice)
        interrupt(KeyboardInterrupt())
    elif number not in _stop.patient and time.monotonic() - _stop.at > ONCE_S:
        if not _stop.commands:  # the process is the user's
            raise KeyboardInterrupt
        leave_at_once("left at once")


def interrupt(error: KeyboardInterrupt) -> None:
    """Raise this, or where the outermost `held` block ends; after the first one, do nothing."""
    if _stop.raised:
        return
    if _stop.held:
        _stop.pending = _stop.pending or error
    else:
        _stop.raised = True
        raise error


@contextmanager
def held(notice: str = "") -> Iterator[None]:
    """Let no signal interrupt this block: KeyboardInterrupt is raised when the outermost such block ends.

    `notice`: a line to print at the signal, of a block that may take long. Threads other than the main one are never
    interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _stop.held += 1
    _stop.notice = notice or _stop.notice
    try:
        yield
    finally:
        _stop.held -= 1
        if notice:
            _stop.notice = ""
        if not _stop.held and (pending := _stop.pending) is not None:
            _stop.pending = None
            interrupt(pending)


def owns_process() -> bool:
    """Whether this process runs a command of this program, and not a user's script."""
    return _stop.commands


def stop_signal() -> str | None:
    """Return the name of the signal that requested the stop; None where there was none."""
    return None if _stop.first is None else signal.Signals(_stop.first).name


def stop_requested() -> bool:
    """Return whether a signal, or `interrupt`, ends the command where the outermost `held` block ends."""
    return _stop.first is not None or _stop.pending is not None


def why_stopped(error: KeyboardInterrupt) -> str:
    """Return what interrupted a command, and its progress, where the error has it."""
    by = "" if isinstance(error, ReaderGone) else f"by {stop_signal() or 'a signal'}"
    return f"{by} {error}".strip()


def arrived() -> None:
    """Note that clean-up begins: from now on only a second signal interrupts it."""
    _stop.raised |= _stop.first is not None


@contextmanager
def temporary_folder(prefix: str, place: Path | None = None) -> Iterator[str]:
    """Yield the path of a new folder, removed at the end of the block or of the process, whichever is first."""
    folder = tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True)
    with folder as path, before_leaving(lambda: shutil.rmtree(path)):
        yield path


@contextmanager
def before_leaving(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback`, which must be quick, if the process ends immediately in this block."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def leave(code: int) -> NoReturn:
    """End the process after a stop, also where a thread is stuck in a library."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    with suppress(Exception):
        atexit._run_exitfuncs()
    _clear()
    os._exit(code)


def leave_at_once(text: str, code: int = CODE) -> NoReturn:
    """End the process and all its descendants, and remove its temporary folders; from any thread."""
    _clear()
    end_with(text, code)


def _clear() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if "resource_tracker" not in " ".join(child.cmdline()):  # Python's, which removes what they shared
                child.kill()
    for callback in list(_callbacks):
        with suppress(BaseException):
            callback()


def killed_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
