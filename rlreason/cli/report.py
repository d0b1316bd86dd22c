"""Turn runs and sweeps into a report: which setting is better, by how much, and when the data cannot tell.

Writes report.html, one page that needs no network, and report.md with its pictures in report_files/, into the first
folder given. RUNS are folders of runs, sweeps, or settings of a sweep (SWEEP/KEY=VALUE), finished or not.
"""

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rlreason.cli.ls import RUNS
from rlreason.discovery.report import runs_below, write_report
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.report.compare import entry
from rlreason.report.figures import FIGURES, figures_for_paper
from rlreason.report.forecast import forecast_text, forecasts_of
from rlreason.report.read import read_study
from rlreason.report.sections import TOLD_APART, build_report
from rlreason.report.study import PAPER_AXES, Study
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer, Parser
from rlreason.runtime.text import aligned, few

HTML, MARKDOWN = "report.html", "report.md"
PAPER = {"metric": [], "x": "step", "width": 3.25, "font": "sans", "label": []}  # options of the files of --figures
COURSES = ("cs336_2025", "cs336_2026", "pku_hw3")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason report`."""
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="folders of runs and sweeps")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the report goes; the first folder given")
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="also pictures for a paper (SVG, PNG, PDF) and tables (TeX), each with its CSV",
    )
    paper = parser.add_argument_group("the files of --figures")
    paper.add_argument(
        "--metric", action="append", help="of metrics.jsonl, also several times; else the page's pictures"
    )
    paper.add_argument("--x", help=f"their x axis: {', '.join(PAPER_AXES)}, or any key of metrics.jsonl")
    paper.add_argument("--width", type=float, metavar="INCHES", help="3.25: one column; 6.75: two")
    paper.add_argument("--font", choices=("sans", "serif"), help="of their text, which has 8 points")
    labels = "another name for a metric, the x axis or a setting: eval/accuracy=Accuracy"
    paper.add_argument("--label", action="append", metavar="NAME=TEXT", help=labels)
    parser.set_defaults(**PAPER)
    later = "also the accuracy to expect at this later step, and the ceiling"
    parser.add_argument("--forecast", type=float, metavar="STEPS", help=later)
    parser.add_argument(
        "--assignment", choices=COURSES, help=f"the write-up of a whole assignment, of all sweeps below RUN ({RUNS})"
    )


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Write the report."""
    runs, out, figures = arguments.runs, arguments.out, arguments.figures
    discovered = arguments.assignment is None and any(map(runs_below, runs))
    for name, default in PAPER.items():
        if figures is None and getattr(arguments, name) != default:
            raise ConfigError(f"--{name} needs --figures DIR")
    if not 1 <= arguments.width <= 20:
        raise ConfigError("--width is in inches: give 1 to 20")
    if (discovered or arguments.assignment) and (figures, arguments.forecast) != (None, None):
        raise ConfigError("--assignment and runs of discovery have no --figures and no --forecast: leave these out")
    if discovered:
        with console.wait("writing the report"):
            return write_report(
                [run for folder in runs for run in runs_below(folder) or [folder]], folder_of(out, runs[0])
            )
    if missing := [name for name in ("altair", "pandas", "vl_convert") if find_spec(name) is None]:
        raise ConfigError(f"rlreason report needs {' and '.join(missing)}: pip install 'rlreason[report]'")
    from rlreason.report.assignment import write_up  # slow to import, as the other
    from rlreason.report.documents import FILES, page_of, write_figures, write_markdown, write_tables

    if arguments.assignment is not None:
        if len(runs) > 1:
            raise ConfigError(f"--assignment gathers what lies below one folder, and {len(runs)} are given")
        runs = runs or [RUNS]
        return write_up(arguments.assignment, runs[0], out or runs[0], console)
    if not runs:
        raise ConfigError("the following arguments are required: RUN: write rlreason report [-h] RUN [RUN ...]")
    out = folder_of(out, runs[0])
    with console.wait("writing the report"):
        study = read_study(runs, arguments.x)
        labels = relabelled(study, arguments.label, arguments.x)
        forecasts = [] if arguments.forecast is None else forecasts_of(study, arguments.forecast)
        report = build_report(study)
        curves = [] if figures is None else figures_for_paper(study, arguments.metric, arguments.x, labels)
        try:
            write_whole(out / HTML, page_of(report))
            write_markdown(report, out / MARKDOWN)
            if figures is not None:
                pictures = [*filter(None, (*curves, report.forest))]
                write_figures(pictures, report.legend, figures, arguments.width, arguments.font)
                write_tables(report.tables, figures)
        except OSError as error:
            raise ConfigError(f"{error}: give --out FOLDER, or other --figures") from None
    lines = [report.question, report.summary, ""]
    measured = [table for table in report.tables if table.title == TOLD_APART]
    lines += [aligned([table.head, *table.rows]) for table in measured]
    for verdict in [one for one in report.verdicts if one.of_set or not measured]:
        word = "" if verdict.difference is None else f"{verdict.word}: "  # the sentence says that nothing is compared
        lines.append(f"{word}{verdict.sentence}")
    lines += ["", *forecast_text(forecasts)] if forecasts else []
    lines += [f"! {line}" for line in (*report.warnings, *report.problems)]
    lines += ["", f"report: {out / HTML} and {out / MARKDOWN} (with {FILES}/)"]
    lines += [f"figures: {figures}"] if figures is not None else []
    told = {"question": report.question, "summary": report.summary, "verdicts": list(map(entry, report.verdicts))}
    told["models"] = report.models
    told |= {"warnings": report.warnings, "problems": report.problems}
    told |= {"forecast": [asdict(one) | {"ceiling_told": one.told} for one in forecasts]} if forecasts else {}
    told |= {"html": str(out / HTML), "markdown": str(out / MARKDOWN)}
    return Answer("\n".join(lines), told)


def relabelled(study: Study, texts: list[str], x: str) -> dict[str, str]:
    """Give settings their labels of `texts`, each NAME=TEXT, and return all; `ConfigError` where one goes nowhere."""
    labels = dict(text.rpartition("=")[::2] for text in texts)
    settings, metrics = [one.label for one in study.settings], {name for run in study.runs for name in run.series}
    if unknown := labels.keys() - {x, *settings, *metrics, *(figure.name for figure in FIGURES)}:
        raise ConfigError(f"--label {min(unknown)!r} is no metric, x or setting: write NAME=TEXT")
    for one in study.settings:
        one.label = labels.get(one.label, one.label)
    if len({one.label for one in study.settings}) < len(settings):
        raise ConfigError(f"--label names two settings alike: give each of {few(settings)} its own")
    return labels


def folder_of(out: Path | None, run: Path) -> Path:
    """Return the folder to write into, made if missing: `out`, else the run's, or its sweep's if RUN is a setting."""
    if out is None:
        out = run if run.is_dir() or "=" not in run.name else run.parent
        if not out.is_dir():
            raise ConfigError(
                f"RUN={run} is no folder: give the folder of a run or of a sweep, as printed at its start"
            )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made ({error.strerror}): give another folder") from None
    return out
