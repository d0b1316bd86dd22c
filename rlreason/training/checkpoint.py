"""Write a run's checkpoints and put a run back to one: samples as JSON, moments and weights as tensors."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlreason.config.training import CheckpointConfig
from rlreason.engines.base import Engine
from rlreason.errors import ConfigError
from rlreason.evaluation.evaluator import Evaluated, Validation
from rlreason.grading import Grader
from rlreason.health.watch import Monitors
from rlreason.model.policy import Policy
from rlreason.records.checkpoints import (
    checkpoints_in,
    linked,
    moments_in,
    name_of,
    pruned,
    read_state,
    remove,
    without_moments,
    write_checkpoint,
)
from rlreason.records.files import CHECKPOINTS, MODEL, SPREAD, TENSORS
from rlreason.records.files import MOMENTS as MOMENTS_FILE
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime.files import explained
from rlreason.runtime.process import random_states, set_random_states
from rlreason.training.algorithms.base import RolloutPrefetcher
from rlreason.training.learner import Learner
from rlreason.training.progress import BYTES_PER_S, Cost, Mark, Position, Step, checkpoint_due
from rlreason.types import Collected, Grade, Problem, Response, Sample, Update

Plain = dict[str, Any]


def shallow(record: Any) -> Plain:
    """The fields of a dataclass by name, their values as they are."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def plain_sample(sample: Sample) -> Plain:
    """A sample in plain values: JSON keeps every float to the last digit."""
    second = sample.prompt_grade
    return shallow(sample) | {
        "response": shallow(sample.response),
        "grade": shallow(sample.grade),
        "prompt_grade": None if second is None else shallow(second),
    }


def sample_from(plain: Plain) -> Sample:
    """The sample that `plain_sample` was given."""
    second = plain["prompt_grade"]
    parts = {
        "response": Response(**plain["response"]),
        "grade": Grade(**plain["grade"]),
        "prompt_grade": None if second is None else Grade(**second),
    }
    return Sample(**(plain | parts))


def to_show(sample: Sample) -> Sample:
    """The sample without what no reader of its text needs: token ids and log-probabilities."""
    response = replace(sample.response, prompt_ids=[], token_ids=[], log_probs=[])
    return replace(sample, response=response, log_probs=None, old_log_probs=None, reference_log_probs=None)


def plain_collected(collected: Collected) -> Plain:
    """A collection: every sample once, and where each stands."""
    places: dict[int, int] = {}
    pool: list[Sample] = []

    def placed(samples: list[Sample]) -> list[int]:
        for sample in samples:
            if id(sample) not in places:
                places[id(sample)] = len(pool)
                pool.append(sample)
        return [places[id(sample)] for sample in samples]

    found = {"samples": placed(collected.samples), "batches": [placed(batch) for batch in collected.batches]}
    rest = {"metrics": collected.metrics, "notices": collected.notices, "restart": collected.restart}
    return {"pool": [plain_sample(sample) for sample in pool], **found, **rest}


def collected_from(plain: Plain) -> Collected:
    """The collection that `plain_collected` was given."""
    pool = [sample_from(row) for row in plain["pool"]]
    return Collected(
        samples=[pool[place] for place in plain["samples"]],
        batches=[[pool[place] for place in batch] for batch in plain["batches"]],
        metrics=plain["metrics"],
        notices=plain["notices"],
        restart=plain["restart"],
    )


def plain_step(step: Step) -> Plain:
    """A step with the updates that it has taken."""
    return {
        "number": step.number,
        "weight_version": step.weight_version,
        "collected": plain_collected(step.collected),
        "updates": [shallow(update) for update in step.updates],
    }


def step_from(plain: Plain) -> Step:
    """The step that `plain_step` was given."""
    updates = [Update(**update) for update in plain["updates"]]
    return Step(plain["number"], collected_from(plain["collected"]), plain["weight_version"], updates)


MOMENTS, WEIGHTS = "optimizer.", "weight."


def moments(learner: Learner) -> tuple[list[Plain], dict[str, Tensor]]:
    """What the optimizer keeps of each trained parameter, in their order: plain values, and tensors by name.

    Those that are spread over ranks are left out: the learner writes them.
    """
    plain: list[Plain] = []
    tensors: dict[str, Tensor] = {}
    for i, parameter in enumerate(learner.parameters):
        kept = learner.optimizer.state.get(parameter, {})
        plain.append({name: value for name, value in kept.items() if not isinstance(value, Tensor)})
        whole = {name: v for name, v in kept.items() if isinstance(v, Tensor) and not hasattr(v, "to_local")}
        tensors |= {f"{MOMENTS}{i}.{name}": value for name, value in whole.items()}
    return plain, tensors


