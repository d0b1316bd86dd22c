"""Build every section of a report from a study, and write the report as Markdown."""

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlreason.report.charts import figures_of, forest_of, legend_of
from rlreason.report.content import SIGNS, Case, Detail, Figure, Report, Table, Verdict, written_out
from rlreason.report.pictures import svg_of
from rlreason.report.remarks import budget_of, warnings_of
from rlreason.report.sections import cases_of, health_of, health_table, slices_table
from rlreason.report.study import Study
from rlreason.report.tables import (
    ONE_SAMPLE,
    axes_table,
    best_of_n_table,
    cost_of,
    details_of,
    log_of,
    passes_table,
    settings_table,
    what_differs,
)
from rlreason.report.verdicts import EQUAL_WITHIN, summary_of, verdicts_of
from rlreason.runtime.files import write_whole
from rlreason.runtime.text import few


def build_report(study: Study, equal_within: float = EQUAL_WITHIN) -> Report:
    """Build the whole report of a study."""
    verdicts = verdicts_of(study, equal_within)
    return Report(
        name=study.name,
        question=study.question,
        summary=summary_of(verdicts, study),
        lead=introduction_of(study),
        legend=legend_of(study, verdicts),
        verdicts=verdicts,
        facts=facts_of(study),
        warnings=[*warnings_of(study), *study.notes, *_carried(study)],
        figures=figures_of(study),
        tables=tables_of(study, verdicts),
        log=log_of(study),
        problems=study.problems,
        cases=cases_of(study),
        details=details_of(study),
        forest=forest_of(verdicts),
    )


def tables_of(study: Study, verdicts: Sequence[Verdict]) -> list[Table]:
    """Return the tables with content: settings, two axes, slices, pass@k, best of N."""
    passes = passes_table(study)
    found = [settings_table(study, verdicts), axes_table(study, verdicts), slices_table(study), passes]
    found += [best_of_n_table(study), health_table(study)]
    tables = [table for table in found if table is not None]
    if passes is None and any(run.final is not None for run in study.runs):
        first = tables[0]
        tables[0] = Table(
            first.title, first.head, first.rows, first.numbers, f"{first.note} {ONE_SAMPLE}", first.labels
        )
    return tables


def introduction_of(study: Study) -> str:
    """Return what was compared with what, in two sentences."""
    n, seeds = len(study.settings), {len(one.runs) for one in study.settings}
    each = (
        f"{min(seeds)} seed{'s' * (min(seeds) > 1)} each" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    )
    asked = max((len(run.final.problems) for run in study.runs if run.final is not None), default=0)
    problems = f" of {asked:,} validation problem{'s' * (asked != 1)}" if asked else ""
    if n < 2:
        return f"One setting, {each.removesuffix(' each')}, measured by {study.figure}{problems}."
    reference = study.reference.name
    if any(run.final is not None and not run.ended for run in study.runs):
        problems += " (of a run that ended early, the last one that it reached)"
    chosen = few([one.label for one in study.settings if one.best_of])
    fixed = f"but {chosen} was chosen by its result" if chosen else "nothing was chosen by its result"
    return (
        f"{n} settings of {what_differs(study)}, {each}, compared with {reference} on {study.figure}{problems}. "
        f"That figure is fixed{', ' if chosen else ': '}{fixed}."
    )


def facts_of(study: Study) -> list[tuple[str, str]]:
    """Return the facts below the first screen."""
    hashes = list(dict.fromkeys(str(run.protocol.get("hash")) for run in study.runs if run.protocol is not None))
    measured = sum(run.protocol is not None for run in study.runs)
    if len(hashes) == 1:
        protocol = f"{hashes[0]}, one for all {measured} runs"
    else:
        protocol = f"{few(hashes, 3)}: they differ" if hashes else "none on record yet"
    overlaps = {str(run.settings.get("data.overlap")) for run in study.runs if run.settings.get("data.overlap")}
    overlap = {"refuse": "none: it is refused", "drop": "dropped from training"}
    return [
        ("Compared", f"each run's {study.figure.removeprefix('the ')}"),
        ("Differs between settings", what_differs(study)),
        ("Budget", budget_of(study)),
        ("Protocol", protocol),
        ("Training and validation overlap", few([overlap.get(word, word) for word in sorted(overlaps)]) or "not known"),
        ("Health", health_of(study)),
        ("Cost", cost_of(study).rstrip(".")),
    ]


def _carried(study: Study) -> list[str]:
    """Return what `carry=` brought, in the sentences of that sweep."""
    return [f"Carried from an earlier sweep: {one.get('sentence', '')}" for one in study.carried if one.get("sentence")]


FILES = "report_files"  # next to the Markdown
PICTURES = ("eval/accuracy", "length", "entropy", "train/grad_norm")  # the forest comes with them
_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write_markdown(report: Report, target: Path) -> None:
    """Write `target` and, in the folder FILES next to it, its pictures. `UnwritableError` if the system refuses."""
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
    """Yield the lines of the document; `names`: the files of the pictures, without their endings."""
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
    r"""Escape a text for Markdown and the HTML in it, on one line.

    >>> text("<b> a|b *c*\u202e")
    '&lt;b&gt; a\\|b \\*c\\*⟨U+202E⟩'
    """
    line = " ".join(written_out(given).split())
    escaped = _SPECIAL.sub(r"\\\1", html.escape(line, quote=False))
    return re.sub(r"^(\d+)([.)])(\s)", r"\1\\\2\3", re.sub(r"^([#+>-])", r"\\\1", escaped))


def picture(figure: Figure, stem: str) -> list[str]:
    """Return a picture that follows the reader's colour scheme, with its alternative text."""
    alt = html.escape(" ".join(written_out(figure.alt).split()))
    return [
        "",
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{FILES}/{stem}_dark.svg">'
        f'<img alt="{alt}" src="{FILES}/{stem}.svg"></picture>',
    ]


def table_lines(table: Table) -> list[str]:
    """Return a table in Markdown; lines within a cell are broken."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join("<br>".join(map(text, cell.split("\n"))) for cell in cells) + " |"

    marks = ["--:" if k in table.numbers else "---" for k in range(len(table.head))]
    lines = [row(table.head), "| " + " | ".join(marks) + " |", *map(row, table.rows)]
    return [*lines, "", text(table.note)] if table.note else lines


def fenced(content: str) -> list[str]:
    """Return text in a fence longer than any run of backticks in it.

    >>> fenced("a```b")
    ['````text', 'a```b', '````']
    """
    shown = written_out(content)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return [f"{fence}text", *shown.splitlines(), fence]


def case_lines(case: Case) -> Iterator[str]:
    """Yield one problem: its question, and the responses of each step below each other."""
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
    """Return a collapsible section: a table, or plain text."""
    inner = table_lines(detail.table) if detail.table is not None else fenced(detail.text)
    return ["", "<details>", f"<summary>{text(detail.title)}</summary>", "", *inner, "", "</details>"]
