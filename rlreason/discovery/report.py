"""Write the report of one discover run, or of several together: report.md and score.png."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rlreason.config.leaves import flat, typed_word
from rlreason.discovery.comparison import SeedGroup, settings_of
from rlreason.discovery.log import Log, Turn, read_log
from rlreason.discovery.report_picture import draw
from rlreason.errors import ConfigError
from rlreason.records.files import CONVERSATION, REPORT, SCORE_PICTURE, SET_ASIDE
from rlreason.report.content import counted
from rlreason.report.documents import fenced, text
from rlreason.runtime.files import explained, free_folder, whole
from rlreason.runtime.streams import Answer
from rlreason.runtime.text import shorten

QUOTED_CHARS = 700  # of the first prompt


def runs_below(folders: Sequence[Path]) -> list[Path]:
    """Return the runs among folders and directly in them, each once: as given, those of one folder by name."""
    runs: dict[Path, Path] = {}
    for folder in folders:
        inner = [folder]
        if folder.is_dir() and not (folder / CONVERSATION).is_file():
            inner = sorted(one for one in folder.iterdir() if not one.name.startswith((".", SET_ASIDE)))
        runs = {one.resolve(): one for one in inner if (one / CONVERSATION).is_file()} | runs
    return list(runs.values())


def report_of(folders: Sequence[Path], out: Path) -> Answer:
    """Write the report of these runs into `out`, and print the result of each."""
    report, logs = write_report(folders, out)
    figures = [
        {"run": str(log.folder), "strategy": log.strategy, "model": log.model, "seed": log.seed}
        | {"score": log.best["score"], "calls": log.calls, "ended": log.ended}
        for log in logs
    ]
    lines = [f"{one['run']}: {one['score']} in {one['calls']} calls; {one['ended'] or 'not ended'}" for one in figures]
    summary = "\n".join([*lines, "", f"report: {report} (with {SCORE_PICTURE})"])
    return Answer(summary, {"runs": figures, "markdown": str(report), "picture": str(out / SCORE_PICTURE)})


def write_report(folders: Sequence[Path], out: Path) -> tuple[Path, list[Log]]:
    """Write OUT/report.md and OUT/score.png of runs of one problem, ended or not; return the former and the logs.

    `ConfigError` if a log cannot be used, or they are of several problems; `UnwritableError` if the system refuses.
    """
    logs = list(map(read_log, folders))
    if len(problems := sorted({log.problem for log in logs})) > 1:
        raise ConfigError(f"the runs are of {len(problems)} problems ({', '.join(problems)}): give those of one")
    settings = settings_of(logs)
    context = _context(settings)
    out.mkdir(parents=True, exist_ok=True)
    draw(out / SCORE_PICTURE, f"{context['title']}: {context['subject']}", settings)
    report = out / REPORT
    document = TEMPLATES.get_template("report.md.j2").render(context).encode() + b"\n" + reader_text(report)
    with explained(report), whole(report) as partial:
        partial.write_bytes(document)
    return report, logs


def _context(settings: Sequence[SeedGroup]) -> dict[str, Any]:
    """Compute what the template puts in."""
    logs = [log for setting in settings for log in setting.logs]
    log, best = logs[0], max(logs, key=lambda log: log.best["score"])
    subject = f"{log.strategy} with {log.model}, seed {log.seed}"
    if len(logs) > 1:
        subject = f"{counted(len(logs), 'run')} with {', '.join(dict.fromkeys(one.strategy for one in logs))}"
    return {
        "title": log.title or Path(log.problem).name,
        "subject": subject,
        "problem": Path(log.problem).name,
        "log": log,
        "logs": logs,
        "settings": settings,
        "best": best,
        "best_result": next((turn.result for turn in best.turns if turn.id == best.best["turn"]), best.start["result"]),
        "starter": Path(log.start["program"]).name,
        "overrides": [f"{key}={typed_word(value)}" for key, value in flat(log.settings).items() if value is not None],
        "errors": errors_of([turn for setting in settings for turn in setting.turns]),
        "ranked": sorted(log.record, key=lambda one: one.score),
    }


def errors_of(turns: Sequence[Turn]) -> list[tuple[str, str, int]]:
    """Return what went wrong, and how often: with calls, and with programs and their sets."""
    calls = Counter(call.outcome for turn in turns for call in turn.calls if call.outcome != "ok")
    results = [turn.result for turn in turns if turn.result is not None and not turn.is_valid]
    programs = Counter(result.get("error_kind") or "invalid" for result in results)
    rows = (("call", calls), ("program", programs))
    return [(what, kind, times) for what, counter in rows for kind, times in sorted(counter.items())]


_LINKED = re.compile(r"(?<=[:])//|(?<=\bwww)\.|[@$]", re.IGNORECASE)


def as_markdown(value: Any, most: int = 160) -> Markup:
    r"""Return what the template puts in as safe Markdown: numbers with at most one digit, texts cut and escaped.

    Nothing in a text is markup, a link or a formula.

    >>> print(as_markdown("<b>*a*</b> $x$ https://evil.test @all"), as_markdown(1234), as_markdown(153.33))
    &lt;b&gt;\*a\*&lt;/b&gt; \$x\$ https:\/\/evil.test \@all 1,234 153.3
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, int | float):
        value = round(value, 1)
        return Markup(f"{value:,.0f}" if value == int(value) else f"{value:,.1f}")
    line = text(shorten(str(value), most))
    return Markup(_LINKED.sub(lambda match: "".join(f"\\{one}" for one in match[0]), line))


def quote(given: str) -> Markup:
    """Return a foreign text in a fence that it cannot end: only beginning and end if it is long."""
    return Markup("\n".join(fenced(shorten(given, QUOTED_CHARS, "both"))))


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
    "json": json.dumps,
    "listed": lambda parts: Markup(", ".join(map(as_markdown, parts))),
    "median": statistics.median,
    "quote": quote,
}

INVITATION = (
    b"## Reflection\n\n"
    b"_Write here what you make of it: what worked, what did not, and why; what you would try next. Everything from "
    b"this heading on stays as it is when the report is written again._\n"
)
#: A fenced block, which may quote the heading, or the heading.
_FENCE_OR_HEADING = re.compile(rb"^(`{3,})text\n.*?^\1$|^## Reflection\s*?$", re.DOTALL | re.MULTILINE)


def reader_text(report: Path) -> bytes:
    """Return the text after the generated part: the reader's text of an existing report, or an invitation.

    A file without the heading, which may be all the reader's own, is set aside as `report_before.md`.
    """
    with explained(report):
        old = report.read_bytes() if report.exists() else b""
        headings = [match.start() for match in _FENCE_OR_HEADING.finditer(old) if not match[1]]
        if old and not headings:
            report.rename(free_folder(report.with_name("report_before.md")))
    return old[headings[0] :] if headings else INVITATION
