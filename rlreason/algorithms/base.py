"""What the loop knows of an algorithm: `collect(step)` -> what was seen, and what to learn from it, cut into steps.

It must not know the optimizer, and the loop must not know how credit was given.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from rlreason.types import Sample


@dataclass(slots=True)
class Collected:
    """One step of an algorithm."""

    samples: list[Sample]  # sampled in this step, learned from or not: for the records and the guards
    batches: list[list[Sample]]  # one optimizer step each, in order; empty when there is nothing to learn
    metrics: dict[str, float]
    notices: dict[str, str] = field(default_factory=dict)  # name -> what went wrong quietly, in words
    restart: bool = False  # learn from the weights that the run started with


class Algorithm(Protocol):
    @property
    def n_steps(self) -> int: ...

    def collect(self, step: int) -> Collected: ...


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
