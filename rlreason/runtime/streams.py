"""Standard output and standard error as every command uses them: any text can be written, and a pipe may close.

What others wrote (responses, questions, names) may hold codes that a terminal obeys; they are shown instead.
"""

import errno
import io
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from rlreason.errors import ReaderGone
from rlreason.runtime.text import visible

READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed
LOG_WIDTH = 120  # columns of what goes to a file or a pipe
LINE_ANEW = "\r\033[K"  # our own code: the current line of the terminal is emptied
_LABEL = re.compile(r" *(?:! |\S+ {2,})?")  # `! ` or a first word: the rest is indented by it


class Outlet(io.TextIOWrapper):
    """A standard stream that replaces what its encoding lacks, and ends the command when its reader has gone.

    It obeys `LINE_ANEW`, and on standard error a carriage return, as of a library's progress bar; nothing else.

    `ReaderGone` is raised once and in the main thread; what is written after that is discarded, so that a command can
    clean up. Another error, such as a full disk behind `> FILE`, gets the stream's name as its file name.
    """

    def __init__(self, stream: io.TextIOWrapper, errors: str) -> None:
        lines, through = stream.line_buffering, stream.write_through
        super().__init__(stream.buffer, stream.encoding, errors, line_buffering=lines, write_through=through)
        self._gone = self._raised = False
        self.title = {1: "standard output", 2: "standard error"}.get(stream.fileno(), "the terminal")
        codes = [LINE_ANEW, *(["\r"] if self.title == "standard error" else [])]
        self._obeyed = re.compile(f"({'|'.join(map(re.escape, codes))})")

    def write(self, text: str, /) -> int:
        """Write the text; returns its length. `ReaderGone` or `OSError`, see the class."""
        parts = self._obeyed.split(text)  # every second one is a code that is obeyed
        self._do(super().write, "".join(part if place % 2 else visible(part) for place, part in enumerate(parts)))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered; errors as in `write`."""
        self._do(super().flush)

    def _do(self, action: Callable[..., Any], *arguments: str) -> None:
        try:
            action(*arguments)
        except BlockingIOError:
            raise
        except OSError as error:
            self._discard()  # or what is buffered would fail again when the process ends
            self._gone = error.errno in READER_GONE
            if not self._gone:
                error.filename = error.filename or self.title
                raise
        if self._gone and not self._raised and threading.current_thread() is threading.main_thread():
            self._raised = True
            raise ReaderGone("nobody read its output any more")

    def _discard(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def settle_streams() -> None:
    """Replace standard output and standard error of this process by `Outlet`s; a second call does nothing.

    Streams that a notebook or a test has put in their place are left alone.
    """
    if sys.stdout is None:  # closed by the shell, as by `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = Outlet(sys.stdout, "replace")
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = Outlet(sys.stderr, "backslashreplace")


def print_stderr(text: str) -> None:
    """Print a message line by line on standard error; on a terminal, each is broken at its width."""
    for line in visible(text).splitlines():
        message = f"rlreason: {line}" if line else ""
        print(folded(message, width_of(sys.stderr), below=10) if sys.stderr.isatty() else message, file=sys.stderr)


def width_of(stream: TextIO) -> int:
    """Columns for text in a stream: the terminal's (COLUMNS, where it is set), or 120 for a file or pipe."""
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
    """Every line of a text in at most `width` columns, broken at spaces.

    The rest of a broken line is indented to the text after its label, or to the column `below`.

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
    rest = " " * indent
    return textwrap.fill(
        line, width, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )
