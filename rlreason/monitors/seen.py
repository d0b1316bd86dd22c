"""What monitors look at, and what they find: the records between the functions of this package and who calls them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

Metrics = Mapping[str, float]
FEWEST_ASKED = 8  # questions of an evaluation, below which its answers say too little
SLOWER = "lower learning_rate or max_grad_norm"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the monitors look at behind a step, or behind an evaluation.

    `limits`: the settings in use, by their names in `MonitorsConfig`. `history`: metric -> its first value in the run
    and those of the steps before, the largest of each step's updates, as far as they were measured.
    """

    metrics: Metrics
    updates: Sequence[Metrics] = ()  # of the step, one by one
    limits: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    finite_weights: bool = True
    group_size: int = 1
    evaluations: Sequence[Metrics] = ()  # all of the run; empty where none has been added
    eval_limit: str = ""  # the setting at which evaluations cut responses, where it is not that of the rollouts
    steps: bool = True  # whether the run has any, so that an evaluation is one of several

    def finite(self) -> "Seen":
        """The same without the metrics that are no numbers."""

        def kept(metrics: Metrics) -> Metrics:
            return {name: value for name, value in metrics.items() if math.isfinite(value)}

        return replace(self, metrics=kept(self.metrics), updates=[kept(update) for update in self.updates])

    def worst(self, name: str) -> float | None:
        """The largest value of a metric among the step's updates; None where none measured it."""
        return max((u[name] for u in self.updates if name in u), default=None)

    def before(self, name: str) -> Sequence[float]:
        """The values of a metric in the steps before."""
        return self.history.get(name, ())


@dataclass(frozen=True, slots=True)
class Found:
    """What a monitor has found: in words, what helps, and the numbers. `rule`: where it is not the monitor's name."""

    text: str
    cure: str
    numbers: dict[str, float] = field(default_factory=dict)
    rule: str = ""


class Monitor(NamedTuple):
    """`causes`: the commonest ones, in a sentence. `diverges`: a run that it stops has diverged; else it was stopped.

    `shown`: the metrics whose course a reader wants to see beside what was found.
    """

    look: Callable[[Seen], Found | None]
    causes: str
    shown: tuple[str, ...] = ()
    diverges: bool = False


def exploded(now: float, usual: float, factor: float) -> bool:
    """Whether a measure is above so many times its usual size: x > f * median(x before). No number is above nothing.

    >>> exploded(2.1, 0.1, 20), exploded(1.9, 0.1, 20)
    (True, False)
    """
    return now > factor * usual


def in_a_row(values: Sequence[float], holds: Callable[[float], bool]) -> int:
    """How many of the newest values, one after the other, something holds for.

    >>> in_a_row([0.0, 1.0, 0.0, 0.0], lambda value: value == 0)
    2
    """
    return next((n for n, value in enumerate(reversed(values)) if not holds(value)), len(values))


def start_and_end(values: Sequence[float], width: int) -> tuple[float, float] | None:
    """The first value, and the median of the last `width`; None where these would hold it.

    The first alone, because a policy can be another one three steps later.

    >>> start_and_end([1.0, 5.0, 7.0, 7.0], 3), start_and_end([1.0, 2.0], 2)
    ((1.0, 7.0), None)
    """
    return (values[0], median(values[-width:])) if len(values) > width else None
