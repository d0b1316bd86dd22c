"""Write every request, answer and score of a run to a journal, and add up what it has spent.

Its lines, each with `event` and `at`, the seconds of the run so far:

    begin    the setup: model, problem, problem_hash, templates, first prompt, and start (program, source, result)
    part     the run starts, or is resumed
    ask      a request that is about to be sent: id, prompt_bound (its most tokens), max_tokens
    answer   its outcome: the fields of `Answer`
    score    of a reply's program: of (the reply, as "TURN.SAMPLE"), result
    alive    the run is still going: it counts the time of a run that is killed
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rlreason.config.algorithms import DiscoverConfig
from rlreason.discovery.log import Call
from rlreason.errors import ConfigError
from rlreason.records.files import finite
from rlreason.runtime.files import append_line

BEAT_S = 2.0
PER_MESSAGE = 16  # tokens that a chat template puts around a message, at most
FEWEST = 256  # tokens of a reply that are worth asking for
Event = dict[str, Any]
Messages = list[dict[str, str]]


class Answer(msgspec.Struct):
    """The outcome of one request; None where the server does not say."""

    outcome: str  # ok, http_NNN, timeout, connection, empty, broken (no chat completion), no_code, truncated
    content: str = ""  # without its thinking
    reasoning: str | None = None
    finish_reason: str | None = None
    detail: str = ""  # one line for a person, without the key
    prompt_tokens: int | None = None  # as the server counts them
    completion_tokens: int | None = None
    id: str = ""


class Journal:
    """The events of a run from its beginning, across kills and resumes."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        """Read the events of the file; cut off an unfinished last line, which a killed process leaves."""
        self.path = path
        self.begin: Event = {}
        self.asks: dict[str, Event] = {}  # by the id of the request
        self.answers: dict[str, Answer] = {}
        self.scores: dict[str, dict[str, Any]] = {}  # "TURN.SAMPLE" -> result
        self.by_program: dict[str, dict[str, Any]] = {}  # hash -> result
        self.seconds_before = 0.0  # until it was resumed
        data = path.read_bytes() if path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            warn(f"the last line of {path.name} is unfinished and was cut off: its process was killed")
            os.truncate(path, len(complete))
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                event = json.loads(line)
                self._add(event)
                self.seconds_before = max(self.seconds_before, event["at"])
            except (ValueError, LookupError, TypeError) as error:
                cure = "put it back from a copy, or choose another folder"
                raise ConfigError(f"{path} is damaged at line {number} ({error}): {cure}") from None
        self._began = self._beaten = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds that the run has taken, summed over its resumes."""
        return self.seconds_before + time.monotonic() - self._began

    @property
    def last_turn(self) -> int:
        """Return the newest turn with a request; 0 before the first."""
        return max((int(id.partition(".")[0]) for id in self.asks), default=0)

    def _add(self, event: Event) -> None:
        match event["event"]:
            case "begin":
                self.begin = event
            case "ask":
                self.asks[event["id"]] = event
            case "answer":
                self.answers[event["id"]] = msgspec.convert(event, Answer)
            case "score":
                self.scores[event["of"]] = self.by_program[event["result"]["program_sha256"]] = event["result"]

    def write(self, event: str, **fields: Any) -> None:
        """Append an event to the file. `UnwritableError` if the system refuses."""
        line = {"event": event, "at": round(self.seconds, 3), **fields}
        append_line(self.path, json.dumps(finite(line), allow_nan=False))
        self._add(line)
        self._beaten = time.monotonic()

    def beat(self) -> None:
        """Write the time, at most every two seconds, so that the hours of a killed run count."""
        if time.monotonic() - self._beaten > BEAT_S:
            self.write("alive")


def prompt_bound(messages: Messages) -> int:
    """Return an upper bound on a prompt's tokens: every token is at least one byte.

    >>> prompt_bound([{"role": "user", "content": "abcd"}])
    20
    """
    return sum(len(message["content"].encode()) + PER_MESSAGE for message in messages)


class Spending:
    """Sums the tokens of all requests, and reserves the most that those in progress may use."""

    def __init__(self, run: DiscoverConfig) -> None:
        """Take the budget, and the prices of a million tokens; an unknown one counts as 0."""
        self.budget = run.budget
        self.prompt_price, self.completion_price = run.client.prompt_price or 0.0, run.client.completion_price or 0.0
        self.calls = self.prompt_tokens = self.completion_tokens = 0
        self._reserved: dict[str, Event] = {}

    @property
    def tokens(self) -> int:
        """Return the tokens of prompts and replies."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> float:
        """Return the cost by the prices."""
        return self._price(self.prompt_tokens, self.completion_tokens)

    def _price(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6

    def seconds_left(self, seconds: float) -> float:
        """Return the remaining seconds of the hours, after so many of the run."""
        hours = self.budget.hours
        return math.inf if hours is None else max(0.0, hours * 3600 - seconds)

    def begin(self, ask: Event) -> None:
        """Count a request and reserve the most that it may use, before it is sent."""
        self.calls += 1
        self._reserved[ask["id"]] = ask

    def end(self, id: str, answer: Answer | None) -> Call:
        """Replace the reservation of a request by its use: as the server counts it, else the most that it can be.

        `answer`: None if it was lost. Refused requests, which the model never saw, cost nothing.
        """
        ask = self._reserved.pop(id)
        prompt, completion, counted = ask["prompt_bound"], ask["max_tokens"], "at most"
        outcome = answer.outcome if answer else "interrupted"
        if answer and answer.prompt_tokens is not None and answer.completion_tokens is not None:
            prompt, completion, counted = answer.prompt_tokens, answer.completion_tokens, "by the server"
        elif outcome == "connection" or (outcome.startswith("http_") and not outcome.startswith("http_5")):
            prompt, completion, counted = 0, 0, "estimated"
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        return Call(id, outcome, prompt, completion, counted, round(self._price(prompt, completion), 9))

    def room(self, bound: int, max_tokens: int, seconds: float) -> tuple[int, str]:
        """Return (the most tokens that the next reply may have, ""), or (0, the budget that is spent).

        `bound`: the most tokens of the prompt; `seconds`: of the run so far. A reply is shortened to what the budget
        leaves, down to `FEWEST` tokens, or to `max_tokens` if that is less.
        """
        budget = self.budget
        if budget.calls is not None and self.calls >= budget.calls:
            return 0, f"budget.calls={budget.calls} are spent"
        if not self.seconds_left(seconds):
            return 0, f"budget.hours={budget.hours:g} are spent"
        prompts = bound + sum(ask["prompt_bound"] for ask in self._reserved.values())
        replies = sum(ask["max_tokens"] for ask in self._reserved.values())
        allowed, fewest = float(max_tokens), min(FEWEST, max_tokens)
        if budget.tokens is not None:
            allowed = min(allowed, budget.tokens - self.tokens - prompts - replies)
            if allowed < fewest:
                return 0, f"budget.tokens={budget.tokens}: {self.tokens} are spent, and one more call could exceed it"
        if budget.cost is not None:
            left = budget.cost - self.cost - self._price(prompts, replies)
            if self.completion_price:
                allowed = min(allowed, left / (self.completion_price / 1e6))
            if left < 0 or allowed < fewest:
                return 0, f"budget.cost={budget.cost:g}: {self.cost:.6g} are spent, and one more call could exceed it"
        return int(allowed), ""
