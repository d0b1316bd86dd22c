"""The baseline of independent sampling: what as many calls of the bare first prompt would have reached.

A draw is one call (one HTTP request) of the first prompt, nothing before it in the conversation, by whatever strategy:
the first turn of a refinement is one, every turn of `simple` is. **At equal calls** means equal requests, because
that is what `budget.calls` counts: the call that gave a turn's reply has the score of its program, and every other
call of the turn (refused, timed out, empty, without a program, interrupted) is a draw of 0, as it cost a call too.
So is a reply whose set is invalid. A run never falls below the program it began with, so the best of k draws is the
best of that program and k draws.

Draws are put together over runs of one problem, model, system and first prompt, starting score and all settings but
those of `APART`. A run of another strategy stops drawing at its first reply, so its failed calls come a little less
often than in sampling without end; the mean over many runs is right (the draws of a renewal process).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlreason.config.leaves import flat
from rlreason.report.discovery.log import Log
from rlreason.statistics.best_of_k import best_of_curve, best_of_interval

#: Settings that change no reply to the first prompt, and no score of it, by their first words. `hints` stand in it.
APART = {"budget", "replies", "retries", "hints", "history", "restart_after"}
MOST_GROUPS = 200  # of a rank test
FEW = 5  # with fewer draws, no interval is told: they have shown too little of what there is


@dataclass(frozen=True, slots=True)
class Baseline:
    """Independent draws of one kind. `scores`: of each call, in the order of runs and turns; 0 where it gave no set."""

    key: str
    start: int  # the score of the program that the runs began with
    scores: tuple[int, ...]
    runs: int  # how many runs they come from

    @property
    def count(self) -> int:
        """How many calls it can be told for."""
        return len(self.scores)

    def expected(self, calls: Sequence[int]) -> list[float]:
        """The expected best after each number of calls, each at most `count`."""
        return best_of_curve(self._values(), calls)

    def interval(self, calls: Sequence[int]) -> tuple[list[float], list[float]]:
        """95% bootstrap interval of the same, low and high."""
        low, high = best_of_interval(self._values(), calls)
        return low.tolist(), high.tolist()

    def groups(self, calls: int) -> list[int]:
        """The best of each group of so many draws in a row: what runs of independent sampling would have ended with."""
        whole = min(self.count // calls, MOST_GROUPS)
        values = self._values()
        return [max(values[k * calls : (k + 1) * calls]) for k in range(whole)]

    def _values(self) -> list[int]:
        return [max(self.start, score) for score in self.scores]


def draws_of(log: Log) -> list[int]:
    """The score of every call of the bare first prompt in a run; see the module for what counts."""
    found: list[int] = []
    for turn in log.turns:
        if turn.is_independent and turn.calls:
            found += [0] * (len(turn.calls) - 1) + [turn.credit]
    return found


def baselines_of(logs: Iterable[Log]) -> dict[str, Baseline]:
    """The baseline of each kind of draw, by `kind_of_draw`; without draws it has none of its own."""
    kinds: dict[str, list[Log]] = {}
    for log in logs:
        kinds.setdefault(kind_of_draw(log), []).append(log)
    found = {}
    for key, of_kind in kinds.items():
        drawn = [draws_of(log) for log in of_kind]
        scores = tuple(score for one in drawn for score in one)
        found[key] = Baseline(key, of_kind[0].start.score, scores, sum(map(bool, drawn)))
    return found


def kind_of_draw(log: Log) -> str:
    """What two runs must have in common for a call of the first prompt to be the same draw: equal texts then."""
    return json.dumps(facts_of_draw(log), sort_keys=True)


def facts_of_draw(log: Log) -> dict[str, Any]:
    """The same by name: settings by their dotted names, and what has a field of its own in the log."""
    settings = {key: value for key, value in flat(log.settings).items() if key.partition(".")[0] not in APART}
    own = {"problem": log.problem, "model": log.model, "system prompt": log.system, "first prompt": log.first_prompt}
    return {**settings, **own, "starting score": log.start.score}


def is_sampling(logs: Sequence[Log]) -> bool:
    """Whether runs consist of independent draws alone: they are the baseline, and cannot be held against it."""
    return all(turn.is_independent for log in logs for turn in log.turns)
