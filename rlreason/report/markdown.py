"""A report as Markdown, with its pictures as SVG files beside it: for a repository, a pull request, a hand-in."""

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlreason.report.content import SIGNS, Case, Detail, Figure, Report, Table
from rlreason.report.pictures import svg_of
from rlreason.report.shown import written_out
from rlreason.runtime.atomic_files import write_whole

FILES = "report_files"  # beside the Markdown
PICTURES = ("eval/accuracy", "length", "entropy", "train/grad_norm")  # the forest comes with them
_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write_markdown(report: Report, target: Path) -> None:
    """Write `target` and, in the folder FILES beside it, its pictures. `UnwritableError` where the system refuses."""
    files = target.parent / FILES
    files.mkdir(parents=True, exist_ok=True)
    drawn = [figure for figure in report.figures if figure.name in PICTURES]
    drawn = drawn[:1] + ([report.forest] if report.forest else []) + drawn[1:]
    names = {}
    for figure in drawn:
        names[figure.name] = stem = re.sub(r"\W+", "_", figure.name)
        write_whole(files / f"{stem}.svg", svg_of(figure, report.legend))
        write_whole(files / f"{stem}_dark.svg", svg_of(figure, report.legend, dark=True))
    write_whole(target, "\n".join(markdown_lines(report, drawn, names)) + "\n")


def markdown_lines(report: Report, drawn: Sequence[Figure], names: dict[str, str]) -> Iterator[str]:
    """The lines of the document; `names`: the files of the pictures, without their endings."""
    yield f"# {text(report.question)}"
    yield from ("", f"**{text(report.summary)}**", "", text(report.lead), "")
    for verdict in report.verdicts:
        small = f" <small>{text(verdict.small)}</small>" if verdict.small else ""
        yield f"- **{SIGNS[verdict.word]} {verdict.word}:** {text(verdict.sentence)}{small}"
    for figure in drawn:
        yield from picture(figure, names[figure.name])
    yield ""
    yield from (f"- {text(term)}: {text(told)}" for term, told in report.facts)
    if report.warnings:
        yield from ("", "## To keep in mind", "", *(f"- {text(line)}" for line in report.warnings))
    for table in (*report.tables, report.log):
        yield from ("", f"## {text(table.title)}", "", *table_lines(table))
    if report.problems:
        yield from ("", "## Problems found in the folders", "", *(f"- {text(line)}" for line in report.problems))
    if report.cases:
        yield from ("", "## The same problems over training")
        for case in report.cases:
            yield from case_lines(case)
    yield from ("", "## Details")
    for detail in report.details:
        yield from detail_lines(detail)


def text(given: str) -> str:
    r"""A text that stays text in Markdown and in the HTML that it may hold: on one line, nothing of it obeyed.

    >>> text("<b> a|b *c*\u202e")
    '&lt;b&gt; a\\|b \\*c\\*⟨U+202E⟩'
    """
    line = " ".join(written_out(given).split())
    escaped = _SPECIAL.sub(r"\\\1", html.escape(line, quote=False))
    return re.sub(r"^(\d+)([.)])(\s)", r"\1\\\2\3", re.sub(r"^([#+>-])", r"\\\1", escaped))


def picture(figure: Figure, stem: str) -> list[str]:
    """A picture that follows the reader's colour scheme, with its alternative text."""
    alt = html.escape(" ".join(written_out(figure.alt).split()))
    return [
        "",
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{FILES}/{stem}_dark.svg">'
        f'<img alt="{alt}" src="{FILES}/{stem}.svg"></picture>',
    ]


def table_lines(table: Table) -> list[str]:
    """A table; lines within a cell are broken."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join("<br>".join(map(text, cell.split("\n"))) for cell in cells) + " |"

    marks = ["--:" if k in table.numbers else "---" for k in range(len(table.head))]
    lines = [row(table.head), "| " + " | ".join(marks) + " |", *map(row, table.rows)]
    return [*lines, "", text(table.note)] if table.note else lines


def fenced(content: str) -> list[str]:
    """Text as it is, in a fence longer than any run of backticks in it.

    >>> fenced("a```b")
    ['````text', 'a```b', '````']
    """
    shown = written_out(content)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return [f"{fence}text", *shown.splitlines(), fence]


def case_lines(case: Case) -> Iterator[str]:
    """One problem: its question, and the responses of each step below each other."""
    yield from ("", f"### {text(case.question)}", "", f"Right answer: {text(case.ground_truth)}")
    for step, shown in case.steps.items():
        for one in shown:
            yield from (
                "",
                f"Step {step}, {text(one.setting)}: **{one.outcome}** ({text(one.where)})",
                "",
                *fenced(one.text),
            )


def detail_lines(detail: Detail) -> list[str]:
    """Something to open: a table, or text as it is."""
    inner = table_lines(detail.table) if detail.table is not None else fenced(detail.text)
    return ["", "<details>", f"<summary>{text(detail.title)}</summary>", "", *inner, "", "</details>"]
