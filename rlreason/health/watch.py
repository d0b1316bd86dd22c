"""Run all monitors on a run: count their findings, warn, and stop the run where the settings say so."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rlreason.config.groups import MODES, OF_JOBS, OF_SWEEPS, WEIGHTS, MonitorsConfig, limits_of
from rlreason.health.finding import Finding, Metrics, Observation, found
from rlreason.health.monitors import DIVERGES, MONITORS

#: Metrics whose values the monitors keep, step by step.
REMEMBERED = (
    "train/grad_norm", "train/weights_changed", "train/learning_rate", "train/kl_reference", "train/approx_kl",
    "reward/frac_reward_zero_std", "reward/mean", "reward/min", "reward/max", "reward/format",
    "rollout/right", "rollout/length", "rollout/length_correct", "rollout/mismatch_mean",
    "eval/mismatch_mean", "eval/accuracy_low", "eval/accuracy_high", "eval/accuracy",
)  # fmt: skip
WINDOW = 200  # steps of a median; the first of the run is kept as well


@dataclass
class Monitors:
    """Checks every step; prints a new notice by `say`, and again at its 10th, 100th ... time; counts them all."""

    group_size: int
    say: Callable[[str], None]
    settings: MonitorsConfig = field(default_factory=MonitorsConfig)
    eval_limit: str = ""  # the setting that limits responses of evaluations, where it is not that of the rollouts
    steps: bool = True  # whether the run has any; a job that only evaluates has none
    counts: Counter[str] = field(default_factory=Counter)
    stopped: dict[str, Any] = field(default_factory=dict)  # the finding that ends the run: see `_record`
    on_finding: Callable[[Finding], object] = lambda finding: None  # called with each

    def __post_init__(self) -> None:
        self.limits: dict[str, Any] = {}
        for name in (*MONITORS, "grader"):
            mode = "off" if not self.steps and name not in OF_JOBS else getattr(self.settings, name)
            on = () if mode == "off" else limits_of(name)
            self.limits |= {name: mode} | {limit: getattr(self.settings, limit) for limit in on}
        self.history: dict[str, list[float]] = {name: [] for name in REMEMBERED}

    def check(
        self,
        step: int | None,
        metrics: Metrics,
        updates: Sequence[Metrics] = (),
        *,
        finite_weights: bool = True,
        evaluations: Sequence[Metrics] = (),
    ) -> None:
        """Check a step or an evaluation, then add the metrics to the history.

        `step`: None where there are no steps. `updates`: those of the step; none: the metrics are of its only update.
        `evaluations`: all so far, where one is to be compared.
        """
        seen = Observation(
            metrics, updates or [metrics], self.limits, self.history, finite_weights, self.group_size, evaluations,
            self.eval_limit, step is not None,
        )  # fmt: skip
        numbers = seen.finite()  # only `nan` checks values that are not finite
        for name, look in MONITORS.items():
            on = self.limits[name] != "off" or (name == "nan" and not finite_weights)
            if on and (result := look(seen if name == "nan" else numbers)):
                self._record(step, name, found(name, *result) if isinstance(result, tuple) else result)
        for name, (*before,) in self.history.items():
            worst = numbers.worst(name)
            if (value := numbers.metrics.get(name) if worst is None else worst) is not None:
                self.history[name] = [*before[:1], *[*before[1:], value][-WINDOW:]] if before else [value]

    def check_grades(self, step: int | None, warnings: Sequence[str], when: str = "") -> None:
        """Pass on the grader's warnings about a step or an evaluation."""
        if self.limits["grader"] != "off":
            for warning in warnings:
                self._record(step, "grader", found("grader", f"{when}{warning}"))

    def _record(self, step: int | None, name: str, finding: Finding) -> None:
        rule = finding.rule
        self.on_finding(replace(finding, step=step))
        self.warn(step, rule, finding.sentence)
        enough = finding.figures.get("steps", 1) >= self.limits.get(f"{name}_steps", 1)
        if rule == WEIGHTS or (self.limits[name] == "stop" and enough and not self.stopped):
            self.stopped = {
                "status": f"{'diverged' if name in DIVERGES else 'stopped'}:{rule}",
                "reason": f"{_at(step)}{finding.sentence}",
                "monitor": name,
                "rule": rule,
                "step": step,
                "numbers": finding.figures,
                "settings": self._settings(name),
            }

    def _settings(self, name: str) -> dict[str, Any]:
        return {key: self.limits[key] for key in (name, *limits_of(name)) if key in self.limits}

    def state_dict(self) -> dict[str, Any]:
        """Return counts, the stop and the history as plain values, for a checkpoint."""
        return {"counts": dict(self.counts), "stopped": dict(self.stopped), "history": dict(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state. A stop by a monitor whose settings have changed is dropped."""
        self.counts, self.stopped = Counter(state["counts"]), (stop := dict(state["stopped"]))
        self.history |= state["history"]
        if stop and stop["rule"] != WEIGHTS and stop["settings"] != self._settings(stop["monitor"]):
            self.stopped = {}

    def reason_to_stop(self) -> tuple[str, str] | None:
        """Return (status, reason) where a monitor ends the run, else None."""
        return (self.stopped["status"], self.stopped["reason"]) if self.stopped else None

    def alarm(self) -> dict[str, Any]:
        """Return monitor, rule, step and numbers of the stop, for the summary; {} where no monitor stopped the run."""
        return {key: self.stopped[key] for key in ("monitor", "rule", "step", "numbers")} if self.stopped else {}

    def warn(self, step: int | None, name: str, text: str) -> None:
        """Count a notice of this name, and print it the 1st, 10th, 100th ... time."""
        self.counts[name] += 1
        if str(self.counts[name]).strip("0") == "1":
            times = f" (seen {self.counts[name]} times)" if self.counts[name] > 1 else ""
            self.say(f"! {_at(step)}{text}{times}")


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}: "


Row = Mapping[str, float | None]
LARGEST = 1e300


#: The step, its metrics and updates, and whether it is an evaluation.
Event = tuple[int, dict[str, float], list[dict[str, float]], bool]


def events_of(rows: Sequence[Row]) -> Iterator[Event]:
    """Yield the steps and evaluations in the order in which they ended; a step ends with the last row of its number."""
    plain = [{name: math.nan if v is None else v for name, v in row.items()} for row in rows]
    steps = [int(step) if math.isfinite(step := row.get("rollout_step", 0.0)) else 0 for row in plain]
    last = {step: n for n, (step, row) in enumerate(zip(steps, plain, strict=True)) if "eval/accuracy" not in row}
    updates: list[dict[str, float]] = []
    for n, (step, row) in enumerate(zip(steps, plain, strict=True)):
        if "eval/accuracy" in row:
            yield step, row, [row], True
            continue
        updates.append(row)
        if last[step] == n:
            names = dict.fromkeys(name for update in updates for name in update)
            whole = {name: [update[name] for update in updates if name in update] for name in names}
            yield step, {name: sum(v) / len(v) for name, v in whole.items()}, updates, False
            updates = []


def as_numbers(rows: Sequence[Row]) -> list[dict[str, float | None]]:
    """Convert the rows to floats, with None for values that are not finite or too large for a float."""
    return [{name: None if v is None or not abs(v) <= LARGEST else float(v) for name, v in row.items()} for row in rows]


def replay_monitors(
    rows: Sequence[Row], settings: Mapping[str, Any], group_size: int = 8, eval_limit: str = ""
) -> list[list[Finding]]:
    """Return the monitors' findings in these rows: those of a rule together, by its first step.

    Every monitor warns, with the run's own thresholds of `settings` where they are numbers; a rule that stopped the run
    does not stop the replay. `eval_limit` as in `Monitors`.
    """
    events = list(events_of(rows))
    trained = not all(evaluates for *_, evaluates in events)
    own: dict[str, Any] = {
        f.name: value
        for f in fields(MonitorsConfig)
        if isinstance(value := settings.get(f.name), int | float) and type(value) is not bool and math.isfinite(value)
    }
    own |= {name: "warn" for name in MODES if name not in OF_SWEEPS}
    own |= {"parity": "correct"} if settings.get("parity") == "correct" else {}
    by_rule: dict[str, list[Finding]] = {}
    monitors = Monitors(group_size, lambda line: None, MonitorsConfig(**own), eval_limit, steps=trained)
    monitors.on_finding = lambda finding: by_rule.setdefault(finding.rule, []).append(finding)
    evaluations: list[dict[str, float]] = []
    for step, metrics, updates, evaluates in events:
        whole = {name.replace("final/", "eval/"): v for name, v in metrics.items() if name.startswith("final/")}
        monitors.check(step if trained else None, metrics | whole, updates)
        if evaluates and trained:
            evaluations.append(metrics)
            monitors.check(step, {}, evaluations=evaluations)
    return list(by_rule.values())
