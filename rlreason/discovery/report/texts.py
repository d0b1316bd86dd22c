"""Make texts safe for a discovery report, name kinds of calls, and keep what a reader wrote."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.report.read import Log
from rlreason.errors import ConfigError
from rlreason.report.build import fenced, text
from rlreason.runtime.differences import LEVEL, holm
from rlreason.runtime.files import whole
from rlreason.runtime.intervals import best_of_curve, best_of_interval, rank_sum_p, smallest_p
from rlreason.runtime.text import shorten

_LINKED = re.compile(r"(?<=[:])//|(?<=\bwww)\.|[@$]", re.IGNORECASE)


def inline(given: str, most: int = 160) -> str:
    r"""Make a foreign text safe within a line: cut, with all of Markdown and HTML escaped, no links or formulas.

    >>> inline("<b>*a*</b> $x$ https://evil.test @all")
    '&lt;b&gt;\\*a\\*&lt;/b&gt; \\$x\\$ https:\\/\\/evil.test \\@all'
    """
    return _LINKED.sub(lambda match: "".join(f"\\{one}" for one in match[0]), text(shorten(given, most)))


def quoted(given: str, most: int, lines: int = 24) -> list[str]:
    """Return a foreign text in a fence that it cannot end: only beginning and end if it is long."""
    given_lines, half = given.splitlines(), lines // 2
    if len(given_lines) > lines:
        left_out = counted(len(given_lines) - 2 * half, "line")
        given = "\n".join([*given_lines[:half], f"[... {left_out} ...]", *given_lines[-half:]])
    return fenced(shorten(given, most, "both"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> list[str]:
    """Return a table of cells that are already Markdown; columns in `numbers` are right-aligned."""
    marks = ["--:" if k in numbers else "---" for k in range(len(head))]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *rows)]


def name_in(path: str) -> str:
    """Return the last part of a path; the folders above it are private.

    >>> name_in("/home/me/mine.py"), name_in("kissing_11")
    ('mine.py', 'kissing_11')
    """
    return PurePosixPath(path).name or path


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "seed"), counted(2000, "call")
    ('1 seed', '2,000 calls')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times_text(number: int) -> str:
    """Return "once", "twice" and so on.

    >>> times_text(1), times_text(2), times_text(3)
    ('once', 'twice', '3 times')
    """
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def figure(value: float) -> str:
    """Return a score or a mean of scores: as a whole number, or else with one digit.

    >>> figure(438.0), figure(153.33), figure(1234)
    ('438', '153.3', '1,234')
    """
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def whole_number(value: int) -> str:
    """Return a whole number of any size, cut in its middle if it is long.

    >>> whole_number(10**50)
    '100000000000...000000000000 (51 digits)'
    """
    try:
        digits = str(value)
    except ValueError:
        return "a number of thousands of digits"
    return digits if len(digits) <= 40 else f"{digits[:12]}...{digits[-12:]} ({len(digits)} digits)"


LARGEST_SCORE = 1e15


def records_of(record: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Return (score, who) of the entries of a problem's `record` that have a number as their score."""
    entries = []
    for row in record:
        score = row.get("score")
        if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= LARGEST_SCORE:
            entries.append((float(score), str(row.get("who") or "")))
    return entries


def standing(record: Sequence[Mapping[str, Any]], score: int, unit: str) -> list[str]:
    """Return the record of a problem, and where a score ranks among it."""
    if not record:
        return ["The problem names no records."]
    rows = [
        [
            inline(typed_word(row.get("score")), 30),
            inline(str(row.get("who") or ""), 80),
            inline(str(row.get("note") or "")),
        ]
        for row in record
    ]
    lines = [*table([inline(unit, 30), "who", "note"], rows, frozenset({0})), ""]
    ranked = sorted(records_of(record), key=lambda one: one[0])
    if not ranked:
        return [*lines, ""]
    below, above = [one for one in ranked if one[0] <= score], [one for one in ranked if one[0] > score]
    reached = f"reaches {figure(below[-1][0])} ({inline(below[-1][1], 80)})" if below else "reaches none of these"
    if above:
        ahead = f"; the next above it is {figure(above[0][0])} ({inline(above[0][1], 80)})."
    else:
        ahead = ", the highest figure of the table: check it by other means before you believe it."
    return [*lines, f"The best score here, {figure(score)}, {reached}{ahead}"]


