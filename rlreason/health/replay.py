"""Replay the monitors on the recorded metrics of a run, all of them, also those that were off or did not exist."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple

from rlreason.config.monitors import MODES, OF_SWEEPS, MonitorsConfig
from rlreason.health.finding import Alert
from rlreason.health.watch import Monitors

Row = Mapping[str, float | None]
LARGEST = 1e300


class Event(NamedTuple):
    """A step with its updates, or an evaluation, from the rows of a run."""

    step: int
    metrics: dict[str, float]
    updates: list[dict[str, float]]
    evaluates: bool


@dataclass
class ReplayedRule:
    """The alerts of one rule: their steps, and the first and the last one in full."""

    monitor: str
    rule: str
    first: Alert
    last: Alert
    steps: list[int] = field(default_factory=list)
    of: int = 0  # steps and evaluations examined

    @property
    def longest(self) -> int:
        """The largest number of steps in a row.

        >>> ReplayedRule("m", "m", Alert("", ""), Alert("", ""), [1, 2, 3, 7, 8]).longest
        3
        """
        return max(len(list(group)) for _, group in groupby(enumerate(self.steps), lambda pair: pair[1] - pair[0]))


def events_of(rows: Sequence[Row]) -> Iterator[Event]:
    """Yield the steps and evaluations in the order in which they ended; a step ends with the last row of its number."""
    plain = [{name: math.nan if v is None else v for name, v in row.items()} for row in rows]
    last = {_step(row): n for n, row in enumerate(plain) if "eval/accuracy" not in row}
    updates: list[dict[str, float]] = []
    for n, row in enumerate(plain):
        step = _step(row)
        if "eval/accuracy" in row:
            yield Event(step, row, [row], True)
            continue
        updates.append(row)
        if last[step] == n:
            yield Event(step, _whole(updates), updates, False)
            updates = []


def _step(row: Mapping[str, float]) -> int:
    step = row.get("rollout_step", 0.0)
    return int(step) if math.isfinite(step) else 0


def as_numbers(rows: Sequence[Row]) -> list[dict[str, float | None]]:
    """Convert the rows to floats, with None for values that are not finite or too large for a float.

    >>> as_numbers([{"a": 1, "b": None, "c": 10**400}])
    [{'a': 1.0, 'b': None, 'c': None}]
    """
    return [{name: None if v is None or not abs(v) <= LARGEST else float(v) for name, v in row.items()} for row in rows]


def steps_done(rows: Sequence[Row]) -> int:
    """Return the largest step of the rows (`as_numbers`); 0 without any."""
    return max((int(row.get("rollout_step") or 0) for row in rows), default=0)


def _whole(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step: means over its updates; those of the samples are in one row only.

    >>> _whole([{"train/loss": 1.0, "reward/mean": 0.5}, {"train/loss": 2.0}])
    {'train/loss': 1.5, 'reward/mean': 0.5}
    """
    named: dict[str, list[float]] = {}
    for row in updates:
        for name, value in row.items():
            named.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in named.items()}


def replay_monitors(
    rows: Sequence[Row], settings: Mapping[str, Any] | None = None, group_size: int = 8, eval_limit: str = ""
) -> list[ReplayedRule]:
    """Return the monitors' alerts in these rows, each rule once, in the order of its first step.

    `settings`: the run's own thresholds, where known; `eval_limit` as in `Monitors`. A rule that stopped the run does
    not stop the replay.
    """
    events = list(events_of(rows))
    trained = any(not event.evaluates for event in events)
    monitors = Monitors(group_size, lambda line: None, _all_on(settings or {}), eval_limit, steps=trained)
    found: dict[str, ReplayedRule] = {}
    monitors.on_alert = lambda step, name, one: _note(found, step, name, one)
    evaluations: list[dict[str, float]] = []
    for event in events:
        step = event.step if trained else None
        whole = {name.replace("final/", "eval/"): v for name, v in event.metrics.items() if name.startswith("final/")}
        monitors.check(step, event.metrics | whole, event.updates)
        if event.evaluates and trained:
            evaluations.append(event.metrics)
            monitors.check(step, {}, evaluations=evaluations)
    for one in found.values():
        one.of = len({event.step for event in events})
    return list(found.values())


def _note(found: dict[str, ReplayedRule], step: int | None, monitor: str, one: Alert) -> None:
    rule = one.rule or monitor
    known = found.setdefault(rule, ReplayedRule(monitor, rule, one, one))
    known.last = one
    if (step or 0) not in known.steps:
        known.steps.append(step or 0)


def _all_on(settings: Mapping[str, Any]) -> MonitorsConfig:
    """Return the run's thresholds, where readable, with every monitor set to warn."""
    plain = MonitorsConfig()
    usable = {
        f.name: value
        for f in fields(MonitorsConfig)
        if isinstance(value := settings.get(f.name), int | float) and type(value) is not bool and math.isfinite(value)
    }
    modes = {name: "warn" for name in MODES if name not in OF_SWEEPS}
    if settings.get("parity") == "correct":
        modes["parity"] = "correct"
    return MonitorsConfig(**{f.name: getattr(plain, f.name) for f in fields(plain)} | usable | modes)
