"""When a checkpoint is due, from what the ones before have cost."""

from dataclasses import dataclass

SHARE = 0.03  # of a run's time that checkpoints may take where the run decides,
SHARE_OF_BEST = 0.05  # and where the newest evaluation is the best so far
BYTES_PER_S = 2e8  # a cautious guess before the first one has been written


@dataclass
class Cost:
    """What the checkpoints of a run have cost in this process.

    `guess`: seconds that the first one is expected to take.
    """

    guess: float
    count: int = 0
    seconds: float = 0.0  # of all
    newest: float = 0.0  # seconds that the newest took
    bytes: int = 0  # of the newest

    def summary(self) -> dict[str, float]:
        """How many there were, their seconds, and the bytes of the newest."""
        return {"count": self.count, "seconds": round(self.seconds, 2), "bytes": self.bytes}

    def add(self, seconds: float, size: int) -> None:
        """One more was written."""
        self.count, self.seconds, self.newest, self.bytes = self.count + 1, self.seconds + seconds, seconds, size


def checkpoint_due(step: int, every: int | None, best: bool, elapsed: float, cost: Cost) -> bool:
    """Whether a checkpoint belongs behind step 1, 2, ...

    every: steps between them, 0 for none; None: where their seconds with the next one stay within 3% of the `elapsed`
    seconds of the run, or 5% where the newest evaluation is the `best`.

    >>> [checkpoint_due(step, 2, False, 0.0, Cost(1.0)) for step in (1, 2)]
    [False, True]
    >>> [checkpoint_due(1, None, best, 25.0, Cost(1.0)) for best in (False, True)]
    [False, True]
    """
    if every is not None:
        return every > 0 and step % every == 0
    expected = cost.newest or cost.guess
    return cost.seconds + expected <= (SHARE_OF_BEST if best else SHARE) * elapsed