HEADING = "## Reflection"
INVITATION = (
    f"{HEADING}\n\n"
    "_Write here what you make of it: what worked, what did not, and why; what you would try next. Everything from "
    "this heading on stays as it is when the report is written again._\n"
)
BEFORE = "report.before"  # .md: a report without the heading, which somebody else must have written
_FENCE = re.compile(rb" {0,3}(`{3,}|~{3,})(.*)")


def reader_text(report: Path) -> bytes:
    """Return the text after the generated part: the reader's text of an existing report, or an invitation.

    A report without the heading is someone's own: it is moved next to the new one, which says so.
    """
    if not report.is_file():
        return INVITATION.encode()
    try:
        old = report.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{report} cannot be read ({error.strerror}), and what was written into it would be lost"
        ) from error
    place = _place_of_heading(old)
    if place is not None:
        return old[place:]
    if not old.strip():
        return INVITATION.encode()
    number, aside = 1, report.with_name(f"{BEFORE}.md")
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = report.with_name(f"{BEFORE}-{number}.md")
    with whole(aside) as partial:
        partial.write_bytes(old)
    return f"{INVITATION}\nThe report that was here before had no such heading: it is kept as {aside.name}.\n".encode()


def _place_of_heading(old: bytes) -> int | None:
    """Return the position of the first line with the heading outside fences, which quote what models wrote."""
    place, fence, last = 0, b"", None
    for line in old.splitlines(keepends=True):
        stripped = line.rstrip()
        is_heading = stripped == HEADING.encode()
        if is_heading and not fence:
            return place
        if is_heading:
            last = place
        if match := _FENCE.fullmatch(stripped):
            mark, rest = match[1], match[2].strip()
            if not fence:
                fence = mark if not (mark[:1] == b"`" and b"`" in rest) else b""
            elif mark.startswith(fence) and not rest:
                fence = b""
        place += len(line)
    return last  # somebody has opened a fence above it that is not closed


STRATEGIES = {
    "simple": "every call asks the first prompt anew, with nothing before it: independent draws",
    "best_of_n": "several replies to the first prompt side by side, again and again; the verifier selects the best",
    "refine": "one conversation, in which the exact error is given back after a failure, and a larger set is asked for "
    "after a valid one",
    "hybrid": "as refine, with several replies to every prompt, of which the verifier selects the one to go on with",
}
PROMPTS = {
    "first": "the first prompt",
    "error": "the exact error given back",
    "extend": "a larger set asked for",
    "no_code": "a program asked for that was missing",
}
#: Outcomes of calls other than "ok".
CALLS = {
    "timeout": "no answer in time",
    "connection": "no connection",
    "empty": "an empty answer",
    "no_code": "a reply without a program",
    "truncated": "a reply cut at the limit of tokens",
    "broken": "an answer that is not in the protocol",
    "interrupted": "the run was stopped meanwhile",
}
#: Kinds of errors -> (whose they are, what they mean).
ERRORS = {
    "exception": ("program", "it raised an error"),
    "exit": ("program", "it ended before it gave points"),
    "timeout": ("program", "it took too long"),
    "memory": ("program", "it took too much memory"),
    "output": ("program", "it printed without end"),
    "disk": ("program", "it wrote too much"),
    "processes": ("program", "it ran too many processes"),
    "no_points": ("program", "it gave no points"),
    "type": ("program", "it gave values that are no integers"),
    "size": ("program", "it gave too many rows, digits or bytes"),
    "channel": ("program", "what it gave are no rows of integers"),
    "program": ("program", "it cannot be read, or is too large"),
    "empty": ("set", "it has no points"),
    "ragged": ("set", "its rows have different lengths"),
    "dimension": ("set", "its vectors have another dimension"),
    "zero_vector": ("set", "it holds the zero vector"),
    "too_close": ("set", "two of its points are too close, or equal"),
    "alarm": ("set", "its score is impossible: look at the verifier"),
}


def outcome_text(outcome: str) -> str:
    """Return an outcome of a call in words; "" if it is unknown.

    >>> outcome_text("http_429")
    'the endpoint refused it with status 429'
    """
    status = outcome.removeprefix("http_")
    if status != outcome and status.isdecimal() and len(status) == 3:
        return f"the endpoint refused it with status {status}"
    return CALLS.get(outcome, "")


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
