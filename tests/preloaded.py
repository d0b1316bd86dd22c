"""What every command makes first, made once in the server that the tests' commands are forked from."""

import rich.live  # noqa: F401
from hydra.core.plugins import Plugins

from rlreason.config.store import register

register()
Plugins.instance()
