"""Record what a run has done and spent, before and after everything that costs."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlreason.config.algorithms import DiscoverBudgetConfig, DiscoverConfig
from rlreason.discovery.exchange import Attempt
from rlreason.discovery.turns import DiscoveryProblem, Reply, without_measurements
from rlreason.errors import ConfigError
from rlreason.records.files import finite
from rlreason.runtime.files import append_line

BEAT_S = 2.0


def id_of(turn: int, sample: int, attempt: int) -> str:
    """Return the id of a request.

    >>> id_of(3, 0, 2)
    '3.0.2'
    """
    return f"{turn}.{sample}.{attempt}"


class Journal:
    """The events of a run, those of its earlier parts first."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        """Read existing events; an unfinished last line of a killed process is cut off."""
        self.path = path
        self.begin: dict[str, Any] | None = None
        self.asked: dict[str, dict[str, Any]] = {}  # id -> the event before it was sent
        self.answers: dict[str, dict[str, Any]] = {}  # id -> the event after it
        self.scores: dict[str, dict[str, Any]] = {}  # "T.S" -> result
        self.by_program: dict[str, dict[str, Any]] = {}  # hash -> result
        self.seconds_before = 0.0  # in earlier parts
        for event in _read(path, say):
            self._take(event)
        self._began = self._beaten = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the wall clock of all parts so far."""
        return self.seconds_before + time.monotonic() - self._began

    @property
    def last_turn(self) -> int:
        """Return the newest turn with a request; 0 before the first."""
        return max((int(id.partition(".")[0]) for id in self.asked), default=0)

    def _take(self, event: dict[str, Any]) -> None:
        self.seconds_before = max(self.seconds_before, float(event.get("at", 0.0)))
        match event["event"]:
            case "begin":
                self.begin = event
            case "ask":
                self.asked[event["id"]] = event
            case "answer":
                self.answers[event["id"]] = event
            case "score":
                self.scores[event["of"]] = event["result"]
                self.by_program[event["result"]["program_sha256"]] = event["result"]

    def write(self, event: str, **what: Any) -> None:
        """Append an event; it is in the file when this returns. `UnwritableError` if the system refuses."""
        told = {"event": event, "at": round(self.seconds, 3), **what}
        append_line(self.path, json.dumps(finite(told), allow_nan=False))
        before = self.seconds_before
        self._take(told)
        self.seconds_before, self._beaten = before, time.monotonic()

    def beat(self) -> None:
        """Record that time passes, at most every two seconds, so that a killed run has counted it."""
        if time.monotonic() - self._beaten > BEAT_S:
            self.write("alive")

    def answer(self, id: str, attempt: Attempt, outcome: str, **more: Any) -> None:
        """Record the answer to a request, with an outcome that may be more specific than the attempt's."""
        told = {name: getattr(attempt, name) for name in ("content", "reasoning", "finish_reason", "detail")}
        counts = {name: getattr(attempt, name) for name in ("prompt_tokens", "completion_tokens")}
        self.write("answer", id=id, outcome=outcome, **told, **counts, **more)


def _read(path: Path, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Read the events of a file; `ConfigError` if a line other than the last is damaged."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        say(f"the last line of {path.name} is unfinished and was cut off: its process was killed")
        with path.open("r+b") as file:
            file.truncate(len(whole))
    events = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            event = json.loads(line)
            if not isinstance(event["event"], str) or not _is_sound(event):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{path} is damaged at line {number}: put it back from a copy, or choose another folder"
            ) from None
        events.append(event)
    return events


def _is_sound(event: dict[str, Any]) -> bool:
    """Return whether an event has all that resuming needs."""
    needed: dict[str, dict[str, type | tuple[type, ...]]] = {
        "begin": {"model": str, "first": str, "problem": str, "templates": dict, "start": dict},
        "ask": {"id": str, "prompt_bound": int, "max_tokens": int},
        "answer": {"id": str, "outcome": str, "content": str},
        "score": {"of": str, "result": dict},
    }
    sound = all(isinstance(event.get(name), kind) for name, kind in needed.get(event["event"], {}).items())
    return sound and isinstance(event.get("at", 0.0), int | float)