def set_moments(learner: Learner, plain: list[Plain], tensors: dict[str, Tensor]) -> None:
    """Give the optimizer what `moments` took from it; new moments where a finished run has kept none."""
    there = any(name.startswith(MOMENTS) for name in tensors)
    found: list[Plain] = [dict(kept) if there else {} for kept in plain]
    for name, tensor in tensors.items():
        if name.startswith(MOMENTS):
            number, _, key = name.removeprefix(MOMENTS).partition(".")
            found[int(number)][key] = tensor
    learner.restore(found)


def adapters(policy: Policy) -> dict[str, Tensor]:
    """Trained weights that a saved model folder holds merged into others, by name: those of LoRA."""
    named = policy.model.named_parameters()
    return {f"{WEIGHTS}{name}": p.detach() for name, p in named if p.requires_grad and ".lora_" in name}


def write_tensors(folder: Path, policy: Policy, tensors: dict[str, Tensor]) -> None:
    """`model/` and the tensors in the folder of a checkpoint."""
    policy.save(folder / MODEL)
    stored: set[int] = set()
    files: dict[str, dict[str, Tensor]] = {TENSORS: {}, MOMENTS_FILE: {}}
    for name, tensor in tensors.items():  # safetensors takes no two that share memory
        tensor = tensor.detach().cpu().contiguous()
        apart = files[MOMENTS_FILE if name.startswith(MOMENTS) else TENSORS]
        apart[name] = tensor.clone() if tensor.data_ptr() in stored else tensor
        stored.add(tensor.data_ptr())
    for file, apart in files.items():
        if apart or file == TENSORS:
            with explained(folder / file):
                save_file(apart, folder / file)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, without the model's."""
    tensors = load_file(folder / TENSORS)
    if (folder / MOMENTS_FILE).is_file():
        tensors |= load_file(folder / MOMENTS_FILE)
    if (folder / SPREAD / ".metadata").is_file():
        from rlreason.training.distributed import read_whole  # what a run of one process need not load

        tensors |= {f"{MOMENTS}{name}": tensor for name, tensor in read_whole(folder / SPREAD).items()}
    return tensors


