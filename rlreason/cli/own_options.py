"""Options of one's own beside the files of `conf/`: `loss=module:function`, `data=module:function`, packages' names.

Hydra asks the repository for `GROUP/OPTION` while it composes, and it is made from the function then. So nothing is
registered anywhere, and a function may be another one next time.
"""

from functools import cache
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from rlreason.config.groups import names_function
from rlreason.config.sources import resource_dir
from rlreason.config.sweep_files import BLOCKS, content
from rlreason.config.tasks import of_function
from rlreason.errors import ConfigError
from rlreason.objectives.objective import own_loss_config
from rlreason.plugins.announced import announced

SETTINGS = {"loss": own_loss_config, "data": of_function}  # group -> its settings for a function


class Repository(ConfigRepository):
    """Hydra's, with these options; it lives as long as one command."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._announced = cache(announced)  # reading the metadata of every package takes 10 ms

    def load_config(self, config_path: str) -> ConfigResult | None:
        """The config at a path, or that of a function. `ConfigError` where the function cannot be used."""
        if (function := self._function(config_path)) is None:
            result = super().load_config(config_path)
            if result and config_path.startswith("sweep/") and isinstance(result.config, DictConfig):
                for block in BLOCKS:
                    result.config.pop(block, None)
            return result
        group, _, option = config_path.partition("/")
        try:
            node = OmegaConf.structured(SETTINGS[group](function))
        except ConfigError as error:
            if option == function:
                raise
            raise ConfigError(
                f"{group}={option}, which an installed package announces, cannot be used: {error}"
            ) from None
        return ConfigResult("rlreason", function, node, {"package": None}, defaults_list=[])

    def sweep_content(self, name: str) -> dict[str, Any]:
        """All that the file of a sweep holds, the blocks that Hydra does not get too. `ConfigError`: there is none."""
        path = f"sweep/{name}"
        source = self._find_object_source(path, ObjectType.CONFIG)
        if source is None:
            known = ", ".join(self.get_group_options("sweep"))
            raise ConfigError(f"sweep={name} is no option of sweep: choose one of {known}")
        if source.scheme() == "structured":  # `register` has stored Hydra's part of our own files
            return content(OmegaConf.load(resource_dir("multirun_sweeps") / f"{name}.yaml"))
        return content(source.load_config(path).config)

    def config_exists(self, config_path: str) -> bool:
        """Whether there is such an option."""
        return self._function(config_path) is not None or super().config_exists(config_path)

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        """The options of a group: those of installed packages too, which a file of the same name goes before."""
        has_names = group_name in SETTINGS and results_filter is not ObjectType.GROUP
        names = self._announced(group_name) if has_names else {}
        return sorted({*super().get_group_options(group_name, results_filter), *names})

    def _function(self, config_path: str) -> str | None:
        """`module:function`, where an option names one."""
        group, _, option = config_path.partition("/")
        if group not in SETTINGS or super().config_exists(config_path):
            return None
        return option if names_function(option) else self._announced(group).get(option)
