"""Read `conversation_log.json` of a discover run, and derive figures from it."""

import json
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.runtime.files import fits
from rlreason.runtime.text import shorten, visible

FIRST = "first"  # the kind of the bare first prompt
REPLIED = {"ok", "no_code", "truncated"}  # outcomes of calls that brought a text of the model's
START = "start"  # what `Best.turn` names where no turn has been better


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One request to the model's endpoint: each counts as one, whatever its outcome."""

    id: str
    outcome: str  # "ok", or what went wrong: "http_429", "timeout", "no_code" ...
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_counted: str | None = None  # "by the server", "at most" or "estimated"
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedReply:
    """The model's reply."""

    content: str | None
    reasoning: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The verifier's result on a program. Distances and norms are squared, and exact."""

    score: int
    validity: float  # 1.0 or 0.0
    num_points: int = 0
    raw_points: int = 0  # how many the program gave, valid or not
    dimension: int | None = None
    error: str | None = None
    error_kind: str | None = None
    alarm: str | None = None
    worst_pair: Any = None  # the two vectors that break the rule, with their places
    min_squared_distance: int | None = None
    max_squared_norm: int | None = None
    protections: Any = None

    @property
    def credit(self) -> int:
        """Return the score if the set is valid and raised no alarm, else 0."""
        return self.score if self.validity == 1 and self.alarm is None else 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt with its calls, reply, program and verdict. `sees`: ids of the turns before it."""

    turn: int
    sample: int
    prompt: str
    prompt_kind: str  # "first", "error", "extend", "no_code"
    calls: tuple[LoggedCall, ...]
    sees: list[str] = field(default_factory=list)
    reply: LoggedReply | None = None
    program: str | None = None
    program_sha256: str | None = None
    result: Result | None = None

    @property
    def id(self) -> str:
        """Return its id in the log: "TURN.SAMPLE"."""
        return f"{self.turn}.{self.sample}"

    @property
    def credit(self) -> int:
        """Return the score of its program; 0 if there is none."""
        return self.result.credit if self.result else 0

    @property
    def is_valid(self) -> bool:
        """Return whether the reply had a program with a valid set."""
        return self.result is not None and self.result.validity == 1 and self.result.alarm is None

    @property
    def is_independent(self) -> bool:
        """Return whether the model saw only the bare first prompt."""
        return self.prompt_kind == FIRST and not self.sees


@dataclass(frozen=True, slots=True)
class LoggedStart:
    """The program that the run began with."""

    program: str  # its name
    score: int
    program_sha256: str | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What the run has used so far; tokens and cost as far as they are known."""

    calls: int
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The best program so far: of a turn by its id, or the one the run began with."""

    score: int
    turn: str
    program_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """One run. `ended` is None while it is in progress, and if it was killed."""

    folder: Path
    problem: str
    strategy: str
    model: str
    seed: int
    settings: dict[str, Any]
    first_prompt: str
    start: LoggedStart
    turns: tuple[Turn, ...]
    spent: Spent
    best: Best
    title: str = ""
    unit: str = "points"
    system: str | None = None
    ended: str | None = None

    @property
    def calls(self) -> int:
        """Return how many requests its turns made, including retries."""
        return sum(len(turn.calls) for turn in self.turns)

    @property
    def answered(self) -> int:
        """Return how many of its calls brought a reply, with a program or without."""
        return sum(call.outcome in REPLIED for turn in self.turns for call in turn.calls)

    @property
    def replies(self) -> list[Turn]:
        """Return the turns that ended with a reply."""
        return [turn for turn in self.turns if turn.reply is not None]

    @property
    def best_turn(self) -> Turn | None:
        """Return the turn of the best program; None if that is the one the run began with."""
        return next((turn for turn in self.turns if turn.id == self.best.turn), None)

    def curve(self) -> tuple[list[int], list[int]]:
        """Return (calls, best score so far): from 0 calls and the starting score, a point after each turn, in order.

        A turn's score counts once its last call is made. It is computed from the verdicts.
        """
        calls, best = [0], [self.start.score]
        for turn in self.turns:
            calls.append(calls[-1] + len(turn.calls))
            best.append(max(best[-1], turn.credit))
        return calls, best

    def best_at(self, calls: int) -> int:
        """Return the best score after so many calls; a turn with later calls does not count yet."""
        xs, ys = self.curve()
        return max(y for x, y in zip(xs, ys, strict=True) if x <= calls)


MOST_BYTES = 1 << 29  # a larger file is no log
MOST_LEVELS = 60  # lists and objects within one another
LARGEST = 10**15  # of whatever is counted
UNBOUNDED = {"min_squared_distance", "max_squared_norm", "seed"}  # whole numbers of any size
Kind = TypeVar("Kind")
Reader = Callable[[Any, str], Any]


class _WrongError(Exception):
    """An error in a file, without its path."""


def is_discover_run(folder: Path) -> bool:
    """Return whether a folder has the log of a discover run, readable or not."""
    with suppress(OSError, ValueError):
        return (folder / files.CONVERSATION).is_file()
    return False


def read_log(folder: Path) -> Log:
    """Read the log of a run that has ended, was killed or is in progress.

    `ConfigError`, one line with the file's path, if there is none or anything in it is wrong.
    """
    path = folder / files.CONVERSATION
    try:
        return replace(_log(_document(path), ""), folder=folder)
    except _WrongError as error:
        raise ConfigError(
            f"{visible(str(path))} is no log of a discover run: {error}: give the folder of another run"
        ) from None


def _document(path: Path) -> Any:
    if not path.is_file():
        raise _WrongError("there is no such file")
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise _WrongError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
        document = json.loads(path.read_bytes().decode(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else shorten(visible(str(error)), 80)
        raise _WrongError(f"it cannot be read ({why or type(error).__name__})") from None
    if _levels(document) > MOST_LEVELS:
        raise _WrongError(f"its lists and objects lie more than {MOST_LEVELS} deep")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _levels(document: Any) -> int:
    """Return how deep lists and objects are nested, at most one more than MOST_LEVELS."""
    level, within = 0, [document]
    while within and level <= MOST_LEVELS:
        inner: list[Any] = []
        for one in within:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level, within = level + 1, inner
    return level


def _log(told: Any, at: str) -> Log:
    told = {**told, "folder": Path()} if isinstance(told, dict) else told
    parts = {"start": _start, "turns": _each(_turn), "spent": _plain(Spent), "best": _plain(Best)}
    log = _read_object(Log, told, at, parts)
    seen: set[str] = set()
    for k, turn in enumerate(log.turns):
        if turn.id in seen:
            raise _WrongError(f"turns[{k}] is turn {turn.id} a second time")
        seen.add(turn.id)
    if log.best.turn != START and log.best.turn not in seen:
        raise _WrongError(f"best.turn={_shown(log.best.turn)} names none of its turns")
    return log


def _start(told: Any, at: str) -> LoggedStart:
    return _read_object(LoggedStart, told, at, {"result": _or_none(_plain(Result))})


def _turn(told: Any, at: str) -> Turn:
    parts = {
        "calls": _each(_plain(LoggedCall)),
        "reply": _or_none(_plain(LoggedReply)),
        "result": _or_none(_plain(Result)),
    }
    return _read_object(Turn, told, at, parts)


def _plain(kind: type[Any]) -> Reader:
    return lambda told, at: _read_object(kind, told, at, {})


def _or_none(read: Reader) -> Reader:
    return lambda told, at: None if told is None else read(told, at)


def _each(read: Reader) -> Reader:
    def read_each(told: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(told, list):
            raise _WrongError(f"{at} is no list")
        return tuple(read(one, f"{at}[{k}]") for k, one in enumerate(told))

    return read_each


def _read_object(kind: type[Kind], told: Any, at: str, parts: dict[str, Reader]) -> Kind:
    """Read a dataclass from an object of the file; `parts` reads the fields that are objects themselves."""
    if not isinstance(told, dict):
        raise _WrongError(f"{at or 'it'} is no object")
    found: dict[str, Any] = {}
    for name, (expected, is_needed) in _fields(cast(Hashable, kind)).items():
        where = f"{at}.{name}" if at else name
        if name not in told:
            if is_needed:
                raise _WrongError(f"{where} is missing")
            continue
        value = told[name]
        if name in parts:
            value = parts[name](value, where)
        elif not fits(value, expected):
            raise _WrongError(f"{where}={_shown(value)} is no {_type_name(expected)}")
        elif isinstance(value, int | float) and name not in UNBOUNDED and not 0 <= value <= LARGEST:
            raise _WrongError(f"{where}={_shown(value)} lies outside 0 to {LARGEST:,}")
        found[name] = value
    return kind(**found)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return name -> (type, whether it is required)."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _type_name(expected: Any) -> str:
    """Return a type in words.

    >>> _type_name(int | None), _type_name(list[str])
    ('whole number or null', 'list of texts')
    """
    words = {int: "whole number", float: "number", str: "text", NoneType: "null", list[str]: "list of texts"}
    if expected in words:
        return words[expected]
    parts = get_args(expected)
    return " or ".join(map(_type_name, parts)) if NoneType in parts else "object"


def _shown(value: Any) -> str:
    try:
        return shorten(visible(json.dumps(value)), 40)
    except ValueError:  # a number with more digits than Python writes
        return type(value).__name__
