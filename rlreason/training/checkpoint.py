"""Write a run's checkpoints, restore a run from one, and leave what an interrupted run has.

Samples are kept as JSON, moments and weights as tensors.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlreason.config.training import CheckpointConfig, TrainingConfig
from rlreason.engines.base import Engine
from rlreason.errors import ConfigError, EngineError
from rlreason.evaluation.evaluator import Evaluated, Validation
from rlreason.grading import Grader
from rlreason.health.watch import Monitors
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.records.files import (
    CHECKPOINTS,
    MODEL,
    SPREAD,
    SUMMARY,
    checkpoints_in,
    linked,
    moments_in,
    name_of,
    pruned,
    read_state,
    remove,
    write_checkpoint,
)
from rlreason.records.reader import RunFolder, write_status
from rlreason.records.rows import Counters
from rlreason.records.training_curves import draw_curves
from rlreason.records.writer import RunWriter
from rlreason.runtime import signals
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.algorithms import RolloutPrefetcher
from rlreason.training.build import Components
from rlreason.training.learner import Learner, adapters, moments, read_tensors, set_moments, set_weights, write_tensors
from rlreason.training.progress import CheckpointCost, Position, Snapshot, Step, checkpoint_due
from rlreason.training.summary import print_loggers
from rlreason.types import Collected, Grade, Problem, Response, Sample, Update

Plain = dict[str, Any]


BYTES_PER_S = 2e8  # a cautious guess before the first one has been written


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


@dataclass
class Interruption:
    """Saves what a run has when an error or a signal ends it."""

    run: TrainingConfig
    components: Components
    records: RunWriter
    counters: Counters
    console: Console
    checkpointer: Checkpointer | None = None  # until the trainer is built

    def handle(self, error: BaseException) -> None:
        """Save what the run has; after a signal, raise KeyboardInterrupt with how far it got."""
        if signals.stop_signal() is None and not isinstance(error, KeyboardInterrupt):
            checkpointer = self.working_checkpointer()
            if checkpointer is not None and isinstance(error, EngineError):  # the trainer itself is intact
                self.attempt(checkpointer.write)
            return
        stop = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
        progress = self.stop_in_order(signals.why_stopped(stop))
        raise type(stop)(f"{stop} {progress}".strip()) from None

    def working_checkpointer(self) -> Checkpointer | None:
        """Return the checkpointer, if checkpoints are wanted and there is something to resume from."""
        wanted = self.run.checkpoint.every != 0
        return self.checkpointer if self.checkpointer is not None and self.checkpointer.begun and wanted else None

    def stop_in_order(self, why: str) -> str:
        """Stop sampling, write a checkpoint, finish the records, save the model; return how far the run got.

        The status is written first, to be right even if the rest fails.
        """
        signals.arrived()
        records, console, learned = self.records, self.console, self.counters.train_step
        if (records.folder / SUMMARY).exists():
            return "when everything was recorded"
        progress = self.describe_progress()
        checkpointer = self.working_checkpointer()
        saves_model = self.run.save_model and learned > 0 and not records.model.exists()
        outputs = {"a checkpoint": checkpointer is not None, "model": saves_model, "curves": records.evaluated}
        leaving = " and ".join(name for name, wanted in outputs.items() if wanted) or "records"
        self.attempt(lambda: write_status(records.folder, "interrupted", f"{why} {progress}"))
        self.attempt(lambda: console.say(f"stopping {progress}; leaving {leaving} (a second signal leaves at once)"))
        if checkpointer is not None:
            self.attempt(lambda: self.write_checkpoint(checkpointer))
        self.attempt(self.components.close)  # ends sampling ahead, too
        if self.checkpointer is not None:
            self.attempt(self.checkpointer.prefetcher.close)
        if learned > records.train_step:  # the newest update has no row yet
            self.attempt(lambda: records.metrics(self.counters.row() | self.counters.newest))
        if saves_model and self.checkpointer is not None:
            self.attempt(self.checkpointer.save_model)
        if records.evaluated:
            self.attempt(lambda: draw_curves(RunFolder(records.folder)))
        self.attempt(records.loggers.interrupted)
        self.attempt(lambda: print_loggers(console, records.loggers))
        return progress

    def write_checkpoint(self, checkpointer: Checkpointer) -> None:
        """Write a checkpoint of the current position, after waiting for what is being sampled ahead."""
        with suppress(NotInTime):
            checkpointer.prefetcher.drain(AHEAD_S)
        if checkpointer.write() is None:
            self.console.say(
                "! no checkpoint of this place: what was sampled ahead had not ended; the run goes on from before"
            )

    def describe_progress(self) -> str:
        """Describe the step and the updates so far: "in step 2 of 8, after 1 ..."."""
        if self.checkpointer is None:
            return "before the first step"
        prefetcher, updates = self.checkpointer.prefetcher, self.counters.train_step
        begun = max(prefetcher.begun, self.checkpointer.position.finished)
        if begun == 0:
            return "before the first step"
        plural = "" if updates == 1 else "s"
        return f"in step {begun} of {prefetcher.n_steps}, after {updates} optimizer update{plural}"

    def attempt(self, act: Callable[[], object]) -> None:
        """Call `act`; print an error and continue, since the terminal may be gone or the disk full."""
        try:
            act()
        except Exception as error:
            with suppress(OSError):
                named = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                self.console.say(f"! while stopping: {named}")


AHEAD_S = 8.0  # a stop waits for sampling ahead: without it, the run resumes from an earlier checkpoint
