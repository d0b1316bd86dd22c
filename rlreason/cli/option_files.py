"""Read what each option file sets and its purpose, and translate the overrides of `algorithm=discover`."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from rlreason.cli.flags import OWN_CONFIGS
from rlreason.config.leaves import resource_dir
from rlreason.config.rules import NAMING
from rlreason.config.store import SCHEMAS
from rlreason.errors import ConfigError


class Option(NamedTuple):
    """One option of a group."""

    name: str
    about: str
    sets: dict[str, dict[str, Any]]  # {key: value} under "", and by algorithm where it says more for some
    schema: str  # that its settings are of; empty where the group has one for all options


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted keys.

    >>> flat({"a": {"b": 1}, "c": None}, "x.")
    {'x.a.b': 1, 'x.c': None}
    """
    if not isinstance(settings, dict):
        return {prefix.removesuffix("."): settings}
    return {key: value for name, child in settings.items() for key, value in flat(child, f"{prefix}{name}.").items()}


@cache
def options() -> dict[str, list[Option]]:
    """Return every group that a user chooses from, with the options that come with the package."""
    groups = [path for path in sorted(resource_dir("conf").iterdir()) if path.is_dir()]
    folders = {folder.name: folder for folder in groups}
    folders["sweep"] = resource_dir("multirun_sweeps")
    return {group: [_read(file, group) for file in sorted(path.glob("*.yaml"))] for group, path in folders.items()}


def _read(file: Path, group: str) -> Option:
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("# @package")]
    comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    own = {name: own for name in SCHEMAS["schema"] if (own := file.parent / name / file.name).is_file()}
    sets = {name: _sets(path, group) for name, path in {"": file, **own}.items()}
    schema = sets[""].pop("schema", "")
    return Option(file.stem, comment, sets, schema)


def _sets(file: Path, group: str) -> dict[str, Any]:
    """Return what a file sets, including other options that it chooses, as typed; and its schema, as `schema`."""
    whole = group == "sweep" or file.read_text("utf-8").startswith("# @package _global_")
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    found: dict[str, Any] = {}
    for item in content.pop("defaults", ()):
        for place, option in item.items() if isinstance(item, dict) else []:
            if place.startswith("override "):
                group_of, _, package = place.removeprefix("override /").partition("@")
                found[package.removeprefix("_global_.") or group_of] = option
        if not whole and str(item).startswith("/schema/"):
            found["schema"] = item.partition("@")[0].rpartition("/")[2]
    grid = content.pop("hydra", {}).get("sweeper", {}).get("params", {})
    found |= flat(content, "" if whole else f"{group}.") | grid
    named = (group, *(f"{group}.{word}" for word in NAMING))  # by which the chosen option is known again
    return {key: value for key, value in found.items() if key not in named or value != file.stem}


#: Short names, and the courses', for settings that have another meaning or none in other algorithms.
NAMES = {
    "model": "client.model",
    "base_url": "client.base_url",
    "temperature": "client.temperature",
    "max_tokens": "client.max_tokens",
    "enable_thinking": "client.thinking",
    "thinking": "client.thinking",
    "timeout": "score.timeout_s",
}
#: Groups of options that only algorithms with a model of their own have.
OF_MODELS = (
    "experiment", "data", "scale", "loss", "objective", "prompt", "rollout", "eval", "logger", "baseline", "std_norm",
    "length_norm", "off_policy",
)  # fmt: skip


def own_names(words: Sequence[str], note: Callable[[str], object] = print) -> list[str]:
    """Return the words with discovery's names of settings if it is chosen; `ConfigError` with others next to it.

    >>> own_names(["algorithm=discover", "model=Qwen/Qwen3-32B"], note=lambda line: None)
    ['algorithm=discover', 'client.model=Qwen/Qwen3-32B']
    >>> own_names(["algorithm=grpo", "model=tiny"])
    ['algorithm=grpo', 'model=tiny']
    """
    chosen = [word.partition("=")[2].lower().split(",") for word in words if word.startswith("algorithm=")]
    names = {name.strip() for values in chosen for name in values}
    if not names & OWN_CONFIGS.keys():
        return list(words)
    if len(names) > 1:
        raise ConfigError(
            f"algorithm={','.join(sorted(names))}: discover shares no settings with the others: give it a command of "
            "its own"
        )
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in OF_MODELS:
            raise ConfigError(
                f"{word} belongs to algorithms that work on a model here, and algorithm=discover asks one elsewhere "
                "(client.base_url, client.model): leave it out"
            )
        if ours := NAMES.get(key):
            note(f"note: {key} is {ours} here")
        found.append(f"{ours or key}{equals}{value}")
    return found
