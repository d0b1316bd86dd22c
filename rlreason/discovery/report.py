"""Write report.md and score.png of discover runs, grouped over seeds and compared with calls of the first prompt."""

import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.log import Log, Turn, read_log
from rlreason.errors import ConfigError
from rlreason.records.files import CONVERSATION, REPORT, SCORE_PICTURE, SET_ASIDE
from rlreason.records.training_curves import picture
from rlreason.report.content import LIGHT, counted, evenly, fenced, text
from rlreason.runtime.files import explained, free_folder, whole
from rlreason.runtime.statistics import LEVEL, best_of, best_of_interval, holm, rank_sum_p, smallest_p
from rlreason.runtime.streams import Answer
from rlreason.runtime.text import shorten

#: Facts that change no reply to the first prompt, and no score of it, by their first words. `hints` stand in it.
APART = {"strategy", "budget", "replies", "retries", "hints", "history", "restart_after"}
MOST_GROUPS = 200  # of a rank test
QUOTED_CHARS = 700  # of the first prompt
POINTS = 120  # of the picture's baseline
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
    """Group runs by all but the seed, labelled by the strategy and what differs among those of one strategy.

    Compare every group with the baseline of its draws, by a rank test whose p-values are adjusted by Holm: its seeds at
    the fewest calls that any of them made, with consecutive groups of as many draws, as from independent sampling.
    """
    groups: dict[str, list[Log]] = {}
    for log in sorted(logs, key=lambda log: (log.seed, str(log.folder))):
        groups.setdefault(json.dumps(facts_of(log), sort_keys=True), []).append(log)
    settings = []
    for group in groups.values():
        own, kind = facts_of(group[0]), kind_of(group[0])
        alike = [facts_of(one) for one, *_ in groups.values() if one.strategy == own["strategy"]]
        draws = [max(own["starting score"], score) for log in logs if kind_of(log) == kind for score in draws_of(log)]
        settings.append(SeedGroup(", ".join([own["strategy"], *differing(own, alike)]), group, draws))
    settings.sort(key=lambda one: one.label)
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
    return settings


def differing(own: Facts, others: Sequence[Facts]) -> list[str]:
    """Return `key=value` for what differs; texts of prompts as the start of a hash."""
    words = []
    for key, value in own.items():
        if any(value != of.get(key) for of in others):
            digest = hashlib.sha256(str(value).encode()).hexdigest()[:8]
            words.append(f"{key}={digest if key.endswith('prompt') else shorten(typed_word(value), 40)}")
    return words


def draws_of(log: Log) -> list[int]:
    """Return the score of every call of the bare first prompt in a run; 0 for one that was repeated."""
    made = [turn for turn in log.turns if turn.is_independent and turn.calls]
    return [score for turn in made for score in ([0] * (len(turn.calls) - 1) + [turn.credit])]


def draw(path: Path, title: str, settings: Sequence[SeedGroup]) -> None:
    """Draw the best score against calls: each run, the median of seeds, the expected best of k draws, and records."""
    logs = [log for setting in settings for log in setting.logs]
    longest = max(1, *(log.calls for log in logs))
    with picture(path, shorten(title, 90), (8.5, 5)) as ax:
        for place, setting in enumerate(settings):
            draws, reach = setting.draws, min(len(setting.draws), longest)  # and calls to compare with
            if reach > 1 and draws not in [one.draws for one in settings[:place]]:
                ks = [1 + int(k) for k in evenly(reach, POINTS)]
                name = shorten(f"independent draws: expected best of {len(draws)} ({setting.label})", 110)
                ax.plot(ks, [best_of(draws, k) for k in ks], label=name, color=LIGHT["s0"], linestyle="--")
                ax.fill_between(ks, *best_of_interval(draws, ks), color=LIGHT["s0"], alpha=0.13, linewidth=0)
            colour = LIGHT[f"s{1 + place % 7}"]
            for log in setting.logs:
                ax.step(*log.curve(), where="post", color=colour, linewidth=0.9, alpha=0.4)
            calls = range(1 + min(log.calls for log in setting.ended))
            middle = [np.median([log.best_at(made) for log in setting.ended]) for made in calls]
            name = shorten(f"{setting.label} (median of {counted(len(setting.ended), 'run')})", 110)
            ax.step(calls, middle, where="post", color=colour, linewidth=2.4, label=name)
        top = 1.1 * max(1.0, ax.dataLim.y1)
        for record in logs[0].record:
            if 0 < record.score <= top:
                ax.axhline(record.score, color=LIGHT["axis"], linewidth=0.8, linestyle=":")
                name = shorten(f"{record.score:g} {record.who}", 30)
                ax.text(1.01, record.score, name, transform=ax.get_yaxis_transform(), fontsize=7, va="center")
        ax.set(xlabel="calls of the model (requests, retries counted)", xlim=(0, longest * 1.02), ylim=(0, top))
        ax.set_ylabel(f"best score so far ({shorten(logs[0].unit, 40)})")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.25)
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.12), fontsize=8, frameon=False)


