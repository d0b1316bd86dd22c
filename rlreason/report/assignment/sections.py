"""Answer each question of an assignment from what was gathered, in the handout's order."""

import re
from dataclasses import replace

from rlreason.report.assignment.courses import (
    DONE,
    IN_WORDS,
    NOT_YET,
    PARTLY,
    Assignment,
    AssignmentQuestion,
    Picture,
    Section,
    WriteUp,
    directions_table,
)
from rlreason.report.assignment.figures import (
    against,
    bar_line,
    is_of,
    of_budget,
    published_line,
    published_text,
    what_ran,
    with_bands,
)
from rlreason.report.assignment.gather import Gathered, ReadStudy, values_of
from rlreason.report.assignment.parts import PARTS, by_budget
from rlreason.report.charts import figures_of, legend_of
from rlreason.report.content import Table
from rlreason.report.study import Study
from rlreason.report.verdicts import verdicts_of
from rlreason.runtime.text import few

CARRIED = "Carried from an earlier sweep"  # such a sentence stands once, where the chain first has it
MOST_REFUSED = 4  # runs of which is said why they do not answer a question
TIME = "time"  # in `figures` of a question: its accuracy against seconds
#: part -> the sweep of a question that it is about, where it is not about each of them.
ONLY = {"filtered": "sft_filtered", "entropy": "grpo_off_policy_focused"}


def write_up_of(gathered: Gathered) -> WriteUp:
    """Build the whole document."""
    course = gathered.course
    sections = [section_of(question, gathered) for question in course.questions]
    found = {one.question.id: [v for _, verdicts in one.verdicts for v in verdicts] for one in sections}
    return WriteUp(
        f"{course.title}: write-up",
        introduction_lines(gathered, sections),
        sections,
        directions_table(course, found),
        published_table(course),
        list(dict.fromkeys([*gathered.problems, *(line for section in sections for line in section.problems)])),
    )


def introduction_lines(gathered: Gathered, sections: list[Section]) -> list[str]:
    """Return how many questions are answered, and the cost of the runs."""
    read = gathered.all_read
    done = sum(section.state == DONE for section in sections)
    runs = [run for one in read for run in one.study.runs]
    seconds = sum(run.seconds or 0.0 for run in runs)
    took = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
    beside = " Runs that ran side by side count each with its own time." if any(r.shared_machine for r in runs) else ""
    return [
        f"{done} of {len(sections)} questions are answered, from {counted(len(runs), 'run')} in "
        f"{counted(len(read), 'folder')}; together they ran for {took}.{beside}",
        *([f"Asked for and not part of this write-up: {gathered.course.lacks}."] if gathered.course.lacks else []),
        *rehearsal_lines(gathered),
        "A verdict is a 95% interval of a difference over seeds and problems, corrected for the number of settings "
        "that a sweep compares (Holm); a sentence on other metrics is corrected for all metrics of all "
        "settings. Where the interval holds zero it says that the data cannot tell.",
    ]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "run"), counted(228, "run")
    ('1 run', '228 runs')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def rehearsal_lines(gathered: Gathered) -> list[str]:
    """Return a note if runs are not of the handout's model and data: published figures then do not compare."""
    course = gathered.course
    others = [one for one in gathered.all_read if not is_of(course, one.study)]
    if not others:
        return []
    runs = [run for one in others for run in one.study.runs if run.settings]
    pairs = {(run.settings.get("model.name"), run.settings.get("data.name")) for run in runs}
    names = few(sorted(f"{model} on {data}" for model, data in pairs), 4)
    return [
        f"{len(others)} of {len(gathered.all_read)} folders are not of the handout's {course.model_name} on "
        f"{course.data_name}, but of {names}. They rehearse the questions and are nothing to hand in: the published "
        "figures and the pass bars are those of another model, so no band is drawn, and only directions are laid side "
        "by side."
    ]


