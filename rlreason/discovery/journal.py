"""Write every request, answer and score of a run to a journal, and add up what it has spent."""

import json
import time
from collections.abc import Callable, Iterator
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
COUNTED, AT_MOST, ESTIMATED = "by the server", "at most", "estimated"


class Event(msgspec.Struct, tag_field="event", kw_only=True):
    """A line of the journal."""

    at: float = 0.0  # seconds of the run so far


class Start(msgspec.Struct):
    """The program that the model begins with, and its score."""

    program: str
    source: str
    result: dict[str, Any]


class Begin(Event, tag="begin"):
    """The setup of the run."""

    model: str
    problem: str
    problem_hash: str
    templates: dict[str, str]
    first: str
    start: Start


class Ask(Event, tag="ask"):
    """A request that is about to be sent, with an upper bound on its tokens."""

    id: str
    prompt_bound: int
    max_tokens: int


class Answer(msgspec.Struct, tag_field="event", tag="answer"):
    """The outcome of one request.

    `outcome`: ok | http_NNN (the server's status) | timeout | connection | empty (a reply without content) | broken
    (no JSON, or not of the shape) | no_code, truncated (a reply without a whole program). `content`: the reply without
    its thinking. `reasoning`: the thinking, where the server shows it. Tokens: as the server counts them, None where it
    does not say. `retry_after_s`: how long the server asks to wait. `detail`: one line for a person, without the key.
    """

    outcome: str
    content: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None
    detail: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    retry_after_s: float | None = None
    id: str = ""
    at: float = 0.0


class Scored(Event, tag="score"):
    """The score of a reply's program. `of`: the reply, as "TURN.SAMPLE"."""

    of: str
    result: dict[str, Any]


class Part(Event, tag="part"):
    """The run starts, or is resumed."""


class Alive(Event, tag="alive"):
    """The run is still going: it counts the time of a run that is killed."""


class Journal:
    """The events of a run from its beginning, across kills and resumes."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        """Read the events of the file; cut off an unfinished last line, which a killed process leaves."""
        self.path = path
        self.begin: Begin | None = None
        self.asks: dict[str, Ask] = {}  # by the id of the request
        self.answers: dict[str, Answer] = {}
        self.scores: dict[str, dict[str, Any]] = {}  # "TURN.SAMPLE" -> result
        self.by_program: dict[str, dict[str, Any]] = {}  # hash -> result
        self.seconds_before = 0.0  # until it was resumed
        for event in _read(path, warn):
            self._add(event)
            self.seconds_before = max(self.seconds_before, event.at)
        self._began = self._beaten = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds that the run has taken, summed over its resumes."""
        return self.seconds_before + time.monotonic() - self._began

    @property
    def last_turn(self) -> int:
        """Return the newest turn with a request; 0 before the first."""
        return max((int(id.partition(".")[0]) for id in self.asks), default=0)

    def _add(self, event: Event | Answer) -> None:
        match event:
            case Begin():
                self.begin = event
            case Ask():
                self.asks[event.id] = event
            case Answer():
                self.answers[event.id] = event
            case Scored():
                self.scores[event.of] = event.result
                self.by_program[event.result["program_sha256"]] = event.result

    def write(self, event: Event | Answer) -> None:
        """Append an event to the file. `UnwritableError` if the system refuses."""
        event.at = round(self.seconds, 3)
        append_line(self.path, json.dumps(finite(msgspec.to_builtins(event)), allow_nan=False))
        self._add(event)
        self._beaten = time.monotonic()

    def beat(self) -> None:
        """Write the time, at most every two seconds, so that the hours of a killed run count."""
        if time.monotonic() - self._beaten > BEAT_S:
            self.write(Alive())


def _read(path: Path, warn: Callable[[str], object]) -> Iterator[Event | Answer]:
    """Yield the events of a file; `ConfigError` if a line other than the last is damaged."""
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        warn(f"the last line of {path.name} is unfinished and was cut off: its process was killed")
        with path.open("r+b") as file:
            file.truncate(len(complete))
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            yield msgspec.convert(json.loads(line), Begin | Ask | Answer | Scored | Part | Alive)
        except ValueError as error:
            raise ConfigError(
                f"{path} is damaged at line {number} ({error}): put it back from a copy, or choose another folder"
            ) from None


def prompt_bound(messages: list[dict[str, str]]) -> int:
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
        self._reserved: dict[str, Ask] = {}

    @property
    def tokens(self) -> int:
        """Return the tokens of prompts and replies."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> float:
        """Return the cost by the prices."""
        return self.price(self.prompt_tokens, self.completion_tokens)

    def price(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the cost of so many tokens."""
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6

    def begin(self, ask: Ask) -> None:
        """Count a request and reserve the most that it may use, before it is sent."""
        self.calls += 1
        self._reserved[ask.id] = ask

    def end(self, id: str, answer: Answer | None) -> Call:
        """Replace the reservation of a request by its use: as the server counts it, else the most that it can be.

        `answer`: None if it was lost. Refused requests, which the model never saw, cost nothing.
        """
        ask = self._reserved.pop(id)
        prompt, completion, counted = ask.prompt_bound, ask.max_tokens, AT_MOST
        outcome = answer.outcome if answer else "interrupted"
        if answer and answer.prompt_tokens is not None and answer.completion_tokens is not None:
            prompt, completion, counted = answer.prompt_tokens, answer.completion_tokens, COUNTED
        elif outcome == "connection" or (outcome.startswith("http_") and not outcome.startswith("http_5")):
            prompt, completion, counted = 0, 0, ESTIMATED
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        return Call(id, outcome, prompt, completion, counted, round(self.price(prompt, completion), 9))

    def room(self, bound: int, max_tokens: int, seconds: float) -> tuple[int, str]:
        """Return (the most tokens that the next reply may have, ""), or (0, the budget that is spent).

        `bound`: the most tokens of the prompt; `seconds`: of the run so far. A reply is shortened to what the budget
        leaves, down to `FEWEST` tokens, or to `max_tokens` if that is less.
        """
        budget = self.budget
        if budget.calls is not None and self.calls >= budget.calls:
            return 0, f"budget.calls={budget.calls} are spent"
        if budget.hours is not None and seconds >= budget.hours * 3600:
            return 0, f"budget.hours={budget.hours:g} are spent"
        prompts = bound + sum(ask.prompt_bound for ask in self._reserved.values())
        replies = sum(ask.max_tokens for ask in self._reserved.values())
        allowed, fewest = float(max_tokens), min(FEWEST, max_tokens)
        if budget.tokens is not None:
            allowed = min(allowed, budget.tokens - self.tokens - prompts - replies)
            if allowed < fewest:
                return 0, f"budget.tokens={budget.tokens}: {self.tokens} are spent, and one more call could exceed it"
        if budget.cost is not None:
            left = budget.cost - self.cost - self.price(prompts, replies)
            if self.completion_price:
                allowed = min(allowed, left / (self.completion_price / 1e6))
            if left < 0 or allowed < fewest:
                return 0, f"budget.cost={budget.cost:g}: {self.cost:.6g} are spent, and one more call could exceed it"
        return int(allowed), ""
