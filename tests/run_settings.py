"""The typed settings of a run, from its overrides or from those of another."""

import copy
from functools import cache, reduce
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.compose import key_of
from rlreason.cli.flags import Request, options_by_group
from rlreason.config.leaves import resource_dir
from rlreason.config.rules import complaints
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.sweeps.design import parsed


def settings(*overrides: str) -> Any:
    """Compose the overrides; `ConfigError` if they break a rule, or set what nothing reads."""
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        run = typed(composed_once(*overrides), map(key_of, overrides))
        if bad := complaints(run):
            raise ConfigError("\n".join(bad.values()))
        return run


def composed_once(*overrides: str) -> DictConfig:
    """Compose the overrides: once for each choice of options (a quarter second); values are then set in a copy."""
    words = parsed(overrides)
    config = copy.deepcopy(_composed(tuple(str(one.input_line) for one in words if not _is_value(one))))
    for one in filter(_is_value, words):
        OmegaConf.update(config, one.key_or_group, one.value(), merge=True)  # as Hydra does, behind the options
    return config


def _is_value(one: Override) -> bool:
    is_plain = one.type == OverrideType.CHANGE and one.package is None and not one.is_sweep_override()
    return is_plain and not one.is_hydra_override() and one.key_or_group not in {"sweep", *_groups()}


@cache
def _groups() -> frozenset[str]:
    return frozenset(options_by_group())


@cache
def _composed(options: tuple[str, ...]) -> DictConfig:
    return compose(Request({}, list(options)).config_name, list(options))


def altered(run: Any, **settings: Any) -> Any:
    """Return a copy of the run with other values (`group__name=value`), unchecked; composing takes much longer."""
    run = copy.deepcopy(run)
    for key, value in settings.items():
        *groups, name = key.split("__")
        holder = reduce(getattr, groups, run)
        assert hasattr(holder, name), key
        setattr(holder, name, value)
    return run
