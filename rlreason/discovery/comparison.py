"""Group runs over seeds, and compare them with independent draws: calls of the bare first prompt."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.log import Log, Turn
from rlreason.runtime.statistics import (
    LEVEL,
    best_of_curve,
    best_of_interval,
    holm,
    mean_interval,
    rank_sum_p,
    smallest_p,
)
from rlreason.runtime.text import shorten

#: Facts that change no reply to the first prompt, and no score of it, by their first words. `hints` stand in it.
APART = {"strategy", "budget", "replies", "retries", "hints", "history", "restart_after"}
MOST_GROUPS = 200  # of a rank test
FEW = 5  # with fewer draws no interval is given
FEWEST_FOR_MEAN = 3  # seeds, for an interval of their mean
ORDER = ("simple", "best_of_n", "refine", "hybrid")  # of the strategies in tables and pictures
Facts = dict[str, Any]


@dataclass(slots=True)
class SeedGroup:
    """Runs that differ only in their seeds, and how they compare with independent draws at equal calls."""

    label: str
    logs: list[Log]  # by seed
    draws: list[int]  # scores of all draws of their kind, by run and turn; the start's, if that is larger
    word: str = "cannot tell"  # or: better, worse, itself, no draws
    calls: int = 0  # the fewest that any seed made, and at most as many as there are draws
    bests: list[int] = field(default_factory=list)  # of the seeds at so many calls
    groups: list[int] = field(default_factory=list)  # the best of each consecutive group of so many draws
    p: float = 1.0  # of the rank test, adjusted by Holm
    family: int = 0  # how many comparisons Holm adjusts together

    @property
    def ended(self) -> list[Log]:
        """Return those that have ended; all of them if none has."""
        return [log for log in self.logs if log.ended is not None] or self.logs

    @property
    def turns(self) -> list[Turn]:
        """Return the turns of all of them, run by run."""
        return [turn for log in self.logs for turn in log.turns]

    @property
    def overrides(self) -> list[str]:
        """Return their settings as they are typed, without unset budgets."""
        settings = flat(self.logs[0].settings).items()
        return [f"{key}={typed_word(v)}" for key, v in settings if v is not None or not key.startswith("budget.")]

    @property
    def mean(self) -> tuple[float, float, float] | None:
        """Return mean, low and high of the final scores over seeds; None if the seeds are too few or all alike."""
        finals = [log.best["score"] for log in self.logs]
        return mean_interval(finals) if len(finals) >= FEWEST_FOR_MEAN and len(set(finals)) > 1 else None

    def expected(self, calls: Sequence[int]) -> list[float]:
        """Return the expected best after each number of draws, none of which is above their number."""
        return best_of_curve(self.draws, calls)

    def interval(self, calls: Sequence[int]) -> tuple[list[float], list[float]] | None:
        """Return a 95% bootstrap interval of the same, low and high; None for fewer than `FEW` draws."""
        if len(self.draws) < FEW:
            return None
        low, high = best_of_interval(self.draws, calls)
        return low.tolist(), high.tolist()

    @property
    def can_tell(self) -> bool:
        """Return whether any outcome of so many seeds and groups of draws could be told from chance."""
        return smallest_p(len(self.bests), len(self.groups)) * self.family <= LEVEL


def facts_of(log: Log) -> Facts:
    """Return what the runs of a `SeedGroup` share: all but the seed."""
    facts = {"strategy": log.strategy, "model": log.model, "starting score": log.start["score"]}
    return {**facts, **flat(log.settings), "system prompt": log.system, "first prompt": log.first_prompt}


def kind_of(log: Log) -> Facts:
    """Return what two runs must share for a call of the first prompt to be the same draw."""
    return {name: value for name, value in facts_of(log).items() if name.partition(".")[0] not in APART}


def settings_of(logs: Sequence[Log]) -> list[SeedGroup]:
    """Group runs by all but the seed, labelled by the strategy and what differs among those of one strategy."""
    groups: dict[str, list[Log]] = {}
    for log in sorted(logs, key=lambda log: (log.seed, str(log.folder))):
        groups.setdefault(json.dumps(facts_of(log), sort_keys=True), []).append(log)
    settings = []
    for group in groups.values():
        own, kind = facts_of(group[0]), kind_of(group[0])
        alike = [facts_of(one) for one, *_ in groups.values() if one.strategy == own["strategy"]]
        draws = [max(own["starting score"], score) for log in logs if kind_of(log) == kind for score in draws_of(log)]
        settings.append(SeedGroup(", ".join([own["strategy"], *differing(own, alike)]), group, draws))
    settings.sort(key=lambda one: (ORDER.index(one.logs[0].strategy), one.label))
    compare(settings)
    return settings


def differing(own: Facts, others: Sequence[Facts]) -> list[str]:
    """Return `key=value` for what differs; texts of prompts as the start of a hash.

    >>> differing({"n": 4, "first prompt": "a"}, [{"n": 2, "first prompt": "a"}])
    ['n=4']
    """
    keys = [key for key in own if any(own[key] != of.get(key) for of in others)]
    hashes = {key: hashlib.sha256(str(own[key]).encode()).hexdigest()[:8] for key in keys if key.endswith("prompt")}
    return [f"{key}={hashes.get(key) or shorten(typed_word(own[key]), 40)}" for key in keys]


def without_copies(logs: Sequence[Log]) -> tuple[list[Log], list[str]]:
    """Return runs without those whose prompts and replies all equal another's, and a line about each of these."""
    firsts: dict[str, Log] = {}
    originals, lines = [], []
    for log in logs:
        turns = [[turn.prompt, turn.content, [call.outcome for call in turn.calls]] for turn in log.turns]
        first = firsts.setdefault(json.dumps([log.strategy, log.model, turns]), log)
        if first is log or not any(turn.reply for turn in log.turns):
            originals.append(log)
        else:
            copied = f"{first.folder.name} (seed {first.seed})"
            lines.append(f"{log.folder.name} (seed {log.seed}) has the prompts and replies of {copied}")
    return originals, lines


def draws_of(log: Log) -> list[int]:
    """Return the score of every call of the bare first prompt in a run; 0 for one that was repeated."""
    made = [turn for turn in log.turns if turn.is_independent and turn.calls]
    return [score for turn in made for score in ([0] * (len(turn.calls) - 1) + [turn.credit])]


def compare(settings: Sequence[SeedGroup]) -> None:
    """Compare every setting with the baseline of its draws, by a rank test whose p-values are adjusted by Holm.

    A setting's seeds at the fewest calls that any of them made are compared with consecutive groups of as many draws,
    as from runs of independent sampling. Both sides are samples, and no shape is assumed.
    """
    for one in settings:
        one.calls = calls = min(len(one.draws), *(log.calls for log in one.ended))
        if all(turn.is_independent for turn in one.turns):
            one.word = "itself"
        elif not calls:
            one.word = "no draws"
        else:
            one.bests, many = [log.best_at(calls) for log in one.ended], min(len(one.draws) // calls, MOST_GROUPS)
            one.groups = [max(one.draws[k * calls : (k + 1) * calls]) for k in range(many)]
    tested = [one for one in settings if len(one.bests) > 1]
    for one, p in zip(tested, holm([rank_sum_p(one.bests, one.groups) for one in tested]), strict=True):
        one.p, one.family = p, len(tested)
        if p <= LEVEL:
            above = sum((a > b) - (a < b) for a in one.bests for b in one.groups)
            one.word = "better" if above > 0 else "worse"