def runs_below(folder: Path) -> list[Path]:
    """Return the runs of a folder: itself, or those directly in it, by name."""
    if (folder / CONVERSATION).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{CONVERSATION}"))
    return [run for run in found if not run.name.startswith((".", SET_ASIDE))]


def write_report(folders: Sequence[Path], out: Path) -> Answer:
    """Write OUT/report.md and OUT/score.png of runs of one problem, ended or not; return the result of each.

    A run that repeats the prompts and replies of another is no seed of its own.
    """
    copies, firsts, counted_logs = list[str](), dict[str, Log](), list[Log]()
    for log in map(read_log, folders):
        turns = [[turn.prompt, turn.content, [call.outcome for call in turn.calls]] for turn in log.turns]
        first = firsts.setdefault(json.dumps([log.strategy, log.model, turns]), log)
        if first is log or not any(turn.reply for turn in log.turns):
            counted_logs.append(log)
        else:
            copies.append(f"{log.folder.name} (seed {log.seed}) repeats {first.folder.name} (seed {first.seed})")
    if len(problems := sorted({log.problem for log in counted_logs})) > 1:
        raise ConfigError(f"the runs are of {len(problems)} problems ({', '.join(problems)}): give those of one")
    settings = settings_of(counted_logs)
    logs = [log for setting in settings for log in setting.logs]
    log, all_turns = logs[0], [turn for setting in settings for turn in setting.turns]
    heading = f"{log.strategy} with {log.model}, seed {log.seed}"
    if len(logs) > 1:
        heading = f"{counted(len(logs), 'run')} with {', '.join(dict.fromkeys(one.strategy for one in logs))}"
    heading = f"{log.title or Path(log.problem).name}: {heading}"
    overrides = [f"{key}={typed_word(value)}" for key, value in flat(log.settings).items() if value is not None]
    errors = Counter(("call", call.outcome) for turn in all_turns for call in turn.calls if call.outcome != "ok")
    results = [turn.result for turn in all_turns if turn.result is not None and not turn.is_valid]
    errors.update(("program", result.get("error_kind") or "invalid") for result in results)
    draw(out / SCORE_PICTURE, heading, settings)
    report = out / REPORT
    document = TEMPLATES.get_template("report.md.j2").render(
        heading=heading, settings=settings, logs=logs, overrides=overrides, errors=sorted(errors.items()), copies=copies
    )
    with explained(report), whole(report) as partial:
        old = report.read_bytes() if report.exists() else b""
        headings = [match.start() for match in _FENCE_OR_HEADING.finditer(old) if not match[1]]
        if old and not headings:  # what the reader wrote there is kept
            report.rename(free_folder(report.with_name("report_before.md")))
        partial.write_bytes(document.encode() + b"\n" + (old[headings[0] :] if headings else INVITATION))
    figures = [
        {name: getattr(one, name) for name in ("strategy", "model", "seed", "calls", "ended")}
        | {"run": str(one.folder), "score": one.best["score"]}
        for one in counted_logs
    ]
    lines = [f"{one['run']}: {one['score']} in {one['calls']} calls; {one['ended'] or 'not ended'}" for one in figures]
    summary = "\n".join([*lines, f"report: {report}"])
    return Answer(summary, {"runs": figures, "markdown": str(report), "picture": str(out / SCORE_PICTURE)})


_LINKED = re.compile(r"(?<=[:])//|(?<=\bwww)\.|[@$]", re.IGNORECASE)


def as_markdown(value: Any, most: int = 160) -> Markup:
    r"""Return what the template puts in as safe Markdown: numbers, and texts without markup, links and formulas.

    >>> print(as_markdown("<b>*a*</b> $x$ https://evil.test @all"), as_markdown(1234), as_markdown(153.33))
    &lt;b&gt;\*a\*&lt;/b&gt; \$x\$ https:\/\/evil.test \@all 1,234 153.3
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, int | float):
        return Markup(f"{value:,.1f}".removesuffix(".0"))
    line = text(shorten(str(value), most))
    return Markup(_LINKED.sub(lambda match: "".join(f"\\{one}" for one in match[0]), line))


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    finalize=as_markdown,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "cut": as_markdown,
    "counted": counted,
    "file_name": lambda path: Path(path).name,
    "json": json.dumps,
    "listed": lambda parts: Markup(", ".join(map(as_markdown, parts))),
    "median": statistics.median,
    "quote": lambda given: Markup("\n".join(fenced(shorten(given, QUOTED_CHARS, "both")))),
}

INVITATION = b"""## Reflection

_Write here what you make of it: what worked, what did not, and why; what you would try next. Everything from this
heading on stays as it is when the report is written again._
"""
#: A fenced block, which may quote the heading, or the heading.
_FENCE_OR_HEADING = re.compile(rb"^(`{3,})text\n.*?^\1$|^## Reflection\s*?$", re.DOTALL | re.MULTILINE)
