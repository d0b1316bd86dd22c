"""What the option files of every group say they are for, and what they set."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from rlreason.config.store import SCHEMAS, resource_dir
from rlreason.config.unread import NAMING


class Option(NamedTuple):
    """One file of a group: what it is for, {key: value} that it sets, some by algorithm, and the schema it is of."""

    name: str
    about: str
    sets: dict[str, Any]
    by_algorithm: dict[str, dict[str, Any]]
    schema: str

    def settings(self) -> Iterator[dict[str, Any]]:
        """What it sets, whichever the algorithm."""
        yield from (self.sets, *self.by_algorithm.values())


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys.

    >>> flat({"a": {"b": 1}, "c": None}, "x.")
    {'x.a.b': 1, 'x.c': None}
    """
    if not isinstance(settings, dict):
        return {prefix.removesuffix("."): settings}
    return {key: value for name, child in settings.items() for key, value in flat(child, f"{prefix}{name}.").items()}


@cache
def options() -> dict[str, list[Option]]:
    """Every group that a person chooses from, with the options that come with the package."""
    folders = {folder.name: folder for folder in sorted(resource_dir("conf").iterdir()) if folder.is_dir()}
    folders["sweep"] = resource_dir("multirun_sweeps")
    return {group: [_read(file, group) for file in sorted(path.glob("*.yaml"))] for group, path in folders.items()}


def _read(file: Path, group: str) -> Option:
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("# @package")]
    end = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    by_algorithm = {name: file.parent / name / file.name for name in SCHEMAS["schema"]}
    return Option(
        file.stem,
        " ".join(line.lstrip("# ") for line in lines[:end]),
        _sets(file, group),
        {name: _sets(own, group) for name, own in by_algorithm.items() if own.is_file()},
        _schema(file),
    )


def _sets(file: Path, group: str) -> dict[str, Any]:
    """What a file sets, other options that it chooses included, as it would be typed."""
    whole = group == "sweep" or file.read_text("utf-8").startswith("# @package _global_")
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    chosen = [item for item in content.pop("defaults", ()) if isinstance(item, dict)]
    grid = content.pop("hydra", {}).get("sweeper", {}).get("params", {})
    places = {key.removeprefix("override /"): option for item in chosen for key, option in item.items()}
    others = {
        place.partition("@")[2].removeprefix("_global_.") or place: option
        for place, option in places.items()
        if not place.startswith("/")  # what an algorithm is put together from
    }
    found = others | flat(content, "" if whole else f"{group}.") | grid
    named = (group, *(f"{group}.{word}" for word in NAMING))  # by which the chosen option is known again
    return {key: value for key, value in found.items() if key not in named or value != file.stem}


def _schema(file: Path) -> str:
    """The name of the schema that its settings are of; empty where the group has one for all."""
    named = [item for item in OmegaConf.load(file).get("defaults", ()) if str(item).startswith("/schema/")]
    return str(named[0]).partition("@")[0].rpartition("/")[2] if named else ""
