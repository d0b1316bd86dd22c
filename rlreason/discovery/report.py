"""Write the report of one discover run, or of several together: report.md and score.png."""

import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from rlreason.config.leaves import typed_word
from rlreason.discovery.logs import (
    Log,
    Result,
    SeedGroup,
    Turn,
    compared,
    is_discover_run,
    panels_of,
    read_log,
    settings_of,
    without_copies,
)
from rlreason.discovery.report_picture import MOST_PANELS, draw
from rlreason.errors import ConfigError
from rlreason.records.files import PROGRAM, REPORT, SCORE_PICTURE, SET_ASIDE
from rlreason.report.content import counted
from rlreason.report.documents import fenced, text
from rlreason.runtime.files import explained, whole
from rlreason.runtime.streams import Answer
from rlreason.runtime.text import shorten

DEFAULT_PROBLEM = "kissing_11"  # of `rlreason score`, which needs no option for it
QUOTED_CHARS = 700  # of a prompt or a reply
MOST_QUOTED = 3  # turns
LARGEST_SCORE = 1e15


def write_run_report(folder: Path) -> Path:
    """Write FOLDER/report.md and FOLDER/score.png of one run, ended or not; return the report's path.

    `ConfigError` for a log that cannot be used, `UnwritableError` if the system refuses.
    """
    return _write([read_log(folder)], folder, [])


def write_joint_report(folders: Sequence[Path], out: Path) -> Path:
    """Write OUT/report.md and OUT/score.png of several runs of one problem; return the report's path.

    `folders`: runs, or folders such as a sweep's that hold them. A run whose log cannot be used is left out and named.
    `ConfigError` if none is left, or they are of several problems.
    """
    logs, left_out = [], []
    for folder in runs_below(folders):
        try:
            logs.append(read_log(folder))
        except ConfigError as error:
            left_out.append(str(error).replace(str(folder), folder.name, 1))
    if not logs and left_out:
        raise ConfigError(left_out[0])
    if not logs:
        names = listed([str(folder) for folder in folders[:3]])
        raise ConfigError(f"there is no discover run in {names or 'no folders'}: give folders of some")
    problems = sorted({log.problem for log in logs})
    if len(problems) > 1:
        raise ConfigError(f"the runs are of {len(problems)} problems ({listed(problems)}): give those of one")
    logs, copies = without_copies(logs)
    return _write(logs, out, [*left_out, *copies])


def runs_below(folders: Sequence[Path]) -> list[Path]:
    """Return the runs among folders and directly in them, each once: as given, those of one folder by name."""
    runs: dict[Path, Path] = {}
    for folder in folders:
        inner = [folder]
        if not is_discover_run(folder):
            with suppress(OSError):
                inner = sorted(one for one in folder.iterdir() if not one.name.startswith((".", SET_ASIDE)))
        for one in inner:
            if is_discover_run(one):
                runs.setdefault(one.resolve(), one)
    return list(runs.values())


def report_of(folders: Sequence[Path], out: Path) -> Answer:
    """Write the report of these runs into `out`, and print the result of each."""
    is_alone = len(folders) == 1 and folders[0].resolve() == out.resolve()
    report = write_run_report(out) if is_alone else write_joint_report(folders, out)
    lines, figures = [], []
    for folder in folders:
        with suppress(ConfigError):  # the report names it
            log = read_log(folder)
            row = {"run": str(folder), "strategy": log.strategy, "model": log.model, "seed": log.seed}
            figures.append(row | {"score": log.best.score, "calls": log.calls, "ended": log.ended})
            state = "" if log.ended is not None else ", not ended"
            lines.append(f"{folder}: {log.best.score} {log.unit} in {log.calls} calls{state}")
    summary = "\n".join([*lines, "", f"report: {report} (with {SCORE_PICTURE})"])
    return Answer(summary, {"runs": figures, "markdown": str(report), "picture": str(out / SCORE_PICTURE)})


