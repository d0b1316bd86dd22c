"""How every command of this program ends: mistakes in words, and the exit code of the table in `status.py`."""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from rlreason import signals
from rlreason.errors import ConfigError
from rlreason.status import RESOURCES, exit_code


class Parser(argparse.ArgumentParser):
    """A command's words; mistakes as everywhere in this program: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: write {' '.join(self.format_usage().split()[1:])}")


def say_mistake(error: ConfigError) -> None:
    for line in str(error).splitlines():
        print(f"rlreason: {line}", file=sys.stderr)


def say(error: BaseException) -> bool:
    """Explain in one line what ended a command; False for an error of the program, which needs its traceback."""
    if isinstance(error, ConfigError):
        say_mistake(error)
    elif isinstance(error, KeyboardInterrupt):
        by, far = signals.asked(), f" {error}" if str(error) else "; what was recorded stays in the run folder"
        with suppress(OSError):  # the terminal may be gone
            line = "rlreason: stopped" + f" by {by}" * bool(by) + far
            print(chr(10) * sys.stderr.isatty() + line, file=sys.stderr, flush=True)
    elif exit_code(error) == RESOURCES:
        print(f"rlreason: {shortage(error)}", file=sys.stderr)
    else:
        return False
    return True


def shortage(error: BaseException) -> str:
    """What ran out, and what helps.

    >>> shortage(MemoryError())
    'out of memory: lower micro_batch_tokens or rollout.max_rows, or choose a smaller model'
    """
    cause = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) or "No space" in cause:
        return f"{cause}: free some space, or choose another hydra.run.dir"
    what = "out of memory" + f" ({cause})" * bool(cause)
    return f"{what}: lower micro_batch_tokens or rollout.max_rows, or choose a smaller model"


def answered(command: Callable[[], int | None]) -> int:
    """Do it and return the exit code; anything that cannot be said in a line is raised."""
    try:
        return command() or 0
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = None  # type: ignore[assignment]  # nothing is flushed into the closed pipe at exit
        return exit_code(KeyboardInterrupt()) if signals.asked() else 141
    except (Exception, KeyboardInterrupt) as error:
        signals.arrived()
        if signals.asked() and not isinstance(error, KeyboardInterrupt):
            error = KeyboardInterrupt()  # it failed because everything ends
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
