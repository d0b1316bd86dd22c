"""What a logger of a run is, over which counter each metric is drawn, and how a service is kept quiet."""

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

#: What is shown of a response.
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

LIMIT_S = 60.0  # that a run waits for a service, at its start and at its end


class Known(NamedTuple):
    """The name that a service knows a run by, whether this process goes on with the run, and what was logged before.

    `calls`: how many rows and tables the earlier parts of the run have sent, at most.
    """

    id: str
    goes_on: bool = False
    calls: int = 0


@dataclass
class Sent:
    """What a service holds already of what it will be offered; each is passed over once.

    `metrics`: (metric, value of its counter) -> how often. `rows`: first rows to pass over whatever is in them.
    """

    metrics: Counter[tuple[str, int]] = field(default_factory=Counter)
    tables: Counter[Table] = field(default_factory=Counter)
    rows: int = 0

    def add(self, row: Mapping[str, object]) -> None:
        """The service holds this row, which has every counter."""
        counters = {name: int(float(str(row[name]))) for name in COUNTERS if name in row}
        for name in row:
            if (axis := axis_of(name)) in counters and name not in COUNTERS:
                self.metrics[name, counters[axis]] += 1

    def new_in(self, row: Row) -> Row | None:
        """The row without the metrics that are there already; None where that leaves none."""
        if self.rows:
            self.rows -= 1
            return None
        if not self.metrics:  # always, in a run that does not go on
            return row
        there = {name for name in row if name not in COUNTERS and self._take(name, int(row[axis_of(name)]))}
        left = {name: value for name, value in row.items() if name not in there}
        return None if there and left.keys() <= set(COUNTERS) else left

    def has_table(self, name: str, step: int) -> bool:
        """Whether the table is there already."""
        self.tables[name, step] -= 1
        return self.tables[name, step] >= 0

    def _take(self, name: str, step: int) -> bool:
        if found := self.metrics.get((name, step), 0):
            self.metrics[name, step] = found - 1
        return found > 0


class Logger(Protocol):
    """One run in one service. Anything here may raise or hang: `guarded.Loggers` sees to that."""

    cure: str  # what a user can do where it fails; that of the class where it does not start
    place: str  # where a person finds the run, or the command that shows it; may be empty

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: Known) -> None:
        """Start a run in the service, or go on with it. `config`: all settings of the run in `folder`, nested dicts."""

    def sent(self) -> Sent | None:
        """What the service holds of the run that goes on; None: it is trusted to hold what it was sent."""

    def log(self, row: Row) -> None:
        """One row of metrics, every counter in it."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Responses of a step to read, with `COLUMNS`; `name` is `rollouts` or `evals`."""

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """The run came to an end of its own, or was interrupted, at these counters."""

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


_thread = threading.local()
_lock = threading.Lock()


def listen() -> list[tuple[str, str]]:
    """(function, text) of all that silenced functions are told in this thread from here on, instead of showing it."""
    heard: list[tuple[str, str]] = []
    _thread.heard = heard
    return heard


def silence(module: ModuleType, name: str) -> None:
    """Have a function that a module shows texts with be heard in the threads that listen, and be itself in others."""
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
