"""Honest experiments on teaching language models to reason: GRPO and its relatives with verified rewards."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # Python is looking for the module to run, and most have nothing to run
    from rlreason.runtime.early_signals import heed_signals

    heed_signals()

    from rlreason.cli.modules import forward_or_refuse

    forward_or_refuse()
