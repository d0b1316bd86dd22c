"""Know where a run is, write its checkpoints, and restore a run from one.

Samples are kept as JSON, moments and weights as tensors.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from rlreason.config.training import CheckpointConfig
from rlreason.engines.base import Engine
from rlreason.engines.rollouts import rollout_metrics
from rlreason.errors import ConfigError
from rlreason.evaluation.evaluator import Evaluated, Validation
from rlreason.grading import Grader
from rlreason.grading.grader import grading_metrics
from rlreason.health.watch import Monitors
from rlreason.model.policy import Policy
from rlreason.records.files import (
    CHECKPOINTS,
    MODEL,
    SPREAD,
    checkpoints_in,
    linked,
    moments_in,
    name_of,
    pruned,
    read_state,
    remove,
    write_checkpoint,
)
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.algorithms import RolloutPrefetcher
from rlreason.training.learner import (
    Learner,
    adapters,
    moments,
    read_tensors,
    set_moments,
    set_weights,
    write_tensors,
)
from rlreason.types import Collected, Grade, Problem, Response, Sample, Update

Plain = dict[str, Any]


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


SHARE = 0.03  # of a run's time that checkpoints may take if checkpoint.every is not set,
SHARE_OF_BEST = 0.05  # and if the newest evaluation is the best so far
BYTES_PER_S = 2e8  # a cautious guess before the first one has been written


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


def shallow(record: Any) -> Plain:
    """Return a dataclass's fields by name, without converting their values."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def plain_sample(sample: Sample) -> Plain:
    """Convert a sample to plain values; JSON keeps every float exactly."""
    second = sample.prompt_grade
    return shallow(sample) | {
        "response": shallow(sample.response),
        "grade": shallow(sample.grade),
        "prompt_grade": None if second is None else shallow(second),
    }


def sample_from(plain: Plain) -> Sample:
    """Invert `plain_sample`."""
    second = plain["prompt_grade"]
    parts = {
        "response": Response(**plain["response"]),
        "grade": Grade(**plain["grade"]),
        "prompt_grade": None if second is None else Grade(**second),
    }
    return Sample(**(plain | parts))


def plain_collected(collected: Collected) -> Plain:
    """Convert a collection to plain values: each sample once, referred to by index."""
    places: dict[int, int] = {}
    pool: list[Sample] = []

    def placed(samples: list[Sample]) -> list[int]:
        for sample in samples:
            if id(sample) not in places:
                places[id(sample)] = len(pool)
                pool.append(sample)
        return [places[id(sample)] for sample in samples]

    samples, batches = placed(collected.samples), [placed(batch) for batch in collected.batches]
    return {
        "pool": [plain_sample(sample) for sample in pool],
        "samples": samples,
        "batches": batches,
        "metrics": collected.metrics,
        "notices": collected.notices,
        "restart": collected.restart,
    }


def collected_from(plain: Plain) -> Collected:
    """Invert `plain_collected`."""
    pool = [sample_from(row) for row in plain["pool"]]
    return Collected(
        samples=[pool[place] for place in plain["samples"]],
        batches=[[pool[place] for place in batch] for batch in plain["batches"]],
        metrics=plain["metrics"],
        notices=plain["notices"],
        restart=plain["restart"],
    )


def plain_evaluated(evaluated: Evaluated, with_texts: bool) -> Plain:
    """Convert an evaluation to plain values, its samples without token ids and log-probabilities, or left out."""
    samples = []
    for sample in evaluated.samples if with_texts else []:
        response = replace(sample.response, prompt_ids=[], token_ids=[], log_probs=[])
        bare = replace(sample, response=response, log_probs=None, old_log_probs=None, reference_log_probs=None)
        samples.append(plain_sample(bare))
    return {"metrics": evaluated.metrics, "whole": evaluated.whole, "last": evaluated.last, "samples": samples}


