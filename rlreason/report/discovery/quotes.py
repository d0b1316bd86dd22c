"""The prompts and replies that moved the score most, quoted: text of others, which nothing obeys."""

from collections.abc import Sequence
from typing import NamedTuple

from rlreason.report.discovery.log import Log, Turn
from rlreason.report.discovery.texts import figure, quoted, said, whole
from rlreason.report.discovery.words import PROMPTS

MOST_QUOTED = 3  # turns
QUOTED = 700  # characters of a prompt or a reply


class Moved(NamedTuple):
    """A turn that raised the best score of its run."""

    log: Log
    turn: Turn
    before: int

    @property
    def gain(self) -> int:
        """By how much."""
        return self.turn.credit - self.before


def most_moving(logs: Sequence[Log]) -> list[Moved]:
    """The turns with the largest gains, at most MOST_QUOTED, in the order of runs and turns."""
    found = []
    for log in logs:
        best = log.start.score
        for turn in log.turns:
            if turn.credit > best:
                found.append(Moved(log, turn, best))
            best = max(best, turn.credit)
    largest = sorted(range(len(found)), key=lambda k: (-found[k].gain, k))[:MOST_QUOTED]
    return [found[k] for k in sorted(largest)]


def quotes(logs: Sequence[Log]) -> list[str]:
    """The prompts and replies that moved the score most: cut, and fenced as what others wrote."""
    moved = most_moving(logs)
    if not moved:
        return ["No reply has moved the score."]
    lines: list[str] = []
    for log, turn, before in moved:
        run = "" if len(logs) == 1 else f"{said(log.strategy, 40)}, seed {whole(log.seed)}, "
        lines += ["", f"**{run}turn {turn.id}: {figure(before)} to {figure(turn.credit)}**"]
        same = turn.prompt == log.first_prompt
        lines[-1] += f" ({PROMPTS.get(turn.prompt_kind) or said(turn.prompt_kind, 40)}{', see above' * same}). "
        lines[-1] += "The reply, cut:" if same else "The prompt and the reply, cut:"
        lines += ["", *([] if same else [*quoted(turn.prompt, QUOTED, lines=10), ""])]
        content = (turn.reply.content if turn.reply else "") or turn.program or ""
        lines += quoted(content, QUOTED, lines=20)
    return lines[1:]
