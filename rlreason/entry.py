"""How every command of this program ends: mistakes in words, and the exit code of the table in `status.py`."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

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
        print("\nrlreason: stopped; what was recorded stays in the run folder", file=sys.stderr)
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
        return 141
    except (Exception, KeyboardInterrupt) as error:
        if not say(error):
            raise
        return exit_code(error)
