"""Where a run is: between which two of its acts. And what moves while it acts, as it was there."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rlreason.progress.step import Step


@dataclass
class Position:
    """Changed only in blocks that no signal interrupts, so a run that is stopped can be told where it was.

    In each step: collect, learn (each update gets its row), sync, record, evaluate where it is due.
    """

    finished: int = 0  # whole steps
    step: Step | None = None  # the one in hand, once it is collected
    rows: int = 0  # of its updates that stand in metrics.jsonl
    recorded: bool = False  # all of it does
    evaluated: Fraction | None = None  # steps that were done at the newest evaluation
    status: str = "finished"  # or what ends the run behind the step that has been recorded
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether something ends the run before its last step."""
        return self.status != "finished"

    def end_step(self, number: int) -> None:
        """Step 1, 2, ... is over."""
        self.finished, self.step, self.rows, self.recorded = number, None, 0, False

    def plain(self) -> dict[str, Any]:
        """Everything but the step in plain values."""
        at = self.evaluated
        return {
            "finished": self.finished,
            "rows": self.rows,
            "recorded": self.recorded,
            "evaluated": None if at is None else [at.numerator, at.denominator],
            "status": self.status,
            "reason": self.reason,
        }

    def put(self, plain: dict[str, Any], step: Step | None) -> None:
        """Become what `plain` was made of, with its step."""
        at = plain["evaluated"]
        self.finished, self.rows, self.recorded = plain["finished"], plain["rows"], plain["recorded"]
        self.status, self.reason, self.step = plain["status"], plain["reason"], step
        self.evaluated = None if at is None else Fraction(*at)


@dataclass
class Mark:
    """What also moves between two such blocks, as it was at the end of the last one.

    `draws`: which problems come next and which answers the graders remember; sampling moves it.
    """

    counters: dict[str, Any] = field(default_factory=dict)
    monitors: dict[str, Any] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)  # bytes of the files that grow
    generators: Any = None  # plain values and tensors of `random_states`
    weight_version: int = 0
    draws: dict[str, Any] = field(default_factory=dict)
