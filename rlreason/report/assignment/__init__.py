"""Write up a whole assignment, in the handout's order, from the runs below one folder: Markdown and one HTML page."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.console import Console
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
    course_of,
    directions_table,
    found_below,
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
from rlreason.report.assignment.parts import PARTS, Gathered, ReadStudy, by_budget, values_of
from rlreason.report.charts import standalone, with_own_ids
from rlreason.report.content import Table, counted
from rlreason.report.documents import filled, policy_of, style, write_picture
from rlreason.report.figures import figures_of, legend_of
from rlreason.report.sections import build_report
from rlreason.report.study import Study
from rlreason.report.verdicts import verdicts_of
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer
from rlreason.runtime.text import few

FILES = "writeup_files"  # folder of the pictures, next to the Markdown
MARKDOWN, PAGE = "writeup.md", "writeup.html"


def write_up(course: str, runs: Path, out: Path | None, console: Console) -> Answer:
    """Write writeup.md, its pictures and writeup.html into `out` (None: `runs`), from the sweeps and runs below `runs`.

    `ConfigError` if there is no such folder, or it cannot be written to.
    """
    gathered = Gathered(course_of(course), found_below(runs))
    target = out if out is not None else runs
    with console.wait("writing the write-up"):
        document = write_up_of(gathered)
        try:
            pictures = draw(document, target / FILES)
            write_whole(target / MARKDOWN, markdown_of(document))
            write_whole(target / PAGE, page_of(document, pictures))
        except (UnwritableError, OSError) as error:
            raise ConfigError(f"--out {target}: {error}: give --out FOLDER that can be written to") from None
    return answer_of(document, target)


def draw(document: WriteUp, files: Path, dark: bool = True) -> dict[str, str]:
    """Write the pictures of a document, also dark ones if asked; return stem -> SVG with CSS variables as colours."""
    files.mkdir(parents=True, exist_ok=True)
    pictures = [one for section in document.sections for one in section.pictures]
    svgs = {one.stem: standalone(one.figure, one.legend) for one in pictures}
    for stem, svg in svgs.items():
        write_picture(svg, files, stem, dark)
    return svgs


def answer_of(document: WriteUp, out: Path) -> Answer:
    """Return the checklist for the terminal, and as figures."""
    lines = [document.title, document.lead[0], ""]
    width = max(len(section.question.id) for section in document.sections)
    for section in document.sections:
        command = f"  {section.missing[0]}" if section.missing else ""
        lines.append(f"{section.question.id:<{width}}  {section.state}{command}")
    lines += [f"! {problem}" for problem in document.problems]
    lines += ["", f"write-up: {out / PAGE} and {out / MARKDOWN} (with {FILES}/)"]
    figures = {
        "title": document.title,
        "questions": [
            {"question": section.question.id, "state": section.state, "missing": section.missing}
            for section in document.sections
        ],
        "problems": document.problems,
        "html": str(out / PAGE),
        "markdown": str(out / MARKDOWN),
    }
    return Answer("\n".join(lines), figures)


def markdown_of(document: WriteUp, dark: bool = True) -> str:
    """Return the whole document as Markdown; `dark`: with pictures for dark pages."""
    return filled("writeup.md.j2", document=document, files=FILES, dark=dark)


def page_of(document: WriteUp, pictures: Mapping[str, str]) -> str:
    """Return the whole page, which has no script. `pictures`: stem -> SVG as drawn."""
    from markupsafe import Markup

    drawn = {stem: Markup(with_own_ids(svg, stem)) for stem, svg in pictures.items()}  # made by vl-convert
    return filled("writeup.html.j2", document=document, pictures=drawn, policy=policy_of(), style=Markup(style()))


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
    published = None
    if course.figures:
        rows = [[figure.question, published_text(figure), figure.source] for figure in course.figures]
        note = f"{course.model_name} on {course.data_name}; mostly one seed each, and no target."
        published = Table("What others got", ["question", "figure", "source"], rows, note=note)
    return WriteUp(
        f"{course.title}: write-up",
        lead_of(gathered, sections),
        sections,
        directions_table(course, verdicts),
        published,
        list(dict.fromkeys([*gathered.problems, *(line for section in sections for line in section.problems)])),
    )


def lead_of(gathered: Gathered, sections: list[Section]) -> list[str]:
    """Return what is answered, by which runs, and whether they are the handout's: a paragraph each."""
    read, course = gathered.all_read, gathered.course
    runs = [run for one in read for run in one.study.runs]
    seconds = sum(run.seconds or 0.0 for run in runs)
    rehearsals = [one for one in read if not is_of(course, one.study)]
    settings = [run.settings for one in rehearsals for run in one.study.runs if run.settings]
    lead = filled(
        "writeup_lead.txt.j2",
        done=sum(section.state == DONE for section in sections),
        total=len(sections),
        runs=counted(len(runs), "run"),
        folders=counted(len(read), "folder"),
        time=f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes",
        beside=any(run.shared_machine for run in runs),
        course=course,
        read=len(read),
        rehearsals=len(rehearsals),
        names=few(sorted({f"{one.get('model.name')} on {one.get('data.name')}" for one in settings}), 4),
    )
    return lead.split("\n")


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
        whole = read.study
        title = f"How does {whole.reference.label}, the default, do?"
        alone = Study(whole.name, title, [], [whole.reference], folders=whole.folders)
        reads = [ReadStudy(read.source, alone, build_report(alone))]
    return reads, refused


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
    section.warnings += [line for line in read.report.warnings if line not in {*section.warnings, *gathered.carried}]
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
