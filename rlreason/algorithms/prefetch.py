"""Collects one step after the other; with `ahead`, the next is sampled while the present one is learned.

Sampling ahead means sampling with weights that are exactly one weight sync old: `drain` must be called before new
weights move to the engine.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import torch

from rlreason.algorithms.base import Algorithm
from rlreason.runtime.clock import Clock
from rlreason.types import Collected

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
