"""The typed settings of a run from its overrides."""

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
