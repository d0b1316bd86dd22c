"""Write a run's state at the end of a step, and restore it: moments and weights as tensors, the rest as JSON."""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlreason.config.training import CheckpointConfig
from rlreason.engines.base import Engine
from rlreason.evaluation.evaluator import Validation
from rlreason.grading import Grader
from rlreason.model.policy import Policy
from rlreason.records.files import (
    CHECKPOINTS,
    MODEL,
    MOMENTS,
    SPREAD,
    TENSORS,
    checkpoints_in,
    linked,
    name_of,
    pruned,
    read_state,
    remove,
    write_checkpoint,
)
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime.files import explained
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.learner import Learner

BYTES_PER_S = 2e8  # a cautious guess before the first one has been written
SHARE = 0.05  # of a run's time that checkpoints may take if checkpoint.every is not set,
SHARE_AT_MOST = 0.1  # and if `checkpoint.minutes` have passed


def checkpoint_due(
    step: int, settings: CheckpointConfig, elapsed: float, since: float, spent: float, next_one: float
) -> bool:
    """Return whether a checkpoint is due after this step, `since` seconds after the newest one.

    every: steps between them, 0 for none. None: as long as the seconds `spent` on them and expected for the next one
    stay within 5% of the run's `elapsed` seconds; and after `minutes`, within 10%.

    >>> [checkpoint_due(step, CheckpointConfig(every=2), 0, 0, 0, 1.0) for step in (1, 2)]
    [False, True]
    >>> [checkpoint_due(1, CheckpointConfig(), elapsed, 25.0, 0, 1.0) for elapsed in (19, 20)]
    [False, True]
    >>> [checkpoint_due(1, CheckpointConfig(minutes=10), 700.0, s, 0, 60.0) for s in (599, 600)]
    [False, True]
    """
    if settings.every is not None:
        return settings.every > 0 and step % settings.every == 0
    if settings.minutes is not None and since >= max(60 * settings.minutes, next_one / SHARE_AT_MOST):
        return True
    return spent + next_one <= SHARE * elapsed


@dataclass
class Checkpoints:
    """The checkpoints of one run. `parts`: what else has a `state_dict`, by name."""

    settings: CheckpointConfig
    policy: Policy
    engine: Engine
    learner: Learner
    counters: Counters
    validation: Validation
    graders: Sequence[Grader]
    parts: Mapping[str, Any]
    records: RunWriter
    accuracies: dict[str, float] = field(default_factory=dict)  # of the checkpoints whose weights were evaluated
    written: tuple[int, Path] | None = None  # the newest one: its step, and where it is
    cost: dict[str, float] = field(default_factory=lambda: {"count": 0, "seconds": 0.0, "bytes": 0})  # of this process

    def __post_init__(self) -> None:
        size = sum(p.numel() * p.element_size() for p in self.policy.model.parameters())
        size += 2 * sum(p.numel() * 4 for p in self.learner.parameters)
        self.next_one = size / BYTES_PER_S  # seconds
        self.parts = {"counters": self.counters, "validation": self.validation, **self.parts}
        self.began = self.newest = time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether the settings ask for a checkpoint after this step."""
        elapsed, since = time.monotonic() - self.began, time.monotonic() - self.newest
        return checkpoint_due(step, self.settings, elapsed, since, self.cost["seconds"], self.next_one)

    def write(self, step: int) -> None:
        """Write the state after this step, unless every=0, and remove the checkpoints that the settings do not keep.

        It has its name when it is complete. `UnwritableError` if the system refuses: earlier checkpoints stay.
        """
        if self.settings.every == 0:
            return
        began, counters, accuracy = time.monotonic(), self.counters, self._accuracy(step)
        name = name_of(step, counters.train_step, counters.eval_step)
        generators, generator_tensors = random_states()
        optimizer, optimizer_tensors = moments(self.learner)
        state = {
            "config": self.records.config,
            "step": step,
            "accuracy": accuracy,
            "lines": self.records.lines(),
            "weight_version": self.engine.weight_version,
            "generators": generators,
            "optimizer": optimizer,
            "graders": [grader.remembered() for grader in self.graders],
            "parts": {key: part.state_dict() for key, part in self.parts.items()},
        }
        tensors = optimizer_tensors | generator_tensors | adapters(self.policy)

        def write_large_files(folder: Path) -> None:
            write_tensors(folder, self.policy, tensors)
            self.learner.write_moments(folder / SPREAD)

        path = write_checkpoint(self.records.folder, name, state, write_large_files)
        if accuracy is not None:
            self.accuracies[name] = accuracy
        self.prune(self.settings.keep)
        self.written, self.newest = (step, path), time.monotonic()
        self.next_one = self.newest - began
        self.cost["count"] += 1
        self.cost["seconds"] = round(self.cost["seconds"] + self.next_one, 2)
        self.cost["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def restore(self) -> int:
        """Load the checkpoint from which the run resumes into every part; return the number of finished steps."""
        path = self.records.checkpoint
        assert path is not None
        state, tensors = read_state(path), read_tensors(path)
        set_weights(self.policy, path, tensors)
        set_moments(self.learner, state["optimizer"], tensors)
        for key, part in self.parts.items():
            part.load_state_dict(state["parts"][key])
        for grader, remembered in zip(self.graders, state["graders"], strict=True):
            grader.load_remembered(remembered)
        self.engine.load_weights(self.policy)
        self.engine.weight_version = state["weight_version"]
        set_random_states(state["generators"], tensors)  # last, because building and loading may draw
        self.written = int(state["step"]), path
        for other in checkpoints_in(self.records.folder):
            if (accuracy := read_state(other)["accuracy"]) is not None:
                self.accuracies[other.name] = accuracy
        return self.written[0]

    def _accuracy(self, step: int) -> float | None:
        """Return the accuracy after this step; None if it was not evaluated."""
        newest = self.validation.history[-1]
        return newest.metrics["eval/accuracy"] if newest.step == step else None

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best one."""
        names = [path.name for path in checkpoints_in(self.records.folder)]
        for old in pruned(names, self.accuracies, keep):
            remove(self.records.folder / CHECKPOINTS / old)

    def save_model(self, step: int) -> None:
        """Save the model after this step into `model/`, as hard links if the newest checkpoint is of the same step."""
        if self.written is not None and self.written[0] == step and self.written[1].is_dir():
            linked(self.written[1] / MODEL, self.records.model)
        else:
            self.policy.save(self.records.model)


