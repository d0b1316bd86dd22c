"""What libraries print on standard error during a run goes into the run's `log.txt` instead of the terminal.

Python's warnings, log messages and what native code prints all end there. Lines of our own (`rlreason: ...`) and
errors that end a thread or the process still reach the terminal. Passwords, keys and tokens are hidden in the log: as
it is written where Python writes, and what native code wrote when the run ends.
"""

import faulthandler
import io
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO

from rlreason.errors import ConfigError
from rlreason.runtime import early_signals, signals
from rlreason.runtime.atomic_files import whole
from rlreason.runtime.secrets import redacted
from rlreason.runtime.text import visible

NAME = "log.txt"
OURS = "rlreason: "
EXPECTED = (ConfigError, KeyboardInterrupt, SystemExit)  # the command line prints these in one line


class StderrFilter(io.TextIOBase):
    """Standard error of Python code during a run: our own lines go to the terminal, all others to the log."""

    def __init__(self, log: TextIO, terminal: TextIO) -> None:
        self.log, self.terminal = log, terminal
        self._at_line_start, self._ours = True, False  # _ours: the current line begins with OURS

    def write(self, text: str, /) -> int:
        """Write each line to the terminal or the log; returns the number of characters."""
        for part in text.splitlines(keepends=True):
            if self._at_line_start:
                self._ours = part.startswith(OURS)
            self._at_line_start = part.endswith("\n")
            if self._ours:
                self.terminal.write(visible(part))
                self.terminal.flush()
            else:
                with suppress(OSError):  # a full disk is no reason to stop a library
                    self.log.write(_logged(part))
        return len(text)

    def flush(self) -> None:
        """Flush the log; the terminal is flushed after each write."""
        with suppress(OSError):
            self.log.flush()

    def fileno(self) -> int:
        """The log's file descriptor."""
        return self.log.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The log's encoding."""
        return self.log.encoding

    @property
    def buffer(self) -> IO[bytes]:
        """The log's bytes."""
        return self.log.buffer


class _StderrFile:
    """The file that standard error is redirected to: a temporary one until the run has a folder."""

    def __init__(self) -> None:
        self.spool = tempfile.TemporaryFile()  # noqa: SIM115
        self.path: Path | None = None
        os.dup2(self.spool.fileno(), 2)

    def move_to(self, folder: Path) -> None:
        sys.stderr.flush()
        with suppress(OSError), (folder / NAME).open("ab", buffering=0) as log:  # a full disk ends the run elsewhere
            self.path = folder / NAME
            os.dup2(log.fileno(), 2)
            log.write(_redacted_bytes(self.so_far()))
            self.spool.truncate(0)

    def so_far(self) -> bytes:
        self.spool.seek(0)
        return self.spool.read()

    def tidy(self) -> None:
        """Remove the log where it is empty, and hide what native code wrote into it that nobody else may read."""
        if self.path is not None:
            with suppress(OSError):
                if not self.path.stat().st_size:
                    self.path.unlink()
                elif (now := _redacted_bytes(before := self.path.read_bytes())) != before:
                    with whole(self.path) as partial:
                        partial.write_bytes(now)


_active: list[_StderrFile] = []


@contextmanager
def stderr_logged() -> Iterator[None]:
    """Redirect standard error in this block, the time of a run.

    What was written before the run had a folder is shown in the terminal if the program fails.
    """
    if sys.stderr is None:  # closed by the shell
        yield
        return
    python, screen = sys.stderr, os.dup(2)
    python.flush()
    terminal = open(screen, "w", encoding=python.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    file, filtered, hook = _StderrFile(), StderrFilter(python, terminal), threading.excepthook
    threading.excepthook = lambda args: _show(args, terminal)
    _active.append(file)
    early_signals.terminal = screen
    crashes = not faulthandler.is_enabled()
    if crashes:
        faulthandler.enable(terminal)
    sys.stderr = filtered  # type: ignore[assignment]
    withheld = b""
    try:
        with signals.before_leaving(file.tidy):
            yield
    except EXPECTED:
        raise
    except BaseException:
        withheld = b"" if file.path else file.so_far()
        raise
    finally:
        _active.remove(file)
        if not signals.asked():  # else the process is about to end while threads of libraries still write
            if sys.stderr is filtered:
                sys.stderr = python
            with suppress(OSError):
                python.flush()
            if crashes:
                faulthandler.disable()
            threading.excepthook, filtered.terminal = hook, python  # a library may have kept the filter
            os.dup2(screen, 2)
            early_signals.terminal = 2
            with suppress(OSError):
                os.write(2, _redacted_bytes(withheld))
            os.close(screen)
        file.tidy()


def log_stderr_in(folder: Path) -> None:
    """Write what was and will be printed on standard error into the folder's `log.txt`."""
    for file in _active:
        file.move_to(folder)


def _redacted_bytes(text: bytes) -> bytes:
    """A log without secrets, whatever its encoding."""
    return _logged(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _logged(text: str) -> str:
    """A text for the log: secrets are hidden, what a terminal would obey is shown, a progress bar takes lines."""
    return visible(redacted(re.sub("\r\n?", "\n", text)))


def _show(args: threading.ExceptHookArgs, terminal: TextIO) -> None:
    """An error that ended a thread, as Python shows it."""
    if args.exc_type is not SystemExit:
        name = args.thread.name if args.thread else "an unknown thread"
        error = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        terminal.write(visible(f"Exception in thread {name}:\n{''.join(error)}"))
        terminal.flush()
