"""The config group `budget`: what a run may spend. What it has spent is counted over all parts of a resumed run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BUDGETS = ("hours", "tokens", "steps")


@dataclass
class BudgetConfig:
    """A run ends before the step that would exceed one of these, its last evaluation inside; null: no bound."""

    hours: float | None = None  # wall clock of everything from set-up to the last evaluation (time/total)
    tokens: int | None = None  # response tokens sampled to learn from (tokens/generated)
    steps: int | None = None  # steps as n_steps counts them, which stays what a falling learning rate falls towards


def raised(before: Mapping[str, float | None], now: Mapping[str, float | None], names: Sequence[str] = BUDGETS) -> bool:
    """Whether a budget allows more than another one, and less of nothing.

    >>> raised({"hours": 1.0, "tokens": None}, {"hours": 2.0, "tokens": None})
    True
    >>> raised({"hours": 1.0, "tokens": None}, {"hours": 2.0, "tokens": 100})
    False
    """
    pairs = [(before.get(name), now.get(name)) for name in names]
    more = [b is None or (a is not None and b > a) for a, b in pairs if a != b]
    return bool(more) and all(more)
