"""Parse a command line into flags, overrides and options of sweeps, and make Hydra ready to compose."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from omegaconf import DictConfig

from rlreason.config.leaves import resource_dir
from rlreason.config.run import AnyRunConfig
from rlreason.config.store import OWN, SEARCHED
from rlreason.errors import ConfigError
from rlreason.runtime import __version__
from rlreason.runtime.streams import Parser
from rlreason.sweeps.launcher import Jobs
from rlreason.sweeps.state import SweepState

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of a sweep on the command line that are no settings of its runs."""

    jobs: int | None = None  # runs side by side; null: as many as GPUs suffice for; without GPUs one, of launchers more
    gpus_per_run: int | None = None  # reserved for each run; auto (null): as many as its settings need
    dry: bool = False  # stop after the plan; what the runs need may be on another machine
    carry: tuple[str, ...] = ()  # finished sweeps, by name or folder, whose winners are taken over
    sweep_name: str | None = None  # of the sweep's folder below runs/sweeps

    def overrides(self) -> list[str]:
        """Return the overrides by which Hydra hands the options to our sweeper.

        >>> SweepOptions(jobs=2, carry=("a",), sweep_name="b,c=d").overrides()
        ['hydra.sweeper.jobs=2', "hydra.sweeper.carry=['a']", "hydra.sweeper.sweep_name='b,c=d'"]
        """
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return [f"hydra.sweeper.{key}={list(v) if key == 'carry' else v!r}" for key, v in given.items()]


#: Option of a sweep -> the form of its value, how that is read, and the rule with its cure.
SWEEP_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "jobs": (r"[1-9]\d{0,5}", int, "a whole number, 1 or more: try jobs=2, for two runs side by side"),
    "gpus_per_run": (
        r"auto|null|\d{1,4}",
        lambda value: int(value) if value.isdigit() else None,
        "a whole number or auto: 1 gives every run a GPU of its own, 0 lets every run see all of them",
    ),
    "dry": ("|".join(YES + NO), YES.__contains__, "true or false: dry=true stops after the plan"),
    "carry": (
        r"\[?[^\[\]]+\]?",
        lambda value: tuple(re.split(r", *(?![^,]*=)", value.strip("[]"))),
        "a sweep of runs/sweeps or a list of them, as in carry=grpo_learning_rate",
    ),
    "sweep_name": (r"\w[\w.,=+-]{0,99}", str, "a plain name of at most 100 letters, digits and -_.,=+: try mine"),
}


def split_sweep_options(overrides: Sequence[str], multirun: bool) -> tuple[list[str], SweepOptions]:
    """Split off the options of a sweep; `ConfigError` for a wrong one, and outside a sweep.

    >>> words = ["seed=0,1", "jobs=2", "carry=[a,'b']", "dry=yes"]
    >>> split_sweep_options(words, multirun=True)
    (['seed=0,1'], SweepOptions(jobs=2, gpus_per_run=None, dry=True, carry=('a', 'b'), sweep_name=None))
    >>> split_sweep_options(["carry=grpo_baselines,model=tiny"], multirun=True)[1].carry
    ('grpo_baselines,model=tiny',)
    """
    given, rest = dict[str, Any](), list[str]()
    for word in overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if key not in SWEEP_OPTIONS or not equals:
            rest.append(word)
            continue
        if not multirun:
            raise ConfigError(f"{word} is for a sweep: add -m, or leave it out")
        pattern, read_value, rule = SWEEP_OPTIONS[key]
        value = re.sub(r"['\"]", "", value) if key in ("carry", "sweep_name") else value.lower()
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"{word} must be {rule}")
        given[key] = read_value(value)
    return rest, SweepOptions(**given)


CONF = str(resource_dir("conf"))
USAGE = "settings as key=value, without dashes; python -m rlreason --hydra-help lists the flags"
OWN_CONFIGS = {"discover": "discover"}  # algorithms that share no settings with the others: their files in conf/


