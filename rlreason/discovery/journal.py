"""What a run has done, written down before and after everything that costs: `calls.jsonl`, a line an event.

    {"event": "begin", ...}                   what the run is made of: model, prompts, problem, start program
    {"event": "part", "at": s}                the run began or went on, after s seconds in earlier parts
    {"event": "ask", "id": "T.S.A", ...}      a request is about to be sent
    {"event": "answer", "id": "T.S.A", ...}   it has come back, however
    {"event": "score", "of": "T.S", ...}      a program was scored
    {"event": "alive", "at": s}               time passes

T is the turn and A the attempt, both from 1, S the sample of the turn, from 0. A killed process leaves at most requests
without an answer: these count as spent, and nothing that was answered is ever asked again.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlreason.discovery.exchange import Attempt
from rlreason.errors import ConfigError
from rlreason.records.lines import finite
from rlreason.runtime.atomic_files import append_line

BEAT_S = 2.0


def id_of(turn: int, sample: int, attempt: int) -> str:
    """The id of a request.

    >>> id_of(3, 0, 2)
    '3.0.2'
    """
    return f"{turn}.{sample}.{attempt}"


class Journal:
    """The events of a run, those of its earlier parts first."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        """Reads what is there; a last line that a killed process left unfinished is cut off."""
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
        """Wall clock of all parts so far."""
        return self.seconds_before + time.monotonic() - self._began

    @property
    def last_turn(self) -> int:
        """The newest turn of which something was asked; 0 before the first."""
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
        """Add an event; it is in the file when this returns. `UnwritableError` where the system refuses."""
        told = {"event": event, "at": round(self.seconds, 3), **what}
        append_line(self.path, json.dumps(finite(told), allow_nan=False))
        before = self.seconds_before
        self._take(told)
        self.seconds_before, self._beaten = before, time.monotonic()

    def beat(self) -> None:
        """Write down that time passes, every two seconds at most: a killed run has spent it."""
        if time.monotonic() - self._beaten > BEAT_S:
            self.write("alive")

    def answer(self, id: str, attempt: Attempt, outcome: str, **more: Any) -> None:
        """A request has come back: with this outcome, which knows more than the attempt's own."""
        told = {name: getattr(attempt, name) for name in ("content", "reasoning", "finish_reason", "detail")}
        counts = {name: getattr(attempt, name) for name in ("prompt_tokens", "completion_tokens")}
        self.write("answer", id=id, outcome=outcome, **told, **counts, **more)


def _read(path: Path, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """The events in a file; `ConfigError` where a line that is not the last one is damaged."""
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
    """Whether an event has what the run goes on with."""
    needed: dict[str, dict[str, type | tuple[type, ...]]] = {
        "begin": {"model": str, "first": str, "problem": str, "templates": dict, "start": dict},
        "ask": {"id": str, "prompt_bound": int, "max_tokens": int},
        "answer": {"id": str, "outcome": str, "content": str},
        "score": {"of": str, "result": dict},
    }
    sound = all(isinstance(event.get(name), kind) for name, kind in needed.get(event["event"], {}).items())
    return sound and isinstance(event.get("at", 0.0), int | float)
