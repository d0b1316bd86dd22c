"""Composing next to other users of Hydra in one program, which may be one of Hydra's itself.

Hydra keeps what it knows in one place per process: schemas, resolvers, the config at hand. Here ours is put there for
the time of a block, and whatever was there before is back afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from omegaconf.basecontainer import BaseContainer

from rlreason.config.store import register

_LASTING = (Plugins, SourcesRegistry)  # found once per process, and not changed by composing
_OF_HYDRA = ("hydra", "_dummy_empty_config_.yaml")  # what Hydra itself keeps in its store of configs


@contextmanager
def own_hydra() -> Iterator[None]:
    """In this block Hydra knows our schemas and resolvers, and no config of anybody else's."""
    Plugins.instance()  # before the copy: what a plug-in's module stores while it is imported is to stay
    stored = ConfigStore.instance().repo
    theirs, resolvers = Singleton._instances, BaseContainer._resolvers
    Singleton._instances = {kind: one for kind, one in theirs.items() if kind in _LASTING}
    BaseContainer._resolvers = dict(resolvers)
    try:
        ConfigStore.instance().repo |= {name: stored[name] for name in _OF_HYDRA}
        register()
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = theirs, resolvers
