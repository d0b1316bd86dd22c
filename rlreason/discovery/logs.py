"""Read the logs of discover runs, group them over seeds, and compare them with independent draws.

Scores are whole numbers in the unit of the problem ("points"); 0 is what an invalid set is worth.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rlreason.config.leaves import flat, typed_word
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.runtime.differences import LEVEL, holm
from rlreason.runtime.intervals import best_of_curve, best_of_interval, mean_interval, rank_sum_p, smallest_p
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
    def is_valid(self) -> bool:
        """Return whether the set counts."""
        return self.validity == 1 and self.alarm is None


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
    def is_valid(self) -> bool:
        """Return whether the reply had a program with a valid set."""
        return self.result is not None and self.result.is_valid

    @property
    def credit(self) -> int:
        """Return the score of its program if its set counts, else 0."""
        return self.result.score if self.result is not None and self.result.is_valid else 0

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

    @property
    def tokens(self) -> int:
        """Return the tokens of prompts and replies."""
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


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
    record: list[dict[str, Any]] = field(default_factory=list)  # what others reached: {"score", "who", "note"}
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


#: Settings that change no reply to the first prompt, and no score of it, by their first words. `hints` stand in it.
APART = {"budget", "replies", "retries", "hints", "history", "restart_after"}
MOST_GROUPS = 200  # of a rank test
FEW = 5  # with fewer draws no interval is given
MOST_NEEDED = 60  # groups of draws that a report asks for
FEWEST_FOR_MEAN = 3  # seeds, for an interval of their mean
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
    def finals(self) -> list[int]:
        """Return the best score of each."""
        return [log.best.score for log in self.logs]

    @property
    def ended(self) -> list[Log]:
        """Return those that have ended; all of them if none has."""
        return [log for log in self.logs if log.ended is not None] or list(self.logs)

    @property
    def turns(self) -> list[Turn]:
        """Return the turns of all of them, run by run."""
        return [turn for log in self.logs for turn in log.turns]

    @property
    def calls(self) -> list[LoggedCall]:
        """Return the requests of all of them."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def ends(self) -> list[tuple[str, int]]:
        """Return the most frequent reasons why they ended, and how often each."""
        return Counter(log.ended or "it has not ended" for log in self.logs).most_common(5)

    @property
    def largest(self) -> Log:
        """Return the run with the best score."""
        return max(self.logs, key=lambda log: log.best.score)

    @property
    def overrides(self) -> list[str]:
        """Return their settings as they are typed, without unset budgets."""
        settings = flat(self.logs[0].settings).items()
        return [f"{key}={typed_word(v)}" for key, v in settings if v is not None or not key.startswith("budget.")]

    @property
    def mean(self) -> tuple[float, float, float] | None:
        """Return mean, low and high of the final scores over seeds; None if the seeds are too few or all alike."""
        if len(self.logs) < FEWEST_FOR_MEAN or len(set(self.finals)) == 1:
            return None
        return mean_interval(self.finals)


def settings_of(logs: Sequence[Log]) -> list[SeedGroup]:
    """Group runs by all but the seed, labelled by the strategy and what differs among those of one strategy."""
    groups: dict[str, list[Log]] = {}
    for log in logs:
        groups.setdefault(json.dumps(_facts(log), sort_keys=True), []).append(log)
    by_seed = [sorted(group, key=lambda log: (log.seed, str(log.folder))) for group in groups.values()]
    labels = []
    for log, *_ in by_seed:
        alike = [_facts(other) for other, *_ in by_seed if other.strategy == log.strategy]
        labels.append(", ".join([log.strategy, *differing(_facts(log), alike)]))
    labels = [label if labels.count(label) == 1 else f"{label} ({k + 1})" for k, label in enumerate(labels)]
    settings = [SeedGroup(label, tuple(group)) for label, group in zip(labels, by_seed, strict=True)]
    places = {strategy: place for place, strategy in enumerate(ORDER)}
    return sorted(settings, key=lambda one: (places.get(one.strategy, len(ORDER)), one.label))


