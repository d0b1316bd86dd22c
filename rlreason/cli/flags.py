"""Parse a command line into flags and overrides, and look up what Hydra finds."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.ls import LAST, RUNS, newest
from rlreason.config.leaves import resource_dir
from rlreason.config.run import AnyRunConfig
from rlreason.config.store import OWN, SEARCHED, register
from rlreason.errors import ConfigError
from rlreason.records.files import MODEL, SUMMARY, checkpoints_in
from rlreason.runtime import __version__
from rlreason.runtime.streams import Parser

CONF = str(resource_dir("conf"))
USAGE = "settings as key=value, without dashes; python -m rlreason --hydra-help lists the flags"
OWN_CONFIGS = {"discover": "discover"}  # algorithms that share no settings with the others: their files in conf/


@dataclass(frozen=True, slots=True)
class OneRun:
    """A run that may start: its settings, the config that it writes down, and its folder."""

    run: AnyRunConfig
    config: DictConfig
    folder: Path
    sweep: str | None = None  # that the run belongs to, where it resumes


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed command line: `flags` by name, such as {"multirun": True}, and the overrides in order."""

    flags: dict[str, Any]
    overrides: list[str]
    one: OneRun | None = None  # the only run, where it asks for no sweep; set by the check

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


def read(words: Sequence[str]) -> Request:
    """Parse a command line; `ConfigError` if a flag is unknown, conflicts with another, or names no folder.

    The flags are Hydra's, as its documentation lists them; `--version` is answered here, with this program's.
    """
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
    found = vars(parser.parse_intermixed_args(list(words)))
    overrides = found.pop("overrides") or []
    flags = {name: value for name, value in found.items() if value not in (None, False)}
    if flags.keys() & {"package", "resolve"} and not flags.keys() & {"cfg", "help"}:  # Hydra would start a run
        raise ConfigError("--package and --resolve belong to --cfg: write --cfg job --resolve")
    if (folder := flags.get("config_dir")) is not None:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir={folder} is no folder: give one that holds options, as DIR/loss/mine.yaml")
        flags["config_dir"] = str(Path(folder).absolute())  # a run may work in a folder of its own
    return Request(flags, list(map(spelt_out, overrides)))


#: What `last` may mean, by the word: `rank` of `newest`. A run without a summary was interrupted.
OF_LAST: dict[str, Callable[[Path], int]] = {
    f"resume={LAST}": lambda run: bool(checkpoints_in(run)) if (run / SUMMARY).exists() else 2,
    f"model.path={LAST}": lambda run: (run / MODEL).exists(),
}


def with_newest(word: str) -> str:
    """Replace `last` in a word of a command line by the newest run that fits; `ConfigError` if there is none."""
    if word not in OF_LAST:
        return word
    return f"{word.removesuffix(LAST)}{newest(RUNS, True, word, OF_LAST[word])}"


def spelt_out(word: str) -> str:
    """Replace `key=@FILE` by the values that the file holds, one a line, `last` by the newest run, and `~/` by home.

    `ConfigError` if there is no such file, nothing in it, or no run.
    """
    word = re.sub("(?<=[=,[@])~(?=/)", str(Path.home()), with_newest(word))  # no shell does so behind a dotted key
    key, _, file = word.partition("=@")
    if not file:
        return word
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{word}: {error}: give a text file with a value a line") from None
    values = [line for line in lines if line and not line.startswith("#")]
    if not values:
        raise ConfigError(f"{word}: {file} holds no value: write one a line")
    return f"{key}={','.join(repr(value) for value in values)}"


@contextmanager
def composing(request: Request) -> Iterator[None]:
    """Make Hydra ready for the block to compose the request, which finds those of --config-dir."""
    register()
    folder = request.flags.get("config_dir")
    if folder:
        of_options.cache_clear()  # its files may have changed
    SEARCHED[:] = [("command-line", f"file://{folder}"), OWN] if folder else [OWN]
    with initialize_config_dir(CONF, job_name="rlreason", version_base="1.3"):
        yield


@cache
def of_options(place: str, name: str, *options: str) -> DictConfig:
    """Return the config of options alone, with Hydra's part, where Hydra searches this `place`."""
    return compose(name, list(options), return_hydra_config=True)


# What Hydra finds: groups with their options, and the keys of a config

INTERNAL_GROUPS = ("hydra", "schema")


def sources() -> list[ConfigSource]:
    """Return the places that Hydra searches, in order; it must be ready to compose."""
    return GlobalHydra.instance().config_loader().get_sources()


def chooses(word: Override) -> bool:
    """Return whether an override does more than to give a setting a value. Hydra must be ready to compose."""
    plain = not word.package and not str(word.input_line).startswith(("+", "~", "hydra"))
    return not plain or any(source.is_group(word.key_or_group) for source in sources())


def group_options(group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """Return the options of a group, or with `GROUP` its groups, from all places that Hydra searches.

    The loader's own `get_group_options` parses all overrides anew at each call.
    """
    return sorted({option for source in sources() if source.is_group(group) for option in source.list(group, kind)})


def options_by_group() -> dict[str, list[str]]:
    """Return every group that a user chooses from, with its options, including those of the user's own folders."""
    groups = group_options("", ObjectType.GROUP)
    return {group: group_options(group) for group in groups if group not in INTERNAL_GROUPS}


# Keys and choices


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the nearest of the known words, ignoring case; [] if none is near.

    >>> near("GROPO", ["grpo", "ei"])
    ['grpo']
    """
    folded = {name.lower(): name for name in known}
    return [folded[name] for name in difflib.get_close_matches(word[:100].lower(), folded, n=1, cutoff=cutoff)]


def config_of(choices: Sequence[str], name: str) -> DictConfig:
    """Return the config of these options alone, with Hydra's part; of none, where they do not go with each other."""
    with suppress(Exception):
        return compose(name, list(choices), return_hydra_config=True)
    return compose("config", [], return_hydra_config=True)


def keys_below(node: Any, prefix: str = "") -> list[str]:
    """Return every key as it is typed on the command line: `seed`, `sampling`, `sampling.max_tokens` ..."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node)
    if not isinstance(node, dict):
        return []
    return [key for name, child in node.items() for key in (f"{prefix}{name}", *keys_below(child, f"{prefix}{name}."))]


def choices_named(word: str) -> list[str]:
    """Return the choices whose option has this name, or else the most similar one."""
    choices: dict[str, list[str]] = {}
    for group, options in options_by_group().items():
        for option in options:
            choices.setdefault(option, []).append(f"{group}={option}")
    return next((choices[option] for option in near(word, choices, cutoff=0.8)), [])
