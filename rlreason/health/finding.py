"""A finding, what a monitor sees, and a batch of grades summed up as metrics and warnings."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from rlreason.types import Grade


@dataclass(frozen=True, slots=True)
class Course:
    """How a metric went: (step, value) in the order of the rows, values that are numbers alone."""

    metric: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Finding:
    """`rule`: its name, of a monitor where one has one. `problem`: else it is a note, which makes no run unhealthy."""

    rule: str
    what: str  # what is wrong, in a sentence with its figures
    evidence: Sequence[str] = ()  # where that stands: steps, files, lines
    causes: str = ""  # the commonest, in a sentence
    cure: str = ""  # what to try
    problem: bool = True
    step: int | None = None  # where it began
    figures: dict[str, float] = field(default_factory=dict)
    courses: Sequence[Course] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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


WARN_SHARE = 0.005  # of the responses of a batch
COUNTED = {
    "timeouts": "ran out of time",
    "kills": "killed their worker",
    "errors": "ended in an error of the grader or the plug-in",
    "bad_golds": "have no usable ground truth (null, or not a string, number or list)",
}


def grading_metrics(grades: Sequence[Grade]) -> dict[str, float]:
    """`grading/...`: shares of formats and right answers, of rules that decided, failures by kind, milliseconds.

    >>> right = Grade(1.0, 1.0, 1.0, "correct", "number")
    >>> m = grading_metrics([right, Grade(1.0, 0.1, 0.1, "wrong", "plugin")])
    >>> m["grading/answer_rate"], m["grading/path/number"], m["grading/timeouts"]
    (0.5, 0.5, 0.0)
    """
    if not grades:
        return {}
    n, events = len(grades), Counter(map(event, grades))
    formatted = sum(grade.format > 0 for grade in grades)
    correct = sum(grade.outcome == "correct" for grade in grades)
    rates = {
        "format_rate": formatted / n,
        "answer_rate": correct / n,
        "answer_given_format": correct / max(1, formatted),
        "cache_hit_rate": sum(grade.remembered for grade in grades) / n,
    }
    times = sorted(grade.milliseconds for grade in grades if grade.milliseconds is not None)
    if times:
        rates |= {"ms_median": statistics.median(times), "ms_p99": times[int(0.99 * (len(times) - 1))]}
    counts = {name: float(events[name]) for name in (*COUNTED, "refusals", "bad_responses")}
    paths = {f"path/{path}": count / n for path, count in sorted(Counter(g.path for g in grades).items())}
    return {f"grading/{name}": value for name, value in ({"responses": float(n)} | rates | counts | paths).items()}


def grading_warnings(grades: Sequence[Grade], reasons: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each kind of failure that touched more than 0.5% of the responses.

    `reasons`: for a kind of failure, the cause of the last one, where it is known.
    """
    last = {name: f" (the last: {reason})" for name, reason in (reasons or {}).items()}
    events, n = Counter(map(event, grades)), len(grades)
    return [
        f"grading: {events[name]} of {n} responses ({events[name] / n:.1%}) {words}{last.get(name, '')}; "
        "they earned no reward, and that says nothing about the model"
        for name, words in COUNTED.items()
        if events[name] > WARN_SHARE * n
    ]


def grading_failures(grades: Sequence[Grade]) -> int:
    """Grades that say something about the grader instead of the model: they count as not correct, and are shown."""
    return sum(event(grade) in COUNTED for grade in grades)


def event(grade: Grade) -> str:
    """The counter of a grade; `plain` for verdicts on the model rather than on the grader."""
    if grade.outcome == "error":
        return {"killed": "kills", "bad_gold": "bad_golds", "bad_response": "bad_responses"}.get(grade.path, "errors")
    return {"timeout": "timeouts", "refused": "refusals"}.get(grade.outcome, "plain")
