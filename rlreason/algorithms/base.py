"""What the trainer asks of an algorithm: `collect(step)` -> what was sampled, and what is learned from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from rlreason.algorithms.problem_sampler import ProblemSampler
from rlreason.algorithms.rollouts import Rollouts
from rlreason.engines.base import Sampling
from rlreason.types import Collected, Sample


class Algorithm(Protocol):
    """Decides which sequences a step learns from, and with what advantages."""

    @property
    def n_steps(self) -> int:
        """How often `collect` is called."""
        ...

    def collect(self, step: int) -> Collected:
        """The samples of step 1, 2, ... `n_steps`, cut into optimizer steps."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What the steps so far have moved, in plain values: which problems come next."""
        ...

    def put(self, state: dict[str, Any]) -> None:
        """Go on from this state."""
        ...


@dataclass(frozen=True, slots=True)
class Online:
    """What every algorithm takes that learns from samples of its own."""

    rollouts: Rollouts
    questions: ProblemSampler
    sampling: Sampling
    n_steps: int
    per_step: int  # questions
    group_size: int
    epochs: int
    batch_size: int

    @property
    def state(self) -> dict[str, Any]:
        """Which problems come next."""
        return self.questions.state

    def put(self, state: dict[str, Any]) -> None:
        """Go on from this state."""
        self.questions.state = state

    def batches(self, step: int, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples cut into the optimizer steps of a step's epochs."""
        orders = [f"{self.rollouts.seed}/batches/{step}/{epoch}" for epoch in range(self.epochs)]
        return cut_into_batches(samples, self.batch_size, orders)


def cut_into_batches(samples: Sequence[Sample], size: int, orders: Iterable[str]) -> list[list[Sample]]:
    """The samples cut into optimizer steps, once for each seed in `orders`, shuffled when there is more than one step.

    The last step of a pass takes what is left; its divisor is its own.
    """
    if len(samples) <= size:
        return [list(samples) for _ in orders] if samples else []
    batches = []
    for seed in orders:
        order = list(samples)
        Random(seed).shuffle(order)
        batches += [order[i : i + size] for i in range(0, len(order), size)]
    return batches
