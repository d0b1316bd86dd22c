"""End every command in one way: one-line mistakes, broken pipes, signals, exit codes."""

import errno
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rlreason.errors import ConfigError, ReaderGone
from rlreason.records.reader import RESOURCES, exit_code
from rlreason.runtime import signals
from rlreason.runtime.files import FULL, unwritable
from rlreason.runtime.streams import print_stderr, settle_streams
from rlreason.runtime.text import shorten


def find_modules_here() -> None:
    """Add the current folder to sys.path, as `python -m` does, so that a user's `module:function` is found.

    A script installed by pip has its own folder there instead. Python's own rule against it (`-P`, `-I`,
    PYTHONSAFEPATH) is respected. Processes that grade get the whole path; those of a sweep are started by `python -m`.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise ConfigError("the current folder is gone: go to another, or make it again and enter it anew") from None
    if not sys.flags.safe_path and "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


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
    cause = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) and error.errno in FULL and error.filename:
        return str(unwritable(error.filename, error.errno))
    if isinstance(error, OSError) or "No space" in cause:
        return f"{cause}: free some space, or choose another hydra.run.dir"
    what = "out of memory" + f" ({cause})" * bool(cause)
    cure = "lower micro_batch_tokens or rollout.max_rows, or take a smaller model (rlreason plan adds it up)"
    return f"{what}: {cure}"


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


def run_cli(
    command: Callable[[], int | None], limit_s: float = signals.LIMIT_S, patient: tuple[int, ...] = ()
) -> NoReturn:
    """Run a command and end the process with its exit code.

    After a signal the command has `limit_s` seconds to clean up; a second signal ends it immediately, unless it is one
    of the `patient` ones.
    """

    def from_here() -> int | None:
        find_modules_here()
        return command()

    with signals.stoppable(limit_s, patient):
        try:
            code = exit_code_of(from_here)
        except KeyboardInterrupt as error:  # it came while the error was being printed
            signals.arrived()
            print_error(error)
            code = exit_code(error)
        if signals.stop_signal():
            signals.leave(code)
    sys.exit(code)
