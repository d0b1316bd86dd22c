"""What a comparison returns, a verdict, and the settings that it is given besides the two texts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from rlreason.types import Outcome


class Verdict(NamedTuple):
    """`path` names the rule that decided."""

    outcome: Outcome
    path: str

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON holds it, on its way from a worker process."""
        return {"outcome": self.outcome, "path": self.path}


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """`percent`: 38% may also be written 38. `rel_tol`: how close a decimal must come to a value that has no
    finite decimal form; it must also be that value, rounded or cut, so 0.3333 is never 1/3 at 1e-6.
    """

    percent: bool = True
    rel_tol: float = 1e-6


class RefusedError(Exception):
    """Working this out could cost more than any honest answer needs."""
