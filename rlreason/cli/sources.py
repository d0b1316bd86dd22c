"""Ask Hydra which options there are, wherever it searches; keep it apart from a program's own Hydra."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from rlreason.config.store import SEARCHED, register


def group_options(group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """Return the options of a group, from all places that Hydra searches; it must be ready to compose.

    `kind`: GROUP for the groups inside it; "" is the group that holds all.
    """
    sources = [source for source in GlobalHydra.instance().config_loader().get_sources() if source.is_group(group)]
    return sorted({option for source in sources for option in source.list(group, kind)})


def config_exists(path: str) -> bool:
    """Return whether there is a config of this path, as GROUP/OPTION."""
    return any(source.is_config(path) for source in GlobalHydra.instance().config_loader().get_sources())


def config_content(path: str) -> dict[str, Any]:
    """Return a config as its file has it, its defaults list too; {} if there is none."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    source = next((source for source in sources if source.is_config(path)), None)
    found = OmegaConf.to_container(source.load_config(path).config) if source else {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


#: Hydra's objects that a run of the Python API has for itself.
_RENEWED = (ConfigStore, GlobalHydra, HydraConfig, JobRuntime)
_OF_HYDRA = ("hydra", "_dummy_empty_config_.yaml")  # Hydra's own entries in its store of configs


@contextmanager
def own_hydra() -> Iterator[None]:
    """Give Hydra our schemas and resolvers for the block, and no one else's configs."""
    Plugins.instance()  # before the copy: keep what the modules of plug-ins store on import
    stored = ConfigStore.instance().repo
    theirs, resolvers, searched = Singleton._instances, BaseContainer._resolvers, list(SEARCHED)
    Singleton._instances = {kind: one for kind, one in theirs.items() if kind not in _RENEWED}
    BaseContainer._resolvers = dict(resolvers)
    try:
        ConfigStore.instance().repo |= {name: stored[name] for name in _OF_HYDRA}
        register()
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = theirs, resolvers
        SEARCHED[:] = searched
