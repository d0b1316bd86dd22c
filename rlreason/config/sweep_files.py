"""The contents of `multirun_sweeps/NAME.yaml`, or of a user's own `DIR/sweep/NAME.yaml`.

Hydra gets its plain settings and the axes of `hydra.sweeper.params`. The blocks below are this program's: they define
the sweep's runs, and never reach the config of a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from rlreason.config.leaves import flat, typed_word
from rlreason.errors import ConfigError

BLOCKS = ("cells", "embedded", "reference", "carries", "best_of", "chain")
OF_EMBEDDED = ("like", "cells", "reference")  # of the block `embedded`, besides settings
FIRST = "first"  # as reference: the first setting of the sweep
#: Keys of chain files: the sweeps in order, and axes common to all of them.
OF_CHAIN = ("chain", "hydra")


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A sweep as its file defines it. Words are overrides, `key=value`."""

    name: str
    axes: dict[str, str] = field(default_factory=dict)  # key -> values separated by commas, or one, as typed after key=
    cells: list[list[str]] = field(default_factory=list)  # each a list of overrides; crossed with the axes
    reference: list[str] = field(default_factory=list)  # overrides of the setting to compare the others with, or FIRST
    carries: bool = True  # whether a chain passes its winner on
    best_of: str = ""  # an earlier sweep of its chain whose best settings it takes
    chain: list[str] = field(default_factory=list)  # sweeps to run in order
    chosen: dict[str, str] = field(default_factory=dict)  # options chosen by its defaults, by group
    settings: frozenset[str] = frozenset()  # the keys set in all its runs, those of `embedded` too
    embedded: "SweepFile | None" = None  # the same sweep at scale=embedded; None: unchanged

    def at(self, embedded: bool) -> "SweepFile":
        """Return the sweep at `scale=embedded` without an experiment if `embedded`, else at any other."""
        return self.embedded if embedded and self.embedded else self


def plain_part(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return Hydra's part of a sweep's file.

    >>> plain_part({"n_steps": 50, "cells": [["group_size=4"]], "carries": False})
    {'n_steps': 50}
    """
    return {str(key): value for key, value in content.items() if key not in BLOCKS}


def sweep_file(name: str, content_of: Callable[[str], Mapping[str, Any]]) -> SweepFile:
    """Parse the sweep `name`; `content_of` returns a sweep file's content. `ConfigError` if a block is invalid."""
    content = content_of(name)
    if "chain" in content and (others := sorted(map(str, content.keys() - set(OF_CHAIN)))):
        raise _wrong(name, f"{others[0]} stands beside chain", "a chain has no settings of its own: give them to its")
    carries = content.get("carries", True)
    if not isinstance(carries, bool):
        raise _wrong(name, f"carries={typed_word(carries)} is neither true nor false", "write carries: false")
    file = SweepFile(
        name,
        {str(key): _value(name, key, value) for key, value in _params(content).items()},
        _cells(name, content.get("cells")),
        _reference(name, content.get("reference")),
        carries,
        str(content.get("best_of") or ""),
        _names(name, content.get("chain")),
        _chosen(content.get("defaults")),
        frozenset(flat(plain_part({k: v for k, v in content.items() if k not in ("defaults", "hydra")}))),
    )
    if content.get("embedded") is None:
        return file
    return replace(file, embedded=_embedded(file, _block(name, content_of, ())))


def _embedded(file: SweepFile, block: Mapping[str, Any]) -> SweepFile:
    """Replace the sweep's values by those of its block `embedded`."""
    axes = {key: _value(file.name, key, value) for key, value in block.items() if key not in OF_EMBEDDED}
    return replace(
        file,
        axes=file.axes | axes,
        cells=_cells(file.name, block["cells"]) if "cells" in block else file.cells,
        reference=_reference(file.name, block["reference"]) if "reference" in block else file.reference,
    )


def _block(name: str, content_of: Callable[[str], Mapping[str, Any]], seen: tuple[str, ...]) -> dict[str, Any]:
    """Return a sweep's block `embedded`, merged onto that of the sweep which it is `like`."""
    block = content_of(name).get("embedded") or {}
    if not isinstance(block, Mapping):
        raise _wrong(
            name, f"embedded={typed_word(block)} is no block", "write settings below it, as data: stories_long"
        )
    own = {str(key): value for key, value in block.items()}
    other = own.pop("like", None)
    if other is None:
        return own
    if other in (name, *seen):
        raise _wrong(name, f"like: {other} leads back to {name}", "leave one of them out")
    return _block(str(other), content_of, (*seen, name)) | own


def _params(content: Mapping[str, Any]) -> Mapping[str, Any]:
    sweeper = (content.get("hydra") or {}).get("sweeper") or {}
    return sweeper.get("params") or {}


def _chosen(defaults: Any) -> dict[str, str]:
    """Return the options chosen by a defaults list.

    >>> _chosen([{"override /loss@loss": "gspo"}, {"override /prompt@_global_.eval.prompt": "r1_zero"}, "_self_"])
    {'loss': 'gspo', 'eval.prompt': 'r1_zero'}
    """
    found = {}
    for item in defaults or ():
        for place, option in item.items() if isinstance(item, Mapping) else ():
            group, _, package = str(place).removeprefix("override ").removeprefix("/").partition("@")
            found[package.removeprefix("_global_.") or group] = str(option)
    return found


def _cells(name: str, given: Any) -> list[list[str]]:
    if given is None:
        return []
    if not isinstance(given, list) or not given or not all(isinstance(cell, list) for cell in given):
        raise _wrong(
            name, "cells is no list of lists of words", "write cells: [[group_size=4], [group_size=8, n_steps=50]]"
        )
    return [_words(name, "cells", cell) for cell in given]


def _words(name: str, block: str, given: Any) -> list[str]:
    words = [] if given is None else given
    if not isinstance(words, list) or not all(isinstance(w, str) and w.partition("=")[0] and "=" in w for w in words):
        raise _wrong(name, f"{block} holds {given}, which is no list of words", f"write {block}: [group_size=4]")
    return list(words)


def _reference(name: str, given: Any) -> list[str]:
    return [FIRST] if given == FIRST else _words(name, "reference", given)


def _names(name: str, given: Any) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, list) or not given or not all(isinstance(one, str) for one in given) or name in given:
        raise _wrong(name, f"chain={given} is no list of other sweeps", "write chain: [SWEEP, SWEEP]")
    return given


def _value(name: str, key: Any, value: Any) -> str:
    """Format the value after `key=`: a text unchanged, so that commas separate values; a list as one value."""
    if isinstance(value, Mapping):
        raise _wrong(name, f"{key} is nested", f"write its full name in one line, as {key}.{next(iter(value), 'x')}: 1")
    return typed_word(value)


def _wrong(name: str, what: str, cure: str) -> ConfigError:
    return ConfigError(f"sweep/{name}.yaml: {what}: {cure}")


def content(node: Any) -> dict[str, Any]:
    """Convert a loaded file to plain values, without resolving interpolations."""
    found = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}
