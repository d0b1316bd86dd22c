"""Where a run is: its steps, their rows, its position between updates; when it evaluates, checkpoints and ends."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch.profiler import profile, record_function

from rlreason.config.conflicts import sampling_key
from rlreason.config.training import BudgetConfig, TrainingConfig
from rlreason.engines.rollouts import rollout_metrics
from rlreason.grading.grader import grading_metrics
from rlreason.health.watch import Monitors
from rlreason.records.console import Console
from rlreason.records.files import PROFILE_TABLE, PROFILE_TRACE
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.types import Collected, Sample, Update

FEWEST_EVALUATIONS = 10  # in a run without eval_every, the first and the last included


def evaluation_due(done: Fraction, width: Fraction, total: int, every: int | None, longest: int | None) -> bool:
    """Return whether an evaluation is due after an update of `width` steps that ends at `done` of `total` steps.

    every: steps between evaluations, 0 for none on the way. None: at least ten in the run with the first, before it,
    and no more than `longest` steps apart; in a run of fewer than nine steps some fall between the updates of a step,
    as far as it has several.

    >>> [step for step in range(1, 201) if evaluation_due(Fraction(step), Fraction(1), 200, None, 10)][:3]
    [10, 20, 30]
    >>> sum(evaluation_due(Fraction(step), Fraction(1), 31, None, None) for step in range(1, 32))
    9
    >>> eighths = [Fraction(k, 8) for k in range(1, 41)]  # 5 steps of 8 updates
    >>> sum(evaluation_due(point, Fraction(1, 8), 5, None, None) for point in eighths)
    9
    """
    if every == 0:
        return False
    gap = Fraction(every) if every else min(Fraction(total, FEWEST_EVALUATIONS - 1), Fraction(longest or total))
    if gap >= 1:  # at the ends of steps only
        return done.denominator == 1 and done // gap > (done - 1) // gap
    return done // gap > (done - width) // gap


MARGIN = 1.2  # on predicted times: the next step or evaluation may take longer


def seconds_ahead(pace: Mapping[str, float], due_problems: int, last_problems: int) -> float:
    """Predict the seconds of the next step and of the evaluations due before the run can end.

        1.2 (t_step + t_problem (n_due + n_last))

    pace: seconds of the newest "step" and of the newest evaluation per "problem"; unknown ones count as 0.
    due_problems: of an evaluation before the next step; last_problems: of the last evaluation.

    >>> seconds_ahead({"step": 5.0, "problem": 0.01}, due_problems=0, last_problems=1000)
    18.0
    """
    return MARGIN * (pace.get("step", 0.0) + pace.get("problem", 0.0) * (due_problems + last_problems))


def budget_spent(
    budget: BudgetConfig, steps: int, tokens: float, seconds: float, pace: Mapping[str, float], ahead: float
) -> str:
    """Say why the budget does not allow another step; "" if it does.

    steps, tokens, seconds: used by the whole run so far. ahead: seconds that the next step and the evaluations need.
    The next step is expected to sample as many tokens as the newest.

    >>> budget_spent(BudgetConfig(steps=3), 3, 0, 0.0, {}, 0.0)
    'budget.steps=3 are done'
    >>> budget_spent(BudgetConfig(hours=1.0), 3, 0, 3500.0, {}, 200.0)
    'budget.hours=1: 100 s are left, and the next step and the last evaluation would take about 200 s'
    >>> budget_spent(BudgetConfig(tokens=100), 1, 60.0, 0.0, {"tokens": 60.0}, 0.0)
    'budget.tokens=100: 40 are left, and the newest step sampled 60'
    """
    if budget.steps is not None and steps >= budget.steps:
        return f"budget.steps={budget.steps} are done"
    if budget.tokens is not None and tokens + pace.get("tokens", 0.0) > budget.tokens:
        left = max(budget.tokens - tokens, 0)
        return f"budget.tokens={budget.tokens}: {left:.0f} are left, and the newest step sampled {pace['tokens']:.0f}"
    if budget.hours is not None and seconds + ahead > budget.hours * 3600:
        left = max(budget.hours * 3600 - seconds, 0.0)
        return (
            f"budget.hours={budget.hours:g}: {left:.0f} s are left, and the next step and the last evaluation would "
            f"take about {ahead:.0f} s"
        )
    return ""


@dataclass
class StopRule:
    """Decides after each step whether the run ends there.

    eval_problems, final_problems: number of problems in an intermediate evaluation and in the last one.
    """

    run: TrainingConfig
    monitors: Monitors
    counters: Counters
    n_steps: int
    eval_problems: int
    final_problems: int

    def verdict(self, number: int, evaluates: bool) -> tuple[str, str]:
        """Return (status, reason) after step `number`; `evaluates`: an evaluation is still due after it."""
        status, reason = self.monitors.verdict()
        if status != "finished" or number >= self.n_steps:
            return status, reason
        row, pace = self.counters.row(), self.counters.pace
        ahead = seconds_ahead(pace, self.eval_problems if evaluates else 0, self.final_problems)
        reason = budget_spent(self.run.budget, number, row["tokens/generated"], row["time/total"], pace, ahead)
        return ("budget", reason) if reason else ("finished", "")


def make_monitors(run: TrainingConfig, console: Console) -> Monitors:
    """Create the run's monitors, with the warnings that its settings alone give reason for."""
    limit = sampling_key(run, "max_tokens")
    limits = () if limit == "sampling.max_tokens" else (limit,)  # training warns about its own truncated samples
    group_size = getattr(run, "group_size", 1)
    monitors = Monitors(group_size, console.say, run.monitors, *limits)
    for name, warning in run.warnings().items():
        monitors.warn(0, name, warning)
    return monitors