def _write(logs: Sequence[Log], out: Path, left_out: Sequence[str]) -> Path:
    values = _values(logs)
    out.mkdir(parents=True, exist_ok=True)
    heading = f"{values['title']}: {values['subject']}"
    draw(out / SCORE_PICTURE, heading, logs[0].unit, values["panels"], values["ranked"])
    generated = _environment().get_template("report.md.j2").render(values, left_out=left_out)
    report = out / REPORT
    document = generated.encode() + b"\n" + reader_text(report)
    with explained(report), whole(report) as partial:
        partial.write_bytes(document)
    return report


def _values(logs: Sequence[Log]) -> dict[str, Any]:
    """Compute what the template puts in."""
    settings, log = settings_of(logs), logs[0]
    record = next((log.record for log in logs if log.record), [])
    panels = panels_of(logs, settings)
    logs = [log for setting in settings for log in setting.logs]
    best = max(logs, key=lambda log: log.best.score)
    turns = [turn for log in logs for turn in log.turns]
    results = [result for result in (*(turn.result for turn in turns), *(log.start.result for log in logs)) if result]
    protections = [names for result in results if (names := _names(result.protections))]
    ranked = sorted(records_of(record), key=lambda one: one[0])
    hints = {one if isinstance(one := log.settings.get("hints"), bool) else None for log in logs}
    if len(logs) == 1:
        subject = f"{log.strategy} with {log.model}, seed {digits(log.seed)}"
    else:
        strategies = list(dict.fromkeys(setting.strategy for setting in settings))
        subject = f"{counted(len(logs), 'run')} with {listed(strategies)}"
    problem = ""
    if log.problem != DEFAULT_PROBLEM:  # a name that comes with the package, or somebody's folder
        problem = f" --problem {log.problem if re.fullmatch(r'[a-z0-9_]+', log.problem) else 'FOLDER'}"
    program = None
    with suppress(OSError):
        program = hashlib.sha256((log.folder / PROGRAM).read_bytes()).hexdigest()
    return {
        "title": log.title or name_in(log.problem),
        "subject": subject,
        "problem": name_in(log.problem),
        "problem_option": problem,
        "unit": log.unit,
        "log": log,
        "logs": logs,
        "best": best,
        "settings": settings,
        "common": [one for one in settings[0].overrides if all(one in other.overrides for other in settings)],
        "models": sorted({log.model for log in logs}),
        "starts": sorted({(name_in(log.start.program), log.start.score) for log in logs}),
        "starting_scores": sorted({log.start.score for log in logs}),
        "alone": [setting.label for setting in settings if len(setting.logs) == 1],
        "has_unended": any(len(setting.ended) < len(setting.logs) for setting in settings),
        "systems": {log.system for log in logs},
        "hints": {None: "", True: "with", False: "without"}[hints.pop() if len(hints) == 1 else None],
        "prompt_kinds": Counter(turn.prompt_kind for turn in turns).most_common(8),
        "dimensions": sorted({one.dimension for one in results if one.dimension is not None and one.validity}),
        "protections": sorted(set.intersection(*map(set, protections))) if protections else None,
        "outcomes": outcomes_of(settings),
        "errors": first_errors(results),
        "steps": steps_of(logs),
        "program_sha256": program,
        "record": [
            (typed_word(row.get("score")), str(row.get("who") or ""), str(row.get("note") or "")) for row in record
        ],
        "ranked": ranked,
        "below": [one for one in ranked if one[0] <= best.best.score],
        "above": [one for one in ranked if one[0] > best.best.score],
        "panels": panels,
        "panels_drawn": MOST_PANELS,
        "comparisons": compared(panels, settings),
    }


def _names(protections: Any) -> list[str]:
    if isinstance(protections, Mapping):
        return [f"{name} ({how})" if isinstance(how, str) and how else str(name) for name, how in protections.items()]
    return [str(one) for one in protections] if isinstance(protections, list) else []


GROUPS = ("call", "program", "set", "valid set")  # of the table of outcomes, in its order


