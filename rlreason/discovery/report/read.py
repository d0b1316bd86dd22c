"""Read `conversation_log.json` of a discover run, and derive figures from it."""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.runtime.text import shorten, visible

FIRST = "first"  # the kind of the bare first prompt
REPLIED = {"ok", "no_code", "truncated"}  # outcomes of calls that brought a text of the model's
START = "start"  # what `Best.turn` names where no turn has been better
LARGEST = 10**15  # of whatever is counted
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One request to the model's endpoint: each counts as one, whatever its outcome."""

    id: str
    outcome: str  # "ok", or what went wrong: "http_429", "timeout", "no_code" ...
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    tokens_counted: str | None = None  # "by the server", "at most" or "estimated"
    cost: Amount | None = None


@dataclass(frozen=True, slots=True)
class LoggedReply:
    """The model's reply."""

    content: str | None
    reasoning: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The verifier's result on a program. Distances and norms are squared, and exact."""

    score: Count
    validity: Amount  # 1.0 or 0.0
    num_points: Count = 0
    raw_points: Count = 0  # how many the program gave, valid or not
    dimension: Count | None = None
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

    turn: Count
    sample: Count
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
    score: Count
    program_sha256: str | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What the run has used so far; tokens and cost as far as they are known."""

    calls: Count
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cost: Amount | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The best program so far: of a turn by its id, or the one the run began with."""

    score: Count
    turn: str
    program_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """One run. `ended` is None while it is in progress, and if it was killed."""

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
    folder: Path = Path()

    @property
    def calls(self) -> int:
        """Return how many requests its turns made, including retries."""
        return sum(len(turn.calls) for turn in self.turns)

    @property
    def answered(self) -> int:
        """Return how many of its calls brought a reply, with a program or without."""
        return sum(call.outcome in REPLIED for turn in self.turns for call in turn.calls)

    @property
    def best_turn(self) -> Turn | None:
        """Return the turn of the best program; None if that is the one the run began with."""
        return next((turn for turn in self.turns if turn.id == self.best.turn), None)

    @property
    def best_result(self) -> Result | None:
        """Return the verifier's result on the best program."""
        return self.best_turn.result if self.best_turn else self.start.result

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
        log = replace(msgspec.convert(json.loads(path.read_bytes()), Log), folder=folder)
    except msgspec.ValidationError as error:
        raise _wrong(path, str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else shorten(str(error), 80)
        raise _wrong(path, f"it cannot be read ({cause or type(error).__name__})") from None
    ids = [turn.id for turn in log.turns]
    if len(ids) > len(set(ids)):
        raise _wrong(path, f"turn {Counter(ids).most_common(1)[0][0]} stands there twice")
    if log.best.turn not in (START, *ids):
        raise _wrong(path, f"best.turn={shorten(log.best.turn, 40)} names none of its turns")
    return log


def _wrong(path: Path, problem: str) -> ConfigError:
    return ConfigError(visible(f"{path} is no log of a discover run: {problem}: give the folder of another run"))