LARGEST = 10


class Profile:
    """Profiles the second step of this process, or its only one: the first includes lazy loading."""

    def __init__(self, wanted: bool, records: RunWriter, console: Console, n_steps: int) -> None:
        self.wanted, self.records, self.console, self.n_steps = wanted, records, console, n_steps
        self.first: int | None = None  # step of this process

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Run training step `step` in this block."""
        if self.first is None:
            self.first = step
        if not self.wanted or step != min(self.first + 1, self.n_steps):
            yield
            return
        clock = self.records.clock
        clock.annotate = record_function  # shows the clock's phases next to the operations
        with profile() as trace:
            yield
        clock.annotate = nullcontext
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with self.console.wait("writing the profile"), clock.phase("profile"):
            trace.export_chrome_trace(str(self.records.folder / PROFILE_TRACE))
            costs = trace.key_averages().table(f"self_{device}_time_total", LARGEST, max_name_column_width=60)
            self.records.document(PROFILE_TABLE, f"Step {step}:\n\n```text\n{costs}```\n")


COUNTS = ("train/skipped_updates", "train/empty_updates", "train/tokens")  # metrics that add up


def averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average the metrics of a step's updates over those that measured them; counts are summed.

    >>> averaged([{"train/loss": 1.0, "train/empty_updates": 0}, {"train/empty_updates": 1}])
    {'train/loss': 1.0, 'train/empty_updates': 1.0}
    """
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        out[name] = sum(values) / (1 if name in COUNTS else len(values))
    return out


