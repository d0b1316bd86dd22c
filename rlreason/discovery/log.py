"""The log of a run, conversation_log.json: its records, which the loop fills and a report reads.

Scores are whole numbers in the unit of the problem ("points"); 0 is what an invalid set is worth.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rlreason.errors import ConfigError
from rlreason.records.files import CONVERSATION
from rlreason.runtime.text import shorten, visible

FIRST = "first"  # the kind of the bare first prompt
Result = dict[str, Any]  # of the verifier on a program, as docs/discovery.md lists it


def without_measurements(result: Result) -> Result:
    """Return a result without what differs from run to run, so that the same replies make the same log."""
    measured = ("seconds", "check_seconds", "peak_memory_mb", "output_tail", "left_behind")
    return {name: value for name, value in result.items() if name not in measured}


class Call(msgspec.Struct):
    """One request to the model's endpoint: each counts as one, whatever its outcome."""

    id: str
    outcome: str  # "ok", or what went wrong: "http_429", "timeout", "no_code" ...
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_counted: str | None = None  # "by the server", "at most" or "estimated"
    cost: float | None = None


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
        return self.result is not None and self.result["validity"] == 1 and not self.result.get("alarm")

    @property
    def credit(self) -> int:
        """Return the score of its program if its set counts, else 0."""
        return int(self.result["score"]) if self.result is not None and self.is_valid else 0

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
        return sum(len(turn.calls) for turn in self.turns)

    def curve(self) -> tuple[list[int], list[int]]:
        """Return (calls, best score so far): from 0 calls and the starting score, a point after each turn, in order.

        A turn's score counts once its last call is made. It is computed from the verdicts.
        """
        calls, best = [0], [self.start["score"]]
        for turn in self.turns:
            calls.append(calls[-1] + len(turn.calls))
            best.append(max(best[-1], turn.credit))
        return calls, best

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
