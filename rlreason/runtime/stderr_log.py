"""What libraries say on standard error while a run goes on: out of the terminal, and kept in the run's `log.txt`.

Python's warnings, log messages and what native code prints all end there. Lines of our own (`rlreason: ...`) and
errors that end a thread or the process still reach the terminal. It knows streams; it must not know runs.
"""

import faulthandler
import io
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO

from rlreason.errors import ConfigError
from rlreason.runtime import early_signals as quiet
from rlreason.runtime import signals

NAME = "log.txt"
OURS = "rlreason: "
EXPECTED = (ConfigError, KeyboardInterrupt, SystemExit)  # these are said in a line, and need no noise beside it


class Sieve(io.TextIOBase):
    """Standard error of Python code during a run: our own lines go to the terminal, all others to the log."""

    def __init__(self, log: TextIO, terminal: TextIO) -> None:
        self.log, self.terminal = log, terminal
        self._begins, self._ours = True, False  # whether a line begins here, and whose the line is

    def write(self, text: str, /) -> int:
        for part in text.splitlines(keepends=True):
            if self._begins:
                self._ours = part.startswith(OURS)
            self._begins = part.endswith("\n")
            if self._ours:
                self.terminal.write(part)
                self.terminal.flush()
            else:
                with suppress(OSError):  # a full disk is no reason to stop a library
                    self.log.write(part)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.log.flush()

    def fileno(self) -> int:
        return self.log.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.log.encoding

    @property
    def buffer(self) -> IO[bytes]:
        return self.log.buffer


class _Noise:
    """The file behind standard error: one without a name until the run has a folder."""

    def __init__(self) -> None:
        self.spool = tempfile.TemporaryFile()  # noqa: SIM115
        self.path: Path | None = None
        os.dup2(self.spool.fileno(), 2)

    def move_to(self, folder: Path) -> None:
        sys.stderr.flush()
        with suppress(OSError), (folder / NAME).open("ab", buffering=0) as log:  # a full disk ends the run elsewhere
            self.path = folder / NAME
            os.dup2(log.fileno(), 2)
            log.write(self.so_far())
            self.spool.truncate(0)

    def so_far(self) -> bytes:
        self.spool.seek(0)
        return self.spool.read()

    def tidy(self) -> None:
        """Where nothing was said, there is no file."""
        if self.path is not None:
            with suppress(OSError):
                if not self.path.stat().st_size:
                    self.path.unlink()


_under_way: list[_Noise] = []


@contextmanager
def stderr_logged() -> Iterator[None]:
    """For the time of a run. What was said before the run had a folder is shown after all if the program failed."""
    if sys.stderr is None:  # closed by the shell
        yield
        return
    python, screen = sys.stderr, os.dup(2)
    python.flush()
    terminal = open(screen, "w", encoding=python.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    noise, sieve, hook = _Noise(), Sieve(python, terminal), threading.excepthook
    threading.excepthook = lambda told: _show(told, terminal)
    _under_way.append(noise)
    quiet.terminal = screen
    crashes = not faulthandler.is_enabled()
    if crashes:
        faulthandler.enable(terminal)
    sys.stderr = sieve  # type: ignore[assignment]
    unsaid = b""
    try:
        with signals.before_leaving(noise.tidy):
            yield
    except EXPECTED:
        raise
    except BaseException:
        unsaid = b"" if noise.path else noise.so_far()
        raise
    finally:
        _under_way.remove(noise)
        if not signals.asked():  # else the process is about to end, and threads of libraries still have things to say
            if sys.stderr is sieve:
                sys.stderr = python
            with suppress(OSError):
                python.flush()
            if crashes:
                faulthandler.disable()
            threading.excepthook, sieve.terminal = hook, python  # a library may have kept the sieve
            os.dup2(screen, 2)
            quiet.terminal = 2
            with suppress(OSError):
                os.write(2, unsaid)
            os.close(screen)
        noise.tidy()


def log_stderr_in(folder: Path) -> None:
    """The folder is the run's own now: what was said so far, and what will be, goes to its `log.txt`."""
    for noise in _under_way:
        noise.move_to(folder)


def _show(told: threading.ExceptHookArgs, terminal: TextIO) -> None:
    """An error that ended a thread, as Python shows it."""
    if told.exc_type is not SystemExit:
        name = told.thread.name if told.thread else "an unknown thread"
        error = traceback.format_exception(told.exc_type, told.exc_value, told.exc_traceback)
        terminal.write(f"Exception in thread {name}:\n{''.join(error)}")
        terminal.flush()
