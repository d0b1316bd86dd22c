"""What a discover run writes down: calls.jsonl, its journal, to resume from, and conversation_log.json for the report.

The lines of the journal have `event` and `at`, the seconds of the run so far:

    begin    the setup: model, problem, problem_hash, templates, first prompt, and start (program, source, result)
    part     the run starts, or is resumed
    ask      a request that is about to be sent: id, prompt_bound (its most tokens), max_tokens
    answer   its outcome: the fields of `Answer`
    score    of a reply's program: of (the reply, as "TURN.SAMPLE"), result
"""

import json
import os
import re
import time
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rlreason.config.algorithms import DiscoverConfig
from rlreason.errors import ConfigError
from rlreason.records.files import CONVERSATION, line_of
from rlreason.runtime.files import append_line
from rlreason.runtime.text import shorten, visible

PER_MESSAGE = 16  # tokens that a chat template puts around a message, at most
FIRST = "first"  # the kind of the bare first prompt
Event = dict[str, Any]
Messages = list[dict[str, str]]
Result = dict[str, Any]  # of the verifier on a program, as docs/discovery.md lists it


class Call(msgspec.Struct):
    """One request to the model's endpoint: each counts as one, whatever its outcome."""

    id: str
    outcome: str  # "ok", or what went wrong: "http_429", "timeout", "no_code" ...
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_counted: str | None = None  # "by the server", "at most" or "estimated"
    cost: float = 0.0


class Reply(msgspec.Struct):
    """The model's text, and its thinking."""

    content: str | None
    reasoning: str | None = None
    finish_reason: str | None = None


class Turn(msgspec.Struct, kw_only=True):
    """One prompt with its calls, reply, program and verdict; a turn with several replies has one for each sample."""

    turn: int
    sample: int
    conversation: int = 1
    sees: list[str] = []  # ids of the turns that the model sees again
    prompt: str
    prompt_kind: str  # "first", "error", "extend", "no_code"
    calls: list[Call] = []
    reply: Reply | None = None
    program: str | None = None
    program_sha256: str | None = None
    result: Result | None = None
    chosen: bool = False  # the conversation continues with it
    improved: bool = False
    best_so_far: int = 0

    @property
    def id(self) -> str:
        """Return "TURN.SAMPLE"."""
        return f"{self.turn}.{self.sample}"

    @property
    def content(self) -> str:
        """Return the model's text; "" if there is none."""
        return (self.reply.content if self.reply else None) or ""

    @property
    def is_valid(self) -> bool:
        """Return whether its program gave a set that counts."""
        return self.result is not None and self.result["validity"] == 1

    @property
    def credit(self) -> int:
        """Return the score of its program, which is 0 if its set does not count."""
        return int(self.result["score"]) if self.result else 0

    @property
    def is_independent(self) -> bool:
        """Return whether the model saw only the bare first prompt."""
        return self.prompt_kind == FIRST and not self.sees


class Record(msgspec.Struct, omit_defaults=True):
    """A score that others reached."""

    score: int | float
    who: str = ""
    note: str = ""


class Log(msgspec.Struct, kw_only=True):
    """One run. `ended` is None while it is in progress, and if it was killed."""

    problem: str
    title: str = ""
    unit: str = "points"
    strategy: Annotated[str, msgspec.Meta(pattern="^(simple|best_of_n|refine|hybrid)$")]
    model: str
    seed: int
    settings: dict[str, Any]
    system: str | None = None
    first_prompt: str
    start: dict[str, Any]  # the program that it began with: program (its name), program_sha256, score, result
    turns: list[Turn]
    spent: dict[str, int | float]  # so far: calls, prompt_tokens, completion_tokens, cost, as far as they are known
    best: dict[str, Any]  # score, turn (its id, or "start") and program_sha256 of the best program
    record: list[Record] = []
    ended: str | None = None
    folder: Path = Path()  # not in the file

    @property
    def calls(self) -> int:
        """Return how many requests its turns made, including retries."""
        return self.curve()[0][-1]

    def curve(self) -> tuple[list[int], list[int]]:
        """Return (calls, best score so far) at the start and after each turn, computed from the verdicts."""
        calls = accumulate((len(turn.calls) for turn in self.turns), initial=0)
        best = accumulate((turn.credit for turn in self.turns), max, initial=self.start["score"])
        return list(calls), list(best)

    def best_at(self, calls: int) -> int:
        """Return the best score after so many calls; a turn with later calls does not count yet."""
        return max(best for made, best in zip(*self.curve(), strict=True) if made <= calls)

    def text(self) -> str:
        """Return the file's text."""
        fields = msgspec.to_builtins(self, enc_hook=str)
        del fields["folder"]
        return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"


def read_log(folder: Path) -> Log:
    """Read the log of a run that has ended, was killed or is in progress; `ConfigError` if it is not a whole log."""
    path = folder / CONVERSATION
    try:
        log = msgspec.convert(json.loads(path.read_bytes()), Log)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's error is a ValueError
        problem = visible(shorten(str(error), 200))
        raise ConfigError(f"{path} is no log of a discover run ({problem}): give the folder of another run") from None
    log.folder = folder
    return log


