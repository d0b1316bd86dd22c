"""The interface of a logger, the counter over which each metric is drawn, and silencing a service's output."""

import builtins
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from rlreason.config.groups import LoggerConfig

Row = Mapping[str, float]
Table = tuple[str, int]  # (rollouts or evals, step)

#: The columns of a response.
COLUMNS = (
    "question", "response", "gold", "format_reward", "answer_reward", "reward", "outcome", "entropy", "length",
)  # fmt: skip

#: Counter -> the metrics that are drawn over it. Every row carries every counter, so any other axis can be chosen too.
AXES: dict[str, tuple[str, ...]] = {
    "rollout_step": (
        "rollout/*",
        "reward/*",
        "grading/*",
        "ei/*",
        "time/*",
        "busy/*",
        "perf/*",
        "memory/*",
        "generations/rollouts",
    ),
    "train_step": ("train/*", "sft/*", "tokens/*", "eval/*", "final/*", "generations/evals"),
}
COUNTERS = ("rollout_step", "train_step", "eval_step")

LIMIT_S = 60.0  # a run waits this long for a service, at its start and at its end


class SentRun(NamedTuple):
    """A run's id in a service, whether this process resumes it, and `calls`, the most rows and tables sent before."""

    id: str
    goes_on: bool = False
    calls: int = 0


@dataclass
class Sent:
    """What a service already has of the rows and tables to come, which are skipped once each.

    `metrics`: (metric, value of its counter) -> how often. `rows`: the number of first rows to skip entirely.
    """

    metrics: Counter[tuple[str, int]] = field(default_factory=Counter)
    tables: Counter[Table] = field(default_factory=Counter)
    rows: int = 0

    def add(self, row: Mapping[str, object]) -> None:
        """Count a row that the service has; it has every counter."""
        counters = {name: int(float(str(row[name]))) for name in COUNTERS if name in row}
        for name in row:
            if (axis := axis_of(name)) in counters and name not in COUNTERS:
                self.metrics[name, counters[axis]] += 1

    def new_in(self, row: Row) -> Row | None:
        """Return the row without the metrics that the service has; None where none are left."""
        if self.rows:
            self.rows -= 1
            return None
        if not self.metrics:  # always, in a run that is not resumed
            return row
        there = {name for name in row if name not in COUNTERS and self._take(name, int(row[axis_of(name)]))}
        left = {name: value for name, value in row.items() if name not in there}
        return None if there and left.keys() <= set(COUNTERS) else left

    def has_table(self, name: str, step: int) -> bool:
        """Whether the service already has the table."""
        self.tables[name, step] -= 1
        return self.tables[name, step] >= 0

    def _take(self, name: str, step: int) -> bool:
        if found := self.metrics.get((name, step), 0):
            self.metrics[name, step] = found - 1
        return found > 0


class Logger(Protocol):
    """One run in one service. Any method may raise or hang: `guarded.Loggers` handles that."""

    cure: str  # what a user can do where it fails; that of the class where it does not start
    place: str  # the run's address, or the command that shows it; may be empty

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: SentRun) -> None:
        """Start or resume a run in the service. `config`: all settings of the run in `folder`, nested dicts."""

    def sent(self) -> Sent | None:
        """Return what the service has of a resumed run; None: everything that was sent to it."""

    def log(self, row: Row) -> None:
        """Log a row of metrics with every counter."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log responses of a step, with `COLUMNS`; `name` is `rollouts` or `evals`."""

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """End a run that has ended by itself or was interrupted, at these counters."""

    def abandon(self) -> None:
        """End a run that has failed."""


def axis_of(metric: str) -> str:
    """Return the counter over which a metric is drawn.

    >>> axis_of("reward/mean"), axis_of("eval/accuracy")
    ('rollout_step', 'train_step')
    """
    drawn = (counter for counter, names in AXES.items() if any(fnmatchcase(metric, name) for name in names))
    return next(drawn, "train_step")


def sendable(value: Any) -> Any:
    r"""Replace every character that UTF-8 cannot encode, such as a lone surrogate from a JSON file.

    >>> sendable({"question": "\ud800?", "entropy": None})
    {'question': '??', 'entropy': None}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {sendable(key): sendable(child) for key, child in value.items()}
    return [sendable(child) for child in value] if isinstance(value, list | tuple) else value


_thread = threading.local()
_lock = threading.Lock()


def listen() -> list[tuple[str, str]]:
    """Collect (function, text) of all later calls of silenced functions in this thread, instead of showing them."""
    heard: list[tuple[str, str]] = []
    _thread.heard = heard
    return heard


def silence(module: ModuleType, name: str) -> None:
    """Silence a function with which a module shows texts, in the threads that `listen`; other threads still show."""
    shows = vars(module).get(name) or vars(builtins).get(name)
    with _lock:
        if shows is None or hasattr(shows, "heard"):
            return

        @wraps(shows)
        def heard_or_shown(*words: Any, **how: Any) -> None:
            heard = getattr(_thread, "heard", None)
            if heard is None:
                shows(*words, **how)
            else:
                heard.append((name, " ".join(map(str, words[:1]))))

        vars(heard_or_shown)["heard"] = True
        vars(module)[name] = heard_or_shown
