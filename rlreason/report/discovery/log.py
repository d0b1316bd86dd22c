"""What `conversation_log.json` of a discover run holds, and what follows from it alone: scores against calls, counts.

Fields without a default must be there; those of the file that have no place here are not read.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST = "first"  # the kind of the bare first prompt
REPLIED = {"ok", "no_code", "truncated"}  # outcomes of calls that brought a text of the model's
START = "start"  # what `Best.turn` names where no turn has been better


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the model's endpoint: each counts as one, whatever came of it."""

    id: str
    outcome: str  # "ok", or what went wrong: "http_429", "timeout", "no_code" ...
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_counted: str | None = None  # "by the server", "at most" or "estimated"
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model answered."""

    content: str | None
    reasoning: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What the verifier said of a program. Distances and norms are squared, and exact."""

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
        """The score where the set is valid and raised no alarm, else 0."""
        return self.score if self.validity == 1 and self.alarm is None else 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt with its calls, the reply, its program and the verdict on it. `sees`: ids of the turns before it."""

    turn: int
    sample: int
    prompt: str
    prompt_kind: str  # "first", "error", "extend", "no_code"
    calls: tuple[Call, ...]
    sees: list[str] = field(default_factory=list)
    reply: Reply | None = None
    program: str | None = None
    program_sha256: str | None = None
    result: Result | None = None

    @property
    def id(self) -> str:
        """As the log names it: "TURN.SAMPLE"."""
        return f"{self.turn}.{self.sample}"

    @property
    def credit(self) -> int:
        """What its program is worth; 0 where there is none."""
        return self.result.credit if self.result else 0

    @property
    def is_valid(self) -> bool:
        """Whether the reply held a program whose set is valid."""
        return self.result is not None and self.result.validity == 1 and self.result.alarm is None

    @property
    def is_independent(self) -> bool:
        """Whether the model saw the bare first prompt and nothing else."""
        return self.prompt_kind == FIRST and not self.sees


@dataclass(frozen=True, slots=True)
class Start:
    """The program that the run began with."""

    program: str  # its name
    score: int
    program_sha256: str | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What the run has used up; tokens and cost as far as they are known."""

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
    """One run. `ended` is None while it is under way, and for one that was killed."""

    folder: Path
    problem: str
    strategy: str
    model: str
    seed: int
    settings: dict[str, Any]
    first_prompt: str
    start: Start
    turns: tuple[Turn, ...]
    spent: Spent
    best: Best
    title: str = ""
    unit: str = "points"
    system: str | None = None
    ended: str | None = None

    @property
    def calls(self) -> int:
        """How many requests its turns made, retries counted."""
        return sum(len(turn.calls) for turn in self.turns)

    @property
    def answered(self) -> int:
        """How many of its calls brought a reply, with a program or without."""
        return sum(call.outcome in REPLIED for turn in self.turns for call in turn.calls)

    @property
    def replies(self) -> list[Turn]:
        """The turns that ended with a reply."""
        return [turn for turn in self.turns if turn.reply is not None]

    @property
    def best_turn(self) -> Turn | None:
        """The turn of the best program; None where that is the one the run began with."""
        return next((turn for turn in self.turns if turn.id == self.best.turn), None)

    def curve(self) -> tuple[list[int], list[int]]:
        """(calls, best score so far): from 0 calls and the starting score, a point after each turn, in their order.

        A turn's score counts once its last call is made. It is worked out from the verdicts.
        """
        calls, best = [0], [self.start.score]
        for turn in self.turns:
            calls.append(calls[-1] + len(turn.calls))
            best.append(max(best[-1], turn.credit))
        return calls, best

    def best_at(self, calls: int) -> int:
        """The best score after so many calls; a turn whose calls go beyond them does not count yet."""
        xs, ys = self.curve()
        return max(y for x, y in zip(xs, ys, strict=True) if x <= calls)
