"""Write up a whole assignment, in the handout's order, from the runs below one folder."""

from pathlib import Path

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.console import Console
from rlreason.report.assignment.courses import WriteUp, course_of
from rlreason.report.assignment.documents import FILES, markdown_of, page_of
from rlreason.report.assignment.gather import Gathered, found_below
from rlreason.report.assignment.sections import write_up_of
from rlreason.report.page import svg_of
from rlreason.runtime.files import write_whole
from rlreason.runtime.subcommand import Answer

MARKDOWN, PAGE = "writeup.md", "writeup.html"


def write_up(course: str, runs: Path, out: Path | None, console: Console) -> Answer:
    """Write writeup.md with its pictures and writeup.html, from the sweeps and runs below `runs`, into `out`.

    `out`: None: the runs folder. `ConfigError` if there is no such folder, or it cannot be written to.
    """
    gathered = Gathered(course_of(course), found_below(runs))
    target = out if out is not None else runs
    with console.wait("writing the write-up"):
        document = write_up_of(gathered)
        try:
            write_document(document, target)
        except (UnwritableError, OSError) as error:
            raise ConfigError(f"--out {target}: {error}: give --out FOLDER that can be written to") from None
    return answer_of(document, target)


def write_document(document: WriteUp, out: Path) -> None:
    """Write both forms, with pictures in light and dark."""
    drawn = draw(document, out / FILES)
    write_whole(out / MARKDOWN, markdown_of(document))
    write_whole(out / PAGE, page_of(document, drawn))


def draw(document: WriteUp, files: Path, dark: bool = True) -> dict[str, str]:
    """Write the pictures of a document, with `dark` also for dark pages; return stem -> light SVG."""
    files.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for one in (one for section in document.sections for one in section.pictures):
        drawn[one.stem] = svg_of(one.figure, one.legend)
        write_whole(files / f"{one.stem}.svg", drawn[one.stem])
        if dark:
            write_whole(files / f"{one.stem}_dark.svg", svg_of(one.figure, one.legend, dark=True))
    return drawn


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
