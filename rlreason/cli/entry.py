"""How every command of this program ends: mistakes in words, and the exit code of the table in `status.py`."""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from rlreason.errors import ConfigError, ReaderGone
from rlreason.records.status import RESOURCES, exit_code
from rlreason.runtime import signals
from rlreason.runtime.atomic_files import FULL, unwritable
from rlreason.runtime.streams import complain, settle_streams


class Parser(argparse.ArgumentParser):
    """A command's words; mistakes as everywhere in this program: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: write {' '.join(self.format_usage().split()[1:])}")


def say(error: BaseException) -> bool:
    """Explain in one line what ended a command; False for an error of the program, which needs its traceback."""
    if isinstance(error, ConfigError):
        complain(str(error))
    elif isinstance(error, KeyboardInterrupt):
        with suppress(OSError):  # the terminal may be gone
            complain("\n" * sys.stderr.isatty() + f"stopped {why_stopped(error)}")
    elif exit_code(error) == RESOURCES:
        complain(shortage(error))
    else:
        return False
    return True


def why_stopped(error: KeyboardInterrupt) -> str:
    """What ended a command before its end, and how far it was, as far as the error tells."""
    by = "" if isinstance(error, ReaderGone) else f"by {signals.asked() or 'a signal'}"
    return f"{by} {error}".strip()


def shortage(error: BaseException) -> str:
    """What ran out, and what helps.

    >>> shortage(MemoryError())
    'out of memory: lower micro_batch_tokens or rollout.max_rows, or choose a smaller model'
    """
    cause = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) and error.errno in FULL and error.filename:
        return str(unwritable(error.filename, error.errno))
    if isinstance(error, OSError) or "No space" in cause:
        return f"{cause}: free some space, or choose another hydra.run.dir"
    what = "out of memory" + f" ({cause})" * bool(cause)
    return f"{what}: lower micro_batch_tokens or rollout.max_rows, or choose a smaller model"


def answered(command: Callable[[], int | None]) -> int:
    """Do it and return the exit code; anything that cannot be said in a line is raised."""
    settle_streams()
    try:
        try:
            return command() or 0
        finally:
            sys.stdout.flush()  # here, so that a reader who has left, or a full disk, is not met at the process's end
    except ReaderGone:
        return exit_code(KeyboardInterrupt()) if signals.asked() else ReaderGone.exit_code
    except (Exception, KeyboardInterrupt) as error:
        signals.arrived()
        if signals.asked() and not isinstance(error, KeyboardInterrupt):
            error = KeyboardInterrupt()  # it failed because everything ends
        with suppress(ReaderGone):
            if not say(error):
                raise
        return exit_code(error)


def ended(
    command: Callable[[], int | None], limit_s: float = signals.LIMIT_S, patient: tuple[int, ...] = ()
) -> NoReturn:
    """Do it and end the process; a signal ends it politely, within `limit_s`."""
    with signals.stoppable(limit_s, patient):
        try:
            code = answered(command)
        except KeyboardInterrupt as error:  # it came while the end was being told
            signals.arrived()
            say(error)
            code = exit_code(error)
        if signals.asked():
            signals.leave(code)
    sys.exit(code)
