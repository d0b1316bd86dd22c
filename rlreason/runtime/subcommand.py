"""The parser and the result of a subcommand (`rlreason SUBCOMMAND ...`)."""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlreason.errors import ConfigError


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
