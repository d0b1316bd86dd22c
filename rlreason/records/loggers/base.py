"""What a logger of a run is, and over which counter each metric is drawn."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from rlreason.config.groups import LoggerConfig

Row = Mapping[str, float]

#: What is shown of a response.
COLUMNS = (
    "question", "response", "gold", "format_reward", "answer_reward", "reward", "outcome", "entropy", "length",
)  # fmt: skip

#: Counter -> the metrics that are drawn over it. Every row carries every counter, so any other axis can be chosen too.
AXES: dict[str, tuple[str, ...]] = {
    "rollout_step": ("rollout/*", "reward/*", "grading/*", "ei/*", "time/*", "generations/rollouts"),
    "train_step": ("train/*", "sft/*", "tokens/*", "eval/*", "final/*", "generations/evals"),
}
COUNTERS = ("rollout_step", "train_step", "eval_step")

LIMIT_S = 60.0  # that a run waits for a service, at its start and at its end


class Logger(Protocol):
    """One run in one service. Anything here may raise or hang: `guarded.Loggers` sees to that."""

    cure: str  # what a user can do where it fails; that of the class where it does not start
    place: str  # where a person finds the run, or the command that shows it; may be empty

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any]) -> None:
        """Start a run in the service. `folder` is the run's, `config` all its settings as nested dicts."""

    def log(self, row: Row) -> None:
        """One row of metrics, every counter in it."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Responses of a step to read, with `COLUMNS`; `name` is `rollouts` or `evals`."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run came to an end of its own, or was interrupted."""

    def abandon(self) -> None:
        """The run failed."""


def axis_of(metric: str) -> str:
    """The counter that a metric is drawn over.

    >>> axis_of("reward/mean"), axis_of("eval/accuracy")
    ('rollout_step', 'train_step')
    """
    drawn = (counter for counter, names in AXES.items() if any(fnmatchcase(metric, name) for name in names))
    return next(drawn, "train_step")


def sendable(value: Any) -> Any:
    r"""The value with every character that UTF-8 has no bytes for replaced: a lone surrogate from a JSON file.

    >>> sendable({"question": "\ud800?", "entropy": None})
    {'question': '??', 'entropy': None}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {sendable(key): sendable(child) for key, child in value.items()}
    return [sendable(child) for child in value] if isinstance(value, list | tuple) else value
