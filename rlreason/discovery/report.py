"""Write the report of one discover run, or of several together: report.md and score.png."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlreason.discovery.logs import (
    FEW,
    DrawsComparison,
    Log,
    SamplingBaseline,
    SeedGroup,
    baselines_of,
    compared,
    is_discover_run,
    read_log,
    settings_of,
    without_copies,
)
from rlreason.discovery.report_picture import MOST_PANELS, Panel, draw, panels_of
from rlreason.discovery.report_sections import (
    failures,
    figure,
    inline,
    joint_lines,
    listed,
    methodology,
    name_in,
    progress,
    quotes,
    records_of,
    run_lines,
    standing,
    table,
    whole_number,
)
from rlreason.errors import ConfigError
from rlreason.records.files import CONVERSATION, REPORT, SCORE_PICTURE, SET_ASIDE
from rlreason.report.content import counted
from rlreason.runtime.differences import LEVEL
from rlreason.runtime.files import explained, whole
from rlreason.runtime.intervals import mean_interval, smallest_p
from rlreason.runtime.streams import Answer

Record = Sequence[Mapping[str, Any]]


def write_run_report(folder: Path, record: Record) -> Path:
    """Write FOLDER/report.md and FOLDER/score.png of one run, ended or not; return the report's path.

    `record`: what others reached, as rows of {"score", "who", "note"}. `ConfigError` for a log that cannot be used,
    `UnwritableError` if the system refuses.
    """
    return _write([read_log(folder)], record, folder, [])


def write_joint_report(folders: Sequence[Path], record: Record, out: Path) -> Path:
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
        raise ConfigError(
            f"the runs are of {counted(len(problems), 'problem')} ({listed(problems)}): give those of one"
        )
    logs, copies = without_copies(logs)
    return _write(logs, record, out, [*left_out, *copies])


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


def _write(logs: Sequence[Log], record: Record, out: Path, left_out: Sequence[str]) -> Path:
    settings, baselines, one = settings_of(logs), baselines_of(logs), logs[0]
    panels = panels_of(settings, baselines)
    title, subject = one.title or name_in(one.problem), _subject(settings)
    lines = [f"# {inline(title)}: {inline(subject)}", ""]
    if left_out:
        lines += ["Left out:", "", *(f"- {inline(line, 300)}" for line in left_out), ""]
    lines += ["## Methodology", "", *methodology(settings), "", "## Process", "", progress(settings), ""]
    lines += [f"![The best score so far against the calls of the model]({SCORE_PICTURE})", ""]
    if len(panels) > MOST_PANELS:
        lines += [f"The picture shows {MOST_PANELS} of {len(panels)} kinds of first calls.", ""]
    lines += ["### What came of it", "", *failures(settings)]
    lines += [
        "",
        "### The prompts and replies that moved the score most",
        "",
        *quotes([log for setting in settings for log in setting.logs]),
    ]
    lines += ["", "## Final result", "", *(run_lines(one) if len(logs) == 1 else joint_lines(settings))]
    best = max(log.best.score for log in logs)
    lines += ["", "## Where the record stands", "", *standing(record, best, one.unit)]
    lines += ["", "## Seeds", "", *distribution(settings), "", *baseline_lines(panels, compared(settings, baselines))]
    out.mkdir(parents=True, exist_ok=True)
    draw(out / SCORE_PICTURE, f"{title}: {subject}", one.unit, panels, records_of(record))
    report = out / REPORT
    generated = "\n".join(lines) + "\n\n"
    document = generated.encode() + reader_text(report)
    with explained(report), whole(report) as partial:
        partial.write_bytes(document)
    return report


def _subject(settings: Sequence[SeedGroup]) -> str:
    """Return the runs as a heading."""
    logs = [log for setting in settings for log in setting.logs]
    if len(logs) == 1:
        return f"{logs[0].strategy} with {logs[0].model}, seed {whole_number(logs[0].seed)}"
    strategies = list(dict.fromkeys(log.strategy for log in logs))
    return f"{counted(len(logs), 'run')} with {listed(strategies)}"


def report_of(folders: Sequence[Path], out: Path) -> Answer:
    """Write the report of these runs into `out`, and print the result of each."""
    record = record_in(folders)
    is_alone = len(folders) == 1 and folders[0].resolve() == out.resolve()
    report = write_run_report(out, record) if is_alone else write_joint_report(folders, record, out)
    lines, figures = [], []
    for folder in folders:
        with suppress(ConfigError):  # the report names it
            log = read_log(folder)
            row = {"run": str(folder), "strategy": log.strategy, "model": log.model, "seed": log.seed}
            figures.append(row | {"score": log.best.score, "calls": log.calls, "ended": log.ended})
            state = "" if log.ended is not None else ", not ended"
            lines.append(f"{folder}: {log.best.score} {log.unit} in {log.calls} calls{state}")
    text = "\n".join([*lines, "", f"report: {report} (with {SCORE_PICTURE})"])
    return Answer(text, {"runs": figures, "markdown": str(report), "picture": str(out / SCORE_PICTURE)})


def record_in(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what others reached on the problem, from the first run that has it."""
    for folder in folders:
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            record = json.loads((folder / CONVERSATION).read_text(encoding="utf-8")).get("record")
            if isinstance(record, list) and record:
                return [row for row in record if isinstance(row, dict)]
    return []


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


