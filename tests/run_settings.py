"""The typed settings of a run from its overrides."""

import copy
from functools import reduce
from typing import Any

from hydra import initialize_config_dir
from omegaconf import DictConfig, open_dict

from rlreason.cli.compose import composed_alike, key_of
from rlreason.config.leaves import resource_dir
from rlreason.config.rules import complaints
from rlreason.config.store import typed
from rlreason.errors import ConfigError


def composed(*overrides: str, name: str = "config") -> DictConfig:
    """Compose the overrides as a sweep does: their options once in a process."""
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        config = composed_alike(overrides, name)
    with open_dict(config):
        del config["hydra"]
    return config


def settings(*overrides: str) -> Any:
    """Compose the overrides; `ConfigError` if they break a rule, or set what nothing reads."""
    run = typed(composed(*overrides), map(key_of, overrides))
    if bad := complaints(run):
        raise ConfigError("\n".join(bad.values()))
    return run


def altered(run: Any, **values: Any) -> Any:
    """Return a copy of a run with other values (`group__name=value`), which nothing checks."""
    run = copy.deepcopy(run)
    for key, value in values.items():
        *groups, name = key.split("__")
        holder = reduce(getattr, groups, run)
        assert hasattr(holder, name), key
        setattr(holder, name, value)
    return run
