"""A signal while Python still imports: one line and exit code 130. Nothing was begun that could be left behind.

It imports only what every interpreter has loaded already, so that it can be the first thing that happens.
"""

import _signal  # the part of `signal` in C; the rest of it imports enum and more
import os

CODE = 130  # as in the table of status.py
terminal = 2  # what standard error was when the process began, while noise.py has it elsewhere
NAMES = {_signal.SIGINT: "SIGINT", _signal.SIGTERM: "SIGTERM", _signal.SIGHUP: "SIGHUP"}


def quiet() -> None:
    """Until a command takes over (signals.py), a signal ends the process with one line; an ignored one stays so."""
    for number in NAMES:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, frame: end_with(f"stopped by {NAMES[number]}"))


def end_with(text: str) -> None:
    """Past Python's streams, one of which may be what was interrupted; the terminal may be gone."""
    try:
        os.write(terminal, f"{chr(10) * os.isatty(terminal)}rlreason: {text}\n".encode())
    finally:
        os._exit(CODE)
