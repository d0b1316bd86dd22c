"""Register schemas, sweeps and resolvers with Hydra; turn a composed config into checked settings."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from rlreason.config import data, model
from rlreason.config.algorithms import BestOfNConfig, DiscoverConfig, EIConfig, EvaluateConfig, GRPOConfig, SFTConfig
from rlreason.config.groups import engine_here
from rlreason.config.leaves import flat, resource_dir, typed_word
from rlreason.config.rules import broken_rules
from rlreason.config.run import AnyRunConfig
from rlreason.errors import Absent, ConfigError
from rlreason.objectives.objective import own_loss_config

BLOCKS = ("cells", "embedded", "reference", "carries", "best_of", "chain")  # of hydra.sweeper, besides params
OF_EMBEDDED = ("cells", "reference")  # of the block `embedded`, besides settings
FIRST = "first"  # as reference: the first setting of the sweep
FUNCTIONS = ("loss", "data")  # groups whose option may be a function, `module:function`
#: Where Hydra looks behind conf/, as (provider, path): see hydra_plugins/rlreason_options.py.
SEARCHED: list[tuple[str, str]] = []
OWN = ("rlreason", "rlreason://")


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


def sweep_path(name: str) -> Path:
    """Return the file of one of our own sweeps, which may not exist."""
    return resource_dir("multirun_sweeps") / f"{name}.yaml"


def function_settings(group: str, option: str, function: str) -> Any:
    """Return the settings of `module:function` as an option of a group; `ConfigError` if it cannot be used."""
    try:
        return own_loss_config(function) if group == "loss" else data.of_function(function)
    except ConfigError as error:
        if option == function:
            raise
        raise ConfigError(f"{group}={option}, which an installed package announces, cannot be used: {error}") from None


def sweep_file(name: str, content_of: Callable[[str], Mapping[str, Any]]) -> SweepFile:
    """Parse the sweep `name`; `content_of` returns a sweep file's content. `ConfigError` if a block is invalid."""
    content = content_of(name)
    blocks = dict(_sweeper(content))
    file = _parsed(name, content, blocks)
    if blocks.get("embedded") is None:
        return file
    params = _block(name, content_of, ())
    instead = {key: params.pop(key) for key in OF_EMBEDDED if key in params}
    instead["params"] = dict(blocks.get("params") or {}) | params
    return replace(file, embedded=_parsed(name, content, blocks | instead))


def _parsed(name: str, content: Mapping[str, Any], blocks: Mapping[str, Any]) -> SweepFile:
    settings = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    if blocks.get("chain") and (others := sorted(settings)):
        raise _wrong(name, f"{others[0]} stands beside chain", "a chain has no settings of its own: give them to its")
    carries = blocks.get("carries", True)
    if not isinstance(carries, bool):
        raise _wrong(name, f"carries={typed_word(carries)} is neither true nor false", "write carries: false")
    return SweepFile(
        name,
        {str(key): _value(name, key, value) for key, value in (blocks.get("params") or {}).items()},
        _cells(name, blocks.get("cells")),
        _reference(name, blocks.get("reference")),
        carries,
        str(blocks.get("best_of") or ""),
        _names(name, blocks.get("chain")),
        _chosen(content.get("defaults")),
        frozenset(flat(settings)),
    )


def _block(name: str, content_of: Callable[[str], Mapping[str, Any]], seen: tuple[str, ...]) -> dict[str, Any]:
    """Return a sweep's block `embedded`, merged onto that of the sweep which it is `like`."""
    block = _sweeper(content_of(name)).get("embedded") or {}
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


def _sweeper(content: Mapping[str, Any]) -> Mapping[str, Any]:
    return (content.get("hydra") or {}).get("sweeper") or {}


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


LONGEST_NAME = 190  # most characters of a run's folder name; file systems allow 255 bytes
LONGEST_PART = 80  # most characters of one key and value in it
SCHEMAS: dict[str, dict[str, Any]] = {
    "schema": {
        "sft": SFTConfig,
        "ei": EIConfig,
        "grpo": GRPOConfig,
        "evaluate": EvaluateConfig,
        "best_of_n": BestOfNConfig,
        "discover": DiscoverConfig,
    },
    "schema/model": {"tiny": model.TinyModelConfig, "pretrained": model.PretrainedModelConfig},
    "schema/data": {
        "stories": data.StoriesConfig,
        "files": data.FileDataConfig,
        "countdown": data.CountdownConfig,
        "gym": data.GymConfig,
        "function": data.FunctionDataConfig,
    },
}


