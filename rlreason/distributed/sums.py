"""What a step measures, added up over the ranks that have each measured their part of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlreason.distributed.ranks import Ranks
from rlreason.objectives.step_sums import StepSums, StepValues
from rlreason.types import Sample


@dataclass(slots=True)
class RankedSums(StepSums):
    """Sums of this rank's micro-batches; once read, of all ranks', on each of them."""

    ranks: Ranks = field(kw_only=True)

    def read(self, samples: Sequence[Sample], *more: Tensor) -> StepValues:
        """Everything as numbers, over all ranks, but for `more`, which all of them have alike."""
        mine = StepSums.read(self, samples, *more)
        counts, values = zip(*self.ranks.gathered((self.n_micro, mine)), strict=True)
        self.n_micro = sum(counts)
        return added(values)


def added(parts: Sequence[StepValues]) -> StepValues:
    """The values of one step that several ranks have measured, each on samples of its own.

    >>> one = StepValues({"loss": 1.0}, [2.0], [0.5, None], [0.1])
    >>> added([one, StepValues({"loss": 0.5}, [2.0], [None, 0.25], [])])
    StepValues(sums={'loss': 1.5}, more=[2.0], entropies=[0.5, 0.25], mismatches=[0.1])
    """
    names = dict.fromkeys(name for part in parts for name in part.sums)
    return StepValues(
        {name: sum(part.sums.get(name, 0.0) for part in parts) for name in names},
        parts[0].more,
        [next((e for e in found if e is not None), None) for found in zip(*(p.entropies for p in parts), strict=True)],
        [value for part in parts for value in part.mismatches],
    )