FEWEST_FOR_MEAN = 3  # seeds, for an interval of their mean
MOST_SEEDS = 20  # named in a cell
SEVERAL = 5  # seeds that a command proposes


def distribution(settings: Sequence[SeedGroup]) -> list[str]:
    """Return a table with the final score of every seed, and a note on what one seed cannot show."""
    head = [
        "setting",
        "seeds",
        "final score of each seed",
        "median",
        "min-max",
        "mean (95% interval)",
        "calls",
        "valid",
    ]
    rows = [_row(setting) for setting in settings]
    note = (
        "calls: of the model, retries counted, all seeds together; valid: the share of replies whose set counts. The "
        f"interval is Student's t over seeds, for {FEWEST_FOR_MEAN} or more."
    )
    if any(log.ended is None for setting in settings for log in setting.logs):
        note += " \\* has not ended."
    lines = [*table(head, rows, frozenset({1, 3, 4, 5, 6, 7})), "", note]
    alone = [inline(setting.label) for setting in settings if len(setting.logs) == 1]
    if alone:
        lines += ["", f"One seed: no distribution. It says little about a setting ({listed(alone)}): add seeds."]
    return lines


def _row(setting: SeedGroup) -> list[str]:
    logs = setting.logs
    finals = [log.best.score for log in logs]
    each = [figure(log.best.score) + ("\\*" if log.ended is None else "") for log in logs[:MOST_SEEDS]]
    more = f" and {len(logs) - MOST_SEEDS} more" if len(logs) > MOST_SEEDS else ""
    mean = ""
    if len(logs) >= FEWEST_FOR_MEAN and min(finals) == max(finals):
        mean = f"{figure(finals[0])} (all alike)"
    elif len(logs) >= FEWEST_FOR_MEAN:
        middle, low, high = (figure(round(value, 1)) for value in mean_interval(finals))
        mean = f"{middle} ({low} to {high})"
    replies = sum(log.answered for log in logs)
    valid = sum(turn.is_valid for log in logs for turn in log.turns)
    return [
        inline(setting.label),
        str(len(logs)),
        ", ".join(each) + more,
        figure(statistics.median(finals)),
        f"{figure(min(finals))}-{figure(max(finals))}",
        mean,
        f"{sum(log.calls for log in logs):,}",
        f"{valid} of {replies} ({min(valid / replies, 1):.0%})" if replies else "no reply",
    ]


def baseline_lines(panels: Sequence[Panel], comparisons: Sequence[DrawsComparison]) -> list[str]:
    """Describe each baseline with its extent, then each setting against its own."""
    lines = [
        "A draw is one call of the first prompt with nothing before it, by whatever strategy; calls that gave no valid "
        "set count as 0, retries too, because the budget counts them. The best of k draws is never below the starting "
        "program, as no run is."
    ]
    for panel in panels:
        of = f" ({inline(panel.title)})" if len(panels) > 1 else ""
        lines += ["", f"**Independent draws{of}:** {_reach(panel)}"]
    lines.append("")
    if any(len(one.setting.ended) < len(one.setting.logs) for one in comparisons):
        lines += ["Runs that have not ended are left out of what follows.", ""]
    lines += [f"- **{inline(one.setting.label)}:** {verdict(one, comparisons)}" for one in comparisons]
    return lines


