"""What every command makes first, made once in the server that the tests' commands are forked from."""

import gc

import rich.live  # noqa: F401
from hydra.core.plugins import Plugins
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rlreason.config.store import register

register()
Plugins.instance()
get_checkpoint_conversion_mapping("llama")  # it makes those of all models when a first one is saved
gc.freeze()  # the collector of garbage passes over what is loaded
