"""The typed settings of a run from the words of its command line."""

from typing import Any

from hydra import compose, initialize_config_dir

from rlreason.config.leaves import resource_dir
from rlreason.config.store import typed


def settings(*words: str) -> Any:
    """Compose the words; `ConfigError` where they break a rule."""
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        return typed(compose("config", list(words)))
