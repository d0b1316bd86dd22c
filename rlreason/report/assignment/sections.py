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
from rlreason.report.content import Table, counted
from rlreason.report.study import Study
from rlreason.report.verdicts import verdicts_of
from rlreason.runtime.text import few

CARRIED = "Carried from an earlier sweep"  # a warning that is shown once, in the first section that has it
MOST_REFUSED = 4  # runs with a reason why they do not answer a question
TIME = "time"  # in a question's `figures`: its accuracy against seconds
#: part -> the only sweep of a question that it is for.
ONLY = {"filtered": "sft_filtered", "entropy": "grpo_off_policy_focused"}


def write_up_of(gathered: Gathered) -> WriteUp:
    """Build the whole document."""
    course = gathered.course
    sections = [section_of(question, gathered) for question in course.questions]
    verdicts = {one.question.id: [v for _, group in one.verdicts for v in group] for one in sections}
    return WriteUp(
        f"{course.title}: write-up",
        introduction_lines(gathered, sections),
        sections,
        directions_table(course, verdicts),
        _published_table(course),
        list(dict.fromkeys([*gathered.problems, *(line for section in sections for line in section.problems)])),
    )


def introduction_lines(gathered: Gathered, sections: list[Section]) -> list[str]:
    """Return how many questions are answered, and the cost of the runs."""
    read = gathered.all_read
    done = sum(section.state == DONE for section in sections)
    runs = [run for one in read for run in one.study.runs]
    seconds = sum(run.seconds or 0.0 for run in runs)
    duration = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
    beside = " Runs that ran side by side count each with its own time." if any(r.shared_machine for r in runs) else ""
    return [
        f"{done} of {len(sections)} questions are answered, from {counted(len(runs), 'run')} in "
        f"{counted(len(read), 'folder')}; together they ran for {duration}.{beside}",
        *([f"Asked for and not part of this write-up: {gathered.course.lacks}."] if gathered.course.lacks else []),
        *_rehearsal_lines(gathered),
        "A verdict is a 95% interval of a difference over seeds and problems, corrected for the number of settings "
        "that a sweep compares (Holm); a sentence on other metrics is corrected for all metrics of all "
        "settings. Where the interval holds zero it says that the data cannot tell.",
    ]


def _rehearsal_lines(gathered: Gathered) -> list[str]:
    """Return a note if runs are not of the handout's model and data, so that published figures do not compare."""
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
    """Return the section of one question: its state, and everything that its studies show."""
    section = Section(question, NOT_YET)
    if question.note:
        section.lines.append(question.note)
    if not question.command:
        section.state = IN_WORDS
        return section
    reads, refused = answers_of(question, gathered)
    names = [read.source.name for read in reads]
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
        _add_study(section, read, gathered)
    return section


def answers_of(question: AssignmentQuestion, gathered: Gathered) -> tuple[list[ReadStudy], list[str]]:
    """Return the studies that answer a question, in its order, and why others do not, a sentence each."""
    reads, refused = [read for name in question.sweeps if (read := gathered.sweep(name)) is not None], list[str]()
    if not reads:
        reads, refused = gathered.of_algorithm(question)
    if not reads and question.instead and (read := gathered.sweep(question.instead)) is not None:
        reads = [_reference_alone(read)]
    return reads, refused


def _reference_alone(read: ReadStudy) -> ReadStudy:
    """Return a sweep's reference as a study of its own."""
    from rlreason.report.build import build_report

    whole = read.study
    question = f"How does {whole.reference.label}, the default, do?"
    study = Study(whole.name, question, [], [whole.reference], folders=whole.folders)
    return ReadStudy(read.source, study, build_report(study))


def _add_study(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add the figures of one study to a section."""
    question, study, course = section.question, read.study, gathered.course
    if len(study.settings) == 1 and question.instead == read.source.name:
        section.lines.append(
            f"No run by itself was found: this is {study.reference.label}, the reference of {read.source.name}."
        )
    section.lines.append(f"{read.source.name}: {what_ran(study)}. {read.report.summary}")
    section.lines += filter(None, [bar_line(course, question, study), published_line(course, question, study)])
    if len(study.settings) > 1:
        section.verdicts.append((f"{read.source.name}: {study.question}", verdicts_of(study)))
    section.pictures += _pictures(question, read, course)
    if read.report.tables:
        first = read.report.tables[0]
        section.tables.append(replace(first, title=f"{first.title}: {read.source.name}"))
    for part in question.parts:
        if ONLY.get(part, read.source.name) == read.source.name:
            PARTS[part](section, read, gathered)
    section.keep += [line for line in read.report.warnings if line not in {*section.keep, *gathered.carried}]
    gathered.carried |= {line for line in read.report.warnings if line.startswith(CARRIED)}
    section.problems += read.report.problems


def _pictures(question: AssignmentQuestion, read: ReadStudy, course: Assignment) -> list[Picture]:
    """Return the handout's pictures of one study."""
    pictures = []
    for budget, study in by_budget(read.study):
        report = replace(read.report, figures=figures_of(study), legend=legend_of(study, [])) if budget else read.report
        figures = {figure.name: figure for figure in report.figures}
        if "eval/accuracy" in figures:
            figures["eval/accuracy"] = with_bands(figures["eval/accuracy"], course, question, study)
            if (by_time := against(figures["eval/accuracy"], TIME)) is not None:
                figures[TIME] = by_time
        for name in (name for name in question.figures if name in figures):
            figure = of_budget(figures[name], budget) if budget else figures[name]
            pictures.append(Picture(stem(question, read, f"{name}/{budget}".rstrip("/")), figure, report.legend))
    return pictures


def stem(question: AssignmentQuestion, read: ReadStudy, figure: str) -> str:
    """Return the name of a picture's file, without its ending."""
    own = [question.id] if read.source.name in (question.id, question.instead) else [question.id, read.source.name]
    return "_".join([*own, re.sub(r"\W", "_", figure)])


def _published_table(course: Assignment) -> Table | None:
    """Return the published figures with their sources, or None."""
    if not course.figures:
        return None
    rows = [[figure.question, published_text(figure), figure.source] for figure in course.figures]
    note = f"{course.model_name} on {course.data_name}; mostly one seed each, and no target."
    return Table("What others got", ["question", "figure", "source"], rows, note=note)
