"""Handle a signal while Python still imports: one line and exit code 130, since there is nothing to clean up yet.

Imports only what every interpreter has already loaded, so that it can run before anything else.
"""

import _signal  # the part of `signal` in C; the rest of it imports enum and more
import os
from typing import NoReturn

CODE = 130  # as in records/reader.py
terminal = 2  # the original standard error; streams.py redirects 2 during a run
NAMES = {_signal.SIGINT: "SIGINT", _signal.SIGTERM: "SIGTERM", _signal.SIGHUP: "SIGHUP"}


def heed_signals() -> None:
    """Let a signal end the process with one line, until a command sets its own handlers (signals.py).

    A signal that was ignored when the process began stays ignored.
    """
    for number in NAMES:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, frame: end_with(f"stopped by {NAMES[number]}"))


def write_line(text: str) -> None:
    """Print a line to the terminal, without Python's streams: writing to one may be what was interrupted."""
    os.write(terminal, f"{chr(10) * os.isatty(terminal)}rlreason: {text}\n".encode())


def end_with(text: str, code: int = CODE) -> NoReturn:
    """Print a line and end the process with this exit code."""
    try:
        write_line(text)
    finally:
        os._exit(code)
