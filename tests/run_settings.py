"""The typed settings of a run from its overrides."""

from typing import Any

from hydra import compose, initialize_config_dir

from rlreason.config.leaves import resource_dir
from rlreason.config.store import typed


def settings(*overrides: str) -> Any:
    """Compose the overrides; `ConfigError` if they break a rule."""
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        return typed(compose("config", list(overrides)))
