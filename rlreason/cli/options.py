"""Look up what Hydra finds: groups with their options, what files of options hold, and the keys of a config."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

from rlreason.config.leaves import typed_word
from rlreason.config.store import SCHEMAS, SEARCHED, register


def group_options(group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """Return the options of a group, from all places that Hydra searches; it must be ready to compose.

    `kind`: GROUP for the groups inside it; "" is the group that holds all.
    """
    sources = [source for source in GlobalHydra.instance().config_loader().get_sources() if source.is_group(group)]
    return sorted({option for source in sources for option in source.list(group, kind)})


INTERNAL_GROUPS = ("hydra", "schema")


def options_by_group() -> dict[str, list[str]]:
    """Return every group that a user chooses from, with its options, including those of the user's own folders."""
    groups = [group for group in group_options("", ObjectType.GROUP) if group not in INTERNAL_GROUPS]
    return {group: group_options(group) for group in groups}


def config_exists(path: str) -> bool:
    """Return whether there is a config of this path, as GROUP/OPTION."""
    return any(source.is_config(path) for source in GlobalHydra.instance().config_loader().get_sources())


def config_content(path: str) -> dict[str, Any]:
    """Return a config as its file has it, its defaults list too; {} if there is none."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    source = next((source for source in sources if source.is_config(path)), None)
    found = OmegaConf.to_container(source.load_config(path).config) if source else {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


#: Hydra's objects that a run of the Python API has for itself.
_RENEWED = (ConfigStore, GlobalHydra, HydraConfig, JobRuntime)
_OF_HYDRA = ("hydra", "_dummy_empty_config_.yaml")  # Hydra's own entries in its store of configs


@contextmanager
def own_hydra() -> Iterator[None]:
    """Give Hydra our schemas and resolvers for the block, and no one else's configs."""
    Plugins.instance()  # before the copy: keep what the modules of plug-ins store on import
    stored = ConfigStore.instance().repo
    theirs, resolvers, searched = Singleton._instances, BaseContainer._resolvers, list(SEARCHED)
    Singleton._instances = {kind: one for kind, one in theirs.items() if kind not in _RENEWED}
    BaseContainer._resolvers = dict(resolvers)
    try:
        ConfigStore.instance().repo |= {name: stored[name] for name in _OF_HYDRA}
        register()
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = theirs, resolvers
        SEARCHED[:] = searched


# Keys and choices


TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}


