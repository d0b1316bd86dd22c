"""Watch a run by the table of all monitors: count what is found, warn, and stop where that is asked for."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlreason.config.monitors import OF_JOBS, WEIGHTS, MonitorsConfig, limits_of
from rlreason.health.divergence import DIVERGENCE, ENGINE
from rlreason.health.finding import Found, Metrics, Monitor, Seen
from rlreason.health.sampled import REWARDS, SAMPLES

#: A warning of the grader comes in words of its own and is no function of metrics.
MONITORS: dict[str, Monitor] = DIVERGENCE | SAMPLES | REWARDS | ENGINE
#: Metrics whose values the monitors remember, step by step.
REMEMBERED = (
    "train/grad_norm", "train/weights_changed", "train/learning_rate", "train/kl_reference", "train/approx_kl",
    "reward/frac_reward_zero_std", "reward/mean", "reward/min", "reward/max", "reward/format",
    "rollout/right", "rollout/length", "rollout/length_correct", "rollout/mismatch_mean",
    "eval/mismatch_mean", "eval/accuracy_low", "eval/accuracy_high", "eval/accuracy",
)  # fmt: skip


WINDOW = 200  # steps that a median looks back; the first of the run is remembered as well


@dataclass
class Monitors:
    """Checks every step; gives a new notice to `say` at once, and again at its 10th, 100th ...; counts them all.

    `steps`: whether the run has any; a job that only evaluates has none. `eval_limit`: the setting at which
    evaluations cut responses, where it is not that of the rollouts.
    """

    group_size: int
    say: Callable[[str], None]
    settings: MonitorsConfig = field(default_factory=MonitorsConfig)
    eval_limit: str = ""
    steps: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    stopped: dict[str, Any] = field(default_factory=dict)  # what ends the run: see `_found`
    heard: Callable[[int | None, str, Found], object] = lambda step, monitor, found: None  # is told of each finding

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
        """Check a step, or an evaluation; then the metrics join the history.

        `step`: None where there are no steps. `metrics`: of the step or the evaluation. `updates`: of the step one by
        one; none: the metrics are those of its only one. `evaluations`: all so far, where one is to be compared.
        """
        seen = Seen(
            metrics, updates or [metrics], self.limits, self.history, finite_weights, self.group_size, evaluations,
            self.eval_limit, step is not None,
        )  # fmt: skip
        numbers = seen.finite()  # what is no number is for `nan` alone to judge
        for name, monitor in MONITORS.items():
            on = self.limits[name] != "off" or (name == "nan" and not finite_weights)
            if on and (found := monitor.look(seen if name == "nan" else numbers)):
                self._found(step, name, found, monitor.diverges)
        for name in REMEMBERED:
            value = numbers.worst(name)
            if value is None:  # measured once for the whole step
                value = numbers.metrics.get(name)
            if value is not None:
                first, *more = [*self.history[name], value]
                self.history[name] = [first, *more[-WINDOW:]]

    def check_grades(self, step: int | None, warnings: Sequence[str], when: str = "") -> None:
        """Pass on the grader's warnings about a step or an evaluation."""
        if self.limits["grader"] != "off":
            for warning in warnings:
                self._found(step, "grader", Found(f"{when}{warning}", ""), False)

    def _found(self, step: int | None, name: str, found: Found, diverges: bool) -> None:
        rule = found.rule or name
        self.heard(step, name, found)
        self.warn(step, rule, _sentence(found))
        fatal = rule == WEIGHTS
        enough = found.numbers.get("steps", 1) >= self.limits.get(f"{name}_steps", 1)
        if fatal or (self.limits[name] == "stop" and enough and not self.stopped):
            self.stopped = {
                "status": f"{'diverged' if diverges else 'stopped'}:{rule}",
                "reason": f"{_at(step)}{_sentence(found)}",
                "monitor": name,
                "rule": rule,
                "step": step,
                "numbers": found.numbers,
                "settings": self._settings(name),
            }

    def _settings(self, name: str) -> dict[str, Any]:
        return {key: self.limits[key] for key in (name, *limits_of(name)) if key in self.limits}

    def state(self) -> dict[str, Any]:
        """What was noticed so far, in plain values."""
        history = {name: list(values) for name, values in self.history.items()}
        return {"counts": dict(self.counts), "stopped": dict(self.stopped), "history": history}

    def put(self, state: Mapping[str, Any]) -> None:
        """Go on from what was noticed before. What a monitor with other settings has stopped is stopped no more."""
        self.counts = Counter(state["counts"])
        self.history |= {name: list(values) for name, values in state["history"].items()}
        self.stopped = dict(state["stopped"])
        stands = not self.stopped or self.stopped["rule"] == WEIGHTS
        if not stands and self.stopped["settings"] != self._settings(self.stopped["monitor"]):
            self.stopped = {}

    def verdict(self) -> tuple[str, str]:
        """(status, reason): whether a monitor that was asked to stop the run has done so."""
        return (self.stopped["status"], self.stopped["reason"]) if self.stopped else ("finished", "")

    def alarm(self) -> dict[str, Any]:
        """What ended the run, for its summary: monitor, rule, step and numbers; {} where no monitor did."""
        return {key: self.stopped[key] for key in ("monitor", "rule", "step", "numbers")} if self.stopped else {}

    def warn(self, step: int | None, name: str, text: str) -> None:
        """Count a notice of this name, and print it if it is its 1st, 10th, 100th ... time."""
        self.counts[name] += 1
        if str(self.counts[name]).strip("0") == "1":
            times = f" (seen {self.counts[name]} times)" if self.counts[name] > 1 else ""
            self.say(f"! {_at(step)}{text}{times}")


def _sentence(found: Found) -> str:
    """What was found, with the cure: a text that has a colon itself goes on behind a semicolon.

    >>> _sentence(Found("the loss is no number", "lower learning_rate"))
    'the loss is no number: lower learning_rate'
    """
    between = "; " if ": " in found.text else ": "
    return f"{found.text}{between}{found.cure}" if found.cure else found.text


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}: "
