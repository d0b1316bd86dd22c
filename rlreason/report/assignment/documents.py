"""Write a write-up as Markdown with SVG files next to it, and as one HTML file."""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.report.assignment.courses import Picture, Quote, Section, WriteUp
from rlreason.report.build import case_lines, fenced, table_lines, text
from rlreason.report.content import SIGNS, Table, Verdict, written_out
from rlreason.report.page import breakable, style
from rlreason.report.specifications import LIGHT, variable
from rlreason.runtime.version import __version__

FILES = "writeup_files"  # next to the Markdown


def markdown_of(document: WriteUp, dark: bool = True) -> str:
    """Return the whole document; `dark`: with pictures for dark pages."""
    return "\n".join(_lines(document, dark)) + "\n"


def _lines(document: WriteUp, dark: bool) -> Iterator[str]:
    yield f"# {text(document.title)}"
    for line in document.lead:
        yield from ("", text(line))
    yield from checklist_lines(document.checklist)
    for table in (document.directions, document.published):
        if table is not None:
            yield from table_of(table, "##")
    for number, section in enumerate(document.sections, 1):
        yield from section_lines(number, section, dark)
    if document.problems:
        yield from ("", "## Problems found in the folders", "", *(f"- {text(line)}" for line in document.problems))


def checklist_lines(table: Table) -> Iterator[str]:
    """Return the checklist, its commands as code to copy: they are this package's own, without backticks."""
    yield from ("", f"## {text(table.title)}", "", f"| {' | '.join(table.head)} |", "| --- | --- | --- |")
    for question, state, commands in table.rows:
        code = "<br>".join(f"`{command}`" for command in commands.split("\n")) if commands else "\N{EN DASH}"
        yield f"| `{question}` | {state} | {code} |"
    yield from ("", text(table.note))


def table_of(table: Table, level: str) -> list[str]:
    """Return a table under its title."""
    return ["", f"{level} {text(table.title)}", "", *table_lines(table)]


def section_lines(number: int, section: Section, dark: bool) -> Iterator[str]:
    """Yield the lines of one question."""
    question = section.question
    yield from ("", f"## {number}. {text(question.title)} (`{question.id}`)", "")
    yield f"*Handed in: {text(question.asks)}.* State: **{section.state}**."
    if section.missing:
        yield from ("", "Still to be run:", "", "```bash", *section.missing, "```")
    for line in section.lines:
        yield from ("", text(line))
    for asked, verdicts in section.verdicts:
        yield from ("", f"**{text(asked)}**", "", *verdict_lines(verdicts))
    for one in section.pictures:
        yield from picture_lines(one, dark)
    for table in section.tables:
        yield from table_of(table, "###")
    if section.keep:
        yield from ("", "### To keep in mind", "", *(f"- {text(line)}" for line in section.keep))
    for title, quotes in section.quotes:
        yield from ("", "<details>", f"<summary>{text(title)}</summary>", *quote_lines(quotes), "", "</details>")
    if section.cases:
        yield from ("", "<details>", "<summary>The same problems over training</summary>")
        for case in section.cases:
            yield from case_lines(case)
        yield from ("", "</details>")


def verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Return one line for each verdict."""
    for verdict in verdicts:
        small = f" <small>{text(verdict.small)}</small>" if verdict.small else ""
        yield f"- **{SIGNS[verdict.word]} {verdict.word}:** {text(verdict.sentence)}{small}"


def picture_lines(one: Picture, dark: bool) -> list[str]:
    """Return a picture for light and, if there is one, for dark pages, with its alternative text."""
    alt = html.escape(" ".join(written_out(one.figure.alt).split()))
    other = f'<source media="(prefers-color-scheme: dark)" srcset="{FILES}/{one.stem}_dark.svg">' if dark else ""
    return ["", f'<picture>{other}<img alt="{alt}" src="{FILES}/{one.stem}.svg"></picture>']


def quote_lines(quotes: Sequence[Quote]) -> Iterator[str]:
    """Return responses one below the other."""
    for number, quote in enumerate(quotes, 1):
        guess = f" Guess: {text(quote.why)}." if quote.why else ""
        yield from (
            "",
            f"{number}. {text(quote.question)} Right answer: {text(quote.gold)}.{guess} ({text(quote.where)})",
        )
        yield from ("", *fenced(quote.response))


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
    """Return a light picture whose colours follow the page's, with ids of its own.

    >>> themed('<g id="a" clip-path="url(#a)" fill="#1895D8"/>', "p")
    '<g id="p-a" clip-path="url(#p-a)" fill="var(--s1)"/>'
    """
    svg = re.sub(r'\bid="([\w-]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([\w-]+)\)", rf"url(#{prefix}-\1)", svg)
    names = {colour.lower(): name for name, colour in reversed(LIGHT.items())}
    return re.sub(r'"(#[0-9a-fA-F]{6})"', lambda found: f'"{_named(found[1], names)}"', svg)


def _named(colour: str, names: Mapping[str, str]) -> str:
    name = names.get(colour.lower())
    return variable(name) if name is not None else colour