class Answer(msgspec.Struct):
    """The outcome of one request; None where the server does not say."""

    outcome: str  # ok, http_NNN, timeout, connection, empty, broken (no chat completion), no_code, truncated
    content: str = ""  # without its thinking
    reasoning: str | None = None
    finish_reason: str | None = None
    detail: str = ""  # one line for a person, without the key
    prompt_tokens: int | None = None  # as the server counts them
    completion_tokens: int | None = None
    retry_after_s: float | None = None  # how long the server asks to wait


class Journal:
    """The events of a run from its beginning, across kills and resumes."""

    def __init__(self, path: Path) -> None:
        """Read the events of the file; cut off an unfinished last line, which a killed process leaves."""
        self.path = path
        self.begin: Event = {}
        self.asks: dict[str, Event] = {}  # by the id of the request
        self.answers: dict[str, Answer] = {}
        self.scores: dict[str, Result] = {}  # "TURN.SAMPLE" -> result
        seconds_before = 0.0  # until it was resumed
        data = path.read_bytes() if path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            os.truncate(path, len(complete))
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                event = json.loads(line)
                self._add(event)
                seconds_before = max(seconds_before, event["at"])
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(f"{path} is damaged at line {number} ({error}): choose another folder") from None
        self._began = time.monotonic() - seconds_before  # as if all its parts were one

    @property
    def seconds(self) -> float:
        """Return the seconds that the run has taken, summed over its resumes."""
        return time.monotonic() - self._began

    def _add(self, event: Event) -> None:
        match event["event"]:
            case "begin":
                self.begin = event
            case "ask":
                self.asks[event["id"]] = event
            case "answer":
                self.answers[event["id"]] = msgspec.convert(event, Answer)
            case "score":
                self.scores[event["of"]] = event["result"]

    def write(self, event: str, **fields: Any) -> None:
        """Append an event to the file. `UnwritableError` if the system refuses."""
        line = {"event": event, "at": round(self.seconds, 3), **fields}
        append_line(self.path, line_of(line))
        self._add(line)


def prompt_bound(messages: Messages) -> int:
    """Return an upper bound on a prompt's tokens: every token is at least one byte."""
    return sum(len(message["content"].encode()) + PER_MESSAGE for message in messages)


class Spending:
    """All requests of a run, each with the most that it may use until its answer is known."""

    def __init__(self, run: DiscoverConfig) -> None:
        """Take the budget, and the prices of a million tokens; an unknown one counts as 0."""
        self.budget, self._requests = run.budget, list[Call]()
        self._prices = run.client.prompt_price or 0.0, run.client.completion_price or 0.0

    def total(self) -> dict[str, Any]:
        """Return the calls, their tokens and their cost."""
        prompt = sum(call.prompt_tokens for call in self._requests)
        completion = sum(call.completion_tokens for call in self._requests)
        total = {"calls": len(self._requests), "prompt_tokens": prompt, "completion_tokens": completion}
        return total | {"tokens": prompt + completion, "cost": self._cost(prompt, completion)}

    def _cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self._prices[0] + completion_tokens * self._prices[1]) / 1e6

    def begin(self, ask: Event) -> Call:
        """Count a request before it is sent, with the most that it may use."""
        call = Call(ask["id"], "interrupted", ask["prompt_bound"], ask["max_tokens"], "at most")
        call.cost = round(self._cost(call.prompt_tokens, call.completion_tokens), 9)
        self._requests.append(call)
        return call

    def end(self, call: Call, answer: Answer) -> None:
        """Count what a request used: as the server counts it, nothing if it was refused, else the most."""
        call.outcome = answer.outcome
        if answer.prompt_tokens is not None and answer.completion_tokens is not None:
            call.prompt_tokens, call.completion_tokens = answer.prompt_tokens, answer.completion_tokens
            call.tokens_counted = "by the server"
        elif re.fullmatch("connection|http_[^5].*", answer.outcome):
            call.prompt_tokens, call.completion_tokens, call.tokens_counted = 0, 0, "estimated"
        call.cost = round(self._cost(call.prompt_tokens, call.completion_tokens), 9)

    def spent(self, bound: int, max_tokens: int, seconds_left: float) -> str:
        """Return the budget that has no room for one more call of so many tokens; else ""."""
        budget, total = self.budget, self.total()
        if budget.calls is not None and total["calls"] >= budget.calls:
            return f"budget.calls={budget.calls} are spent"
        if not seconds_left:
            return f"budget.hours={budget.hours:g} are spent"
        if budget.tokens is not None and total["tokens"] + bound + max_tokens > budget.tokens:
            return f"budget.tokens={budget.tokens}: {total['tokens']} are spent, and one more call could exceed it"
        most = self._cost(total["prompt_tokens"] + bound, total["completion_tokens"] + max_tokens)
        if budget.cost is not None and most > budget.cost:
            return f"budget.cost={budget.cost:g}: {total['cost']:.6g} are spent, and one more call could exceed it"
        return ""