def _reach(panel: Panel) -> str:
    baseline = panel.baseline
    if not baseline.count:
        return f"none yet. {more_draws(panel)}"
    longest = max(log.calls for setting in panel.settings for log in setting.logs)
    reach = min(baseline.count, longest)
    ks = sorted({1, max(1, reach // 4), max(1, reach // 2), max(1, reach)})
    bests = listed([f"{_expected(baseline, k)} in {counted(k, 'call')}" for k in ks])
    runs = f"{counted(baseline.count, 'draw')} from {counted(baseline.runs, 'run')}"
    few = baseline.count < FEW
    bounds = "too few for an interval" if few else "in brackets the 95% bootstrap interval of the draws"
    text = f"{runs}; the expected best is {bests}; {bounds}."
    if baseline.count < longest:
        text += f" They reach to {counted(baseline.count, 'call')}, and the longest run made {longest:,}. "
        text += more_draws(panel)
    return text


def _expected(baseline: SamplingBaseline, k: int) -> str:
    """Return the expected best of k draws, with its interval if there are enough draws."""
    (best,) = baseline.expected([k])
    if baseline.count < FEW:
        return figure(round(best, 1))
    (low,), (high,) = baseline.interval([k])
    return f"{figure(round(best, 1))} ({figure(round(low, 1))} to {figure(round(high, 1))})"


def more_draws(panel: Panel) -> str:
    """Return the overrides that give more draws of the same kind."""
    used = [log.seed for setting in panel.settings for log in setting.logs if log.strategy == "simple"]
    calls = max(1, *(log.calls for setting in panel.settings for log in setting.logs))
    seed = whole_number(max(used, default=-1) + 1)
    return f"More: the same command with `strategy=simple seed={seed} budget.calls={calls}`."


def verdict(one: DrawsComparison, family: Sequence[DrawsComparison]) -> str:
    """Compare a setting with independent draws; "cannot tell" if seeds or draws are too few."""
    if one.word == "itself":
        return "independent draws itself: it makes the baseline, and is not held against it."
    if one.word == "no draws":
        return "cannot tell: there is no call of the first prompt to compare it with."
    seeds, groups = len(one.bests), len(one.groups)
    middle, expected = figure(statistics.median(one.bests)), _expected(one.baseline, one.calls)
    reached = f"the seed has {middle}" if seeds == 1 else f"the {seeds} seeds have {middle} in the median"
    compared = (
        f"after {counted(one.calls, 'call')} {reached}; as many independent draws are expected to have {expected}"
    )
    if seeds == 1:
        return f"cannot tell, with one seed: {compared}."
    test = f"exact rank test of {seeds} seeds against {counted(groups, 'group')} of {counted(one.calls, 'draw')}"
    tested = sum(len(other.bests) > 1 and bool(other.groups) for other in family)
    if not one.can_tell:
        return f"cannot tell: {compared}. {_too_few(one, tested)}"
    p = "p < 0.001" if one.p < 0.001 else f"p = {one.p:.3f}"
    holm = f", Holm over {tested} comparisons" if tested > 1 else ""
    if one.word == "cannot tell":
        return f"cannot tell: {compared} ({test}: {p}{holm})."
    return f"{one.word} than independent draws: {compared} ({test}: {p}{holm})."


def _too_few(one: DrawsComparison, family: int) -> str:
    """Explain why no outcome could have been significant, and what would change that."""
    seeds, groups = len(one.bests), len(one.groups)
    needed = next((n for n in range(groups, 60) if n and smallest_p(seeds, n) * family <= LEVEL), None)
    start = (
        f"The {counted(one.baseline.count, 'draw')} make {counted(groups, 'group')} of {one.calls:,}: {seeds} seeds "
        "against so few could not be told from chance, whatever their scores."
    )
    if needed is None or needed <= groups:
        return f"{start} Add seeds."
    more = counted(needed * one.calls - one.baseline.count, "more draw")
    return f"{start} Add {more} (`strategy=simple`), or seeds."
