"""Write up a whole assignment, in the handout's order, from the runs below one folder: Markdown and one HTML page."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.console import Console
from rlreason.report.assignment.courses import Found, Runs, course_of, found_below
from rlreason.report.assignment.sections import DONE, Section, section_of
from rlreason.report.charts import standalone, with_own_ids
from rlreason.report.content import Table
from rlreason.report.documents import filled, policy_of, write_picture
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer

FILES = "writeup_files"  # folder of the pictures, next to the Markdown
MARKDOWN, PAGE = "writeup.md", "writeup.html"


@dataclass(frozen=True, slots=True)
class WriteUp:
    """The whole document."""

    title: str
    lead: list[str]
    sections: list[Section]
    tables: list[Table]  # the checklist, and what others got
    used: list[Found]  # by its sections
    problems: list[str]


def write_up(course: str, runs: Path, out: Path | None, console: Console) -> Answer:
    """Write writeup.md, its pictures and writeup.html into `out` (None: `runs`), from the sweeps and runs below `runs`.

    `ConfigError` if there is no such folder, or it cannot be written to.
    """
    gathered = Runs(course_of(course), found_below(runs))
    target = out if out is not None else runs
    with console.wait("writing the write-up"):
        document = write_up_of(gathered)
        try:
            pictures = draw(document, target / FILES)
            write_whole(target / MARKDOWN, markdown_of(document))
            write_whole(target / PAGE, page_of(document, pictures))
        except (UnwritableError, OSError) as error:
            raise ConfigError(f"--out {target}: {error}: give --out FOLDER that can be written to") from None
    figures = {
        "title": document.title,
        "questions": [{"question": s.question.id, "state": s.state, "missing": s.missing} for s in document.sections],
        "problems": document.problems,
        "html": str(target / PAGE),
        "markdown": str(target / MARKDOWN),
    }
    width = max(len(section.question.id) for section in document.sections)
    written = f"write-up: {target / PAGE} and {target / MARKDOWN} (with {FILES}/)"
    return Answer(filled("writeup.txt.j2", document=document, width=width, written=written), figures)


def write_up_of(runs: Runs) -> WriteUp:
    """Build the whole document."""
    course, sections = runs.course, [section_of(question, runs) for question in runs.course.questions]
    checklist = [[s.question.id, s.state, "\n".join(s.missing or s.question.commands())] for s in sections]
    note = "Where a question is not done, the command is what is still to be run."
    tables = [Table("Checklist", ["question", "state", "command"], checklist, note=note)]
    if course.published:
        rows = [[one["question"], one["text"], one["source"]] for one in course.published]
        note = f"{course.model_name} on {course.data_name}; mostly one seed each, and no target."
        tables.append(Table("What others got", ["question", "figure or direction", "source"], rows, note=note))
    used = [*{read.path: read for section in sections for read in section.reads}.values()]
    lead = filled(
        "writeup_lead.txt.j2",
        course=course,
        done=sum(section.state == DONE for section in sections),
        total=len(sections),
        used=used,
        runs=[run for one in used for run in one.study.runs],
        strange=[one for one in used if not course.has(one.study)],
    )
    problems = [*runs.problems, *(line for section in sections for line in section.problems)]
    return WriteUp(f"{course.title}: write-up", lead.split("\n"), sections, tables, used, list(dict.fromkeys(problems)))


def draw(document: WriteUp, files: Path, dark: bool = True) -> dict[str, str]:
    """Write the pictures of a document, also dark ones if asked; return stem -> SVG with CSS variables as colours."""
    files.mkdir(parents=True, exist_ok=True)
    pictures = [one for section in document.sections for one in section.pictures]
    svgs = {one.stem: standalone(one.figure, one.legend) for one in pictures}
    for stem, svg in svgs.items():
        write_picture(svg, files, stem, dark)
    return svgs


def markdown_of(document: WriteUp, dark: bool = True) -> str:
    """Return the whole document as Markdown; `dark`: with pictures for dark pages."""
    return filled("writeup.md.j2", document=document, files=FILES, dark=dark)


def page_of(document: WriteUp, pictures: Mapping[str, str]) -> str:
    """Return the whole page, which has no script. `pictures`: stem -> SVG as drawn."""
    from markupsafe import Markup

    drawn = {stem: Markup(with_own_ids(svg, stem)) for stem, svg in pictures.items()}  # made by vl-convert
    return filled("writeup.html.j2", document=document, pictures=drawn, policy=policy_of())
