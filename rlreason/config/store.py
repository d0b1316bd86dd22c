"""Register schemas, sweeps and resolvers with Hydra; turn a composed config into checked settings."""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from msgspec import ValidationError, convert
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from rlreason.config import data, model
from rlreason.config.algorithms import BestOfNConfig, DiscoverConfig, EIConfig, EvaluateConfig, GRPOConfig, SFTConfig
from rlreason.config.groups import engine_here
from rlreason.config.leaves import flat, leaves, resource_dir, typed_word
from rlreason.config.rules import broken_rules
from rlreason.config.run import AnyRunConfig, EvalSetConfig
from rlreason.errors import Absent, ConfigError
from rlreason.objectives.objective import own_loss_config

FIRST = "first"  # as reference: the first setting of the sweep
FUNCTIONS = ("loss", "data")  # groups whose option may be a function, `module:function`
#: Where Hydra looks behind conf/, as (provider, path): see hydra_plugins/rlreason_options.py.
SEARCHED: list[tuple[str, str]] = []
OWN = ("rlreason", "rlreason://")
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
    chosen: frozenset[str] = frozenset()  # the groups whose options its defaults choose
    settings: frozenset[str] = frozenset()  # the keys set in all its runs, those of `embedded` too
    embedded: "SweepFile | None" = None  # at scale=embedded without an experiment; None: the same


def sweep_path(name: str) -> Path:
    """Return the file of one of our own sweeps, which may not exist."""
    return resource_dir("multirun_sweeps") / f"{name}.yaml"


def sweep_file(name: str, content: Mapping[str, Any]) -> SweepFile:
    """Parse the content of a sweep's file; `ConfigError` if a block is invalid."""
    blocks = dict((content.get("hydra") or {}).get("sweeper") or {})
    axes, own, reference = blocks.get("params") or {}, blocks.pop("embedded", None), blocks.get("reference") or []
    embedded = None
    if own is not None:
        params = axes | {key: value for key, value in own.items() if key not in ("cells", "reference")}
        embedded = sweep_file(name, {**content, "hydra": {"sweeper": blocks | own | {"params": params}}})
    settings = flat({key: value for key, value in content.items() if key not in ("defaults", "hydra")})
    places = [str(place) for item in content.get("defaults") or () if isinstance(item, Mapping) for place in item]
    chosen = {place.removeprefix("override ").removeprefix("/").partition("@")[0] for place in places}
    if blocks.get("chain") and settings:
        raise ConfigError(f"sweep/{name}.yaml: {min(settings)} stands beside chain: give it to the sweeps of the chain")
    given = {key: value for key in ("cells", "carries", "best_of", "chain") if (value := blocks.get(key)) is not None}
    given |= {
        "name": name,
        "axes": {key: typed_word(value) for key, value in axes.items()},  # commas in a text separate values
        "reference": [FIRST] if reference == FIRST else reference,
        "chosen": chosen,
        "settings": set(settings),
    }
    try:
        return replace(convert(given, SweepFile), embedded=embedded)
    except ValidationError as error:
        raise ConfigError(f"sweep/{name}.yaml: {error}: mend it, as the files in multirun_sweeps/") from None


_made: dict[str, Any] = {}  # what the schemas are in Hydra's store: making them takes half a second


def register() -> None:
    """Register the schemas and resolvers, and where Hydra finds sweeps and functions. Safe to call twice."""
    store = ConfigStore.instance()
    vars(store)["__deepcopy__"] = lambda _: ConfigStore.instance()  # Hydra copies it whole for each config, in 60 ms
    if "schema" not in store.repo:
        store.repo |= _made
    if "schema" not in store.repo:
        for group, nodes in SCHEMAS.items():
            for name, node in nodes.items():
                store.store(group=group, name=name, node=node)
        _made["schema"] = store.repo["schema"]
    if OWN not in SEARCHED:
        SEARCHED.append(OWN)
    resolver = partial(OmegaConf.register_new_resolver, replace=True)
    resolver("run_name", run_name)
    resolver("sweep_name", lambda name: "sweep" if name in (None, "None") else str(name))
    resolver("div", _divided)
    resolver("last_part", lambda path: Path(path).name)
    resolver("engine_here", engine_here)


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
    parts = []
    for override in kept:
        key, _, value = override.partition("=")
        plain = override == _safe(override) and value.count("=") == value.count(",") == 0
        short = plain and len(override) <= LONGEST_PART
        parts.append(override if short else f"{key}={_safe(Path(value).name)[:60]}~{_hash(override)}")
    name = ",".join(parts) or "default"
    if len(name) <= LONGEST_NAME:
        return name
    end = f"~{_hash(name)}" + f",{kept[-1]}" * kept[-1].startswith("seed=")
    return name[: LONGEST_NAME - len(end)] + end


def _safe(text: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "-", text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _divided(whole: int, parts: int) -> int:
    if whole % parts:
        near = whole - whole % parts
        raise ConfigError(f"rollout_batch_size={whole} cannot be divided into {parts} train batches: try {near}")
    return whole // parts


def typed(cfg: DictConfig, given: Iterable[str] = (), absent: list[str] | None = None) -> AnyRunConfig:
    """Convert the composed config to a checked dataclass; `ConfigError` names every violated rule.

    `given`: the keys that were typed. `absent`: receives what is only missing on this machine, if nothing runs here.
    """
    try:
        run = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(f"{key} has no value: give one on the command line ({key}=...)") from error
    if not isinstance(run, AnyRunConfig):
        raise ConfigError("algorithm has no value: choose one (algorithm=grpo)")
    container: Any = OmegaConf.to_container(cfg)
    known = tuple(f"{leaf.key}." for leaf in leaves(run))
    if extra := next((key for key in flat(container) if not f"{key}.".startswith(known)), ""):
        raise ConfigError(f"{extra} is no setting of this run: take the + away and fix the name, or leave it out")
    run.given = frozenset(given)
    bad = broken_rules(run)
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
    sets = [f"eval.sets.{name}" for name in setting_of("eval.sets") or ()]
    for place in sets:
        OmegaConf.update(config, place, EvalSetConfig)
    for place in ("model", "data", "eval.data", *(f"{place}.data" for place in sets)):
        node, kinds = setting_of(place), SCHEMAS[f"schema/{place.rpartition('.')[2]}"].values()
        fitting = [kind for kind in kinds if node and node.keys() <= {field.name for field in fields(kind)}]
        if fitting:
            OmegaConf.update(config, place, fitting[0])
    if ":" in (loss := str(setting_of("loss.loss_type"))):
        config.loss = own_loss_config(loss)
    merged = OmegaConf.merge(config, kept)
    assert isinstance(merged, DictConfig)
    return merged