@dataclass(frozen=True, slots=True)
class OneRun:
    """A run that may start: its settings, the config that it writes down, and its folder."""

    run: AnyRunConfig
    config: DictConfig
    folder: Path
    of_hydra: DictConfig  # the part `hydra` of the config
    sweep: str | None = None  # that the run belongs to, where it resumes


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed command line: `flags` by name, such as {"multirun": True}, and the overrides in order."""

    flags: dict[str, Any]
    overrides: list[str]
    folder: Path | None = None  # where the sweep will write; set by the check
    one: OneRun | None = None  # the only run, where it asks for no sweep; set by the check
    options: SweepOptions = field(default_factory=SweepOptions)
    design: SweepState | None = None  # of a sweep whose runs are known beforehand: not drawn by a plug-in, and no chain
    runs: dict[str, AnyRunConfig] = field(default_factory=dict)  # of the design, by name; set by the check
    jobs: Jobs = field(default_factory=Jobs)  # how a launcher runs the sweep's runs; set by the check
    chain: tuple[str, ...] = ()  # the sweeps of a chain, which run one after the other: see `check_runs.stage_of`
    stages: tuple["Request", ...] = ()  # of a chain: its sweeps as they are before the first has run

    @property
    def multirun(self) -> bool:
        """Return whether it requests a sweep: by -m, or by the setting that -m stands for."""
        return bool(self.flags.get("multirun")) or "hydra.mode=MULTIRUN" in self.overrides

    @property
    def composes(self) -> bool:
        """Return whether its overrides are composed; those of completion and of Hydra's own help are not."""
        return not self.flags.keys() & {"shell_completion", "hydra_help"}

    @property
    def starts(self) -> bool:
        """Return whether runs are to start, rather than a question to be answered."""
        return not self.flags.keys() - {"run", "multirun", "config_dir", "config_name"}

    @property
    def config_name(self) -> str:
        """Return the config that is overridden: `config`, unless a sweep's job or the algorithm has another."""
        chosen = {word.partition("=")[2] for word in self.overrides if word.startswith("algorithm=")}
        return self.flags.get("config_name") or OWN_CONFIGS.get(",".join(chosen).lower()) or "config"

    def for_hydra(self) -> list[str]:
        """Return the command line for Hydra, which knows the places of options already (`composing`).

        >>> read(["-m", "-cd", "/", "seed=0,1"]).for_hydra()
        ['--multirun', 'seed=0,1']
        """
        flags = {f"--{name.replace('_', '-')}": value for name, value in self.flags.items() if name != "config_dir"}
        hidden = "hydra_help" in self.flags  # which shows no run's settings
        words = [word for word in self.overrides if not hidden or word.lstrip("+~").startswith("hydra")]
        spelt = [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]
        return [*spelt, *words, *self.options.overrides()]


def flags_parser() -> argparse.ArgumentParser:
    """Return the parser of Hydra's flags, as its documentation lists them, with this program's version."""
    parser = Parser(prog="rlreason", add_help=False, usage=USAGE)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--version", action="version", version=f"rlreason {__version__}")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd")
    one = parser.add_mutually_exclusive_group()
    for names in (("--hydra-help",), ("--run", "-r"), ("--multirun", "-m"), ("--shell-completion", "-sc")):
        one.add_argument(*names, action="store_true")
    one.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parts = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    one.add_argument("--info", "-i", const="all", nargs="?", choices=parts)
    return parser


def read(words: Sequence[str]) -> Request:
    """Parse a command line; `ConfigError` if a flag is unknown, conflicts with another, or names no folder.

    `--version` is answered here, with this program's.
    """
    found = vars(flags_parser().parse_intermixed_args(list(words)))
    overrides = found.pop("overrides") or []
    flags = {name: value for name, value in found.items() if value not in (None, False)}
    if flags.keys() & {"package", "resolve"} and not flags.keys() & {"cfg", "help"}:  # Hydra would start a run
        raise ConfigError("--package and --resolve belong to --cfg: write --cfg job --resolve")
    if (folder := flags.get("config_dir")) is not None:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir={folder} is no folder: give one that holds options, as DIR/loss/mine.yaml")
        flags["config_dir"] = str(Path(folder).absolute())  # a run may work in a folder of its own
    return Request(flags, overrides)


@contextmanager
def composing(request: Request) -> Iterator[None]:
    """Make Hydra ready for the block to compose the request, which finds those of --config-dir."""
    folder = request.flags.get("config_dir")
    SEARCHED[:] = [("command-line", f"file://{folder}"), OWN] if folder else [OWN]
    with initialize_config_dir(CONF, job_name="rlreason", version_base="1.3"):
        yield
