"""Group runs over seeds, and compare them with independent draws: calls of the bare first prompt."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.log import Log, Turn
from rlreason.runtime.differences import LEVEL, holm
from rlreason.runtime.intervals import best_of_curve, best_of_interval, mean_interval, rank_sum_p, smallest_p
from rlreason.runtime.text import shorten

#: Facts that change no reply to the first prompt, and no score of it, by their first words. `hints` stand in it.
APART = {"strategy", "budget", "replies", "retries", "hints", "history", "restart_after"}
MOST_GROUPS = 200  # of a rank test
FEW = 5  # with fewer draws no interval is given
FEWEST_FOR_MEAN = 3  # seeds, for an interval of their mean
ORDER = ("simple", "best_of_n", "refine", "hybrid")  # of the strategies in tables and pictures
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs that differ only in their seeds."""

    label: str
    logs: tuple[Log, ...]  # by seed

    @property
    def ended(self) -> list[Log]:
        """Return those that have ended; all of them if none has."""
        return [log for log in self.logs if log.ended is not None] or list(self.logs)

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
        finals = [log.best.score for log in self.logs]
        return mean_interval(finals) if len(finals) >= FEWEST_FOR_MEAN and len(set(finals)) > 1 else None


def facts_of(log: Log) -> Facts:
    """Return what the runs of a `SeedGroup` share: all but the seed."""
    own = {"strategy": log.strategy, "model": log.model, "starting score": log.start.score}
    return {**own, **flat(log.settings), "system prompt": log.system, "first prompt": log.first_prompt}


def facts_of_draw(log: Log) -> Facts:
    """Return what two runs must share for a call of the first prompt to be the same draw."""
    return {name: value for name, value in facts_of(log).items() if name.partition(".")[0] not in APART}


def settings_of(logs: Sequence[Log]) -> list[SeedGroup]:
    """Group runs by all but the seed, labelled by the strategy and what differs among those of one strategy."""
    groups: dict[str, list[Log]] = {}
    for log in sorted(logs, key=lambda log: (log.seed, str(log.folder))):
        groups.setdefault(json.dumps(facts_of(log), sort_keys=True), []).append(log)
    labels = []
    for log, *_ in groups.values():
        alike = [facts_of(one) for one, *_ in groups.values() if one.strategy == log.strategy]
        labels.append(", ".join([log.strategy, *differing(facts_of(log), alike)]))
    labels = [label if labels.count(label) == 1 else f"{label} ({k + 1})" for k, label in enumerate(labels)]
    settings = [SeedGroup(label, tuple(group)) for label, group in zip(labels, groups.values(), strict=True)]
    return sorted(settings, key=lambda one: (ORDER.index(one.logs[0].strategy), one.label))


def differing(own: Facts, others: Sequence[Facts]) -> list[str]:
    """Return `key=value` for what differs; texts of prompts, as the start of a hash, only if nothing shorter differs.

    >>> differing({"n": 4, "first prompt": "a"}, [{"n": 2, "first prompt": "b"}])
    ['n=4']
    """
    keys = [key for key in own if any(json.dumps(own[key]) != json.dumps(of.get(key)) for of in others)]
    short = [f"{key}={shorten(typed_word(own[key]), 40)}" for key in keys if not key.endswith("prompt")]
    return short or [f"{key} {hashlib.sha256(json.dumps(own[key]).encode()).hexdigest()[:8]}" for key in keys]


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
    scores: list[int] = []
    for turn in log.turns:
        if turn.is_independent and turn.calls:
            scores += [0] * (len(turn.calls) - 1) + [turn.credit]
    return scores


