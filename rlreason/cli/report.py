"""Turn runs and sweeps into a report: which setting is better, by how much, and when the data cannot tell.

Writes report.html, one page that needs no network, and report.md with its pictures in report_files/, into the first
folder given. RUNS are folders of runs, sweeps, or settings of a sweep (SWEEP/KEY=VALUE), finished or not.
"""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.console import Console
from rlreason.report.charts import write_figures
from rlreason.report.compare import entry
from rlreason.report.content import Report
from rlreason.report.documents import FILES, page_of, write_markdown
from rlreason.report.read import read_study
from rlreason.report.sections import build_report
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer, Parser, folded

HTML, MARKDOWN = "report.html", "report.md"
COURSES = ("cs336_2025", "cs336_2026", "pku_hw3")
RUNS = Path("runs")  # gathered by default for a write-up


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason report`."""
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="folders of runs and sweeps")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the report goes; the first folder given")
    figures = "also every picture as SVG, PNG and PDF of a paper's column, and its data as CSV"
    parser.add_argument("--figures", type=Path, metavar="DIR", help=figures)
    parser.add_argument(
        "--assignment", choices=COURSES, help=f"the write-up of a whole assignment, of all sweeps below RUN ({RUNS})"
    )


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Write the report."""
    runs: list[Path] = arguments.runs
    if arguments.assignment is None and (answer := report_of_discovery(runs, arguments.out, console)) is not None:
        return answer
    if missing := [name for name in ("altair", "vl_convert") if find_spec(name) is None]:
        raise ConfigError(f"rlreason report needs {' and '.join(missing)}: pip install 'rlreason[report]'")
    if arguments.assignment is not None:
        from rlreason.report.assignment import write_up

        if len(runs) > 1:
            raise ConfigError(f"--assignment gathers what lies below one folder, and {len(runs)} are given")
        return write_up(arguments.assignment, (runs or [RUNS])[0], arguments.out, console)
    if not runs:
        raise ConfigError("the following arguments are required: RUN: write rlreason report [-h] RUN [RUN ...]")
    out, figures = folder_of(arguments.out, runs[0]), arguments.figures
    with console.wait("writing the report"):
        report = build_report(read_study(runs))
        try:
            write_whole(out / HTML, page_of(report))
            write_markdown(report, out / MARKDOWN)
            if figures is not None:
                write_figures(report.every_figure, report.legend, writable(figures, "--figures"))
        except UnwritableError as error:
            raise ConfigError(f"{error}: give --out FOLDER") from None
    return answer_of(report, out, console.width, figures)


def report_of_discovery(folders: list[Path], out: Path | None, console: Console) -> Answer | None:
    """Write the report of runs of discovery; None if there is none. `ConfigError` if mixed with other runs."""
    from rlreason.discovery.report import report_of, runs_below

    found = {folder: runs_below([folder]) for folder in folders}
    if not any(found.values()):
        return None
    if strange := [folder for folder, runs in found.items() if not runs]:
        raise ConfigError(
            f"RUN={strange[0]} holds no run of discovery, and {next(f for f, runs in found.items() if runs)} does: "
            "give each to a command of its own"
        )
    place = folder_of(out, folders[0])
    with console.wait("writing the report"):
        answer: Answer = report_of([run for runs in found.values() for run in runs], place)
    return answer


def folder_of(out: Path | None, run: Path) -> Path:
    """Return the folder to write into, made if missing: `out`, else the run's, or its sweep's if RUN is a setting."""
    if out is None:
        out = run if run.is_dir() or "=" not in run.name else run.parent
        if not out.is_dir():
            raise ConfigError(
                f"RUN={run} is no folder: give the folder of a run or of a sweep, as printed at its start"
            )
    return writable(out)


def writable(folder: Path, option: str = "--out") -> Path:
    """Return the folder to write into, made if missing; `ConfigError` if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be made ({error.strerror}): give another folder") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written to: give {option} FOLDER")
    return folder


def answer_of(report: Report, out: Path, width: int, drawn: Path | None = None) -> Answer:
    """Return the report for the terminal, and the same as figures."""
    lines = [report.question, folded(report.summary, width), ""]
    for verdict in report.verdicts:
        word = "" if verdict.difference is None else f"{verdict.word}: "  # the sentence says that nothing is compared
        lines.append(folded(f"{word}{verdict.sentence}", width))
    lines += [folded(f"! {line}", width) for line in (*report.warnings, *report.problems)]
    lines += ["", folded(f"report: {out / HTML} and {out / MARKDOWN} (with {FILES}/)", width)]
    if drawn is not None:
        lines.append(f"figures: {drawn}")
    figures = {
        "question": report.question,
        "summary": report.summary,
        "verdicts": [entry(verdict) for verdict in report.verdicts],
        "warnings": report.warnings,
        "problems": report.problems,
        "html": str(out / HTML),
        "markdown": str(out / MARKDOWN),
    }
    return Answer("\n".join(lines), figures)
