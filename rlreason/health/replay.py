"""Watch a run again from the rows of its metrics: with every monitor on, also those that were off or did not exist."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple

from rlreason.config.monitors import MODES, OF_SWEEPS, MonitorsConfig
from rlreason.health.finding import Found
from rlreason.health.watch import Monitors

Row = Mapping[str, float | None]
LARGEST = 1e300


class Event(NamedTuple):
    """A step with its updates, or an evaluation, as the rows of a run tell them."""

    step: int
    metrics: dict[str, float]
    updates: list[dict[str, float]]
    evaluates: bool


@dataclass
class Replayed:
    """What one rule has found: at which steps, with the first and the last finding in full."""

    monitor: str
    rule: str
    first: Found
    last: Found
    steps: list[int] = field(default_factory=list)
    of: int = 0  # so many steps and evaluations were looked at

    @property
    def longest(self) -> int:
        """The most steps in a row.

        >>> Replayed("m", "m", Found("", ""), Found("", ""), [1, 2, 3, 7, 8]).longest
        3
        """
        return max(len(list(group)) for _, group in groupby(enumerate(self.steps), lambda pair: pair[1] - pair[0]))


def events_of(rows: Sequence[Row]) -> Iterator[Event]:
    """The steps and evaluations in the order in which they ended. A step is over with the last row of its number."""
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
    """The rows with floats, and None for what was not finite; so is what no run writes, integers too large for one.

    >>> as_numbers([{"a": 1, "b": None, "c": 10**400}])
    [{'a': 1.0, 'b': None, 'c': None}]
    """
    return [{name: None if v is None or not abs(v) <= LARGEST else float(v) for name, v in row.items()} for row in rows]


def steps_done(rows: Sequence[Row]) -> int:
    """The largest step of the rows (`as_numbers`); 0 where they name none."""
    return max((int(row.get("rollout_step") or 0) for row in rows), default=0)


def _whole(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step: means over its updates; what was sampled stands in one row alone.

    >>> _whole([{"train/loss": 1.0, "reward/mean": 0.5}, {"train/loss": 2.0}])
    {'train/loss': 1.5, 'reward/mean': 0.5}
    """
    named: dict[str, list[float]] = {}
    for row in updates:
        for name, value in row.items():
            named.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in named.items()}


def replayed(
    rows: Sequence[Row], settings: Mapping[str, Any] | None = None, group_size: int = 8, eval_limit: str = ""
) -> list[Replayed]:
    """What the monitors find in these rows, each rule once, in the order of its first step.

    `settings`: the run's own thresholds, where they are known; `eval_limit` as in `Monitors`. What ended the run does
    not end the replay.
    """
    events = list(events_of(rows))
    trained = any(not event.evaluates for event in events)
    monitors = Monitors(group_size, lambda line: None, _all_on(settings or {}), eval_limit, steps=trained)
    found: dict[str, Replayed] = {}
    monitors.heard = lambda step, name, one: _note(found, step, name, one)
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


def _note(found: dict[str, Replayed], step: int | None, monitor: str, one: Found) -> None:
    rule = one.rule or monitor
    known = found.setdefault(rule, Replayed(monitor, rule, one, one))
    known.last = one
    if (step or 0) not in known.steps:
        known.steps.append(step or 0)


def _all_on(settings: Mapping[str, Any]) -> MonitorsConfig:
    """The thresholds of a run as far as they can be read, with every monitor warning."""
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
