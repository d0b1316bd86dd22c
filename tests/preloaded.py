"""What the commands of tests import, and what every one makes first: once, in the server that they are forked from."""

import gc
from importlib import import_module

gc.disable()  # while what stays is imported
for module in ("cli.command", "training.train", "training.jobs", "training.distributed"):
    import_module(f"rlreason.{module}")
for module in ("matplotlib.pyplot", "rich.live", "tests.starts"):
    import_module(module)
import_module("rlreason.config.store").register()
import_module("hydra.core.plugins").Plugins.instance()
# It makes those of all models when a first one is saved.
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.freeze()  # the collector of garbage passes over what is loaded
gc.enable()
