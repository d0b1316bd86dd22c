"""What the trainer asks of an algorithm, and how the next step is sampled ahead."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch

from rlreason.data.sampler import ProblemSampler
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts
from rlreason.runtime.clock import Clock
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


CLOSING_S = 10.0  # a last decoding step, a last score


class RolloutPrefetcher:
    """`next(step)`, then `taken(step)`, for steps 1, 2 ... in order."""

    def __init__(self, algorithm: Algorithm, ahead: bool = False, clock: Clock | None = None) -> None:
        self.algorithm, self.ahead, self.clock = algorithm, ahead, clock or Clock()
        self.n_steps = algorithm.n_steps
        self.begun = 0  # the step that was asked for last
        self._next: Future[Collected] | None = None
        self._executor = ThreadPoolExecutor(
            1,
            "sampling ahead",
            torch.set_num_threads,
            (torch.get_num_threads(),),  # a setting of each thread
        )

    def next(self, step: int) -> Collected:
        """What this step has collected. `taken` is to follow, when it is in hand."""
        self.begun = step
        return self.algorithm.collect(step) if self._next is None else self._next.result()

    def taken(self, step: int) -> None:
        """What this step has collected is in hand; with `ahead`, the following one begins to be sampled."""
        self._next = None
        if self.ahead and step < self.n_steps:
            self._next = self._executor.submit(self._collect_ahead, step + 1)

    def _collect_ahead(self, step: int) -> Collected:
        with self.clock.phase("rollout"):  # in this thread it is work, in the loop's what is waited for
            return self.algorithm.collect(step)

    @property
    def settled(self) -> bool:
        """Whether nothing is being sampled ahead."""
        return self._next is None or self._next.done()

    def ready(self) -> Collected | None:
        """What has been sampled ahead to its end and is not in hand."""
        future = self._next
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def put(self, collected: Collected) -> None:
        """What was sampled ahead for the next step, before the run was interrupted."""
        self._next = Future()
        self._next.set_result(collected)

    def drain(self, limit_s: float | None = None) -> None:
        """Wait until nothing is being sampled, `limit_s` seconds at most; an error of sampling ahead is raised here."""
        if self._next is not None:
            self._next.result(limit_s)

    def close(self) -> None:
        """Sampling ahead ends with its engine and its grader, which are to be closed before."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        wait_for([self._next] if self._next is not None else [], CLOSING_S)