OF_OPTIMIZER, OF_WEIGHT = "optimizer.", "weight."


def moments(learner: Learner) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the optimizer state of each trained parameter, in order: plain values, and tensors by name.

    State sharded over ranks is left out: the learner writes it.
    """
    plain: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for i, parameter in enumerate(learner.parameters):
        state = learner.optimizer.state.get(parameter, {})
        plain.append({name: value for name, value in state.items() if not isinstance(value, Tensor)})
        whole = {name: v for name, v in state.items() if isinstance(v, Tensor) and not hasattr(v, "to_local")}
        tensors |= {f"{OF_OPTIMIZER}{i}.{name}": value for name, value in whole.items()}
    return plain, tensors


def set_moments(learner: Learner, plain: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """Load what `moments` returned; empty moments if a finished run has kept none."""
    has_moments = any(name.startswith(OF_OPTIMIZER) for name in tensors)
    states: list[dict[str, Any]] = [dict(state) if has_moments else {} for state in plain]
    for name, tensor in tensors.items():
        if name.startswith(OF_OPTIMIZER):
            number, _, key = name.removeprefix(OF_OPTIMIZER).partition(".")
            states[int(number)][key] = tensor
    learner.restore(states)


def adapters(policy: Policy) -> dict[str, Tensor]:
    """Return LoRA weights by name: those that a saved model folder contains only merged into others."""
    named = policy.model.named_parameters()
    return {f"{OF_WEIGHT}{name}": p.detach() for name, p in named if p.requires_grad and ".lora_" in name}


def write_tensors(folder: Path, policy: Policy, tensors: dict[str, Tensor]) -> None:
    """Write `model/` and the tensors into a checkpoint's folder."""
    policy.save(folder / MODEL)
    stored: set[int] = set()
    files: dict[str, dict[str, Tensor]] = {TENSORS: {}, MOMENTS: {}}
    for name, tensor in tensors.items():  # safetensors rejects tensors that share memory
        tensor = tensor.detach().cpu().contiguous()
        apart = files[MOMENTS if name.startswith(OF_OPTIMIZER) else TENSORS]
        apart[name] = tensor.clone() if tensor.data_ptr() in stored else tensor
        stored.add(tensor.data_ptr())
    for file, apart in files.items():
        if apart or file == TENSORS:
            with explained(folder / file):
                save_file(apart, folder / file)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint's tensors, without the model's."""
    tensors = load_file(folder / TENSORS)
    if (folder / MOMENTS).is_file():
        tensors |= load_file(folder / MOMENTS)
    if (folder / SPREAD / ".metadata").is_file():
        tensors |= {f"{OF_OPTIMIZER}{name}": tensor for name, tensor in read_whole(folder / SPREAD).items()}
    return tensors


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Read the whole tensors by name into main memory; one process suffices, however many have written them."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # only runs on several ranks need these
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that only one process reads, as intended
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def set_weights(policy: Policy, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load a checkpoint's weights: the adapters if the policy has any, else every weight of its model folder."""
    own = adapters(policy)
    named: Iterable[tuple[str, Tensor]] = own.items() if own else policy.named_weights()
    saved = dict(tensors)
    if not own:
        for file in (folder / MODEL).glob("*.safetensors"):
            saved |= load_file(file)
    with torch.no_grad():
        for name, live in named:
            live.copy_(saved[name])
