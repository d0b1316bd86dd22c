"""A command's arguments and streams: its parser, what it prints, and libraries' output, which goes to the run's log."""

import argparse
import errno
import faulthandler
import io
import os
import re
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, TextIO

from rlreason.errors import ConfigError, ReaderGone
from rlreason.runtime import signals
from rlreason.runtime.files import whole
from rlreason.runtime.text import redacted, visible

READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed
LINE_ANEW = "\r\033[K"  # our only control code: clears the current line of the terminal
NAME = "log.txt"


class Outlet(io.TextIOWrapper):
    """A standard stream that escapes control codes but `LINE_ANEW`, and ends the command when its reader is gone.

    `ReaderGone` is raised once and in the main thread, after a `held` block; later output is discarded, so that a
    command can clean up.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        buffering = stream.line_buffering, stream.write_through
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", None, *buffering)
        self._gone = False

    def write(self, text: str, /) -> int:
        """Write the text and return its length. `ReaderGone` or `OSError`, see the class."""
        self._do(super().write, LINE_ANEW.join(map(visible, text.split(LINE_ANEW))))
        return len(text)

    def flush(self) -> None:
        """Write the buffer; errors as in `write`."""
        self._do(super().flush)

    def _do(self, action: Callable[..., Any], *arguments: str) -> None:
        try:
            action(*arguments)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)  # else writing the buffer would fail again when the process ends
            os.dup2(null, self.fileno())
            os.close(null)
            if error.errno not in READER_GONE:
                raise
            self._gone = True
        if self._gone and threading.current_thread() is threading.main_thread():
            self._gone = False
            signals.interrupt(ReaderGone("nobody read its output any more"))


def settle_streams() -> None:
    """Replace standard output and standard error of this process by `Outlet`s; a second call does nothing.

    Streams replaced by a notebook or a test are left alone.
    """
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = Outlet(sys.stdout)
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = Outlet(sys.stderr)


def print_stderr(text: str) -> None:
    """Print a message line by line on standard error; during a run that of the command, not the log."""
    for line in visible(text).splitlines():
        print(f"rlreason: {line}" if line else "", file=_screen or sys.stderr, flush=True)


def folded(text: str, width: int, below: int = 0) -> str:
    """Wrap every line of a text to `width` columns, at spaces; what is wrapped begins at the column `below`.

    >>> print(folded("one two three\\nfour", 8, 2))
    one two
      three
    four
    """
    indent = " " * below
    wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(line) if len(line) > width else line for line in text.split("\n"))


class LogStream(io.TextIOWrapper):
    """Standard error of Python code during a run, without secrets and control characters: lines of the log."""

    def __init__(self, descriptor: int) -> None:
        raw: Any = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
        super().__init__(raw, "utf-8", "backslashreplace", write_through=True)

    def write(self, text: str, /) -> int:
        """Write the text and return its length; a full disk must not stop a library."""
        with suppress(OSError):
            super().write(_logged(text))
        return len(text)


_log: Path | None = None  # of the current run; None: it has no folder yet
_early: BinaryIO | None = None  # what was written to standard error before the run had a folder; None: no run
_screen: TextIO | None = None  # the command's standard error during a run


@contextmanager
def stderr_logged() -> Iterator[None]:
    """Redirect standard error during a run, the block, except for `print_stderr`."""
    global _early, _log, _screen
    python, descriptor = sys.stderr, os.dup(2)
    python.flush()
    _screen = open(descriptor, "w", encoding=python.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    _early, _log = tempfile.TemporaryFile(), None  # noqa: SIM115
    os.dup2(_early.fileno(), 2)
    signals.print_to(descriptor)
    faulthandler.enable(_screen)  # a crash in native code
    sys.stderr = LogStream(2)
    try:
        with signals.before_leaving(_tidy_log):
            yield
    finally:
        sys.stderr.flush()
        if not signals.stop_signal():  # else the process is about to end while threads of libraries still write
            sys.stderr = python
            faulthandler.disable()
            os.dup2(descriptor, 2)
            signals.print_to(2)
            os.close(descriptor)
            _early = _screen = None
        _tidy_log()


def log_stderr_in(folder: Path) -> None:
    """Write past and later output to standard error into the folder's `log.txt`."""
    global _log
    if _early is None:
        return
    sys.stderr.flush()
    with suppress(OSError), (folder / NAME).open("ab", buffering=0) as log:  # a full disk ends the run elsewhere
        _log = folder / NAME
        os.dup2(log.fileno(), 2)
        _early.seek(0)
        log.write(_early.read())


def _tidy_log() -> None:
    """Remove the log where it is empty, and hide secrets that native code wrote into it."""
    if _log is None:
        return
    with suppress(OSError):
        before = _log.read_bytes().decode("utf-8", "surrogateescape")
        if not before:
            _log.unlink()
        elif (now := _logged(before)) != before:
            with whole(_log) as partial:
                partial.write_text(now, "utf-8", "surrogateescape")


def _logged(text: str) -> str:
    """Prepare a text for the log: hide secrets, show control characters, and put a progress bar on lines."""
    return visible(redacted(re.sub("\r\n?", "\n", text)))


class Answer(NamedTuple):
    """The result of a subcommand: `text` for a person, and the same as `figures` for `--json`."""

    text: str
    figures: dict[str, Any] | list[dict[str, Any]]
    exit_code: int = 0  # of the run that it started, or of a failed expectation


class Parser(argparse.ArgumentParser):
    """Parses the arguments of a subcommand. A mistake is a `ConfigError`: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with the message and the usage."""
        raise ConfigError(f"{message}: write {' '.join(self.format_usage().split()[1:])}")

    def add_run(self, help: str) -> None:
        """Add RUN, the folder of a run and of no sweep, as `arguments.run`."""
        self.add_argument("run", metavar="RUN", type=run_folder, help=help)


def number_in(low: float, high: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    """Return the type of an argument that is a number from `low` to `high`, whole if `kind` is int."""

    def read(word: str) -> float:
        with suppress(ValueError):
            if low <= kind(word) <= high:
                return kind(word)
        raise argparse.ArgumentTypeError(f"{word} must be a {'whole ' * (kind is int)}number from {low} to {high}")

    return read


def refuse_target(option: str, target: Path | str) -> None:
    """`ConfigError` where an option's FILE cannot be written; called before the work begins."""
    path = Path(target).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} '{target}' cannot be written: give a file in a folder that is there")


def run_folder(word: str) -> Path:
    """Return the folder of a run; `ConfigError` where it is no folder."""
    folder = Path(word)
    if not folder.is_dir():
        raise ConfigError(f"RUN={word} is no folder: give the folder of a run, as printed at its start")
    return folder