@dataclass(frozen=True, slots=True)
class Panel:
    """The settings whose first calls are draws of one kind, and these independent draws."""

    title: str  # what distinguishes the kind
    settings: tuple[SeedGroup, ...]
    draws: tuple[int, ...]  # the score of each, in the order of runs and turns; the start's, if that is larger

    @property
    def longest(self) -> int:
        """Return how many calls the longest run made."""
        return max(log.calls for setting in self.settings for log in setting.logs)

    @property
    def ks(self) -> list[int]:
        """Return the numbers of draws whose expected best a report names."""
        reach = min(len(self.draws), self.longest)
        return sorted({max(1, reach // part) for part in (reach, 4, 2, 1)}) if reach else []

    def expected(self, calls: Sequence[int]) -> list[float]:
        """Return the expected best after each number of draws, none of which is above their number."""
        return best_of_curve(self.draws, calls)

    def interval(self, calls: Sequence[int]) -> tuple[list[float], list[float]] | None:
        """Return a 95% bootstrap interval of the same, low and high; None for fewer than `FEW` draws."""
        if len(self.draws) < FEW:
            return None
        low, high = best_of_interval(self.draws, calls)
        return low.tolist(), high.tolist()

    def groups(self, calls: int) -> list[int]:
        """Return the best of each consecutive group of so many draws, as from runs of independent sampling."""
        most = min(len(self.draws) // calls, MOST_GROUPS)
        return [max(self.draws[k * calls : (k + 1) * calls]) for k in range(most)]


def panels_of(logs: Sequence[Log], settings: Sequence[SeedGroup]) -> list[Panel]:
    """Return a panel for each kind of draw. `logs`: in the order in which their draws are grouped."""
    kinds: dict[str, list[SeedGroup]] = {}
    for setting in settings:
        kinds.setdefault(json.dumps(facts_of_draw(setting.logs[0])), []).append(setting)
    facts = [facts_of_draw(of_kind[0].logs[0]) for of_kind in kinds.values()]
    panels = []
    for own, of_kind in zip(facts, kinds.values(), strict=True):
        start = own["starting score"]
        draws = [max(start, score) for log in logs if facts_of_draw(log) == own for score in draws_of(log)]
        panels.append(Panel(", ".join(differing(own, facts)), tuple(of_kind), tuple(draws)))
    return panels


@dataclass(slots=True)
class DrawsComparison:
    """A setting against independent draws at equal calls. `word`: better, worse, cannot tell, itself or no draws."""

    setting: SeedGroup
    panel: Panel
    word: str
    calls: int  # the fewest that any seed made, and at most as many as there are draws
    bests: list[int]  # of the seeds at so many calls
    groups: list[int]  # the best of each group of so many draws
    p: float = 1.0  # of the rank test, adjusted by Holm
    family: int = 0  # how many comparisons Holm adjusts together

    @property
    def can_tell(self) -> bool:
        """Return whether any outcome of so many seeds and groups of draws could be told from chance."""
        return smallest_p(len(self.bests), len(self.groups)) * self.family <= LEVEL


def compared(panels: Sequence[Panel]) -> list[DrawsComparison]:
    """Compare every setting with the baseline of its draws, by a rank test whose p-values are adjusted by Holm.

    A setting's seeds at the fewest calls that any of them made are compared with consecutive groups of as many draws,
    as from runs of independent sampling. Both sides are samples, and no shape is assumed.
    """
    comparisons = []
    for panel in panels:
        for setting in panel.settings:
            calls = min(len(panel.draws), *(log.calls for log in setting.ended))
            word, bests, groups = "cannot tell", list[int](), list[int]()
            if all(turn.is_independent for turn in setting.turns):
                word = "itself"
            elif not calls:
                word = "no draws"
            else:
                bests, groups = [log.best_at(calls) for log in setting.ended], panel.groups(calls)
            comparisons.append(DrawsComparison(setting, panel, word, calls, bests, groups))
    tested = [one for one in comparisons if len(one.bests) > 1]
    for one, p in zip(tested, holm([rank_sum_p(one.bests, one.groups) for one in tested]), strict=True):
        one.p, one.family = p, len(tested)
        if p <= LEVEL:
            above = sum((a > b) - (a < b) for a in one.bests for b in one.groups)
            one.word = "better" if above > 0 else "worse"
    return comparisons
