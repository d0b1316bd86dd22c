"""Group runs of one problem by their settings, and compare them with independent draws."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.report.read import Log
from rlreason.runtime.differences import LEVEL, holm
from rlreason.runtime.intervals import best_of_curve, best_of_interval, rank_sum_p, smallest_p
from rlreason.runtime.text import shorten

#: Settings that change no reply to the first prompt, and no score of it, by their first words. `hints` stand in it.
APART = {"budget", "replies", "retries", "hints", "history", "restart_after"}
MOST_GROUPS = 200  # of a rank test
FEW = 5  # with fewer draws, no interval is told: they have shown too little of what there is


@dataclass(frozen=True, slots=True)
class SamplingBaseline:
    """Independent draws of one kind. `scores`: of each call, in the order of runs and turns; 0 without a set."""

    key: str
    start: int  # the score of the program that the runs began with
    scores: tuple[int, ...]
    runs: int  # how many runs they come from

    @property
    def count(self) -> int:
        """Return the number of calls for which it is defined."""
        return len(self.scores)

    def expected(self, calls: Sequence[int]) -> list[float]:
        """Return the expected best after each number of calls, each at most `count`."""
        return best_of_curve(self._values(), calls)

    def interval(self, calls: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return a 95% bootstrap interval of the same, low and high."""
        low, high = best_of_interval(self._values(), calls)
        return low.tolist(), high.tolist()

    def groups(self, calls: int) -> list[int]:
        """Return the best of each consecutive group of so many draws, as from runs of independent sampling."""
        whole = min(self.count // calls, MOST_GROUPS)
        values = self._values()
        return [max(values[k * calls : (k + 1) * calls]) for k in range(whole)]

    def _values(self) -> list[int]:
        return [max(self.start, score) for score in self.scores]


def draws_of(log: Log) -> list[int]:
    """Return the score of every call of the bare first prompt in a run; see the module for what counts."""
    found: list[int] = []
    for turn in log.turns:
        if turn.is_independent and turn.calls:
            found += [0] * (len(turn.calls) - 1) + [turn.credit]
    return found


def baselines_of(logs: Iterable[Log]) -> dict[str, SamplingBaseline]:
    """Return the baseline of each kind of draw, by `kind_of_draw`, if there are draws."""
    kinds: dict[str, list[Log]] = {}
    for log in logs:
        kinds.setdefault(kind_of_draw(log), []).append(log)
    found = {}
    for key, of_kind in kinds.items():
        drawn = [draws_of(log) for log in of_kind]
        scores = tuple(score for one in drawn for score in one)
        found[key] = SamplingBaseline(key, of_kind[0].start.score, scores, sum(map(bool, drawn)))
    return found


def kind_of_draw(log: Log) -> str:
    """Return what two runs must share for a call of the first prompt to be the same draw, as text."""
    return json.dumps(facts_of_draw(log), sort_keys=True)


def facts_of_draw(log: Log) -> dict[str, Any]:
    """Return the same by name: settings by their dotted names, and fields of the log."""
    settings = {key: value for key, value in flat(log.settings).items() if key.partition(".")[0] not in APART}
    own = {"problem": log.problem, "model": log.model, "system prompt": log.system, "first prompt": log.first_prompt}
    return {**settings, **own, "starting score": log.start.score}


def is_sampling(logs: Sequence[Log]) -> bool:
    """Return whether runs consist only of independent draws: they are the baseline itself."""
    return all(turn.is_independent for log in logs for turn in log.turns)


ORDER = ("simple", "best_of_n", "refine", "hybrid")  # of the strategies in tables and pictures


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs that differ only in their seeds."""

    label: str
    logs: tuple[Log, ...]  # by seed

    @property
    def strategy(self) -> str:
        """Return the strategy of all of them."""
        return self.logs[0].strategy

    @property
    def ended(self) -> list[Log]:
        """Return those that have ended; all of them if none has."""
        return [log for log in self.logs if log.ended is not None] or list(self.logs)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A setting against independent draws at equal calls. `word`: better, worse, cannot tell, itself or no draws."""

    setting: SeedGroup
    baseline: SamplingBaseline
    word: str
    calls: int = 0  # the fewest that any seed made, and at most as many as there are draws
    bests: tuple[int, ...] = ()  # of the seeds at so many calls
    groups: tuple[int, ...] = ()  # the best of each group of so many draws
    p: float = 1.0  # of the rank test, adjusted by Holm
    can_tell: bool = False  # whether any outcome of so few values could have been told apart


def settings_of(logs: Sequence[Log]) -> list[SeedGroup]:
    """Group runs by all but the seed, labelled by the strategy and their differences."""
    groups: dict[str, list[Log]] = {}
    for log in logs:
        groups.setdefault(json.dumps(_facts(log), sort_keys=True), []).append(log)
    found = [sorted(group, key=lambda log: (log.seed, str(log.folder))) for group in groups.values()]
    labels = labels_of([group[0] for group in found])
    made = [SeedGroup(label, tuple(group)) for label, group in zip(labels, found, strict=True)]
    return sorted(made, key=lambda one: (place_of(one.strategy), one.label))


def place_of(strategy: str) -> int:
    """Return the position of a strategy in tables and pictures; unknown ones are last."""
    return ORDER.index(strategy) if strategy in ORDER else len(ORDER)


def labels_of(logs: Sequence[Log]) -> list[str]:
    """Return a label for each setting: its strategy, and what differs among those of one strategy."""
    labels = []
    for log in logs:
        alike = [_facts(other) for other in logs if other.strategy == log.strategy]
        labels.append(", ".join([log.strategy, *differing(_facts(log), alike)]))
    return [label if labels.count(label) == 1 else f"{label} ({k + 1})" for k, label in enumerate(labels)]


def differing(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `key=value` for what differs; texts of prompts, as the start of a hash, only if nothing shorter differs.

    >>> differing({"n": 4, "first prompt": "a"}, [{"n": 2, "first prompt": "b"}])
    ['n=4']
    """
    keys = [key for key in own if any(json.dumps(own[key]) != json.dumps(of.get(key)) for of in others)]
    plain = [key for key in keys if not key.endswith("prompt")]
    shown = {key: hashlib.sha256(json.dumps(own[key]).encode()).hexdigest()[:8] for key in keys if key not in plain}
    return [f"{key}={shorten(typed_word(own[key]), 40)}" for key in plain] or [f"{k} {v}" for k, v in shown.items()]


def _facts(log: Log) -> dict[str, Any]:
    own = {"strategy": log.strategy, "model": log.model, "starting score": log.start.score}
    return {**own, **flat(log.settings), "system prompt": log.system, "first prompt": log.first_prompt}


def without_copies(logs: Sequence[Log]) -> tuple[list[Log], list[str]]:
    """Return runs without those whose prompts and replies all equal another's, and a line about each."""
    kept: dict[str, Log] = {}
    lines, found = [], []
    for log in logs:
        said = [[turn.prompt, turn.reply and turn.reply.content, [c.outcome for c in turn.calls]] for turn in log.turns]
        digest = json.dumps([log.strategy, log.model, said])
        first = kept.get(digest)
        if first is None or not log.replies:
            kept.setdefault(digest, log)
            found.append(log)
            continue
        of = "the same seed" if first.seed == log.seed else f"seed {first.seed}: another seed changed nothing"
        lines.append(f"{log.folder.name} (seed {log.seed}) has the prompts and replies of {first.folder.name} ({of})")
    return found, lines


def compared(settings: Sequence[SeedGroup], baselines: Mapping[str, SamplingBaseline]) -> list[Comparison]:
    """Compare every setting with the baseline of its draws, by a rank test whose p-values are adjusted by Holm.

    A setting's seeds at the fewest calls that any of them made are compared with consecutive groups of as many draws,
    as from runs of independent sampling. Both sides are samples, and no shape is assumed.
    """
    found = [_raw(setting, baselines[kind_of_draw(setting.logs[0])]) for setting in settings]
    tested = [k for k, one in enumerate(found) if one.word == "" and one.groups and len(one.bests) > 1]
    adjusted = dict(zip(tested, holm([found[k].p for k in tested]), strict=True))
    return [one if one.word else _judged(one, adjusted.get(k, 1.0), len(tested) or 1) for k, one in enumerate(found)]


def _raw(setting: SeedGroup, baseline: SamplingBaseline) -> Comparison:
    if is_sampling(setting.logs):
        return Comparison(setting, baseline, "itself")
    calls = min(baseline.count, *(log.calls for log in setting.ended))
    if calls == 0:
        return Comparison(setting, baseline, "no draws")
    bests = [log.best_at(calls) for log in setting.ended]
    groups = baseline.groups(calls)
    p = rank_sum_p(bests, groups) if groups else 1.0
    return Comparison(setting, baseline, "", calls, tuple(bests), tuple(groups), p)


def _judged(raw: Comparison, p: float, family: int) -> Comparison:
    above = sum((a > b) - (a < b) for a in raw.bests for b in raw.groups)
    word = ("better" if above > 0 else "worse") if p <= LEVEL else "cannot tell"
    possible = len(raw.bests) > 1 and bool(raw.groups) and smallest_p(len(raw.bests), len(raw.groups)) * family <= LEVEL
    return replace(raw, word=word, p=p, can_tell=possible)
