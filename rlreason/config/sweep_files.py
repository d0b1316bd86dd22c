"""What a file `multirun_sweeps/NAME.yaml`, or a user's own `DIR/sweep/NAME.yaml`, says of its sweep.

Hydra gets its plain settings and the axes of `hydra.sweeper.params`. The blocks below are this program's: they say
which runs the sweep has, and never reach the config of a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from rlreason.config.leaves import flat, typed_word
from rlreason.errors import ConfigError

BLOCKS = ("cells", "embedded", "reference", "carries", "best_of", "chain")
OF_EMBEDDED = ("like", "cells", "reference")  # of the block `embedded`, beside settings
FIRST = "first"  # as reference: the first setting of the sweep
#: What chain files may hold: the sweeps after each other, and axes that all of them get.
OF_CHAIN = ("chain", "hydra")


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A sweep as its file has it. A word is an override, `key=value`."""

    name: str
    axes: dict[str, str] = field(default_factory=dict)  # key -> values behind commas, or one, as typed behind key=
    cells: list[list[str]] = field(default_factory=list)  # each a list of words; they multiply with the axes
    reference: list[str] = field(default_factory=list)  # words of the setting to compare the others with, or FIRST
    carries: bool = True  # whether a chain hands its winner on
    best_of: str = ""  # a sweep whose best settings are its own, where it has run before it in a chain
    chain: list[str] = field(default_factory=list)  # sweeps to run one after the other
    chosen: dict[str, str] = field(default_factory=dict)  # options that its defaults choose, by group
    settings: frozenset[str] = frozenset()  # the keys that it sets in all its runs, those of `embedded` too
    embedded: "SweepFile | None" = None  # the same sweep at scale=embedded; None: as it is

    def at(self, embedded: bool) -> "SweepFile":
        """The sweep as it is at `scale=embedded` without an experiment, or else."""
        return self.embedded if embedded and self.embedded else self


def plain_part(content: Mapping[str, Any]) -> dict[str, Any]:
    """What of a sweep's file is Hydra's.

    >>> plain_part({"n_steps": 50, "cells": [["group_size=4"]], "carries": False})
    {'n_steps': 50}
    """
    return {str(key): value for key, value in content.items() if key not in BLOCKS}


def sweep_file(name: str, content_of: Callable[[str], Mapping[str, Any]]) -> SweepFile:
    """The sweep `name`; `content_of` gives the content of a sweep's file. `ConfigError` where a block is not sound."""
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
    """The sweep with the values of its block `embedded` in the place of its own."""
    axes = {key: _value(file.name, key, value) for key, value in block.items() if key not in OF_EMBEDDED}
    return replace(
        file,
        axes=file.axes | axes,
        cells=_cells(file.name, block["cells"]) if "cells" in block else file.cells,
        reference=_reference(file.name, block["reference"]) if "reference" in block else file.reference,
    )


def _block(name: str, content_of: Callable[[str], Mapping[str, Any]], seen: tuple[str, ...]) -> dict[str, Any]:
    """The block `embedded` of a sweep, upon that of the sweep which it is `like`."""
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
    """The options that a defaults list chooses.

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
    """What stands behind `key=`: a text as it is, so that commas separate values; a list as one value."""
    if isinstance(value, Mapping):
        raise _wrong(name, f"{key} is nested", f"write its full name in one line, as {key}.{next(iter(value), 'x')}: 1")
    return typed_word(value)


def _wrong(name: str, what: str, cure: str) -> ConfigError:
    return ConfigError(f"sweep/{name}.yaml: {what}: {cure}")


def content(node: Any) -> dict[str, Any]:
    """A loaded file as plain values, interpolations as they are written."""
    found = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}