def outcomes_of(settings: Sequence[SeedGroup]) -> list[tuple[str, str, list[int]]]:
    """Return the outcomes of calls, programs and sets: group, kind, and how often in each setting."""
    columns = []
    for setting in settings:
        column: Counter[tuple[str, str]] = Counter()
        for log in setting.logs:
            best = log.start.score
            for turn in log.turns:
                column.update(("call", call.outcome) for call in turn.calls if call.outcome != "ok")
                if turn.is_valid:
                    column["valid set", "better than before" if turn.credit > best else "no better"] += 1
                elif turn.result is not None:
                    kind = turn.result.error_kind or ("alarm" if turn.result.alarm else "invalid")
                    column["set" if turn.result.raw_points else "program", kind] += 1
                best = max(best, turn.credit)
        columns.append(column)
    keys = sorted({key for column in columns for key in column}, key=lambda key: (GROUPS.index(key[0]), key[1]))
    return [(group, kind, [column[group, kind] for column in columns]) for group, kind in keys]


def first_errors(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Return kind and first text of the most frequent errors."""
    errors: dict[str, list[str]] = {}
    for result in results:
        if not result.is_valid and result.error:
            errors.setdefault(result.error_kind or "invalid", []).append(result.error)
    return [(kind, errors[kind][0]) for kind in sorted(errors, key=lambda kind: -len(errors[kind]))[:3]]


class ScoreStep(NamedTuple):
    """A turn that raised the best score of its run, and the score before it."""

    log: Log
    turn: Turn
    before: int


def steps_of(logs: Sequence[Log]) -> list[ScoreStep]:
    """Return the turns that raised the score most, in the order of runs and turns."""
    steps = []
    for log in logs:
        best = log.start.score
        for turn in log.turns:
            if turn.credit > best:
                steps.append(ScoreStep(log, turn, best))
                best = turn.credit
    largest = sorted(range(len(steps)), key=lambda k: steps[k].before - steps[k].turn.credit)[:MOST_QUOTED]
    return [steps[k] for k in sorted(largest)]


def records_of(record: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Return (score, who) of the entries of a problem's `record` that have a number as their score."""
    entries = []
    for row in record:
        score = row.get("score")
        if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= LARGEST_SCORE:
            entries.append((float(score), str(row.get("who") or "")))
    return entries


def name_in(path: str) -> str:
    """Return the last part of a path; the folders above it are private.

    >>> name_in("/home/me/mine.py"), name_in("kissing_11")
    ('mine.py', 'kissing_11')
    """
    return PurePosixPath(path).name or path


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def digits(value: int) -> str:
    """Return a whole number of any size, cut in its middle if it is long.

    >>> digits(10**50)
    '100000000000...000000000000 (51 digits)'
    """
    try:
        text = str(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:12]}...{text[-12:]} ({len(text)} digits)"


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


def quote(given: str, lines: int) -> Markup:
    """Return a foreign text in a fence that it cannot end: only beginning and end if it is long."""
    given_lines, half = given.splitlines(), lines // 2
    if len(given_lines) > lines:
        left_out = counted(len(given_lines) - 2 * half, "line")
        given = "\n".join([*given_lines[:half], f"[... {left_out} ...]", *given_lines[-half:]])
    return Markup("\n".join(fenced(shorten(given, QUOTED_CHARS, "both"))))


def hash_code(sha256: str | None) -> Markup:
    """Return a hash as code, or a note if it is no hash."""
    return Markup(f"`{sha256}`" if sha256 and re.fullmatch(r"[0-9a-f]{64}", sha256) else "not in the log")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        finalize=as_markdown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cut": as_markdown,
        "counted": counted,
        "digits": digits,
        "json": json.dumps,
        "listed": lambda parts: Markup(listed([as_markdown(part) for part in parts])),
        "median": statistics.median,
        "quote": quote,
        "sha": hash_code,
    }
    return environment


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
