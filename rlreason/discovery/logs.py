"""Read the logs of discover runs, group them over seeds, and compare them with independent draws.

Scores are whole numbers in the unit of the problem ("points"); 0 is what an invalid set is worth.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rlreason.config.leaves import flat, typed_word
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.runtime.differences import LEVEL, holm
from rlreason.runtime.intervals import best_of_curve, best_of_interval, rank_sum_p, smallest_p
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
    def credit(self) -> int:
        """Return the score if the set is valid and raised no alarm, else 0."""
        return self.score if self.validity == 1 and self.alarm is None else 0


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
    def credit(self) -> int:
        """Return the score of its program; 0 if there is none."""
        return self.result.credit if self.result else 0

    @property
    def is_valid(self) -> bool:
        """Return whether the reply had a program with a valid set."""
        return self.result is not None and self.result.validity == 1 and self.result.alarm is None

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


@dataclass(frozen=True, slots=True)
class SamplingBaseline:
    """Independent draws of one kind. `scores`: of each call, in the order of runs and turns; 0 without a set."""

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
        values = self._values()
        return [max(values[k * calls : (k + 1) * calls]) for k in range(min(self.count // calls, MOST_GROUPS))]

    def _values(self) -> list[int]:
        return [max(self.start, score) for score in self.scores]


def draws_of(log: Log) -> list[int]:
    """Return the score of every call of the bare first prompt in a run; 0 for one that was repeated."""
    scores: list[int] = []
    for turn in log.turns:
        if turn.is_independent and turn.calls:
            scores += [0] * (len(turn.calls) - 1) + [turn.credit]
    return scores


def baselines_of(logs: Iterable[Log]) -> dict[str, SamplingBaseline]:
    """Return the baseline of each kind of draw, by `kind_of_draw`, if there are draws."""
    kinds: dict[str, list[Log]] = {}
    for log in logs:
        kinds.setdefault(kind_of_draw(log), []).append(log)
    baselines = {}
    for key, of_kind in kinds.items():
        draws = [draws_of(log) for log in of_kind]
        scores = tuple(score for one in draws for score in one)
        baselines[key] = SamplingBaseline(of_kind[0].start.score, scores, sum(bool(one) for one in draws))
    return baselines


def kind_of_draw(log: Log) -> str:
    """Return what two runs must share for a call of the first prompt to be the same draw, as text."""
    return json.dumps(facts_of_draw(log), sort_keys=True)


def facts_of_draw(log: Log) -> dict[str, Any]:
    """Return the same by name: settings by their dotted names, and fields of the log."""
    settings = {key: value for key, value in flat(log.settings).items() if key.partition(".")[0] not in APART}
    own = {"problem": log.problem, "model": log.model, "system prompt": log.system, "first prompt": log.first_prompt}
    return {**settings, **own, "starting score": log.start.score}


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
class DrawsComparison:
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
    by_seed = [sorted(group, key=lambda log: (log.seed, str(log.folder))) for group in groups.values()]
    labels = labels_of([group[0] for group in by_seed])
    settings = [SeedGroup(label, tuple(group)) for label, group in zip(labels, by_seed, strict=True)]
    places = {strategy: place for place, strategy in enumerate(ORDER)}
    return sorted(settings, key=lambda one: (places.get(one.strategy, len(ORDER)), one.label))


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
    short = [f"{key}={shorten(typed_word(own[key]), 40)}" for key in keys if not key.endswith("prompt")]
    return short or [f"{key} {hashlib.sha256(json.dumps(own[key]).encode()).hexdigest()[:8]}" for key in keys]


def _facts(log: Log) -> dict[str, Any]:
    own = {"strategy": log.strategy, "model": log.model, "starting score": log.start.score}
    return {**own, **flat(log.settings), "system prompt": log.system, "first prompt": log.first_prompt}


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


def compared(settings: Sequence[SeedGroup], baselines: Mapping[str, SamplingBaseline]) -> list[DrawsComparison]:
    """Compare every setting with the baseline of its draws, by a rank test whose p-values are adjusted by Holm.

    A setting's seeds at the fewest calls that any of them made are compared with consecutive groups of as many draws,
    as from runs of independent sampling. Both sides are samples, and no shape is assumed.
    """
    raw = [_raw(setting, baselines[kind_of_draw(setting.logs[0])]) for setting in settings]
    tested = [k for k, one in enumerate(raw) if one.word == "" and one.groups and len(one.bests) > 1]
    adjusted = dict(zip(tested, holm([raw[k].p for k in tested]), strict=True))
    return [one if one.word else _judged(one, adjusted.get(k, 1.0), len(tested) or 1) for k, one in enumerate(raw)]


def _raw(setting: SeedGroup, baseline: SamplingBaseline) -> DrawsComparison:
    if all(turn.is_independent for log in setting.logs for turn in log.turns):
        return DrawsComparison(setting, baseline, "itself")
    calls = min(baseline.count, *(log.calls for log in setting.ended))
    if calls == 0:
        return DrawsComparison(setting, baseline, "no draws")
    bests = [log.best_at(calls) for log in setting.ended]
    groups = baseline.groups(calls)
    p = rank_sum_p(bests, groups) if groups else 1.0
    return DrawsComparison(setting, baseline, "", calls, tuple(bests), tuple(groups), p)


def _judged(raw: DrawsComparison, p: float, family: int) -> DrawsComparison:
    above = sum((a > b) - (a < b) for a in raw.bests for b in raw.groups)
    word = ("better" if above > 0 else "worse") if p <= LEVEL else "cannot tell"
    possible = len(raw.bests) > 1 and bool(raw.groups) and smallest_p(len(raw.bests), len(raw.groups)) * family <= LEVEL
    return replace(raw, word=word, p=p, can_tell=possible)
