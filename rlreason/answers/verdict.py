"""The small vocabulary that the rooms of the grader share: a verdict, the settings of a comparison, a gold.

It must not know how anything is compared.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from rlreason.types import Outcome

#: What data sets hold as a right answer. A list means any of its members.
Gold = str | int | float | list[str | int | float]


class Verdict(NamedTuple):
    """`path` names the rule that decided."""

    outcome: Outcome
    path: str

    def as_dict(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "path": self.path}


@dataclass(frozen=True, slots=True)
class Settings:
    """`percent`: 38% may also be written 38. `rel_tol`: how close a decimal must come to a value that has no
    finite decimal form; it must also be that value, rounded or cut, so 0.3333 is never 1/3 at 1e-6.
    """

    percent: bool = True
    rel_tol: float = 1e-6


class RefusedError(Exception):
    """Working this out could cost more than any honest answer needs."""


def gold_texts(gold: Any) -> list[str] | None:
    """The texts of a gold answer, or None for a kind that is no gold at all.

    >>> gold_texts([38, "38.0"]), gold_texts(None)
    (['38', '38.0'], None)
    """
    members = gold if isinstance(gold, list) else [gold]
    texts: list[str] = []
    for member in members:
        if isinstance(member, str):
            texts.append(member)
        elif isinstance(member, int | float) and not isinstance(member, bool):
            try:
                texts.append(str(member))
            except ValueError:  # an integer of more digits than Python prints
                return None
        elif not isinstance(gold, list):
            return None
    return texts or None
