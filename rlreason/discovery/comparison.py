"""Group runs over seeds, and compare them with independent draws: calls of the bare first prompt."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.log import Log, Turn
from rlreason.runtime.differences import LEVEL, holm
from rlreason.runtime.intervals import best_of, rank_sum_p, smallest_p
from rlreason.runtime.text import shorten

#: Facts that change no reply to the first prompt, and no score of it, by their first words. `hints` stand in it.
APART = {"strategy", "budget", "replies", "retries", "hints", "history", "restart_after"}
MOST_GROUPS = 200  # of a rank test
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
    expected: float = 0.0  # best of so many draws
    p: float = 1.0  # of the rank test, adjusted by Holm
    too_few: bool = True  # seeds or groups of draws: none of their outcomes could be told from chance

    @property
    def ended(self) -> list[Log]:
        """Return those that have ended; all of them if none has."""
        return [log for log in self.logs if log.ended is not None] or self.logs

    @property
    def turns(self) -> list[Turn]:
        """Return the turns of all of them, run by run."""
        return [turn for log in self.logs for turn in log.turns]


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
            one.expected = best_of(one.draws, calls)
    tested = [one for one in settings if len(one.bests) > 1]
    for one, p in zip(tested, holm([rank_sum_p(one.bests, one.groups) for one in tested]), strict=True):
        one.p, one.too_few = p, smallest_p(len(one.bests), len(one.groups)) * len(tested) > LEVEL
        if p <= LEVEL:
            above = sum((a > b) - (a < b) for a in one.bests for b in one.groups)
            one.word = "better" if above > 0 else "worse"