def register() -> None:
    """Register the schemas and resolvers, and where Hydra finds sweeps and functions. Safe to call twice."""
    store = ConfigStore.instance().store
    # Hydra copies the whole store for each composition, and every entry once more when it takes it.
    vars(ConfigStore.instance())["__deepcopy__"] = lambda memo: ConfigStore.instance()
    for group, nodes in SCHEMAS.items():
        for name, node in nodes.items():
            store(group=group, name=name, node=node)
    if OWN not in SEARCHED:
        SEARCHED.append(OWN)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver(
        "sweep_name", lambda name: "sweep" if name in (None, "None") else name, replace=True
    )
    OmegaConf.register_new_resolver("div", _divided, replace=True)
    OmegaConf.register_new_resolver("engine_here", engine_here, replace=True)


def run_name(overrides: Iterable[str]) -> str:
    """Return a folder name for one run of a sweep: its overrides with keys in alphabetical order, the seed last.

    Values are written in full. If a text was changed to be a safe name, or cut, a hash of it keeps two runs apart.

    >>> run_name(["seed=1", "sweep=grid", "prompt@eval.prompt=r1_zero", "loss=gspo"])
    'eval.prompt=r1_zero,loss=gspo,seed=1'
    >>> run_name(["model.path=/home/me/a model"])
    'model.path=a-model~a0a532e9'
    """
    shown = (re.sub(r"^\w+@(?=eval\.)", "", o) for o in overrides if not o.startswith("sweep="))
    kept = sorted(shown, key=lambda o: (o.startswith("seed="), o))
    name = ",".join(map(_part, kept)) or "default"
    if len(name) <= LONGEST_NAME:
        return name
    end = f"~{_hash(name)}" + f",{kept[-1]}" * kept[-1].startswith("seed=")
    return name[: LONGEST_NAME - len(end)] + end


def _part(override: str) -> str:
    key, _, value = override.partition("=")
    if override == _safe(override) and len(override) <= LONGEST_PART and value.count("=") == value.count(",") == 0:
        return override
    return f"{key}={_safe(Path(value).name)[:60]}~{_hash(override)}"


def _safe(text: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "-", text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _extras(node: DictConfig, typed_node: Any, prefix: str = "") -> list[str]:
    """List keys that `+key=value` added past the schema."""
    names = {f.name for f in fields(typed_node)}
    extra = [f"{prefix}{key!s}" for key in node if key not in names]
    for name in names:
        if is_dataclass(getattr(typed_node, name)):
            extra += _extras(node[name], getattr(typed_node, name), f"{prefix}{name}.")
    return extra


def _divided(whole: int, parts: int) -> int:
    if whole % parts:
        raise ConfigError(
            f"rollout_batch_size={whole} cannot be divided into {parts} train batches: try {whole - whole % parts}"
        )
    return whole // parts


def typed(cfg: DictConfig, of_sweep: bool = False, absent: list[str] | None = None) -> AnyRunConfig:
    """Convert the composed config to a checked dataclass; `ConfigError` names every violated rule.

    `of_sweep`: one of several runs, each of which may leave settings unread that another reads. `absent`: receives what
    is only missing on this machine, if nothing runs here.
    """
    try:
        run = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or str(error).split(":")[-1].strip()
        raise ConfigError(f"{key} has no value: give one on the command line ({key}=...)") from error
    if not isinstance(run, AnyRunConfig):
        raise ConfigError("algorithm has no value: choose one (algorithm=grpo)")
    if extra := _extras(cfg, run):
        raise ConfigError(f"{extra[0]} is no setting of this run: take the + away and fix the name, or leave it out")
    bad = broken_rules(run, resource_dir("conf"), of_sweep)
    if absent is not None:
        absent += [line for line in bad if isinstance(line, Absent)]
        bad = [line for line in bad if not isinstance(line, Absent)]
    if bad:
        raise ConfigError("\n".join(dict.fromkeys(bad)))
    return run


def as_config(settings: Mapping[str, Any], anew: Collection[str] = ()) -> DictConfig:
    """Return plain settings of a run in their classes, which are known by the algorithm and by the keys of each group.

    `anew`: groups that are chosen again, so that what the settings have for them need not exist any more.
    """
    kept = OmegaConf.create({key: value for key, value in settings.items() if key not in anew})
    setting_of = partial(OmegaConf.select, kept, throw_on_resolution_failure=False)
    config = OmegaConf.structured(SCHEMAS["schema"][str(settings["algorithm"])])
    for place in ("model", "data", "eval.data"):
        node, kinds = setting_of(place), SCHEMAS[f"schema/{place.rpartition('.')[2]}"].values()
        if isinstance(node, DictConfig) and OmegaConf.select(config, place, default=0) != 0:
            kind = next((kind for kind in kinds if node.keys() <= {field.name for field in fields(kind)}), None)
            if kind is not None:
                OmegaConf.update(config, place, kind)
    if ":" in (loss := str(setting_of("loss.loss_type"))):
        config.loss = own_loss_config(loss)
    merged = OmegaConf.merge(config, kept)
    assert isinstance(merged, DictConfig)
    return merged
