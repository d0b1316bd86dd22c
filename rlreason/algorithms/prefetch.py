"""Hands the loop one collected step after the other; with `ahead`, the next is sampled while one is learned.

Sampling ahead means sampling with weights that are exactly one hand-over old: `wait` must be called before
weights move to the engine. It must not know engines or the optimizer.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from rlreason.algorithms.base import Algorithm, Collected

CLOSING_S = 10.0  # a last decoding step, a last score


class RolloutPrefetcher:
    """`take(step)` for steps 1, 2 ... in order."""

    def __init__(self, algorithm: Algorithm, ahead: bool = False) -> None:
        self.algorithm, self.ahead = algorithm, ahead
        self.n_steps = algorithm.n_steps
        self.begun = 0  # the step that was asked for last
        self._next: Future[Collected] | None = None
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling ahead")

    def take(self, step: int) -> Collected:
        self.begun = step
        collected = self.algorithm.collect(step) if self._next is None else self._next.result()
        self._next = None
        if self.ahead and step < self.n_steps:
            self._next = self._beside.submit(self.algorithm.collect, step + 1)
        return collected

    def wait(self) -> None:
        """Until nothing is being sampled; an error of sampling ahead is raised here."""
        if self._next is not None:
            self._next.result()

    def close(self) -> None:
        """Sampling ahead ends with its engine and its grader, which are to be closed before."""
        self._beside.shutdown(wait=False, cancel_futures=True)
        wait_for([self._next] if self._next is not None else [], CLOSING_S)
