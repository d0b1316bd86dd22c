"""What a run may spend and has spent: hard bounds, kept by asking for nothing whose worst case would exceed them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlreason.config.discover import DiscoverBudgetConfig

PER_MESSAGE = 16  # tokens that a chat template puts around a message, at most
FEWEST = 256  # tokens of a reply that are worth asking for
COUNTED, AT_MOST, ESTIMATED = "by the server", "at most", "estimated"


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens; None: not known."""

    prompt: float | None = None
    completion: float | None = None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost; 0 where the prices are not known.

        >>> Prices(1.0, 2.0).cost(500_000, 250_000)
        1.0
        """
        return (prompt_tokens * (self.prompt or 0.0) + completion_tokens * (self.completion or 0.0)) / 1e6


@dataclass(frozen=True, slots=True)
class Use:
    """Tokens of one request, and how they are known."""

    prompt_tokens: int
    completion_tokens: int
    counted: str = COUNTED


def prompt_bound(messages: list[dict[str, str]]) -> int:
    """Tokens of a prompt, at most: every token stands for a byte or more.

    >>> prompt_bound([{"role": "user", "content": "abcd"}])
    20
    """
    return sum(len(message["content"].encode()) + PER_MESSAGE for message in messages)


def use_of(asked: Mapping[str, Any], answer: Mapping[str, Any] | None) -> Use:
    """What a request took: as the server says, else the most that it can have been.

    `asked`, `answer`: its events in the journal; no answer: it was sent, perhaps, and nobody heard of it again. Errors
    that servers give before they begin cost nothing.
    """
    if answer is None:
        return Use(asked["prompt_bound"], asked["max_tokens"], AT_MOST)
    outcome = answer["outcome"]
    prompt, completion = answer.get("prompt_tokens"), answer.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(completion, int):
        return Use(prompt, completion)
    if outcome == "connection" or (outcome.startswith("http_") and not outcome.startswith("http_5")):
        return Use(0, 0, ESTIMATED)
    return Use(asked["prompt_bound"], asked["max_tokens"], AT_MOST)


class Spending:
    """The sum over all requests so far, and what is set aside for those under way."""

    def __init__(self, budget: DiscoverBudgetConfig, prices: Prices) -> None:
        self.budget, self.prices = budget, prices
        self.calls = self.prompt_tokens = self.completion_tokens = 0
        self._under_way: dict[str, Use] = {}

    @property
    def tokens(self) -> int:
        """Tokens of prompts and replies."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> float:
        """By the prices."""
        return self.prices.cost(self.prompt_tokens, self.completion_tokens)

    def add(self, use: Use) -> None:
        """A request of an earlier part."""
        self.calls += 1
        self._count(use)

    def _count(self, use: Use) -> None:
        self.prompt_tokens += use.prompt_tokens
        self.completion_tokens += use.completion_tokens

    def begin(self, id: str, bound: int, max_tokens: int) -> None:
        """A request is about to be sent."""
        self.calls += 1
        self._under_way[id] = Use(bound, max_tokens)

    def end(self, id: str, use: Use) -> None:
        """It has come back."""
        del self._under_way[id]
        self._count(use)

    def room(self, bound: int, max_tokens: int, seconds: float) -> tuple[int, str]:
        """(tokens that a reply may have now, ""), or (0, which budget is spent).

        bound: tokens of the prompt at most. seconds: of the run so far. A reply is shortened to what is left, down to
        `FEWEST` tokens or to `max_tokens` where these are fewer.
        """
        budget = self.budget
        if budget.calls is not None and self.calls >= budget.calls:
            return 0, f"budget.calls={budget.calls} are spent"
        if budget.hours is not None and seconds >= budget.hours * 3600:
            return 0, f"budget.hours={budget.hours:g} are spent"
        waiting = list(self._under_way.values())
        prompts, replies = sum(w.prompt_tokens for w in waiting), sum(w.completion_tokens for w in waiting)
        allowed, fewest = float(max_tokens), min(FEWEST, max_tokens)
        if budget.tokens is not None:
            allowed = min(allowed, budget.tokens - self.tokens - prompts - replies - bound)
            if allowed < fewest:
                return 0, _left(f"budget.tokens={budget.tokens}", f"{self.tokens}")
        if budget.cost is not None:
            left = budget.cost - self.cost - self.prices.cost(prompts + bound, replies)
            each = (self.prices.completion or 0.0) / 1e6
            allowed = min(allowed, left / each) if each and left > 0 else (allowed if left >= 0 else 0.0)
            if allowed < fewest:
                return 0, _left(f"budget.cost={budget.cost:g}", f"{self.cost:.6g}")
        return int(allowed), ""


def _left(budget: str, spent: str) -> str:
    return f"{budget}: {spent} are spent, and one more call could exceed it"
