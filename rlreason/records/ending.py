"""End a process as a command does: an error in one line, and the exit code of its kind."""

import errno
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from rlreason.errors import ConfigError, ReaderGone
from rlreason.records.reader import RESOURCES, exit_code
from rlreason.runtime import signals
from rlreason.runtime.files import FULL, unwritable
from rlreason.runtime.plugins import find_modules_here
from rlreason.runtime.streams import print_stderr, settle_streams
from rlreason.runtime.text import shorten


def print_error(error: BaseException) -> bool:
    """Print in one line what ended a command; return False for an error of the program, which needs its traceback."""
    if isinstance(error, ConfigError):
        print_stderr(str(error))
    elif isinstance(error, KeyboardInterrupt):
        with suppress(OSError):  # the terminal may be gone
            print_stderr("\n" * sys.stderr.isatty() + f"stopped {signals.why_stopped(error)}")
    elif exit_code(error) == RESOURCES:
        print_stderr(shortage(error))
    else:
        return False
    return True


def shortage(error: BaseException) -> str:
    """Return what ran out, and what helps.

    >>> shortage(MemoryError())
    'out of memory: lower micro_batch_tokens or rollout.max_rows, or take a smaller model (rlreason plan adds it up)'
    """
    cause = str(error).partition("\n")[0]
    if isinstance(error, OSError) and error.errno in FULL and error.filename:
        return str(unwritable(error.filename, error.errno))
    if isinstance(error, OSError) or "No space" in cause:
        return f"{cause}: free some space, or choose another hydra.run.dir"
    cure = "lower micro_batch_tokens or rollout.max_rows, or take a smaller model (rlreason plan adds it up)"
    return f"out of memory ({cause}): {cure}" if cause else f"out of memory: {cure}"


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; a mistake is printed in one line, an error of the program is raised."""
    settle_streams()
    try:
        try:
            return command() or 0
        finally:
            sys.stdout.flush()  # here: a reader who has left, or a full disk, must not fail at the process's end
    except ReaderGone:
        return exit_code(KeyboardInterrupt()) if signals.stop_signal() else ReaderGone.exit_code
    except (Exception, KeyboardInterrupt) as error:
        signals.arrived()
        if signals.stop_signal() and not isinstance(error, KeyboardInterrupt):
            error = KeyboardInterrupt()  # it failed because the process was ending
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            error = ConfigError(f"{shorten(str(error.filename), 80)} cannot be ({error.strerror}): give a shorter path")
        with suppress(ReaderGone):
            if not print_error(error):
                raise
        return exit_code(error)


def run_cli(command: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit code.

    After a signal the command cleans up; a second signal ends it immediately.
    """

    def from_here() -> int | None:
        find_modules_here()
        return command()

    with signals.stoppable():
        try:
            code = exit_code_of(from_here)
        except KeyboardInterrupt as error:  # it came while the error was being printed
            signals.arrived()
            print_error(error)
            code = exit_code(error)
        if signals.stop_signal():
            signals.leave(code)
    sys.exit(code)
