"""Write a run's state at the end of a step, and restore it: moments and weights as tensors, the rest as JSON."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlreason.config.training import TrainingConfig
from rlreason.evaluation.evaluator import Validation
from rlreason.model.parameters import load_model
from rlreason.model.policy import Policy
from rlreason.records.files import (
    CHECKPOINTS,
    MODEL,
    MOMENTS,
    STATE,
    TENSORS,
    checkpoints_in,
    linked,
    moments_in,
    name_of,
    pruned,
    read_json,
    remove,
    write_checkpoint,
)
from rlreason.runtime.files import explained
from rlreason.runtime.machine import random_states, set_random_states
from rlreason.training.algorithms import Batches
from rlreason.training.build import Components
from rlreason.training.learner import Learner

BYTES_PER_S = 2e8  # a cautious guess before the first one has been written
SHARE = 0.05  # of a run's time that checkpoints may take if checkpoint.every is not set,
SHARE_AT_MOST = 0.1  # and if `checkpoint.minutes` have passed


@dataclass
class Resumable:
    """The parts of a training run, and the checkpoints from which it can resume."""

    run: TrainingConfig
    components: Components  # policy, engine, rollouts, graders, problems
    batches: Batches  # of the algorithm
    learner: Learner
    validation: Validation
    steps_done: int = 0
    cost: dict[str, float] = field(default_factory=lambda: {"count": 0, "seconds": 0.0, "bytes": 0})  # of this process

    def __post_init__(self) -> None:
        validation, self.policy, self.engine = self.validation, self.components.policy, self.components.engine
        self.records, self.console = validation.records, validation.console
        self.counters, self.monitors, self.clock = validation.counters, validation.monitors, self.records.clock
        self.parts: dict[str, Any] = {
            "counters": self.counters,
            "validation": validation,
            "batches": self.batches,
            "monitors": self.monitors,
        }
        if self.learner.scaler.is_enabled():
            self.parts["loss_scale"] = self.learner.scaler
        moments = sum(8 * p.numel() for p in self.learner.parameters)  # bytes
        self.next_one = (sum(p.nbytes for p in self.policy.model.parameters()) + moments) / BYTES_PER_S  # seconds
        self.began = self.newest = time.monotonic()

    @contextmanager
    def waiting(self, what: str, phase: str) -> Iterator[None]:
        """Show `what` on the console, and time this block as `phase`."""
        with self.console.wait(what), self.clock.phase(phase):
            yield

    def checkpoint_due(self) -> bool:
        """Return whether a checkpoint is due after this step.

        every: steps between them, 0 for none. None: as long as the seconds spent on them and expected for the next one
        stay within 5% of the run's; and `minutes` after the newest one, within 10%.
        """
        settings, now = self.run.checkpoint, time.monotonic()
        if settings.every is not None:
            return settings.every > 0 and self.steps_done % settings.every == 0
        longest = math.inf if settings.minutes is None else max(60 * settings.minutes, self.next_one / SHARE_AT_MOST)
        spent = self.cost["seconds"] + self.next_one
        return now - self.newest >= longest or spent <= SHARE * (now - self.began)

    def write_checkpoint(self) -> None:
        """Write the state after this step, unless every=0, and remove the checkpoints that the settings do not keep.

        It has its name when it is complete. `UnwritableError` if the system refuses: earlier checkpoints stay.
        """
        if self.run.checkpoint.every == 0:
            return
        began, evaluated, step = time.monotonic(), self.validation.history[-1], self.steps_done
        generators, states = random_states()
        state = {
            "step": step,
            "accuracy": evaluated.metrics["eval/accuracy"] if evaluated.step == step else None,
            "lines": self.records.lines(),
            "weight_version": self.engine.weight_version,
            "generators": generators,
            "graders": [list(grader.cache) for grader in self.components.graders.all()],
            "parts": {key: part.state_dict() for key, part in self.parts.items()},
        }
        path = self.checkpoint_path()
        write = partial(write_tensors, policy=self.policy, learner=self.learner, generators=states)
        write_checkpoint(self.records.folder, path.name, state, write)
        self.prune(self.run.checkpoint.keep)
        self.newest = time.monotonic()
        self.next_one = self.newest - began
        self.cost["count"] += 1
        self.cost["seconds"] = round(self.cost["seconds"] + self.next_one, 2)
        self.cost["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def restore(self) -> None:
        """Load the checkpoint from which the run resumes into every part."""
        path = self.records.checkpoint
        assert path is not None
        state, tensors = read_json(path / STATE), read_tensors(path, self.policy, self.learner)
        for key, part in self.parts.items():
            part.load_state_dict(state["parts"][key])
        for grader, remembered in zip(self.components.graders.all(), state["graders"], strict=True):
            grader.cache = dict.fromkeys(remembered)  # so that cache hits are counted as in an uninterrupted run
        self.engine.load_weights(self.policy)
        self.engine.weight_version = state["weight_version"]
        set_random_states(state["generators"], tensors)  # last, because building and loading may draw
        self.steps_done = state["step"]

    def checkpoint_path(self) -> Path:
        """Return where the checkpoint of the current state belongs."""
        name = name_of(self.steps_done, self.counters.train_step, self.counters.eval_step)
        return self.records.folder / CHECKPOINTS / name

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best one."""
        paths = {path.name: path for path in checkpoints_in(self.records.folder)}
        accuracies = {name: read_json(path / STATE)["accuracy"] for name, path in paths.items()}
        evaluated = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
        for old in pruned(list(paths), evaluated, keep):
            remove(paths[old])

    def save_model(self) -> None:
        """Save the model into `model/`, if that is wanted: as hard links if the newest checkpoint is of this step."""
        if self.run.save_model:
            with self.waiting("saving the model", "checkpoint"):
                target = self.records.folder / MODEL
                if (path := self.checkpoint_path()).is_dir():
                    linked(path / MODEL, target)
                else:
                    self.policy.save(target)