def evaluated_from(plain: Plain, interim: Sequence[Problem], final: Sequence[Problem]) -> Evaluated:
    """Invert `plain_evaluated`."""
    samples = [sample_from(row) for row in plain["samples"]]
    return Evaluated(samples, plain["metrics"], plain["whole"], final if plain["last"] else interim, plain["last"])


ACCURACY = "eval/accuracy"


@dataclass
class Checkpointer:
    """Writes and restores checkpoints; holds every part of a run whose state belongs into one."""

    settings: CheckpointConfig
    policy: Policy
    engine: Engine
    learner: Learner
    prefetcher: RolloutPrefetcher
    graders: Sequence[Grader]
    records: RunWriter
    counters: Counters
    monitors: Monitors
    validation: Validation
    position: Position = field(default_factory=Position)
    snapshot: Snapshot = field(default_factory=Snapshot)
    began: float = field(default_factory=time.monotonic)
    accuracies: dict[str, float] = field(default_factory=dict)  # of the checkpoints that were evaluated

    def __post_init__(self) -> None:
        size = sum(p.numel() * p.element_size() for p in self.policy.model.parameters())
        size += 2 * sum(p.numel() * 4 for p in self.learner.parameters)
        self.cost = CheckpointCost(size / BYTES_PER_S)
        self.newest: tuple[Path, float] | None = None  # its path, and how many updates its model has seen

    @property
    def begun(self) -> bool:
        """Return whether there is anything to resume from."""
        return bool(self.validation.history) and bool(self.snapshot.counters)  # restoring sets the snapshot last

    def take_snapshot(self, drawn: bool = False) -> None:
        """Take a snapshot of moving state between two acts. Call it inside a `held()` block.

        `drawn`: sampling and grading are at rest, and the draws they have made belong to the snapshot.
        """
        self.snapshot = Snapshot(
            self.counters.state_dict(),
            self.monitors.state_dict(),
            self.records.offsets(),
            random_states(),
            self.engine.weight_version,
            self._draws() if drawn and self.prefetcher.idle else self.snapshot.draws,
        )

    def _draws(self) -> dict[str, Any]:
        return {"algorithm": self.prefetcher.algorithm.state_dict(), "graders": [g.remembered() for g in self.graders]}

    def due(self) -> bool:
        """Whether a checkpoint is due after the step that has just ended."""
        elapsed, done, newest = time.monotonic() - self.began, self.position.finished, self.validation.history[-1]
        best = self.position.evaluated == done and newest.metrics[ACCURACY] > max(self.accuracies.values(), default=-1)
        return checkpoint_due(done, self.settings.every, best, elapsed, self.cost)

    def write(self) -> Path | None:
        """Write a checkpoint and prune old ones; return its path, or None if this state cannot be saved.

        `UnwritableError` if the system refuses: earlier checkpoints stay.
        """
        counters = self.snapshot.counters
        name = name_of(counters["rollout_step"], counters["train_step"], counters["eval_step"])
        path = self.records.folder / CHECKPOINTS / name
        if not self.begun:
            return None
        if path.exists():
            return path
        if self.prefetcher.ready() is not None:
            self.snapshot.draws = self._draws()
        elif not self.prefetcher.idle:  # sampling is moving state that would have to be saved
            return None
        began = time.monotonic()
        plain, tensors = self._parts()

        def write(folder: Path) -> None:
            write_tensors(folder, self.policy, tensors)
            self.learner.write_moments(folder / SPREAD)

        write_checkpoint(self.records.folder, name, plain, write)
        if plain["accuracy"] is not None:
            self.accuracies[name] = plain["accuracy"]
        self.prune(self.settings.keep)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self.cost.add(time.monotonic() - began, size)
        self.newest = path, counters["train_step"]
        return path

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best one."""
        names = [path.name for path in checkpoints_in(self.records.folder)]
        for old in pruned(names, self.accuracies, keep):
            remove(self.records.folder / CHECKPOINTS / old)

    def leaves(self, status: str) -> dict[str, float]:
        """Return the checkpoints' cost, and the bytes of moments to be removed after a run that ended with `status`."""
        removed = 0
        if status == "finished" and not self.settings.keep_final:
            removed = sum(sum(moments_in(path).values()) for path in checkpoints_in(self.records.folder))
        return self.cost.summary() | {"moments_removed": removed}

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the run's state as plain values and as tensors."""
        position, snapshot = self.position, self.snapshot
        plain_moments, tensors = moments(self.learner)
        plain_generators, states = snapshot.generators
        step, ahead = position.step, self.prefetcher.ready()
        history = self.validation.history
        evaluated = position.evaluated == (position.finished if step is None else step.number)
        at_rest = step is None or position.recorded
        plain_step = None
        if step is not None:
            plain_step = {
                "number": step.number,
                "weight_version": step.weight_version,
                "collected": plain_collected(step.collected),
                "updates": [shallow(update) for update in step.updates],
            }
        plain = {
            "config": self.records.config,
            "position": position.state_dict(),
            "begun": position.finished + (step is not None),
            "recorded": position.finished + position.recorded,
            "step": plain_step,
            "ahead": None if ahead is None else plain_collected(ahead),
            "counters": snapshot.counters,
            "monitors": snapshot.monitors,
            "offsets": snapshot.offsets,
            "weight_version": snapshot.weight_version,
            "draws": snapshot.draws,
            "generators": plain_generators,
            "optimizer": plain_moments,
            "accuracy": history[-1].metrics[ACCURACY] if evaluated and at_rest else None,
            "history": [plain_evaluated(e, e is history[0] or e is history[-1]) for e in history],
        }
        return plain, tensors | states | adapters(self.policy)

    def restore(self, path: Path) -> Evaluated:
        """Restore every part of the run from a checkpoint; return the newest evaluation.

        `ConfigError` if it does not fit the run.
        """
        plain, tensors = read_state(path), read_tensors(path)
        set_weights(self.policy, path, tensors)
        if len(plain["optimizer"]) != len(self.learner.parameters):
            raise ConfigError(f"{path} is of another model or other adapters: choose another folder")
        set_moments(self.learner, plain["optimizer"], tensors)
        self.counters.load_state_dict(plain["counters"])
        self.monitors.load_state_dict(plain["monitors"])
        step = None
        if (row := plain["step"]) is not None:
            updates = [Update(**update) for update in row["updates"]]
            step = Step(row["number"], collected_from(row["collected"]), row["weight_version"], updates)
        self.position.load_state_dict(plain["position"], step)
        draws, ahead = plain["draws"], plain["ahead"]
        self.prefetcher.algorithm.load_state_dict(draws["algorithm"])
        for grader, remembered in zip(self.graders, draws["graders"], strict=True):
            grader.load_remembered(remembered)
        if ahead is not None:
            self.prefetcher.restore(collected_from(ahead))
        interim, final = self.validation.interim_problems, self.validation.final_problems
        self.validation.history[:] = [evaluated_from(row, interim, final) for row in plain["history"]]
        self.engine.load_weights(self.policy)
        self.engine.weight_version = plain["weight_version"]
        set_random_states(plain["generators"], tensors)
        self.snapshot = Snapshot(
            plain["counters"], plain["monitors"], plain["offsets"], random_states(), plain["weight_version"], draws
        )
        for other in checkpoints_in(self.records.folder):
            with suppress(OSError, ValueError, KeyError):  # an older one, which may be broken: no run resumes from it
                if (accuracy := read_state(other)["accuracy"]) is not None:
                    self.accuracies[other.name] = accuracy
        return self.validation.history[-1]

    def save_model(self) -> None:
        """Save the model into `model/`, as a hard link if the newest checkpoint has the same weights."""
        if self.newest is not None and self.newest[1] == self.counters.train_step and self.newest[0].is_dir():
            linked(self.newest[0] / MODEL, self.records.model)
        else:
            self.policy.save(self.records.model)