@dataclass
class Step:
    """One training step: what it has collected and learned so far, and the metrics recorded for it."""

    number: int  # 1, 2, ...
    collected: Collected
    weight_version: int  # of the engine once everything was sampled
    updates: list[Update] = field(default_factory=list)
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the weight sync
    finite: bool = True  # whether the weights are, after the updates

    @property
    def count(self) -> int:
        """Number of optimizer updates in the step."""
        return len(self.collected.batches)

    @cached_property
    def samples(self) -> list[Sample]:
        """The collected samples with the entropies that the first update has measured; read after the step."""
        if not self.updates:
            return self.collected.samples
        learned = zip(self.collected.batches[0], self.updates[0].entropies, strict=True)
        measured = {id(sample): entropy for sample, entropy in learned}
        return [replace(s, entropy=measured.get(id(s))) if s.entropy is None else s for s in self.collected.samples]

    @cached_property
    def sampled(self) -> dict[str, float]:
        """Metrics of sampling and grading."""
        if not (samples := self.samples):
            return self.collected.metrics
        staleness = self.weight_version - sum(s.response.weight_version for s in samples) / len(samples)
        graded = grading_metrics([s.grade for s in samples])
        return self.collected.metrics | rollout_metrics(samples) | graded | {"rollout/staleness": staleness}

    def row(self) -> dict[str, float]:
        """Return the newest update's row; a step's first row has the metrics of sampling too, its last the sync's."""
        row = dict(self.updates[-1].metrics) if self.updates else {}
        if len(self.updates) < 2:
            row |= self.sampled
        if len(self.updates) == self.count:
            row |= self.synced
        return row

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics of the whole step; read after the step."""
        return averaged([u.metrics for u in self.updates]) | self.sampled | self.synced


@dataclass
class Position:
    """Where a run is: in a step, how far; between steps, after which. Changed only in `held()` blocks."""

    finished: int = 0  # whole steps
    step: Step | None = None  # the current one, once it is collected
    rows: int = 0  # of its updates, written to metrics.jsonl
    recorded: bool = False  # the whole step is
    evaluated: Fraction | None = None  # steps done at the newest evaluation
    status: str = "finished"  # or what ends the run after the recorded step
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Return whether something ends the run before its last step."""
        return self.status != "finished"

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the step in plain values."""
        at = self.evaluated
        return {
            "finished": self.finished,
            "rows": self.rows,
            "recorded": self.recorded,
            "evaluated": None if at is None else [at.numerator, at.denominator],
            "status": self.status,
            "reason": self.reason,
        }

    def load_state_dict(self, plain: dict[str, Any], step: Step | None) -> None:
        """Restore what `state_dict` returned, and the step."""
        at = plain["evaluated"]
        self.finished, self.rows, self.recorded = plain["finished"], plain["rows"], plain["recorded"]
        self.status, self.reason, self.step = plain["status"], plain["reason"], step
        self.evaluated = None if at is None else Fraction(*at)


@dataclass
class Snapshot:
    """The state of a run's other parts, as it was at the end of the last `held()` block.

    `draws`: which problems come next and which answers the graders remember; sampling moves it.
    """

    counters: dict[str, Any] = field(default_factory=dict)
    monitors: dict[str, Any] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)  # sizes of the growing files, in bytes
    generators: Any = None  # plain values and tensors of `random_states`
    weight_version: int = 0
    draws: dict[str, Any] = field(default_factory=dict)


@dataclass
class CheckpointCost:
    """What this process's checkpoints have cost; `guess`: expected seconds of the first one."""

    guess: float
    count: int = 0
    seconds: float = 0.0  # of all of them
    newest: float = 0.0  # seconds of the newest
    bytes: int = 0  # of the newest

    def summary(self) -> dict[str, float]:
        """Return their number, their seconds, and the bytes of the newest."""
        return {"count": self.count, "seconds": round(self.seconds, 2), "bytes": self.bytes}

    def add(self, seconds: float, size: int) -> None:
        """Count a checkpoint that was written."""
        self.count, self.seconds, self.newest, self.bytes = self.count + 1, self.seconds + seconds, seconds, size


def checkpoint_due(step: int, every: int | None, best: bool, elapsed: float, cost: CheckpointCost) -> bool:
    """Return whether a checkpoint is due after this step.

    every: steps between them, 0 for none; None: as long as their seconds, with the next one, stay within 3% of the
    run's `elapsed` seconds, or within 5% if the newest evaluation is the `best`.

    >>> [checkpoint_due(step, 2, False, 0.0, CheckpointCost(1.0)) for step in (1, 2)]
    [False, True]
    >>> [checkpoint_due(1, None, best, 25.0, CheckpointCost(1.0)) for best in (False, True)]
    [False, True]
    """
    if every is not None:
        return every > 0 and step % every == 0
    expected = cost.newest or cost.guess
    return cost.seconds + expected <= (SHARE_OF_BEST if best else SHARE) * elapsed


SHARE = 0.03  # of a run's time that checkpoints may take if checkpoint.every is not set,


SHARE_OF_BEST = 0.05  # and if the newest evaluation is the best so far
