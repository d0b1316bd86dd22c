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
from typing import IO, Any, NamedTuple, NoReturn, TextIO

from rlreason.errors import ConfigError, ReaderGone
from rlreason.runtime import early_signals, signals
from rlreason.runtime.files import whole
from rlreason.runtime.text import redacted, visible

READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed
LOG_WIDTH = 120  # columns of a file or a pipe
LINE_ANEW = "\r\033[K"  # our only control code: clears the current line of the terminal
_LABEL = re.compile(r" *(?:! |\S+ {2,})?")  # `! ` or a first word, to which following lines are indented


class Outlet(io.TextIOWrapper):
    """A standard stream that replaces characters its encoding lacks, and ends the command when its reader is gone.

    Of control codes it passes only `LINE_ANEW` and, on standard error, a carriage return, as of a progress bar.
    `ReaderGone` is raised once and in the main thread, after a `held` block; later output is discarded, so that a
    command can clean up. Another error, such as a full disk with `> FILE`, gets the stream's name as its file name.
    """

    def __init__(self, stream: io.TextIOWrapper, title: str, errors: str, codes: str) -> None:
        lines, through = stream.line_buffering, stream.write_through
        super().__init__(stream.buffer, stream.encoding, errors, line_buffering=lines, write_through=through)
        self._gone = False
        self._title, self._obeyed = title, re.compile(f"({codes})")

    def write(self, text: str, /) -> int:
        """Write the text and return its length. `ReaderGone` or `OSError`, see the class."""
        parts = self._obeyed.split(text)  # every second one is a code to pass on
        self._do(super().write, "".join(part if place % 2 else visible(part) for place, part in enumerate(parts)))
        return len(text)

    def flush(self) -> None:
        """Write the buffer; errors as in `write`."""
        self._do(super().flush)

    def _do(self, action: Callable[..., Any], *arguments: str) -> None:
        try:
            action(*arguments)
        except BlockingIOError:
            raise
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)  # else writing the buffer would fail again when the process ends
            os.dup2(null, self.fileno())
            os.close(null)
            self._gone = error.errno in READER_GONE
            if not self._gone:
                error.filename = error.filename or self._title
                raise
        if self._gone and threading.current_thread() is threading.main_thread():
            self._gone = False
            signals.interrupt(ReaderGone("nobody read its output any more"))


def settle_streams() -> None:
    """Replace standard output and standard error of this process by `Outlet`s; a second call does nothing.

    Streams replaced by a notebook or a test are left alone.
    """
    if sys.stdout is None:  # closed by the shell, as by `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = Outlet(sys.stdout, "standard output", "replace", re.escape(LINE_ANEW))
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = Outlet(sys.stderr, "standard error", "backslashreplace", f"{re.escape(LINE_ANEW)}|\r")


def print_stderr(text: str) -> None:
    """Print a message line by line on standard error, wrapped to the width of a terminal."""
    for line in visible(text).splitlines():
        message = f"rlreason: {line}" if line else ""
        print(folded(message, width_of(sys.stderr), below=10) if sys.stderr.isatty() else message, file=sys.stderr)


def width_of(stream: TextIO) -> int:
    """Return the columns of a stream: the terminal's (COLUMNS, where it is set), or 120 for a file or pipe."""
    if not stream.isatty():
        return LOG_WIDTH
    with suppress(ValueError):
        if (columns := int(os.environ.get("COLUMNS", ""))) > 0:
            return columns
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def folded(text: str, width: int, below: int | None = None) -> str:
    """Wrap every line of a text to `width` columns, at spaces.

    The rest of a wrapped line is indented to the text after its label, or to the column `below`.

    >>> print(folded("records    runs/grpo/one and others\\n! a notice", 34))
    records    runs/grpo/one and
               others
    ! a notice
    """
    return "\n".join(_fold(line, width, below) for line in text.split("\n"))


def _fold(line: str, width: int, below: int | None) -> str:
    if len(line) <= width:
        return line
    label = _LABEL.match(line)
    indent = below if below is not None else label.end() if label else 0
    if indent > width // 3:
        indent = min(len(line) - len(line.lstrip(" ")), width // 3)
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )


NAME = "log.txt"
OURS = "rlreason: "
EXPECTED = (ConfigError, KeyboardInterrupt, SystemExit)  # the command line prints these in one line