PER_MESSAGE = 16  # tokens that a chat template puts around a message, at most
FEWEST = 256  # tokens of a reply that are worth asking for
COUNTED, AT_MOST, ESTIMATED = "by the server", "at most", "estimated"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens; None: unknown."""

    prompt: float | None = None
    completion: float | None = None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the cost of so many tokens; 0 if the prices are unknown.

        >>> Prices(1.0, 2.0).cost(500_000, 250_000)
        1.0
        """
        return (prompt_tokens * (self.prompt or 0.0) + completion_tokens * (self.completion or 0.0)) / 1e6


@dataclass(frozen=True, slots=True)
class Use:
    """Tokens of one request, and how they were counted."""

    prompt_tokens: int
    completion_tokens: int
    counted: str = COUNTED


def prompt_bound(messages: list[dict[str, str]]) -> int:
    """Return an upper bound on a prompt's tokens: every token is at least one byte.

    >>> prompt_bound([{"role": "user", "content": "abcd"}])
    20
    """
    return sum(len(message["content"].encode()) + PER_MESSAGE for message in messages)


def use_of(asked: Mapping[str, Any], answer: Mapping[str, Any] | None) -> Use:
    """Return what a request used: as the server says, else an upper bound.

    `asked`, `answer`: its events in the journal; no answer: it may have been sent, and the answer was lost. Errors that
    servers return before they begin cost nothing.
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
    """The sum over all requests so far, and the amount reserved for those in progress."""

    def __init__(self, budget: DiscoverBudgetConfig, prices: Prices) -> None:
        self.budget, self.prices = budget, prices
        self.calls = self.prompt_tokens = self.completion_tokens = 0
        self._under_way: dict[str, Use] = {}

    @property
    def tokens(self) -> int:
        """Return the tokens of prompts and replies."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> float:
        """Return the cost by the prices."""
        return self.prices.cost(self.prompt_tokens, self.completion_tokens)

    def add(self, use: Use) -> None:
        """Add a request of an earlier part."""
        self.calls += 1
        self._count(use)

    def _count(self, use: Use) -> None:
        self.prompt_tokens += use.prompt_tokens
        self.completion_tokens += use.completion_tokens

    def begin(self, id: str, bound: int, max_tokens: int) -> None:
        """Reserve the most that a request may use, before it is sent."""
        self.calls += 1
        self._under_way[id] = Use(bound, max_tokens)

    def end(self, id: str, use: Use) -> None:
        """Replace the reservation of a request by its use."""
        del self._under_way[id]
        self._count(use)

    def room(self, bound: int, max_tokens: int, seconds: float) -> tuple[int, str]:
        """Return (tokens that a reply may have now, ""), or (0, the budget that is spent).

        bound: tokens of the prompt at most. seconds: of the run so far. A reply is shortened to what is left, down to
        `FEWEST` tokens or to `max_tokens` if that is less.
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


def log_of(
    run: DiscoverConfig,
    problem: DiscoveryProblem,
    begin: Mapping[str, Any],
    replies: Sequence[Reply],
    spending: Spending,
    best: Mapping[str, Any],
    ended: str | None,
) -> dict[str, Any]:
    """Return the log. `begin`: the journal's first event; `best`: score, sha256 and turn of the best program."""
    start, client = begin["start"], run.client
    return {
        "problem": run.problem,
        "title": problem.title,
        "unit": problem.unit,
        "strategy": run.strategy,
        "model": begin["model"],
        "seed": run.seed,
        "settings": {
            "replies": run.side_by_side,
            "temperature": client.temperature,
            "thinking": client.thinking,
            "max_tokens": client.max_tokens,
            "extra": client.extra or {},
            "retries": client.retries,
            "hints": run.prompts.hints,
            "history": run.history if run.converses else 0,
            "restart_after": run.restart_after,
            "score": {name: asdict(run.score)[name] for name in ("timeout_s", "memory_mb", "check_timeout_s")},
            "budget": asdict(run.budget),
        },
        "system": client.system,
        "first_prompt": begin["first"],
        "start": {
            "program": start["program"],
            "program_sha256": start["result"]["program_sha256"],
            "score": start["result"]["score"],
            "result": without_measurements(start["result"]),
        },
        "turns": [reply.as_row() for reply in replies],
        "spent": {
            "calls": spending.calls,
            "prompt_tokens": spending.prompt_tokens,
            "completion_tokens": spending.completion_tokens,
            "cost": round(spending.cost, 9),
        },
        "best": {"score": best["score"], "turn": best["turn"], "program_sha256": best["sha256"]},
        "record": [dict(row) for row in problem.record],
        "ended": ended,
    }
