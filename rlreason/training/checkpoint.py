"""Write a run's state at the end of a step, and restore it: moments and weights as tensors, the rest as JSON."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlreason.config.training import CheckpointConfig
from rlreason.evaluation.evaluator import Validation
from rlreason.model.policy import Policy
from rlreason.records.files import (
    CHECKPOINTS,
    MODEL,
    MOMENTS,
    TENSORS,
    checkpoints_in,
    linked,
    name_of,
    pruned,
    read_state,
    remove,
    write_checkpoint,
)
from rlreason.records.writer import RunWriter
from rlreason.runtime.files import explained
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.build import Components
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
    """The checkpoints of one run. `parts`: what has a `state_dict`, by name."""

    settings: CheckpointConfig
    components: Components
    learner: Learner
    validation: Validation
    parts: Mapping[str, Any]
    records: RunWriter
    cost: dict[str, float] = field(default_factory=lambda: {"count": 0, "seconds": 0.0, "bytes": 0})  # of this process

    def __post_init__(self) -> None:
        size = sum(p.numel() * p.element_size() for p in self.components.policy.model.parameters())
        size += 2 * sum(p.numel() * 4 for p in self.learner.parameters)
        self.next_one = size / BYTES_PER_S  # seconds
        self.began = self.newest = time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether the settings ask for a checkpoint after this step."""
        now = time.monotonic()
        spent = self.cost["seconds"]
        return checkpoint_due(step, self.settings, now - self.began, now - self.newest, spent, self.next_one)

    def write(self, step: int) -> None:
        """Write the state after this step, unless every=0, and remove the checkpoints that the settings do not keep.

        It has its name when it is complete. `UnwritableError` if the system refuses: earlier checkpoints stay.
        """
        if self.settings.every == 0:
            return
        began, evaluated, policy = time.monotonic(), self.validation.history[-1], self.components.policy
        generators, tensors = random_states()
        tensors |= moments(self.learner) | adapters(policy)
        state = {
            "config": self.records.config,
            "step": step,
            "accuracy": evaluated.metrics["eval/accuracy"] if evaluated.step == step else None,
            "lines": self.records.lines(),
            "weight_version": self.components.engine.weight_version,
            "generators": generators,
            "graders": [grader.remembered() for grader in self.components.graders.all()],
            "parts": {key: part.state_dict() for key, part in self.parts.items()},
        }
        path = self.path(step)
        write_checkpoint(self.records.folder, path.name, state, lambda folder: write_tensors(folder, policy, tensors))
        self.prune(self.settings.keep)
        self.newest = time.monotonic()
        self.next_one = self.newest - began
        self.cost["count"] += 1
        self.cost["seconds"] = round(self.cost["seconds"] + self.next_one, 2)
        self.cost["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def restore(self) -> int:
        """Load the checkpoint from which the run resumes into every part; return the number of finished steps."""
        path, policy, engine = self.records.checkpoint, self.components.policy, self.components.engine
        assert path is not None
        state, tensors = read_state(path), read_tensors(path)
        set_weights(policy, path, tensors)
        set_moments(self.learner, tensors)
        for key, part in self.parts.items():
            part.load_state_dict(state["parts"][key])
        for grader, remembered in zip(self.components.graders.all(), state["graders"], strict=True):
            grader.load_remembered(remembered)
        engine.load_weights(policy)
        engine.weight_version = state["weight_version"]
        set_random_states(state["generators"], tensors)  # last, because building and loading may draw
        return int(state["step"])

    def path(self, step: int) -> Path:
        """Return where the checkpoint of the current state belongs, after this step."""
        counters = self.validation.counters
        return self.records.folder / CHECKPOINTS / name_of(step, counters.train_step, counters.eval_step)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best one."""
        paths = {path.name: path for path in checkpoints_in(self.records.folder)}
        accuracies = {name: read_state(path)["accuracy"] for name, path in paths.items()}
        evaluated = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
        for old in pruned(list(paths), evaluated, keep):
            remove(paths[old])

    def save_model(self, step: int) -> None:
        """Save the model after this step into `model/`, as hard links if the newest checkpoint is of the same step."""
        if (path := self.path(step)).is_dir():
            linked(path / MODEL, self.records.model)
        else:
            self.components.policy.save(self.records.model)


OF_OPTIMIZER, OF_WEIGHT = "optimizer.", "weight."


def moments(learner: Learner) -> dict[str, Tensor]:
    """Return the optimizer's state of every trained parameter as tensors by name, a plain number as one of its own."""
    tensors: dict[str, Tensor] = {}
    for i, state in enumerate(learner.moments()):
        tensors |= {f"{OF_OPTIMIZER}{i}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return tensors


def set_moments(learner: Learner, tensors: dict[str, Tensor]) -> None:
    """Load what `moments` returned; empty moments if a finished run has kept none."""
    states: list[dict[str, Any]] = [{} for _ in learner.parameters]
    for name, tensor in tensors.items():
        if name.startswith(OF_OPTIMIZER):
            number, _, key = name.removeprefix(OF_OPTIMIZER).partition(".")
            plain = tensor.dim() == 0 and not tensor.is_floating_point()  # a count of steps that is no tensor
            states[int(number)][key] = tensor.item() if plain else tensor
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
    moments = load_file(folder / MOMENTS) if (folder / MOMENTS).is_file() else {}
    return load_file(folder / TENSORS) | moments


def set_weights(policy: Policy, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load a checkpoint's weights: the adapters if the policy has any, else every weight of its model folder."""
    live = adapters(policy)
    if not live:
        live, tensors = dict(policy.named_weights()), {}
        for file in (folder / MODEL).glob("*.safetensors"):
            tensors |= load_file(file)
    with torch.no_grad():
        for name, weight in live.items():
            weight.copy_(tensors[name])
