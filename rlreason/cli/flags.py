"""Parse a command line into flags, overrides and options of sweeps, and make Hydra ready to compose."""

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.initialize import initialize_config_dir

from rlreason.cli.options import Repository
from rlreason.config.leaves import resource_dir
from rlreason.config.store import register
from rlreason.errors import ConfigError
from rlreason.runtime.version import __version__
from rlreason.sweeps.design import Design
from rlreason.sweeps.gpus import GpuPlan

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NAME = re.compile(r"\w[\w.,=+-]*")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of a sweep on the command line that are no settings of its runs."""

    jobs: int | None = None  # runs side by side; null: as many as GPUs suffice for; without GPUs one, of launchers more
    gpus_per_run: int | None = None  # reserved for each run; auto (null): as many as its settings need
    dry: bool = False  # stop after the plan; what the runs need may be on another machine
    carry: tuple[str, ...] = ()  # finished sweeps, by name or folder, whose winners are taken over
    sweep_name: str | None = None  # of the sweep's folder below runs/sweeps


def split_sweep_options(overrides: Sequence[str], multirun: bool) -> tuple[list[str], SweepOptions]:
    """Split off the options of a sweep; `ConfigError` for a wrong one, and outside a sweep.

    >>> rest, options = split_sweep_options(["seed=0,1", "jobs=2", "carry=[a,b]", "dry=yes"], multirun=True)
    >>> rest, options.jobs, options.dry, options.carry
    (['seed=0,1'], 2, True, ('a', 'b'))
    """
    given: dict[str, str] = {}
    rest = []
    for word in overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if key not in _READ or not equals:
            rest.append(word)
        elif not multirun:
            raise ConfigError(f"{word} is for a sweep: add -m, or leave it out")
        elif key in given:
            raise ConfigError(f"{key}={given[key]} and {word} both set {key}: leave one of them out")
        else:
            given[key] = value
    return rest, SweepOptions(**{key: _READ[key](_unquoted(value)) for key, value in given.items()})  # type: ignore[arg-type]


def _jobs(value: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", value):
        raise ConfigError(f"jobs={value} must be a whole number, 1 or more: try jobs=2, for two runs side by side")
    return int(value)


def _gpus(value: str) -> int | None:
    if value.lower() in ("auto", "null"):
        return None
    if not re.fullmatch(r"\d{1,4}", value):
        raise ConfigError(
            f"gpus_per_run={value} must be a whole number or auto: 1 gives every run a GPU of its own, 0 lets every "
            "run see all of them"
        )
    return int(value)


def _dry(value: str) -> bool:
    if value.lower() not in YES + NO:
        raise ConfigError(f"dry={value} must be true or false: dry=true stops after the plan")
    return value.lower() in YES


def _carry(value: str) -> tuple[str, ...]:
    inside = value[1:-1] if value[:1] == "[" and value[-1:] == "]" else value
    names = tuple(_unquoted(name.strip()) for name in re.split(r",(?![^,]*=)", inside))
    if not all(names):
        raise ConfigError(f"carry={value} names no sweep: give one of runs/sweeps, as in carry=grpo_learning_rate")
    return names


def _name(value: str) -> str:
    if not NAME.fullmatch(value) or len(value) > 100:
        raise ConfigError(
            f"sweep_name={value} must be a plain name of at most 100 letters, digits and -_.,=+: it becomes the folder "
            "runs/sweeps/NAME; hydra.sweep.dir=DIR puts it elsewhere"
        )
    return value


def _unquoted(value: str) -> str:
    """
    >>> _unquoted("'a b'"), _unquoted("a")
    ('a b', 'a')
    """
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


_READ: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {"jobs": _jobs, "gpus_per_run": _gpus, "dry": _dry, "carry": _carry, "sweep_name": _name}
)


SOURCES = ("config_dir", "config_path", "config_name")  # flags that say where options come from
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")  # of which one is done at a time
HELP = ("help", "hydra_help")
OWN_CONFIGS = {"discover": "discover"}  # algorithms that share no settings with the others: their files in conf/


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed command line: `flags` by name, such as {"multirun": True}, and the overrides in order."""

    flags: dict[str, Any]
    overrides: list[str]
    folder: Path | None = None  # where the run or sweep will write; set by the check
    options: SweepOptions = field(default_factory=SweepOptions)
    design: Design | None = None  # of a sweep whose runs are known beforehand: not drawn by a plug-in, and no chain
    gpus: GpuPlan = field(default_factory=GpuPlan)  # of the sweep's runs; set by the check
    chain: tuple[str, ...] = ()  # the sweeps of a chain, which run one after the other: see `check.stage_of`
    carried: tuple[dict[str, Any], ...] = ()  # what carry= took from finished sweeps, for sweep.json

    @property
    def multirun(self) -> bool:
        """Return whether it requests a sweep: by -m, or by the setting that -m stands for."""
        return bool(self.flags.get("multirun")) or "hydra.mode=MULTIRUN" in self.overrides

    @property
    def composes(self) -> bool:
        """Return whether its overrides are composed; completion and a rerun from a pickle read theirs differently."""
        return not any(self.flags.get(name) for name in ("shell_completion", "hydra_help", "experimental_rerun"))

    @property
    def starts(self) -> bool:
        """Return whether runs are to start, rather than a question to be answered."""
        return self.composes and not any(self.flags.get(name) for name in ("help", "cfg", "info"))

    @property
    def config_name(self) -> str:
        """Return the config that is overridden: `config`, unless --config-name or the algorithm selects another."""
        chosen = {word.partition("=")[2] for word in self.overrides if word.startswith("algorithm=")}
        return self.flags.get("config_name") or OWN_CONFIGS.get(",".join(chosen).lower()) or "config"

    def arguments(self) -> list[str]:
        """Return the command line again, flags first: Hydra's parser stops at overrides between flags.

        >>> read(["seed=0,1", "-m", "loss=gspo"]).arguments()
        ['--multirun', 'seed=0,1', 'loss=gspo']
        """
        return [*_spelt(self.flags), *self.overrides]

    def sources(self) -> list[str]:
        """Return the flags that the processes of a sweep need to find the same options.

        >>> read(["-m", "-cd", "/", "seed=0,1"]).sources()
        ['--config-dir=/']
        """
        return _spelt({name: value for name, value in self.flags.items() if name in SOURCES})


