"""What a verb of the command line (`rlreason VERB ...`) is made of: its arguments, and its answer."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlreason.errors import ConfigError


class Answer(NamedTuple):
    """What a verb found out: `text` for a person, and the same as `figures` for `--json`."""

    text: str
    figures: dict[str, Any]


class Parser(argparse.ArgumentParser):
    """The arguments of a verb. A mistake in them is a `ConfigError`: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with the message and how to write the command."""
        raise ConfigError(f"{message}: write {' '.join(self.format_usage().split()[1:])}")

    def add_run(self, help: str, several: bool = False) -> None:
        """Add RUN, the folder of a run, as `arguments.run`; with `several`, one or more of them as `arguments.runs`."""
        if several:
            self.add_argument("runs", metavar="RUN", type=run_folder, nargs="+", help=help)
        else:
            self.add_argument("run", metavar="RUN", type=run_folder, help=help)


def run_folder(word: str) -> Path:
    """The folder of one run; `ConfigError` where it is no folder, or one that holds several runs, as a sweep's does."""
    folder = Path(word)
    if not folder.is_dir():
        raise ConfigError(f"RUN={word} is no folder: give the folder of a run, as printed at its start")
    inner = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
    if inner and not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"RUN={word} is no run and holds {len(inner)} of them: give one, such as {folder / inner[-1]}"
        )
    return folder
