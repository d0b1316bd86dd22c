"""SFT: `-A log p` with A = 1 on given responses.

The loss is a mean over the response tokens of a whole optimizer step (`length_norm=token`), so how the step is
cut into micro-batches changes nothing. The prompt is read and not learned; the end token is learned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

from rlreason.types import Collected, Grade, Response, Sample

GIVEN = Grade(1.0, 1.0, 1.0, "correct", path="given")  # a trace to imitate is not graded


def sft_sample(prompt_ids: list[int], response_ids: list[int], text: str, problem_id: str = "given") -> Sample:
    """A given response as a sample with advantage 1; `response_ids` hold the end token."""
    return Sample(Response(problem_id, prompt_ids, response_ids, [], text, "stop"), GIVEN, advantage=1.0)


@dataclass(frozen=True)
class SFT:
    """`collect(step)` -> the next traces, in passes over all of them, each in its own order."""

    traces: Sequence[Sample]
    batch_size: int
    seed: int
    steps: int | None = None
    epochs: float | None = None  # one of the two is given
    _orders: dict[int, list[int]] = field(default_factory=dict)

    @cached_property
    def total(self) -> int:
        """How many traces are learned from, repetitions included."""
        if self.steps is not None:
            return self.steps * self.batch_size
        assert self.epochs is not None
        return max(1, round(self.epochs * len(self.traces)))

    @property
    def n_steps(self) -> int:
        """Optimizer steps, the last of which may be smaller."""
        return math.ceil(self.total / self.batch_size)

    @property
    def state(self) -> dict[str, Any]:
        """Nothing: the traces of a step follow from its number."""
        return {}

    def put(self, state: dict[str, Any]) -> None:
        """Nothing to go on from."""

    def collect(self, step: int) -> Collected:
        """The step's traces as its one batch; nothing is sampled."""
        first = (step - 1) * self.batch_size
        last = min(first + self.batch_size, self.total)
        batch = [self._at(position) for position in range(first, last)]
        tokens = sum(len(s.response.token_ids) for s in batch)
        metrics = {"sft/epoch": last / len(self.traces), "sft/sequences": len(batch), "sft/response_tokens": tokens}
        return Collected([], [batch], metrics)

    def _at(self, position: int) -> Sample:
        epoch, place = divmod(position, len(self.traces))
        return self.traces[self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.traces)))
            Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
            self._orders.clear()  # passes follow one another: only the last is asked for again
            self._orders[epoch] = order
        return self._orders[epoch]
