"""Honest experiments on teaching language models to reason: GRPO and its relatives with verified rewards."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlreason.api.results import Run, load_run
    from rlreason.api.start import compose, evaluate, train
    from rlreason.grading import Grader

__version__ = "0.1.0"
__all__ = ["Grader", "Run", "compose", "evaluate", "load_run", "train"]

#: Where each of them is defined: imported when it is asked for, so that `import rlreason` itself is quick.
_PLACES = {
    **dict.fromkeys(("compose", "evaluate", "train"), "rlreason.api.start"),
    **dict.fromkeys(("Run", "load_run"), "rlreason.api.results"),
    "Grader": "rlreason.grading",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if sys.argv[:1] == ["-m"]:  # Python is looking for the module to run, and most have nothing to run
    from rlreason.runtime.early_signals import heed_signals

    heed_signals()

    from rlreason.cli.modules import forward_or_refuse

    forward_or_refuse()
