"""The typed settings of a run from its overrides."""

import copy
from functools import reduce
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


def altered(run: Any, **values: Any) -> Any:
    """Return a copy of a run with other values (`group__name=value`), which nothing checks."""
    run = copy.deepcopy(run)
    for key, value in values.items():
        *groups, name = key.split("__")
        holder = reduce(getattr, groups, run)
        assert hasattr(holder, name), key
        setattr(holder, name, value)
    return run
