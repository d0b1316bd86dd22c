"""The flags of a command line, read as Hydra reads them, and Hydra made ready to compose with what they bring in.

Reading them here first means that nothing has to be left unchecked because a flag stands beside it. It knows Hydra's
argument parser and search path; it must not know settings.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.initialize import initialize_config_dir

from rlreason import __version__
from rlreason.config.store import resource_dir
from rlreason.errors import ConfigError

SOURCES = ("config_dir", "config_path", "config_name")  # flags that say where options come from
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")  # of which Hydra does one at a time


@dataclass(frozen=True, slots=True)
class Asked:
    """A command line in its two halves: `flags` by name, such as {"multirun": True}, and the overrides in order."""

    flags: dict[str, Any]
    overrides: list[str]
    folder: Path | None = None  # where the run, or the sweep, will write; once it was checked

    @property
    def multirun(self) -> bool:
        """Whether it asks for a sweep: by -m, or by the setting that -m stands for."""
        return bool(self.flags.get("multirun")) or "hydra.mode=MULTIRUN" in self.overrides

    @property
    def composes(self) -> bool:
        """Whether the overrides are composed at all; completion and a rerun from a pickle read theirs otherwise."""
        return not any(self.flags.get(name) for name in ("shell_completion", "hydra_help", "experimental_rerun"))

    @property
    def starts(self) -> bool:
        """Whether runs are to start, instead of a question being answered."""
        return self.composes and not any(self.flags.get(name) for name in ("help", "cfg", "info"))

    @property
    def config_name(self) -> str:
        return self.flags.get("config_name") or "config"

    def words(self) -> list[str]:
        """The command line again, flags first: Hydra's parser stops at overrides that follow a flag that follows one.

        >>> read(["seed=0,1", "-m", "loss=gspo"]).words()
        ['--multirun', 'seed=0,1', 'loss=gspo']
        """
        return [*_spelt(self.flags), *self.overrides]

    def sources(self) -> list[str]:
        """The flags that the processes of a sweep need too, to find the same options.

        >>> read(["-m", "-cd", "/", "seed=0,1"]).sources()
        ['--config-dir=/']
        """
        return _spelt({name: value for name, value in self.flags.items() if name in SOURCES})


def _spelt(flags: dict[str, Any]) -> list[str]:
    named = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in named.items()]


class _Parser(argparse.ArgumentParser):
    """Mistakes as everywhere in this program: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: python -m rlreason --hydra-help lists the flags")


def read(words: Sequence[str]) -> Asked:
    """Split a command line; `ConfigError` where a flag is unknown, does not go with another, or names no folder.

    `--version` is answered here, with this program's.
    """
    parser = _Parser(add_help=False, parents=[get_args_parser()], conflict_handler="resolve")
    parser.add_argument("--version", action="version", version=f"rlreason {__version__}")
    found = vars(parser.parse_intermixed_args(list(words)))
    overrides = found.pop("overrides") or []
    flags = {name: value for name, value in found.items() if value not in (None, False)}
    several = [name for name in COMMANDS if name in flags]
    if len(several) > 1:
        raise ConfigError(f"{' and '.join(_spelt(dict.fromkeys(several, True)))} exclude each other: give one")
    if "resolve" in flags and not flags.keys() & {"cfg", "help"}:
        raise ConfigError("--resolve belongs to --cfg: write --cfg job --resolve")
    if folder := flags.get("config_dir"):
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir={folder} is no folder: give one that holds options, as DIR/loss/mine.yaml")
        flags["config_dir"] = str(Path(folder).absolute())  # a run may be told to work in a folder of its own
    path = flags.get("config_path")
    if path and not (Path(path).is_absolute() and Path(path).is_dir()) and not path.startswith("pkg://"):
        raise ConfigError(
            f"--config-path={path} is no absolute path of a folder: give one, or add options by --config-dir DIR"
        )
    return Asked(flags, overrides)


@contextmanager
def composing(asked: Asked) -> Iterator[None]:
    """Hydra ready to compose what was asked, with the same options in reach as its own command line has."""
    conf = asked.flags.get("config_path") or str(resource_dir("conf"))
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):  # and restored afterwards
        search_path = create_config_search_path(conf)
        if folder := asked.flags.get("config_dir"):
            place = SearchPathQuery(provider="schema")
            search_path.prepend("command-line", f"file://{folder}", anchor=place)
        GlobalHydra.instance().clear()
        Hydra.create_main_hydra2(task_name=Path(sys.argv[0]).stem, config_search_path=search_path)
        yield
