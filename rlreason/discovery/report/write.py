"""Write the report of one discover run, or of several together."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlreason.discovery.report.picture import MOST_PANELS, baseline_lines, distribution, draw, panels_of
from rlreason.discovery.report.read import Log, is_discover_run, read_log
from rlreason.discovery.report.sections import failures, joint_lines, methodology, progress, quotes, run_lines
from rlreason.discovery.report.texts import (
    SeedGroup,
    baselines_of,
    compared,
    counted,
    inline,
    listed,
    name_in,
    reader_text,
    records_of,
    settings_of,
    standing,
    whole_number,
    without_copies,
)
from rlreason.errors import ConfigError
from rlreason.records.files import CONVERSATION, REPORT, SCORE_PICTURE, SET_ASIDE
from rlreason.runtime.files import explained, whole
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
