"""One step of a training run: what it has collected and learned so far, and the numbers that are recorded of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlreason.algorithms.rollouts import rollout_metrics
from rlreason.grading.metrics import grading_metrics
from rlreason.optimization import averaged
from rlreason.types import Collected, Sample, Update


@dataclass
class Step:
    """What one step of a run has collected and learned so far, and the numbers that are recorded of it."""

    number: int  # 1, 2, ...
    collected: Collected
    weight_version: int  # of the engine when all was sampled
    updates: list[Update] = field(default_factory=list)
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the weight sync

    @property
    def count(self) -> int:
        """How many updates learn from what was collected."""
        return len(self.collected.batches)

    @cached_property
    def samples(self) -> list[Sample]:
        """What was sampled, with the entropies that the first update has measured. Ask when it is done."""
        if not self.updates:
            return self.collected.samples
        learned = zip(self.collected.batches[0], self.updates[0].entropies, strict=True)
        measured = {id(sample): entropy for sample, entropy in learned}
        return [replace(s, entropy=measured.get(id(s))) if s.entropy is None else s for s in self.collected.samples]

    @cached_property
    def sampled(self) -> dict[str, float]:
        """Metrics of what was sampled and how it was graded."""
        if not (samples := self.samples):
            return self.collected.metrics
        staleness = self.weight_version - sum(s.response.weight_version for s in samples) / len(samples)
        graded = grading_metrics([s.grade for s in samples])
        return self.collected.metrics | rollout_metrics(samples) | graded | {"rollout/staleness": staleness}

    def row(self) -> dict[str, float]:
        """The newest update; the first one's row has what was sampled for the step, and the last one's the sync."""
        newest = self.updates[-1].metrics if self.updates else {}
        last = self.synced if len(self.updates) == self.count else {}
        return newest | (self.sampled if len(self.updates) < 2 else {}) | last

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The whole step in numbers. Ask when it is over."""
        return averaged([u.metrics for u in self.updates]) | self.sampled | self.synced


def tokens_of(samples: Sequence[Sample]) -> int:
    """Response tokens in these."""
    return sum(len(s.response.token_ids) for s in samples)
