"""Build the section of each question: its state, and the figures, verdicts and words that its runs give."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlreason.records.files import COMPLIANCE
from rlreason.report.assignment.courses import Course, Found, Question, Runs
from rlreason.report.content import Axis, Case, Figure, Table, Verdict
from rlreason.report.documents import filled
from rlreason.report.figures import STEPS
from rlreason.report.study import Setting, StudyRun
from rlreason.report.tables import accuracy_of, percent
from rlreason.report.verdicts import best_of, comparing_half
from rlreason.runtime.statistics import TIED, mean_interval, wilson_interval
from rlreason.runtime.text import few

DONE, PARTLY, NOT_YET, IN_WORDS = "done", "partly", "not yet run", "in words"
MOST_REFUSED = 4  # runs with a reason why they do not answer a question
_HOURS = {"values": [3600 * hour for hour in range(5)], "labelExpr": "datum.value / 3600"}
#: Name of a picture of the accuracy against a clock, which is one of the axes of a curve -> its x.
CLOCKS = {
    "time": Axis("seconds, evaluations left out", STEPS.scale, STEPS.axis),
    "total": Axis("hours since the start, evaluations included", {"domain": [0, 4 * 3600]}, _HOURS),
}
Interval = tuple[float, float, float]  # mean, low, high


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with the labels that have a colour."""

    stem: str  # of its file
    figure: Figure
    legend: Sequence[str]


@dataclass(slots=True)
class Section:
    """The answer to one question."""

    question: Question
    state: str = IN_WORDS  # DONE, PARTLY, NOT_YET or IN_WORDS
    reads: list[Found] = field(default_factory=list)  # its sweeps and runs
    missing: list[str] = field(default_factory=list)  # commands that are still to be run
    lines: list[str] = field(default_factory=list)  # paragraphs
    verdicts: list[tuple[str, list[Verdict]]] = field(default_factory=list)  # what is compared, and the verdicts
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # "to keep in mind"
    problems: list[str] = field(default_factory=list)  # found in the folders

    def write(self, part: str, **values: Any) -> None:
        """Add the paragraphs that writeup_lines.txt.j2 has for a part."""
        words = filled("writeup_lines.txt.j2", part=part, question=self.question, percent=percent, few=few, **values)
        self.lines += [line for line in words.splitlines() if line]


def section_of(question: Question, runs: Runs) -> Section:
    """Return the section of one question: its state, and everything that its studies show."""
    section = Section(question, lines=[question.note] if question.note else [])
    if not (question.sweeps or question.command):
        return section
    reads, refused = [read for name in question.sweeps if (read := runs.sweep(name)) is not None], list[str]()
    lacking = [name for name in question.sweeps if name not in [read.name for read in reads]]
    if not reads and question.algorithm:
        reads, refused = runs.of_algorithm(question)
        lacking = [] if reads else lacking
    if not reads and question.instead and (read := runs.sweep(question.instead)) is not None:
        reads = [read.reference_alone()]
        section.write("instead", read=read)
    values = set(question.values(question.each)).difference(*(read.values(question.each) for read in reads))
    unfinished = sum(not run.ended for read in reads for run in read.study.runs)
    section.write("missing", values=sorted(values) if reads else [], unfinished=unfinished)
    section.lines += refused[:MOST_REFUSED] if values or not reads else []
    section.missing = question.commands(lacking)
    if not section.missing and (values or unfinished or not reads):
        section.missing = question.commands()[:1]
    section.state = NOT_YET if not reads else PARTLY if section.missing else DONE
    section.reads = reads
    for read in reads:
        _add_study(section, read, runs.course)
    section.warnings = list(dict.fromkeys(section.warnings))
    return section


def _add_study(section: Section, read: Found, course: Course) -> None:
    """Add what one study shows to a section."""
    question, study, report = section.question, read.study, read.report
    best, half = best_of(study), comparing_half(study.settings) if len(study.settings) > 1 else None
    fair = interval_of(best.runs, half)
    cards = {run.name: run.folder / COMPLIANCE for run in best.runs if (run.folder / COMPLIANCE).is_file()}
    for part in ("study", *question.parts):
        section.write(
            part,
            read=read,
            study=study,
            course=course,
            is_of=course.has(study),
            steps=sorted({run.planned_steps for run in study.runs if run.planned_steps}),
            made=max((int(run.totals.get("step") or run.planned_steps or 0) for run in study.runs), default=0),
            best=best,
            fair=fair,
            reached=against_bar(fair, question.bar) if fair and question.bar is not None else "",
            problems=max((len(run.final.problems) for run in best.runs if run.final is not None), default=0),
            cards={name: card.read_text("utf-8", errors="replace").split("\n") for name, card in cards.items()},
        )
    if report.verdicts:
        section.verdicts.append((f"{read.name}: {study.question}", report.verdicts))
    figures = {one.name: one for one in report.figures}
    for axis, x in CLOCKS.items():
        accuracy = figures.get("eval/accuracy")
        if accuracy is not None and any(axis in curve.x for curve in accuracy.curves):
            figures[axis] = replace(accuracy, name=axis, title=f"{accuracy.title} against wall clock", axis=axis, x=x)
    for name in [name for name in question.figures if name in figures]:
        stem = re.sub(r"\W", "_", f"{question.id}/{read.name}/{name}")
        section.pictures.append(Picture(stem, figures[name], report.legend))
    tables = [report.tables[0], report.log] if "log" in question.parts else report.tables[:1]
    section.tables += [replace(table, title=f"{table.title}: {read.name}") for table in tables]
    section.cases += report.cases if "cases" in question.parts else []
    section.warnings += report.warnings
    section.problems += report.problems


def interval_of(runs: Sequence[StudyRun], among: set[str] | None = None) -> Interval | None:
    """Return (mean, low, high) of the final accuracies, within 0 to 1; None if no run has one.

    Student's interval over several seeds (if they tie, that of the settings' table), Wilson's over the problems of one.
    `among`: the problems that count.
    """
    shares = []
    for run in runs:
        counted = [p.share for name, p in run.final.problems.items() if name in among] if run.final and among else []
        share = float(np.mean(counted)) if counted else run.accuracy
        shares += [] if share is None else [share]
    if not shares:
        return None
    if len(shares) > 1:
        mean, low, high = mean_interval(shares)
        tied = accuracy_of(Setting((), "", list(runs)), among) if high - low < TIED else None
        return tied or (mean, max(low, 0.0), min(high, 1.0))
    problems = next((set(run.final.problems) for run in runs if run.final), {""})
    n = max(1, len(problems if among is None else problems & among))
    return shares[0], *wilson_interval(shares[0] * n, n)


def against_bar(accuracy: Interval, bar: float) -> str:
    """Return whether a (mean, low, high) reaches a bar.

    >>> [against_bar(accuracy, 0.25) for accuracy in ((0.5, 0.4, 0.6), (0.3, 0.2, 0.4), (0.1, 0.0, 0.2))]
    ['reached', 'cannot tell', 'not reached']
    """
    _, low, high = accuracy
    if low >= bar:
        return "reached"
    return "not reached" if high < bar else "cannot tell"
