"""Write up a whole assignment, in the handout's order, from the runs below one folder: Markdown and one HTML page."""

import html
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlreason.errors import ConfigError, UnwritableError
from rlreason.records.console import Console
from rlreason.report.assignment.courses import Section, WriteUp, course_of
from rlreason.report.assignment.gather import Gathered, found_below
from rlreason.report.assignment.sections import write_up_of
from rlreason.report.build import case_lines, fenced, table_lines, text, verdict_line
from rlreason.report.content import SIGNS, Table, written_out
from rlreason.report.page import breakable, style, svg_of, with_own_ids
from rlreason.report.specifications import LIGHT, variable
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer
from rlreason.runtime.version import __version__

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
    """Write the pictures of a document, also dark ones if asked; return stem -> light SVG."""
    files.mkdir(parents=True, exist_ok=True)
    svgs = {}
    for one in (one for section in document.sections for one in section.pictures):
        svgs[one.stem] = svg_of(one.figure, one.legend)
        write_whole(files / f"{one.stem}.svg", svgs[one.stem])
        if dark:
            write_whole(files / f"{one.stem}_dark.svg", svg_of(one.figure, one.legend, dark=True))
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
    return "\n".join(_lines(document, dark)) + "\n"


def _lines(document: WriteUp, dark: bool) -> Iterator[str]:
    yield f"# {text(document.title)}"
    for line in document.lead:
        yield from ("", text(line))
    yield from ("", f"## {text(document.checklist.title)}", "", f"| {' | '.join(document.checklist.head)} |")
    yield "| --- | --- | --- |"
    for question, state, commands in document.checklist.rows:  # commands are ours, without backticks
        code = "<br>".join(f"`{command}`" for command in commands.split("\n")) if commands else "\N{EN DASH}"
        yield f"| `{question}` | {state} | {code} |"
    yield from ("", text(document.checklist.note))
    for table in (document.directions, document.published):
        if table is not None:
            yield from _titled_table(table, "##")
    for number, section in enumerate(document.sections, 1):
        yield from _section_lines(number, section, dark)
    if document.problems:
        yield from ("", "## Problems found in the folders", "", *(f"- {text(line)}" for line in document.problems))


def _titled_table(table: Table, level: str) -> list[str]:
    return ["", f"{level} {text(table.title)}", "", *table_lines(table)]


def _section_lines(number: int, section: Section, dark: bool) -> Iterator[str]:
    """Yield the lines of one question."""
    question = section.question
    yield from ("", f"## {number}. {text(question.title)} (`{question.id}`)", "")
    yield f"*Handed in: {text(question.asks)}.* State: **{section.state}**."
    if section.missing:
        yield from ("", "Still to be run:", "", "```bash", *section.missing, "```")
    for line in section.lines:
        yield from ("", text(line))
    for comparison, verdicts in section.verdicts:
        yield from ("", f"**{text(comparison)}**", "", *map(verdict_line, verdicts))
    for one in section.pictures:
        alt = html.escape(" ".join(written_out(one.figure.alt).split()))
        other = f'<source media="(prefers-color-scheme: dark)" srcset="{FILES}/{one.stem}_dark.svg">' if dark else ""
        yield from ("", f'<picture>{other}<img alt="{alt}" src="{FILES}/{one.stem}.svg"></picture>')
    for table in section.tables:
        yield from _titled_table(table, "###")
    if section.keep:
        yield from ("", "### To keep in mind", "", *(f"- {text(line)}" for line in section.keep))
    for title, quotes in section.quotes:
        yield from ("", "<details>", f"<summary>{text(title)}</summary>")
        for place, quote in enumerate(quotes, 1):
            guess = f" Guess: {text(quote.why)}." if quote.why else ""
            yield ""
            yield f"{place}. {text(quote.question)} Right answer: {text(quote.gold)}.{guess} ({text(quote.where)})"
            yield from ("", *fenced(quote.response))
        yield from ("", "</details>")
    if section.cases:
        yield from ("", "<details>", "<summary>The same problems over training</summary>")
        for case in section.cases:
            yield from case_lines(case)
        yield from ("", "</details>")


TEMPLATE = "writeup.html.j2"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page_of(document: WriteUp, pictures: Mapping[str, str]) -> str:
    """Return the whole page. `pictures`: stem -> SVG as drawn. `ConfigError` if jinja2 is not installed."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError("a write-up needs jinja2, which is not installed: pip install 'rlreason[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: written_out(value) if type(value) is str else value,
    )
    environment.filters["breakable"] = breakable
    return environment.get_template(TEMPLATE).render(
        document=document,
        pictures={stem: Markup(themed(svg, stem)) for stem, svg in pictures.items()},  # made by vl-convert
        policy=POLICY,
        style=Markup(style()),
        signs=SIGNS,
        version=__version__,
    )


def themed(svg: str, prefix: str) -> str:
    """Return a light picture with the page's colours as CSS variables, and ids that begin with `prefix`.

    >>> themed('<g id="a" clip-path="url(#a)" fill="#1895D8"/>', "p")
    '<g id="p-a" clip-path="url(#p-a)" fill="var(--s1)"/>'
    """
    names = {colour.lower(): name for name, colour in reversed(LIGHT.items())}

    def themed_colour(match: re.Match[str]) -> str:
        name = names.get(match[1].lower())
        return match[0] if name is None else f'"{variable(name)}"'

    return re.sub(r'"(#[0-9a-fA-F]{6})"', themed_colour, with_own_ids(svg, prefix))
