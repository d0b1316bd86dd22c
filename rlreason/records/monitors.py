"""Checks for what can go wrong in a step without an error, on the metrics that the step recorded anyway."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metrics = Mapping[str, float]
MOST_CUT = 0.5  # of the responses, above which there is a notice


def _identical(m: Metrics, group_size: int) -> str | None:
    """A model with an entropy near 0 repeats itself for good reason; another one's samples must share a seed."""
    uncertain = m.get("train/entropy", math.inf) > 0.05
    if group_size > 1 and uncertain and m.get("rollout/distinct", 1.0) <= 1 / group_size + 1e-9:
        return "all responses of every group are identical: the samples share one seed, or the temperature is too low"
    return None


def _nothing_to_learn(m: Metrics, group_size: int) -> str | None:
    if group_size < 2 or m.get("reward/frac_reward_zero_std", 0.0) < 1:  # GRPO's: imitation compares nothing
        return None
    share = m["reward/mean"]
    return (
        f"no group holds better and worse responses (mean reward {share:.2f}): every advantage is 0 (a KL term aside) "
        "and the rewards teach nothing; use easier or harder questions, or a larger group_size"
    )


def _truncated(m: Metrics, group_size: int) -> str | None:
    share = m.get("rollout/truncated", 0.0)
    if share > MOST_CUT:
        return f"{share:.0%} of the responses were cut at sampling.max_tokens: raise it, or expect no reward"
    return None


def _skipped(m: Metrics, group_size: int) -> str | None:
    if m.get("train/skipped_updates", 0):
        return "the gradient was not finite, so the optimizer step was left out: the run is diverging"
    return None


MONITORS: dict[str, Callable[[Metrics, int], str | None]] = {
    "identical_samples": _identical,
    "no_live_group": _nothing_to_learn,
    "truncated": _truncated,
    "skipped_update": _skipped,
}


@dataclass
class Monitors:
    """Checks every step; gives a new notice to `say` at once, and again at its 10th, 100th ...; counts them all.

    `step` is None where there are no steps, as in a job that only evaluates. `eval_limit`: the setting at which
    evaluations cut responses, where it is not that of the rollouts. `parity`: warn, stop the run or correct where
    engine and trainer differ by more than `parity_bound` nats per token.
    """

    group_size: int
    say: Callable[[str], None]
    parity: str = "warn"
    parity_bound: float = 0.05
    eval_limit: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    stopped: str = ""  # why guards.parity=stop ends the run

    def check(self, step: int | None, metrics: Metrics) -> None:
        """Check the metrics of a step or of an evaluation."""
        self._mismatch(step, metrics)
        for name, monitor in MONITORS.items():
            if notice := monitor(metrics, self.group_size):
                self.warn(step, name, notice)
        share = metrics.get("eval/truncated", 0.0)
        if self.eval_limit and share > MOST_CUT:
            text = f"{share:.0%} of the responses were cut at {self.eval_limit}"
            cure = "raise it, as what is cut before its answer counts as wrong"
            self.warn(step, "truncated_evaluation", f"{'' if step is None else 'in evaluation: '}{text}: {cure}")

    def state(self) -> dict[str, Any]:
        """What was noticed so far, in plain values."""
        return {"counts": dict(self.counts), "stopped": self.stopped}

    def put(self, state: Mapping[str, Any]) -> None:
        """Go on from what was noticed before."""
        self.counts, self.stopped = Counter(state["counts"]), state["stopped"]

    def verdict(self) -> tuple[str, str]:
        """(status, reason): whether a check that was asked to stop the run has done so."""
        return ("stopped:parity", self.stopped) if self.stopped else ("finished", "")

    def check_grades(self, step: int | None, warnings: Sequence[str], when: str = "") -> None:
        """Warn of the grader's warnings about a step or an evaluation."""
        for warning in warnings:
            self.warn(step, "grader", f"{when}{warning}")

    def _mismatch(self, step: int | None, m: Metrics) -> None:
        """Engine and trainer must give sampled tokens the same probability, while they hold the same weights."""
        mismatch = max(m.get("rollout/mismatch_mean", 0.0), m.get("eval/mismatch_mean", 0.0))
        if mismatch <= self.parity_bound or m.get("rollout/staleness", 0.0):
            return
        text = (
            f"engine and trainer disagree by {mismatch:.3f} nats per token (guards.parity_bound={self.parity_bound:g})"
        )
        if self.parity == "stop" and not self.stopped:
            self.stopped = (
                f"{_at(step)}{text}: weights, temperature or precision differ; use rollout=hf, model.dtype=float32, "
                "or guards.parity=correct with mismatch=truncate"
            )
        corrected = "; mismatch weights correct for it" if self.parity == "correct" else ""
        self.warn(step, "mismatch", f"{text}: weights, temperature or precision differ{corrected}")

    def warn(self, step: int | None, name: str, text: str) -> None:
        """Count a notice of this name, and print it if it is its 1st, 10th, 100th ... time."""
        self.counts[name] += 1
        if str(self.counts[name]).strip("0") == "1":
            times = f" (seen {self.counts[name]} times)" if self.counts[name] > 1 else ""
            self.say(f"! {_at(step)}{text}{times}")


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}: "
