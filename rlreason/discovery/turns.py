"""The turns of a run as plain data: what was asked and answered, and the conversation that a model sees of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlreason.discovery.exchange import Attempt

Message = dict[str, str]
PROGRAM_KEYS = ("seconds", "check_seconds", "peak_memory_mb", "output_tail", "left_behind")  # differ from run to run


@dataclass(slots=True)
class Question:
    """What a turn asks: the messages, the last of which is its prompt."""

    turn: int
    conversation: int
    kind: str  # first, error, extend, no_code
    messages: list[Message]
    sees: list[str] = field(default_factory=list)  # earlier replies in the messages, as "TURN.SAMPLE"

    @property
    def prompt(self) -> str:
        """The new message."""
        return self.messages[-1]["content"]


@dataclass(slots=True)
class Reply:
    """One reply to a question, with every request that it took; what its program was worth, where it held one."""

    question: Question
    sample: int
    calls: list[dict[str, Any]] = field(default_factory=list)
    attempt: Attempt | None = None  # the last answer
    program: str | None = None
    result: dict[str, Any] | None = None
    chosen: bool = False
    improved: bool = False
    best_so_far: int = 0

    @property
    def id(self) -> str:
        """ "TURN.SAMPLE"."""
        return f"{self.question.turn}.{self.sample}"

    @property
    def content(self) -> str:
        """What the model said; "" where it said nothing."""
        return self.attempt.content if self.attempt else ""

    @property
    def score(self) -> int:
        """Of its program; 0 where there is none, or it gave no valid set."""
        return int(self.result["score"]) if self.result else 0

    def as_row(self) -> dict[str, Any]:
        """Its entry in the log."""
        told = self.attempt
        said = None
        if told is not None and (told.content or told.reasoning):
            said = {"content": told.content, "reasoning": told.reasoning, "finish_reason": told.finish_reason}
        question = self.question
        return {
            "turn": question.turn,
            "sample": self.sample,
            "conversation": question.conversation,
            "sees": question.sees,
            "prompt": question.prompt,
            "prompt_kind": question.kind,
            "calls": self.calls,
            "reply": said,
            "program": self.program,
            "program_sha256": self.result["program_sha256"] if self.result else None,
            "result": without_measurements(self.result),
            "chosen": self.chosen,
            "improved": self.improved,
            "best_so_far": self.best_so_far,
        }


def without_measurements(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """A result without times and sizes: the same replies make the same log twice."""
    return None if result is None else {name: value for name, value in result.items() if name not in PROGRAM_KEYS}


def chosen_of(replies: Sequence[Reply]) -> Reply | None:
    """The reply that a conversation goes on with: the best set, else one that gave points, else one with a program.

    The first of equals. None where nothing came back.
    """
    answered = [reply for reply in replies if reply.content]
    if not answered:
        return None
    return max(answered, key=lambda r: (r.score, bool(r.result and r.result["raw_points"]), r.program is not None))


@dataclass(slots=True)
class Conversation:
    """One conversation with the model: the replies that it went on with, and what was said after each."""

    number: int
    system: str | None
    first: str
    exchanges: list[tuple[Reply, str, str]] = field(default_factory=list)  # reply, kind and text of what followed
    without_progress: int = 0  # turns since its best program

    def add(self, reply: Reply, kind: str, text: str) -> None:
        """The conversation goes on with this reply, and with this message after it."""
        better = reply.score > max((one.score for one, _, _ in self.exchanges), default=0)
        self.without_progress = 0 if better else self.without_progress + 1
        self.exchanges.append((reply, kind, text))

    def ask(self, turn: int, history: int) -> Question:
        """The next question: the first message, the best reply so far, the last `history` replies.

        With history=0 it goes on from the best alone; where nothing was valid yet, from the last.
        """
        shown = set(range(len(self.exchanges))[-history:] if history else ())
        scores = [reply.score for reply, _, _ in self.exchanges]
        if scores and max(scores) > 0:
            shown.add(scores.index(max(scores)))
        elif scores and not shown:
            shown.add(len(scores) - 1)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.first})
        kind, sees = "first", []
        for place in sorted(shown):
            reply, kind, text = self.exchanges[place]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": text}]
            sees.append(reply.id)
        return Question(turn, self.number, kind, messages, sees)
