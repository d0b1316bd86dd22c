"""The typed settings of a run from its overrides."""

from typing import Any

from hydra import compose, initialize_config_dir

from rlreason.cli.compose import key_of
from rlreason.config.leaves import resource_dir
from rlreason.config.rules import complaints
from rlreason.config.store import typed
from rlreason.errors import ConfigError


def settings(*overrides: str) -> Any:
    """Compose the overrides; `ConfigError` if they break a rule, or set what nothing reads."""
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        run = typed(compose("config", list(overrides)), map(key_of, overrides))
        if bad := complaints(run):
            raise ConfigError("\n".join(bad.values()))
        return run