def near(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the nearest of the known words, ignoring case.

    >>> near("GROPO", ["grpo", "ei"])
    ['grpo']
    """
    folded = {name.lower(): name for name in known}
    return [folded[name] for name in difflib.get_close_matches(word[:100].lower(), folded, n=count, cutoff=cutoff)]


def keys_of_models() -> list[str]:
    """Return the settings that some option of the model and of the data has."""
    nodes = {group: SCHEMAS[f"schema/{group}"].values() for group in ("model", "data")}
    return [f"{group}.{field.name}" for group, kinds in nodes.items() for kind in kinds for field in fields(kind)]


def algorithms_with(key: str) -> list[str]:
    """Return the algorithms that have a setting, by its whole key or by the group that contains it."""
    top = key.partition(".")[0]
    return [name for name, node in SCHEMAS["schema"].items() if top in {field.name for field in fields(node)}]


def schemas_of(group: str, option: str) -> list[type]:
    """Return the classes of settings that an option's file names; [] where there is no such option."""
    defaults = [item for item in config_content(f"{group}/{option}").get("defaults") or [] if isinstance(item, str)]
    names = [path.partition("@")[0].rpartition("/")[2] for path in defaults]
    return [kind for name, kind in SCHEMAS.get(f"schema/{group}", {}).items() if name in names]


def options_with(group: str, key: str) -> list[str]:
    """Return the options of a group whose schema has a setting, such as `n_train` of `data`, which stories have."""
    if f"schema/{group}" not in SCHEMAS:
        return []
    return [one for one in group_options(group) if any(_has(kind, key) for kind in schemas_of(group, one))]


def _has(node: Any, key: str) -> bool:
    first, _, rest = key.partition(".")
    inner = {field.name: field.type for field in fields(node)}
    return first in inner and (not rest or (is_dataclass(inner[first]) and _has(inner[first], rest)))


def type_of(cfg: DictConfig, key: str) -> str:
    """Return what a setting takes, such as `a whole number or null`."""
    place, _, last = key.rpartition(".")
    kind = OmegaConf.get_type(OmegaConf.select(cfg, place) if place else cfg)
    hint = get_type_hints(kind).get(last) if is_dataclass(kind) else None
    kinds = get_args(hint) if get_args(hint) and not str(hint).startswith("list") else (hint,)
    return " or ".join(
        TYPES.get(one, "a list, as in [1,2]" if "list" in str(one) else "another value") for one in kinds
    )


def config_of(choices: Sequence[str], name: str) -> DictConfig:
    """Return the config of these options alone, with Hydra's part; without files that contain a mistake themselves."""
    without_files = [word for word in choices if not word.lstrip("+").startswith(("experiment=", "sweep="))]
    for words in (list(choices), without_files, [word for word in choices if word.startswith("algorithm=")]):
        try:
            return compose(name, words, return_hydra_config=True)
        except Exception:  # options that do not go with each other
            continue
    return compose("config", [], return_hydra_config=True)


def keys_below(node: Any, prefix: str = "") -> list[str]:
    """Return every key as it is typed on the command line: `seed`, `sampling`, `sampling.max_tokens` ..."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node)
    if not isinstance(node, dict):
        return []
    return [key for name, child in node.items() for key in (f"{prefix}{name}", *keys_below(child, f"{prefix}{name}."))]


def keys_to_set(cfg: DictConfig) -> list[str]:
    """Return the keys that take a value or an option: no group of settings without options, such as `sampling`."""
    keys, groups = [key for key in keys_below(cfg) if not key.startswith("hydra")], options_by_group()
    holders = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in holders or key in groups]


def choices_named(word: str) -> list[str]:
    """Return the choices whose option has this name, or else a similar one."""
    offered = [(option, f"{group}={option}") for group, names in options_by_group().items() for option in names]
    exact = [choice for option, choice in offered if option.lower() == word.lower()]
    nearest = near(word, [option for option, _ in offered], cutoff=0.8)  # a short name is near to too many others
    return exact or [choice for option, choice in offered if option in nearest]


def choices_among(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that choose an option."""
    groups = options_by_group()
    keys = {word: word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides}
    return [word for word, key in keys.items() if (key in groups or key.startswith("hydra/")) and not is_sweep(word)]


def is_sweep(word: str) -> bool:
    """Return whether an override names several values; False where it cannot be parsed."""
    try:
        return OverridesParser.create().parse_override(word).is_sweep_override()
    except HydraException:
        return False


def values_of(override: Override) -> list[str]:
    """Return the values of an override as texts, those of a sweep and those of a list one by one."""
    value = override._value
    several: list[Any] = list(value.list) if isinstance(value, ChoiceSweep) else [value]
    if override.is_sweep_override() and not isinstance(value, ChoiceSweep | IntervalSweep):
        several = list(override.sweep_iterator())
    one_by_one = [inner for one in several for inner in (one if isinstance(one, list) else [one])]
    return [one.text if isinstance(one, QuotedString) else typed_word(one) for one in one_by_one]


def shortens(word: str, name: str) -> bool:
    """Return whether a word consists of the beginnings of a name's words, in their order.

    >>> shortens("grpo_lr", "grpo_learning_rate"), shortens("qwen3", "qwen3_1_7b"), shortens("rate", "grpo_off_policy")
    (True, True, False)
    """
    letters = re.sub(r"[\W_]", "", word.lower())
    reached = {0}  # how many of the letters are accounted for
    for part in re.findall(r"[a-z]+|\d", name.lower()):
        reached |= {at + n for at in reached for n in range(1, len(part) + 1) if letters.startswith(part[:n], at)}
    return len(letters) > 1 and len(letters) in reached
