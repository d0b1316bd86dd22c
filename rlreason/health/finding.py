"""One thing that is wrong with a run, or worth knowing of it: plain data for terminal, JSON and report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Course:
    """How a metric went: (step, value) in the order of the rows, values that are numbers alone."""

    metric: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Finding:
    """`rule`: its name, of a monitor where one has one. `problem`: else it is a note, which makes no run unhealthy."""

    rule: str
    what: str  # what is wrong, in a sentence with its figures
    evidence: Sequence[str] = ()  # where that stands: steps, files, lines
    causes: str = ""  # the commonest, in a sentence
    cure: str = ""  # what to try
    problem: bool = True
    step: int | None = None  # where it began
    figures: dict[str, float] = field(default_factory=dict)
    courses: Sequence[Course] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
