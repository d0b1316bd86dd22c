"""Register schemas, sweeps and resolvers with Hydra; turn a composed config into checked settings."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from rlreason.config import data, model
from rlreason.config.algorithms import BestOfNConfig, EIConfig, EvaluateConfig, GRPOConfig, SFTConfig
from rlreason.config.discover import DiscoverConfig
from rlreason.config.groups import engine_here
from rlreason.config.leaves import resource_dir
from rlreason.config.rules import broken_rules
from rlreason.config.run import AnyRunConfig, RunConfig, works_on_a_model
from rlreason.config.sweep_files import content, plain_part
from rlreason.errors import Absent, ConfigError
from rlreason.objectives.objective import own_loss_config

Run = TypeVar("Run", bound=RunConfig)

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
    """Register the schemas, and every `multirun_sweeps/NAME.yaml` as `sweep=NAME`. Safe to call twice."""
    store = ConfigStore.instance().store
    # Hydra copies the whole store for each composition, and every entry once more when it takes it.
    vars(ConfigStore.instance())["__deepcopy__"] = lambda memo: ConfigStore.instance()
    for group, nodes in SCHEMAS.items():
        for name, node in nodes.items():
            store(group=group, name=name, node=node)
    for path in sorted(resource_dir("multirun_sweeps").glob("*.yaml")):
        node = OmegaConf.create(plain_part(content(OmegaConf.load(path))))
        store(group="sweep", name=path.stem, node=node, package="_global_")
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


def schemas_of(run: AnyRunConfig) -> dict[str, str]:
    """Return the entries of `SCHEMAS` that a run's settings belong to: {"algorithm": "grpo", "model": "tiny", ...}.

    "eval.data" is among them if evaluations have their own data.
    """
    parts: dict[str, Any] = {"algorithm": run}
    if works_on_a_model(run):
        parts |= {"model": run.model, "data": run.data, "eval.data": run.eval.data}
    names = {schema: name for group in SCHEMAS.values() for name, schema in group.items()}
    return {
        key: next(names[kind] for kind in type(part).__mro__ if kind in names)
        for key, part in parts.items()
        if part is not None
    }


def retyped(settings: dict[str, Any], schemas: Mapping[str, str], kind: type[Run]) -> Run:
    """Convert saved settings of a run of this kind back to their classes (`schemas_of`).

    No rule is checked.

    Raises omegaconf's `OmegaConfBaseException` if they do not fit these classes.
    """
    schema = OmegaConf.structured(SCHEMAS["schema"][schemas["algorithm"]])
    for key, name in schemas.items():
        if key != "algorithm":
            OmegaConf.update(schema, key, SCHEMAS[f"schema/{key.rpartition('.')[2]}"][name])
    loss = str((settings.get("loss") or {}).get("loss_type"))
    if ":" in loss:
        schema.loss = own_loss_config(loss)
    run = OmegaConf.to_object(OmegaConf.merge(schema, settings))
    assert isinstance(run, kind)
    return run