def section_of(question: AssignmentQuestion, gathered: Gathered) -> Section:
    """Return one question: its state, and all that its studies show."""
    section = Section(question, NOT_YET)
    if question.note:
        section.lines.append(question.note)
    if not question.command:
        section.state = IN_WORDS
        return section
    reads, refused = answers_of(question, gathered)
    names = [read.found.name for read in reads]
    by_sweeps = not question.algorithm or not reads
    lacking = [name for name in question.sweeps if name not in names] if by_sweeps else []
    section.missing = list(dict.fromkeys(question.command_of(name) for name in lacking))
    if not reads:
        section.missing = section.missing or [question.command]
        section.lines += refused[:MOST_REFUSED]
        return section
    values = set(question.values(question.each)).difference(*(values_of(read, question.each) for read in reads))
    if values:
        section.lines += [f"Not yet run: {question.each}={few(sorted(values))}.", *refused[:MOST_REFUSED]]
        section.missing = section.missing or [question.command]
    open_runs = sum(not run.ended for read in reads for run in read.study.runs)
    if open_runs:
        section.lines.append(
            f"Runs that have not come to their end yet: {open_runs}. The same command goes on with them."
        )
        section.missing = section.missing or [question.command]
    section.state = PARTLY if section.missing else DONE
    for read in reads:
        add(section, read, gathered)
    return section


def answers_of(question: AssignmentQuestion, gathered: Gathered) -> tuple[list[ReadStudy], list[str]]:
    """Return the studies that answer a question, in its own order; and the faults of others, a sentence each."""
    reads, refused = [read for name in question.sweeps if (read := gathered.sweep(name)) is not None], list[str]()
    if not reads:
        reads, refused = gathered.of_algorithm(question)
    if not reads and question.instead and (read := gathered.sweep(question.instead)) is not None:
        reads = [reference_of(read)]
    return reads, refused


def reference_of(read: ReadStudy) -> ReadStudy:
    """Return a sweep's reference as a study of its own, for a question that asks for a run that did not run alone."""
    from rlreason.report.build import build_report

    whole = read.study
    study = Study(
        whole.name, f"How does {whole.reference.label}, the default, do?", [], [whole.reference], folders=whole.folders
    )
    return ReadStudy(read.found, study, build_report(study))


def add(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add what one study shows to a section."""
    question, study, course = section.question, read.study, gathered.course
    if len(study.settings) == 1 and question.instead == read.found.name:
        section.lines.append(
            f"No run by itself was found: this is {study.reference.label}, the reference of {read.found.name}."
        )
    section.lines.append(f"{read.found.name}: {what_ran(study)}. {read.report.summary}")
    section.lines += [
        line for line in (bar_line(course, question, study), published_line(course, question, study)) if line
    ]
    if len(study.settings) > 1:
        section.verdicts.append((f"{read.found.name}: {study.question}", verdicts_of(study)))
    section.pictures += pictures_of(question, read, course)
    if read.report.tables:
        first = read.report.tables[0]
        title = f"{first.title}: {read.found.name}"
        section.tables.append(Table(title, first.head, first.rows, first.numbers, first.note, first.labels))
    for part in question.parts:
        if ONLY.get(part, read.found.name) == read.found.name:
            PARTS[part](section, read, gathered)
    section.keep += [line for line in read.report.warnings if line not in {*section.keep, *gathered.carried}]
    gathered.carried |= {line for line in read.report.warnings if line.startswith(CARRIED)}
    section.problems += read.report.problems


def pictures_of(question: AssignmentQuestion, read: ReadStudy, course: Assignment) -> list[Picture]:
    """Return the handout's pictures of one study; several studies of a question have stems of their own."""
    found = []
    for budget, study in by_budget(read.study):
        report = replace(read.report, figures=figures_of(study), legend=legend_of(study, [])) if budget else read.report
        figures = {figure.name: figure for figure in report.figures}
        if "eval/accuracy" in figures:
            figures["eval/accuracy"] = with_bands(figures["eval/accuracy"], course, question, study)
            if (by_time := against(figures["eval/accuracy"], TIME)) is not None:
                figures[TIME] = by_time
        for name in (name for name in question.figures if name in figures):
            figure = of_budget(figures[name], budget) if budget else figures[name]
            found.append(Picture(stem(question, read, f"{name}/{budget}".rstrip("/")), figure, report.legend))
    return found


def stem(question: AssignmentQuestion, read: ReadStudy, figure: str) -> str:
    """Return the name of a picture's file, without its ending."""
    own = [question.id] if read.found.name in (question.id, question.instead) else [question.id, read.found.name]
    return "_".join([*own, re.sub(r"\W", "_", figure)])


def published_table(course: Assignment) -> Table | None:
    """Return published figures with their sources, or None."""
    if not course.figures:
        return None
    rows: list[list[str]] = [[got.question, published_text(got), got.source] for got in course.figures]
    note = f"{course.model_name} on {course.data_name}; mostly one seed each, and no target."
    return Table("What others got", ["question", "figure", "source"], rows, note=note)