class StderrFilter(io.TextIOBase):
    """Standard error of Python code during a run: our own lines go to the terminal, all others to the log."""

    def __init__(self, log: TextIO, terminal: TextIO) -> None:
        self.log, self.terminal = log, terminal
        self._at_line_start, self._ours = True, False  # _ours: the current line begins with OURS

    def write(self, text: str, /) -> int:
        """Write each line to the terminal or the log; return the number of characters."""
        for part in text.splitlines(keepends=True):
            if self._at_line_start:
                self._ours = part.startswith(OURS)
            self._at_line_start = part.endswith("\n")
            if self._ours:
                self.terminal.write(visible(part))
                self.terminal.flush()
            else:
                with suppress(OSError):  # a full disk must not stop a library
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
    """The target of the redirected standard error: a temporary file until the run has a folder."""

    def __init__(self) -> None:
        self.spool = tempfile.TemporaryFile()  # noqa: SIM115
        self.path: Path | None = None
        os.dup2(self.spool.fileno(), 2)

    def move_to(self, folder: Path) -> None:
        sys.stderr.flush()
        with suppress(OSError), (folder / NAME).open("ab", buffering=0) as log:  # a full disk ends the run elsewhere
            self.path = folder / NAME
            os.dup2(log.fileno(), 2)
            log.write(self.withheld())
            self.spool.truncate(0)

    def withheld(self) -> bytes:
        """Return what was written before the run had a folder."""
        self.spool.seek(0)
        return _redacted_bytes(self.spool.read())

    def tidy(self) -> None:
        """Remove the log where it is empty, and hide secrets that native code wrote into it."""
        with suppress(OSError):
            if self.path is not None and not self.path.stat().st_size:
                self.path.unlink()
            elif self.path is not None and (now := _redacted_bytes(before := self.path.read_bytes())) != before:
                with whole(self.path) as partial:
                    partial.write_bytes(now)


_active: list[_StderrFile] = []


@contextmanager
def stderr_logged() -> Iterator[None]:
    """Redirect standard error during a run, the block.

    Output from before the run had a folder is shown in the terminal if the program fails.
    """
    if sys.stderr is None:  # closed by the shell
        yield
        return
    python, screen = sys.stderr, os.dup(2)
    python.flush()
    terminal = open(screen, "w", encoding=python.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    file, filtered = _StderrFile(), StderrFilter(python, terminal)
    _active.append(file)
    early_signals.terminal = screen
    faulthandler.enable(terminal)  # a crash in native code
    sys.stderr = filtered  # type: ignore[assignment]
    withheld = b""
    try:
        with signals.before_leaving(file.tidy):
            yield
    except EXPECTED:
        raise
    except BaseException:
        withheld = b"" if file.path else file.withheld()
        raise
    finally:
        _active.remove(file)
        if not signals.stop_signal():  # else the process is about to end while threads of libraries still write
            if sys.stderr is filtered:
                sys.stderr = python
            with suppress(OSError):
                python.flush()
            faulthandler.disable()
            filtered.terminal = python  # a library may have kept the filter
            os.dup2(screen, 2)
            early_signals.terminal = 2
            with suppress(OSError):
                os.write(2, withheld)
            os.close(screen)
        file.tidy()


def log_stderr_in(folder: Path) -> None:
    """Write past and later output to standard error into the folder's `log.txt`."""
    for file in _active:
        file.move_to(folder)


def _redacted_bytes(text: bytes) -> bytes:
    """Hide secrets in a log of any encoding."""
    return _logged(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


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

    def add_run(self, help: str, several: bool = False) -> None:
        """Add RUN, the folder of a run, as `arguments.run`; with `several`, one or more as `arguments.runs`.

        The folder of a sweep is refused as `arguments.run`, and means all of its runs in `runs`.
        """
        if several:
            self.add_argument("runs", metavar="RUN", type=run_folder, nargs="+", help=help)
        else:
            self.add_argument("run", metavar="RUN", type=run_folder, help=help)


def number_in(low: float, high: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    """Return the type of an argument that is a number from `low` to `high`, whole if `kind` is int."""

    def read(word: str) -> float:
        with suppress(ValueError):
            if low <= kind(word) <= high:
                return kind(word)
        whole = "whole " if kind is int else ""
        raise argparse.ArgumentTypeError(f"{word} must be a {whole}number from {low} to {high}")

    return read


def refuse_target(option: str, target: Path | str) -> None:
    """`ConfigError` where an option's FILE cannot be written; called before the work begins."""
    path = Path(target).absolute()
    if not str(target) or path.is_dir():
        raise ConfigError(f"{option} '{target}' is no file: give the path of one")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {target} lies in no folder that is there: give another FILE")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {target} lies in a folder that cannot be written to: give another FILE")


def run_folder(word: str) -> Path:
    """Return the folder of a run; `ConfigError` where it is no folder."""
    folder = Path(word)
    if not folder.is_dir():
        raise ConfigError(f"RUN={word} is no folder: give the folder of a run, as printed at its start")
    return folder