def set_weights(policy: Policy, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Give the policy the weights of a checkpoint: its adapters, or else every weight of its model folder."""
    if own := adapters(policy):
        with torch.no_grad():
            for name, live in own.items():
                live.copy_(tensors[name])
        return
    saved: dict[str, Tensor] = {}
    for file in sorted((folder / MODEL).glob("*.safetensors")):
        saved |= load_file(file)
    with torch.no_grad():
        for name, live in policy.named_weights():
            if name not in saved or saved[name].shape != live.shape:
                raise ConfigError(f"{folder / MODEL} lacks the weight {name} of this model: choose another folder")
            live.copy_(saved[name])


ACCURACY = "eval/accuracy"


@dataclass
class Keeper:
    """Knows the parts of a run that a checkpoint holds."""

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
    mark: Mark = field(default_factory=Mark)
    began: float = field(default_factory=time.monotonic)
    accuracies: dict[str, float] = field(default_factory=dict)  # of the checkpoints, where they were evaluated

    def __post_init__(self) -> None:
        size = sum(p.numel() * p.element_size() for p in self.policy.model.parameters())
        size += 2 * sum(p.numel() * 4 for p in self.learner.parameters)
        self.cost = Cost(size / BYTES_PER_S)
        self.newest: tuple[Path, float] | None = None  # the newest one, and how many updates its model has seen

    @property
    def begun(self) -> bool:
        """Whether there is anything to go on with."""
        return bool(self.validation.history) and bool(self.mark.counters)  # the mark is what restoring sets last

    @property
    def best(self) -> float:
        """The best accuracy of the checkpoints so far."""
        return max(self.accuracies.values(), default=-1.0)

    def settle(self, drawn: bool = False) -> None:
        """The run is between two acts: keep what moves. To be called in a block that no signal interrupts.

        `drawn`: sampling and grading rest, and what they have moved counts.
        """
        self.mark = Mark(
            self.counters.state(),
            self.monitors.state(),
            self.records.offsets(),
            random_states(),
            self.engine.weight_version,
            self._draws() if drawn and self.prefetcher.settled else self.mark.draws,
        )

    def _draws(self) -> dict[str, Any]:
        return {"algorithm": self.prefetcher.algorithm.state, "graders": [g.remembered() for g in self.graders]}

    def due(self) -> bool:
        """Whether the settings ask for a checkpoint behind the step that has just ended."""
        elapsed, done, newest = time.monotonic() - self.began, self.position.finished, self.validation.history[-1]
        best = self.position.evaluated == done and newest.metrics[ACCURACY] > self.best
        return checkpoint_due(done, self.settings.every, best, elapsed, self.cost)

    def write(self) -> Path | None:
        """Write where the run is, and remove what the settings do not keep; None where that is written already.

        `UnwritableError` where the system refuses: what was there before stays.
        """
        counters = self.mark.counters
        name = name_of(counters["rollout_step"], counters["train_step"], counters["eval_step"])
        if (path := self.records.folder / CHECKPOINTS / name).exists() or not self.begun:
            return path if self.begun else None
        if self.prefetcher.ready() is not None:
            self.mark.draws = self._draws()
        elif not self.prefetcher.settled:  # its sampling moves what would have to be kept
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
        """Remove all but the newest so many, and the best."""
        names = [found.name for found in checkpoints_in(self.records.folder)]
        for old in pruned(names, self.accuracies, keep):
            remove(self.records.folder / CHECKPOINTS / old)

    def leaves(self, status: str) -> dict[str, float]:
        """What the checkpoints have cost, and the bytes of moments that go once a run that ended so is summed up."""
        kept = self.settings.keep_final or status != "finished"
        there = [] if kept else checkpoints_in(self.records.folder)
        return self.cost.summary() | {"moments_removed": sum(sum(moments_in(path).values()) for path in there)}

    def drop_moments(self) -> None:
        """A finished run keeps its models alone. To be called behind its summary, when nothing can go on from them."""
        for path in checkpoints_in(self.records.folder):
            without_moments(path)

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Where the run is, in plain values and in tensors."""
        position, mark = self.position, self.mark
        plain_moments, tensors = moments(self.learner)
        plain_generators, states = mark.generators
        step, ahead = position.step, self.prefetcher.ready()
        history = self.validation.history
        evaluated = position.evaluated == (position.finished if step is None else step.number)
        at_rest = step is None or position.recorded
        plain = {
            "config": self.records.config,
            "position": position.plain(),
            "begun": position.finished + (step is not None),
            "recorded": position.finished + position.recorded,
            "step": None if step is None else plain_step(step),
            "ahead": None if ahead is None else plain_collected(ahead),
            "counters": mark.counters,
            "monitors": mark.monitors,
            "offsets": mark.offsets,
            "weight_version": mark.weight_version,
            "draws": mark.draws,
            "generators": plain_generators,
            "optimizer": plain_moments,
            "accuracy": history[-1].metrics[ACCURACY] if evaluated and at_rest else None,
            "history": [plain_evaluated(e, e is history[0] or e is history[-1]) for e in history],
        }
        return plain, tensors | states | adapters(self.policy)

    def restore(self, path: Path) -> Evaluated:
        """Put every part of the run back to where the checkpoint was written; returns the newest evaluation.

        `ConfigError` where it does not fit.
        """
        plain, tensors = read_state(path), read_tensors(path)
        set_weights(self.policy, path, tensors)
        if len(plain["optimizer"]) != len(self.learner.parameters):
            raise ConfigError(f"{path} is of another model or other adapters: choose another folder")
        set_moments(self.learner, plain["optimizer"], tensors)
        self.counters.put(plain["counters"])
        self.monitors.put(plain["monitors"])
        step = None if plain["step"] is None else step_from(plain["step"])
        self.position.put(plain["position"], step)
        draws, ahead = plain["draws"], plain["ahead"]
        self.prefetcher.algorithm.put(draws["algorithm"])
        for grader, remembered in zip(self.graders, draws["graders"], strict=True):
            grader.put_remembered(remembered)
        if ahead is not None:
            self.prefetcher.put(collected_from(ahead))
        interim, final = self.validation.interim_problems, self.validation.final_problems
        self.validation.history[:] = [evaluated_from(row, interim, final) for row in plain["history"]]
        self.engine.load_weights(self.policy)
        self.engine.weight_version = plain["weight_version"]
        set_random_states(plain["generators"], tensors)
        self.mark = Mark(
            plain["counters"], plain["monitors"], plain["offsets"], random_states(), plain["weight_version"], draws
        )
        for found in checkpoints_in(self.records.folder):
            with suppress(OSError, ValueError, KeyError):  # an older one, which may be broken: nobody goes on from it
                if (accuracy := read_state(found)["accuracy"]) is not None:
                    self.accuracies[found.name] = accuracy
        return self.validation.history[-1]

    def save_model(self) -> None:
        """The model as it is now into `model/`; where a checkpoint holds it already, the disk keeps it once."""
        if self.newest is not None and self.newest[1] == self.counters.train_step and self.newest[0].is_dir():
            linked(self.newest[0] / MODEL, self.records.model)
        else:
            self.policy.save(self.records.model)


def plain_evaluated(evaluated: Evaluated, shown: bool) -> dict[str, Any]:
    """An evaluation in plain values; its samples, as far as a person reads them, where it is `shown` in the end."""
    return {
        "metrics": evaluated.metrics,
        "whole": evaluated.whole,
        "last": evaluated.last,
        "samples": [plain_sample(to_show(sample)) for sample in evaluated.samples] if shown else [],
    }


def evaluated_from(plain: dict[str, Any], interim: Sequence[Problem], final: Sequence[Problem]) -> Evaluated:
    """The evaluation that `plain_evaluated` was given."""
    samples = [sample_from(row) for row in plain["samples"]]
    return Evaluated(samples, plain["metrics"], plain["whole"], final if plain["last"] else interim, plain["last"])
