"""Collects one step after the other; with `ahead`, the next is sampled while the present one is learned.

Sampling ahead means sampling with weights that are exactly one weight sync old: `drain` must be called before new
weights move to the engine.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import torch

from rlreason.algorithms.base import Algorithm
from rlreason.types import Collected

CLOSING_S = 10.0  # a last decoding step, a last score


class RolloutPrefetcher:
    """`next(step)` for steps 1, 2 ... in order."""

    def __init__(self, algorithm: Algorithm, ahead: bool = False) -> None:
        self.algorithm, self.ahead = algorithm, ahead
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
        """What this step has collected; with `ahead`, the following one begins to be sampled."""
        self.begun = step
        collected = self.algorithm.collect(step) if self._next is None else self._next.result()
        self._next = None
        if self.ahead and step < self.n_steps:
            self._next = self._executor.submit(self.algorithm.collect, step + 1)
        return collected

    def drain(self) -> None:
        """Wait until nothing is being sampled; an error of sampling ahead is raised here."""
        if self._next is not None:
            self._next.result()

    def close(self) -> None:
        """Sampling ahead ends with its engine and its grader, which are to be closed before."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        wait_for([self._next] if self._next is not None else [], CLOSING_S)