def adapters(policy: Policy) -> dict[str, Tensor]:
    """Return LoRA weights by name: those that a saved model folder contains only merged into others."""
    named = policy.model.named_parameters()
    return {f"weight.{name}": p.detach() for name, p in named if p.requires_grad and ".lora_" in name}


OF_OPTIMIZER = "optimizer."


def write_tensors(folder: Path, policy: Policy, learner: Learner, generators: Mapping[str, Tensor]) -> None:
    """Write `model/` into a checkpoint's folder, and files of tensors, but for an empty one.

    One has the generators' states and the adapters, one the optimizer's state of every trained parameter, where a plain
    number is a tensor of its own.
    """
    policy.save(folder / MODEL)
    moments: dict[str, Tensor] = {}
    for i, state in enumerate(learner.moments()):
        moments |= {f"{OF_OPTIMIZER}{i}.{name}": torch.as_tensor(value) for name, value in state.items()}
    for file, tensors in ((TENSORS, {**generators, **adapters(policy)}), (MOMENTS, moments)):
        stored, known = dict[str, Tensor](), set[int]()
        for name, tensor in tensors.items():  # safetensors rejects tensors that share memory
            tensor = tensor.detach().cpu().contiguous()
            stored[name] = tensor.clone() if tensor.data_ptr() in known else tensor
            known.add(tensor.data_ptr())
        if stored:
            with explained(folder / file):
                save_file(stored, folder / file)


def read_tensors(folder: Path, policy: Policy, learner: Learner) -> dict[str, Tensor]:
    """Load a checkpoint's weights and moments; return the generators' states by name.

    The weights are the adapters if the policy has any, else those of the model folder. The moments are empty if a
    finished run has kept none.
    """
    live, tensors = adapters(policy), load_file(folder / TENSORS)
    weights = tensors
    if not live:
        live, weights = dict(policy.named_weights()), {}
        for file in (folder / MODEL).glob("*.safetensors"):
            weights |= load_file(file)
        if live.keys() - weights.keys():  # of some families, mixtures of experts among them, files have other names
            weights = load_model(str(folder / MODEL)).state_dict()
    with torch.no_grad():
        for name, weight in live.items():
            weight.copy_(weights[name])
    states: list[dict[str, Any]] = [{} for _ in learner.parameters]
    for name, tensor in (load_file(folder / MOMENTS) if moments_in(folder) else {}).items():
        _, number, key = name.split(".", 2)
        plain = tensor.dim() == 0 and not tensor.is_floating_point()  # a count of steps that is no tensor
        states[int(number)][key] = tensor.item() if plain else tensor
    learner.restore(states)
    return {name: tensor for name, tensor in tensors.items() if name not in live}
