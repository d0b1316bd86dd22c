"""The interface of an algorithm, and sampling of the next step ahead."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch

from rlreason.data.prompts import ProblemSampler
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts
from rlreason.runtime.clock import Clock
from rlreason.types import Collected, Sample


class Algorithm(Protocol):
    """Chooses the sequences a step learns from, and their advantages."""

    @property
    def n_steps(self) -> int:
        """Number of training steps: `collect` is called once for each."""
        ...

    def collect(self, step: int) -> Collected:
        """Return the samples of a step (1 to `n_steps`), cut into optimizer updates."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return which problems come next, in plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this state."""
        ...


@dataclass(frozen=True, slots=True)
class Online:
    """What algorithms that learn from their own samples have in common."""

    rollouts: Rollouts
    questions: ProblemSampler
    sampling: Sampling
    n_steps: int
    per_step: int  # questions
    group_size: int
    epochs: int
    batch_size: int

    def state_dict(self) -> dict[str, Any]:
        """Return which problems come next."""
        return self.questions.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this state."""
        self.questions.state = state

    def batches(self, step: int, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Cut the samples into the optimizer steps of a step's epochs."""
        orders = [f"{self.rollouts.seed}/batches/{step}/{epoch}" for epoch in range(self.epochs)]
        return cut_into_batches(samples, self.batch_size, orders)


def cut_into_batches(samples: Sequence[Sample], size: int, orders: Iterable[str]) -> list[list[Sample]]:
    """Cut the samples into optimizer steps, once for each seed in `orders`, shuffled if there is more than one step.

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


CLOSING_S = 10.0  # for the last decoding step and the last score


class RolloutPrefetcher:
    """Collects the steps in order; with `ahead`, a thread samples the next one while the current one learns.

    Call `next(step)`, then `start_next(step)`.
    """

    def __init__(self, algorithm: Algorithm, ahead: bool = False, clock: Clock | None = None) -> None:
        self.algorithm, self.ahead, self.clock = algorithm, ahead, clock or Clock()
        self.n_steps = algorithm.n_steps
        self.begun = 0  # the last step requested
        self._next: Future[Collected] | None = None
        threads = torch.get_num_threads()  # which torch sets for each thread by itself
        self._executor = ThreadPoolExecutor(1, "sampling ahead", torch.set_num_threads, (threads,))

    def next(self, step: int) -> Collected:
        """Return what this step has collected, waiting for it if it is being sampled ahead."""
        self.begun = step
        return self.algorithm.collect(step) if self._next is None else self._next.result()

    def start_next(self, step: int) -> None:
        """With `ahead`, begin to sample the step after this one."""
        self._next = None
        if self.ahead and step < self.n_steps:
            self._next = self._executor.submit(self._collect_ahead, step + 1)

    def _collect_ahead(self, step: int) -> Collected:
        with self.clock.phase("rollout"):  # work in this thread, waiting in the loop's
            return self.algorithm.collect(step)

    @property
    def idle(self) -> bool:
        """Whether nothing is being sampled ahead."""
        return self._next is None or self._next.done()

    def ready(self) -> Collected | None:
        """Return what was sampled ahead, if it is complete."""
        future = self._next
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def restore(self, collected: Collected) -> None:
        """Restore what was sampled ahead for the next step before the run was interrupted."""
        self._next = Future()
        self._next.set_result(collected)

    def drain(self, limit_s: float | None = None) -> None:
        """Wait until nothing is being sampled, at most `limit_s` seconds; raise an error of sampling ahead here."""
        if self._next is not None:
            self._next.result(limit_s)

    def close(self) -> None:
        """Wait for sampling ahead to end; close its engine and grader before."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._next is not None:
            wait([self._next], CLOSING_S)
