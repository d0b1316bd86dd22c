"""Honest experiments on teaching language models to reason: GRPO and its relatives with verified rewards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlreason.runtime import __version__ as __version__

if TYPE_CHECKING:
    from rlreason.api.runs import Run, load_run, load_sweep
    from rlreason.api.start import compose, evaluate, train
    from rlreason.grading import Grader

__all__ = ["Grader", "Run", "compose", "evaluate", "load_run", "load_sweep", "train"]
_MODULES = {"Grader": "rlreason.grading", **dict.fromkeys(("Run", "load_run", "load_sweep"), "rlreason.api.runs")}


def __getattr__(name: str) -> Any:  # imported on first use, so that `import rlreason` is quick
    if name in __all__:
        return getattr(import_module(_MODULES.get(name, "rlreason.api.start")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