def _spelt(flags: dict[str, Any]) -> list[str]:
    named = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in named.items()]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        cure = "python -m rlreason --hydra-help lists the flags"
        if unknown := re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL):
            cure = self._instead_of(unknown[1])
        raise ConfigError(f"{message}: {cure}")

    def _instead_of(self, word: str) -> str:
        name, equals, value = word.partition("=")
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        if nearest := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
            return f"did you mean {nearest[0]}{equals}{value}?"
        setting = f"{name.lstrip('-')}={value or 'VALUE'}"
        return f"a setting has no dashes ({setting}), and python -m rlreason --hydra-help lists the flags"


def flags_parser() -> argparse.ArgumentParser:
    """Return the parser of Hydra's flags, with this program's version."""
    parser = _Parser(add_help=False, parents=[get_args_parser()], conflict_handler="resolve")
    parser.add_argument("--version", action="version", version=f"rlreason {__version__}")
    return parser


def read(words: Sequence[str]) -> Request:
    """Parse a command line; `ConfigError` if a flag is unknown, conflicts with another, or names no folder.

    `--version` is answered here, with this program's.
    """
    found = vars(flags_parser().parse_intermixed_args(list(words)))
    overrides = found.pop("overrides") or []
    flags = {name: value for name, value in found.items() if value not in (None, False)}
    several = [name for name in (*COMMANDS, *HELP) if name in flags]
    if set(several) <= {"multirun", "help"}:  # help on a sweep
        several = []
    if len(several) > 1:
        raise ConfigError(f"{' and '.join(_spelt(dict.fromkeys(several, True)))} exclude each other: give one")
    if "package" in flags and "cfg" not in flags:
        raise ConfigError(f"--package={flags['package']} belongs to --cfg: write --cfg job -p {flags['package']}")
    if "resolve" in flags and not flags.keys() & {"cfg", "help"}:
        raise ConfigError("--resolve belongs to --cfg: write --cfg job --resolve")
    if (folder := flags.get("config_dir")) is not None:
        if not folder or not Path(folder).is_dir():
            raise ConfigError(f"--config-dir={folder} is no folder: give one that holds options, as DIR/loss/mine.yaml")
        flags["config_dir"] = str(Path(folder).absolute())  # a run may work in a folder of its own
    path = flags.get("config_path")
    if path is not None and not (Path(path).is_absolute() and Path(path).is_dir()) and not path.startswith("pkg://"):
        raise ConfigError(
            f"--config-path={path} is no absolute path of a folder: give one, or add options by --config-dir DIR"
        )
    return Request(flags, overrides)


class Loader(ConfigLoaderImpl):
    """Lists options directly from the sources: Hydra's own loader copies every stored config for each call."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = Repository(config_search_path)

    def __reduce__(self) -> tuple[Callable[[ConfigSearchPath], "Loader"], tuple[ConfigSearchPath]]:
        """Pickle only the search path, for the processes of a launcher."""
        return _loader_there, (self.config_search_path,)

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Return the options of a group, by name, as Hydra's loader lists them."""
        if overrides:  # they may add to the search path
            return super().get_group_options(group_name, results_filter, config_name, overrides)
        return self.repository.get_group_options(group_name, results_filter)


def _loader_there(config_search_path: ConfigSearchPath) -> Loader:
    Plugins.instance()  # registers the kinds of sources
    register()
    return Loader(config_search_path)


@contextmanager
def composing(request: Request) -> Iterator[Hydra]:
    """Make Hydra ready for the block to compose, answer and run the request, with the options that the flags add."""
    conf = request.flags.get("config_path") or str(resource_dir("conf"))
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):  # and restored afterwards
        search_path = create_config_search_path(conf)
        if folder := request.flags.get("config_dir"):
            place = SearchPathQuery(provider="schema")
            search_path.prepend("command-line", f"file://{folder}", anchor=place)
        loader = Loader(search_path)
        if not loader.repository.config_exists(request.config_name):
            raise ConfigError(_no_config(request, loader))
        hydra = Hydra(task_name="rlreason", config_loader=loader)
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(hydra)
        yield hydra


def _no_config(request: Request, loader: Loader) -> str:
    """Return the message if there is no file to compose."""
    name, path = request.config_name, request.flags.get("config_path")
    if path:
        return f"--config-path={path} holds no {name}.yaml: give a folder that does, or add options by --config-dir DIR"
    there = [found for found in loader.get_group_options("") if not found.startswith("_")]
    return f"--config-name={name} is no config (there is {', '.join(there)}): leave it out, or put it into --config-dir"