def _facts(log: Log) -> dict[str, Any]:
    """Return what runs of one setting share."""
    own = {"strategy": log.strategy, "model": log.model, "starting score": log.start.score}
    return {**own, **flat(log.settings), "system prompt": log.system, "first prompt": log.first_prompt}


def differing(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `key=value` for what differs; texts of prompts, as the start of a hash, only if nothing shorter differs.

    >>> differing({"n": 4, "first prompt": "a"}, [{"n": 2, "first prompt": "b"}])
    ['n=4']
    """
    keys = [key for key in own if any(json.dumps(own[key]) != json.dumps(of.get(key)) for of in others)]
    short = [f"{key}={shorten(typed_word(own[key]), 40)}" for key in keys if not key.endswith("prompt")]
    return short or [f"{key} {hashlib.sha256(json.dumps(own[key]).encode()).hexdigest()[:8]}" for key in keys]


def without_copies(logs: Sequence[Log]) -> tuple[list[Log], list[str]]:
    """Return runs without those whose prompts and replies all equal another's, and a line about each."""
    firsts: dict[str, Log] = {}
    originals, lines = [], []
    for log in logs:
        turns = [
            [turn.prompt, turn.reply and turn.reply.content, [c.outcome for c in turn.calls]] for turn in log.turns
        ]
        first = firsts.setdefault(json.dumps([log.strategy, log.model, turns]), log)
        if first is log or not any(turn.reply for turn in log.turns):
            originals.append(log)
            continue
        of = "the same seed" if first.seed == log.seed else f"seed {first.seed}: another seed changed nothing"
        lines.append(f"{log.folder.name} (seed {log.seed}) has the prompts and replies of {first.folder.name} ({of})")
    return originals, lines


def draws_of(log: Log) -> list[int]:
    """Return the score of every call of the bare first prompt in a run; 0 for one that was repeated."""
    scores: list[int] = []
    for turn in log.turns:
        if turn.is_independent and turn.calls:
            scores += [0] * (len(turn.calls) - 1) + [turn.credit]
    return scores


def facts_of_draw(log: Log) -> dict[str, Any]:
    """Return what two runs must share for a call of the first prompt to be the same draw, by name."""
    settings = {key: value for key, value in flat(log.settings).items() if key.partition(".")[0] not in APART}
    own = {"problem": log.problem, "model": log.model, "system prompt": log.system, "first prompt": log.first_prompt}
    return {**settings, **own, "starting score": log.start.score}


@dataclass(frozen=True, slots=True)
class Panel:
    """The settings whose first calls are draws of one kind, and these independent draws."""

    title: str  # what distinguishes the kind
    settings: tuple[SeedGroup, ...]
    draws: tuple[int, ...]  # the score of each, in the order of runs and turns; 0 without a set
    runs: int  # how many runs they come from

    @property
    def count(self) -> int:
        """Return the number of draws: of calls for which there is a baseline."""
        return len(self.draws)

    @property
    def start(self) -> int:
        """Return the score of the program that the runs began with."""
        return self.settings[0].logs[0].start.score

    @property
    def logs(self) -> list[Log]:
        """Return the runs of all its settings."""
        return [log for setting in self.settings for log in setting.logs]

    @property
    def longest(self) -> int:
        """Return how many calls the longest run made."""
        return max(log.calls for log in self.logs)

    @property
    def ks(self) -> list[int]:
        """Return the numbers of draws whose expected best a report names."""
        reach = min(self.count, self.longest)
        return sorted({max(1, reach // part) for part in (reach, 4, 2, 1)}) if reach else []

    @property
    def unused_seed(self) -> int:
        """Return a seed that gives more draws of the kind."""
        return 1 + max((log.seed for log in self.logs if log.strategy == "simple"), default=-1)

    def expected(self, calls: Sequence[int]) -> list[float]:
        """Return the expected best after each number of draws, each at most `count`."""
        return best_of_curve(self._values(), calls)

    def interval(self, calls: Sequence[int]) -> tuple[list[float], list[float]] | None:
        """Return a 95% bootstrap interval of the same, low and high; None for fewer than `FEW` draws."""
        if self.count < FEW:
            return None
        low, high = best_of_interval(self._values(), calls)
        return low.tolist(), high.tolist()

    def groups(self, calls: int) -> list[int]:
        """Return the best of each consecutive group of so many draws, as from runs of independent sampling."""
        values = self._values()
        return [max(values[k * calls : (k + 1) * calls]) for k in range(min(self.count // calls, MOST_GROUPS))]

    def _values(self) -> list[int]:
        return [max(self.start, score) for score in self.draws]


def panels_of(logs: Sequence[Log], settings: Sequence[SeedGroup]) -> list[Panel]:
    """Return a panel for each kind of draw. `logs`: in the order in which their draws are grouped."""
    kinds: dict[str, list[SeedGroup]] = {}
    for setting in settings:
        kinds.setdefault(json.dumps(facts_of_draw(setting.logs[0]), sort_keys=True), []).append(setting)
    facts = [facts_of_draw(of_kind[0].logs[0]) for of_kind in kinds.values()]
    panels = []
    for own, (kind, of_kind) in zip(facts, kinds.items(), strict=True):
        draws = [draws_of(log) for log in logs if json.dumps(facts_of_draw(log), sort_keys=True) == kind]
        scores = tuple(score for one in draws for score in one)
        panels.append(Panel(", ".join(differing(own, facts)), tuple(of_kind), scores, sum(map(bool, draws))))
    return panels


@dataclass(frozen=True, slots=True)
class DrawsComparison:
    """A setting against independent draws at equal calls. `word`: better, worse, cannot tell, itself or no draws."""

    setting: SeedGroup
    panel: Panel
    word: str
    calls: int = 0  # the fewest that any seed made, and at most as many as there are draws
    bests: tuple[int, ...] = ()  # of the seeds at so many calls
    groups: tuple[int, ...] = ()  # the best of each group of so many draws
    p: float = 1.0  # of the rank test, adjusted by Holm
    family: int = 0  # how many comparisons Holm adjusts together

    def can_tell(self, groups: int) -> bool:
        """Return whether any outcome of the seeds and so many groups of draws could be told from chance."""
        return smallest_p(len(self.bests), groups) * self.family <= LEVEL

    @property
    def more_draws(self) -> int:
        """Return how many further draws would do for an outcome to be told from chance; 0 if more seeds are needed."""
        groups = next((n for n in range(len(self.groups) + 1, MOST_NEEDED) if self.can_tell(n)), 0)
        return max(0, groups * self.calls - self.panel.count)


def compared(panels: Sequence[Panel], settings: Sequence[SeedGroup]) -> list[DrawsComparison]:
    """Compare every setting with the baseline of its draws, by a rank test whose p-values are adjusted by Holm.

    A setting's seeds at the fewest calls that any of them made are compared with consecutive groups of as many draws,
    as from runs of independent sampling. Both sides are samples, and no shape is assumed.
    """
    own = {setting.label: panel for panel in panels for setting in panel.settings}
    raw = [_unadjusted(setting, own[setting.label]) for setting in settings]
    tested = [one for one in raw if len(one.bests) > 1]
    adjusted = {one.setting.label: p for one, p in zip(tested, holm([one.p for one in tested]), strict=True)}
    comparisons = []
    for one in raw:
        p, word = adjusted.get(one.setting.label, 1.0), one.word
        if p <= LEVEL:
            above = sum((a > b) - (a < b) for a in one.bests for b in one.groups)
            word = "better" if above > 0 else "worse"
        comparisons.append(replace(one, word=word, p=p, family=len(tested)))
    return comparisons


def _unadjusted(setting: SeedGroup, panel: Panel) -> DrawsComparison:
    if all(turn.is_independent for turn in setting.turns):
        return DrawsComparison(setting, panel, "itself")
    calls = min(panel.count, *(log.calls for log in setting.ended))
    if calls == 0:
        return DrawsComparison(setting, panel, "no draws")
    bests, groups = [log.best_at(calls) for log in setting.ended], panel.groups(calls)
    p = rank_sum_p(bests, groups)
    return DrawsComparison(setting, panel, "cannot tell", calls, tuple(bests), tuple(groups), p)
