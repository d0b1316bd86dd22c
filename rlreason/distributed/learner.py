"""A learner on several ranks that each hold the whole model: they deal the micro-batches and sum the gradients.

Every rank has all samples of a step, so the divisors of the loss are the same on each, and those of one process.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlreason.config.optimization import OptimizationConfig
from rlreason.distributed.ranks import PartedError, Ranks
from rlreason.distributed.sums import RankedSums
from rlreason.learner import Counted, Learner
from rlreason.model.policy import Policy
from rlreason.model.watched import sampled_elements
from rlreason.objectives.objective import Objective
from rlreason.types import Sample, Update

Plain = dict[str, Any]


class RankedLearner(Learner):
    """The learner of one rank. What changes weights is done by all of them together, when that of rank 0 does it."""

    def __init__(
        self, ranks: Ranks, policy: Policy, objective: Objective, optimization: OptimizationConfig, **settings: Any
    ) -> None:
        """`settings`: as of `Learner`."""
        self.ranks, self.world = ranks, ranks.world
        self.ended: Callable[[], object] = lambda: None  # called when the other ranks have been told to end
        super().__init__(policy, objective, optimization, **settings)

    def take(
        self, samples: Sequence[Sample], learning_rate: float | None, mismatch_from: int | None, counted: Counted
    ) -> Update:
        """One optimizer step, by all ranks."""
        with self.ranks.together("update", samples, learning_rate, mismatch_from):
            update = super().take(samples, learning_rate, mismatch_from, counted)
            self.weights_moved()
        return update

    def restart(self) -> None:
        """Back to the first weights, on all ranks."""
        with self.ranks.together("restart"):
            super().restart()
            self.weights_moved()

    def new_sums(self) -> RankedSums:
        """Sums that are read over all ranks."""
        return RankedSums(ranks=self.ranks)

    def dealt(self, samples: Sequence[Sample]) -> Iterator[tuple[bool, list[int]]]:
        """Every so-many-th micro-batch of the step: those of rank r are r, r + world, ..."""
        for with_gradient, batches in groupby(super().dealt(samples), key=itemgetter(0)):
            yield from self.share_of(samples, with_gradient, [places for _, places in batches])

    def share_of(
        self, samples: Sequence[Sample], with_gradient: bool, batches: list[list[int]]
    ) -> Iterator[tuple[bool, list[int]]]:
        """This rank's of these micro-batches."""
        for places in batches[self.ranks.rank :: self.ranks.world]:
            yield with_gradient, places

    def clip(self) -> Tensor:
        """Sum the gradients of all ranks first."""
        self.ranks.summed([p.grad for p in self.parameters if p.grad is not None])
        return super().clip()

    def weights_moved(self) -> None:
        """All ranks must have the same weights: a look at some elements of each tensor."""
        marks = torch.cat([part.float().reshape(-1).cpu() for part in sampled_elements(self.parameters)])
        found = self.ranks.gathered(hashlib.sha256(marks.numpy().tobytes()).hexdigest()[:16])
        if len(set(found)) > 1:
            raise PartedError(
                f"training on {self.ranks.world} ranks: their weights have parted ({', '.join(found)}): resume from "
                "the last checkpoint, on GPUs of one kind"
            )

    def restore(self, moments: Sequence[Plain]) -> None:
        """Have the weights of rank 0, and these moments of its, on all ranks."""
        with self.ranks.together("restore", described(moments)):
            self.receive(moments)

    def receive(self, moments: Sequence[Plain]) -> None:
        """Weights and moments as rank 0 has them; elsewhere `moments` are what `described` says of them."""
        here = [{key: made(value) for key, value in kept.items()} for kept in moments]
        super().restore(here)
        kept = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
        tensors = [value for state in kept for value in state.values() if isinstance(value, Tensor)]
        self.ranks.spread([*self.policy.model.parameters(), *self.policy.model.buffers(), *tensors])
        self.weights_moved()

    def close(self) -> None:
        """The other ranks are needed no more. Where one is lost, those that are left are ended."""
        with suppress(RuntimeError):
            self.ranks.end()
        self.ended()

    def orders(self) -> dict[str, Any]:
        """What rank 0 may ask of the others, by name."""

        def update(samples: Sequence[Sample], learning_rate: float | None, mismatch_from: int | None) -> None:
            self.take(samples, learning_rate, mismatch_from, lambda update: None)

        return {"update": update, "restart": self.restart, "restore": self.receive, "write_moments": self.write_moments}

    def write_moments(self, folder: Path) -> None:
        """Rank 0 has all of them."""


def described(moments: Sequence[Plain]) -> list[Plain]:
    """Moments with shape and type in place of every tensor."""
    return [
        {key: (value.shape, value.dtype) if isinstance(value, Tensor) else value for key, value in kept.items()}
        for kept in moments
    ]


def made(value: Any) -> Any:
    """An empty tensor of such a shape and type; anything else as it is."""
    described_tensor = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)
    return torch.empty(value[0], dtype=value[1]) if described_tensor else value
