"""Options that Hydra finds besides conf/: `sweep=NAME`, and `loss=` and `data=` of functions.

Hydra imports this module at the start of every program here, so nothing heavy is imported, and only the search path of
rlreason's own commands gets an entry.
"""

import sys
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin


class OwnOptions(ConfigSource):
    """Serve the files of multirun_sweeps/, and the settings of functions by `module:function` or an announced name."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of its path."""
        return "rlreason"

    def available(self) -> bool:
        """Return that it can always be searched."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether it has options of this group."""
        from rlreason.config.store import FUNCTIONS

        return config_path in ("", "sweep", *FUNCTIONS)

    def is_config(self, config_path: str) -> bool:
        """Return whether a path is a sweep, or names a function."""
        from rlreason.config.store import sweep_path

        group, _, option = config_path.removesuffix(".yaml").partition("/")
        return sweep_path(option).is_file() if group == "sweep" else bool(self._function(group, option))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the options of a group: the sweeps, or what installed packages announce."""
        from rlreason.config.store import FUNCTIONS, sweep_path
        from rlreason.runtime.plugins import announced

        if not config_path:
            return ["sweep", *FUNCTIONS] if results_filter is not ObjectType.CONFIG else []
        if results_filter is ObjectType.GROUP:
            return []
        if config_path == "sweep":
            return sorted(path.stem for path in sweep_path("").parent.glob("*.yaml"))
        return sorted(announced(config_path)) if config_path in FUNCTIONS else []

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a sweep's file, or the settings of a function, which is imported now; `ConfigError` if unusable."""
        from omegaconf import OmegaConf

        from rlreason.config.data import of_function
        from rlreason.config.store import sweep_path
        from rlreason.objectives.objective import own_loss_config

        group, _, option = config_path.removesuffix(".yaml").partition("/")
        if group == "sweep":
            return ConfigResult("rlreason", config_path, OmegaConf.load(sweep_path(option)), {"package": "_global_"})
        function = self._function(group, option)
        settings: Any = own_loss_config(function) if group == "loss" else of_function(function)
        return ConfigResult("rlreason", config_path, OmegaConf.structured(settings), {"package": None})

    def _function(self, group: str, option: str) -> str:
        """Return `module:function`, "" where the option names none."""
        from rlreason.config.store import FUNCTIONS
        from rlreason.runtime.plugins import announced, names_function

        if group not in FUNCTIONS:
            return ""
        return option if names_function(option) else announced(group).get(option, "")


class OwnSearchPath(SearchPathPlugin):
    """Add the places that a command of rlreason searches."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add them behind the files of conf/, which win; in other programs, which have not loaded them, none."""
        store = sys.modules.get("rlreason.config.store")
        for provider, path in getattr(store, "SEARCHED", ()):
            search_path.append(provider, path)
