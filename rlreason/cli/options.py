"""Look up what Hydra finds: groups with their options, what files of options hold, and the keys of a config."""

import difflib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rlreason.config.store import SCHEMAS

INTERNAL_GROUPS = ("hydra", "schema")


def group_options(group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """Return the options of a group, or with `GROUP` its groups, from all places that Hydra searches; it must be ready.

    The loader's own `get_group_options` parses all overrides anew at each call.
    """
    sources = [source for source in GlobalHydra.instance().config_loader().get_sources() if source.is_group(group)]
    return sorted({option for source in sources for option in source.list(group, kind)})


def options_by_group() -> dict[str, list[str]]:
    """Return every group that a user chooses from, with its options, including those of the user's own folders."""
    groups = group_options("", ObjectType.GROUP)
    return {group: group_options(group) for group in groups if group not in INTERNAL_GROUPS}


def config_exists(path: str) -> bool:
    """Return whether there is a config of this path, as GROUP/OPTION."""
    return any(source.is_config(path) for source in GlobalHydra.instance().config_loader().get_sources())


def config_content(path: str) -> dict[str, Any]:
    """Return a config as its file has it, its defaults list too; {} if there is none."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    source = next((source for source in sources if source.is_config(path)), None)
    found = OmegaConf.to_container(source.load_config(path).config) if source else {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


# Keys and choices


TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def near(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the nearest of the known words, ignoring case.

    >>> near("GROPO", ["grpo", "ei"])
    ['grpo']
    """
    folded = {name.lower(): name for name in known}
    return [folded[name] for name in difflib.get_close_matches(word[:100].lower(), folded, n=count, cutoff=cutoff)]


def options_with(group: str, key: str) -> list[str]:
    """Return the options of a group whose schema has a setting, such as `n_train` of `data`, which stories have."""
    schemas, field = SCHEMAS.get(f"schema/{group}", {}), key.partition(".")[0]
    having = {name for name, kind in schemas.items() if field in kind.__dataclass_fields__}
    options = group_options(group) if having else []
    defaults = {one: re.findall(r"\w+", str(config_content(f"{group}/{one}").get("defaults"))) for one in options}
    return [one for one in options if having & set(defaults[one])]


def type_of(cfg: DictConfig, key: str) -> str:
    """Return what a setting takes, such as `a whole number or null`."""
    place, _, last = key.rpartition(".")
    kind = OmegaConf.get_type(OmegaConf.select(cfg, place) if place else cfg)
    hint = get_type_hints(kind).get(last)
    kinds = (hint,) if "list" in str(hint) else get_args(hint) or (hint,)
    return " or ".join(TYPES.get(one, "a list, as in [1,2]") for one in kinds)


def config_of(choices: Sequence[str], name: str) -> DictConfig:
    """Return the config of these options alone, with Hydra's part; of fewer, where they do not go with each other."""
    without_files = [word for word in choices if not word.lstrip("+").startswith(("experiment=", "sweep="))]
    for words in (list(choices), without_files, [word for word in choices if word.startswith("algorithm=")]):
        with suppress(Exception):
            return compose(name, words, return_hydra_config=True)
    return compose("config", [], return_hydra_config=True)


def keys_below(node: Any, prefix: str = "") -> list[str]:
    """Return every key as it is typed on the command line: `seed`, `sampling`, `sampling.max_tokens` ..."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node)
    if not isinstance(node, dict):
        return []
    return [key for name, child in node.items() for key in (f"{prefix}{name}", *keys_below(child, f"{prefix}{name}."))]


def choices_named(word: str) -> list[str]:
    """Return the choices whose option has this name, or else a similar one."""
    offered = [(option, f"{group}={option}") for group, names in options_by_group().items() for option in names]
    exact = [choice for option, choice in offered if option == word.lower()]
    nearest = near(word, [option for option, _ in offered], cutoff=0.8)
    return exact or [choice for option, choice in offered if option in nearest]


def choices_among(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that choose an option."""
    groups = options_by_group()
    keys = {word: word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides}
    return [word for word, key in keys.items() if (key in groups or key.startswith("hydra/")) and not is_sweep(word)]


def is_sweep(word: str) -> bool:
    """Return whether an override names several values; False where it cannot be parsed."""
    with suppress(HydraException):
        return OverridesParser.create().parse_override(word).is_sweep_override()
    return False
