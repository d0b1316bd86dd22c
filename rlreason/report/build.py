"""Build every section of a report from a study, and write the report as Markdown."""

import html
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.errors import ConfigError
from rlreason.health.finding import Finding
from rlreason.records.files import EVALS, ResponseFile, each_line, response_files
from rlreason.report.charts import figures_of, forest_of, legend_of
from rlreason.report.content import SIGNS, Case, Detail, Figure, Report, ShownResponse, Table, Verdict, written_out
from rlreason.report.page import svg_of
from rlreason.report.read import without_ids
from rlreason.report.remarks import budget_of, warnings_of
from rlreason.report.study import GradedProblem, Pairing, Study, StudyRun, pair, side_of
from rlreason.report.tables import (
    NONE,
    ONE_SAMPLE,
    axes_table,
    best_of_n_table,
    cost_of,
    details_of,
    log_of,
    passes_table,
    percent,
    settings_table,
    what_differs,
)
from rlreason.report.verdicts import EQUAL_WITHIN, signed, summary_of, verdicts_of
from rlreason.runtime.differences import LEVEL, PROBLEMS, holm
from rlreason.runtime.files import write_whole
from rlreason.runtime.text import few, visible

MOST_PARTS = 40  # of one fact: with more different values it tells problems apart, not kinds of them
FEWEST_PROBLEMS = 8  # of a part


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the problems, and what defines it."""

    kind: str  # "level", "question length" ...
    name: str
    problems: frozenset[str]


def slices_of(study: Study) -> list[Slice]:
    """Split the problems that all runs answered: by fact, by length of the question, by difficulty at the start.

    Parts of fewer than FEWEST_PROBLEMS problems are left out, and so is a kind with one part.
    """
    problems = _problems(study)
    kinds = [*_by_facts(problems), ("question length", _by_length(problems))]
    kinds.append(("difficulty for the starting model", _by_difficulty(study)))
    found = []
    for kind, parts in kinds:
        large = {
            name: of & problems.keys() for name, of in parts.items() if len(of & problems.keys()) >= FEWEST_PROBLEMS
        }
        if len(large) > 1:
            found += [Slice(kind, name, frozenset(of)) for name, of in large.items()]
    return found


def _problems(study: Study) -> dict[str, GradedProblem]:
    """Return the problems that every run answered."""
    finals = [run.final.problems for run in study.runs if run.final is not None]
    if not finals:
        return {}
    common = set(finals[0]).intersection(*finals[1:])
    return {name: finals[0][name] for name in sorted(common)}


def _by_facts(problems: Mapping[str, GradedProblem]) -> Iterator[tuple[str, dict[str, set[str]]]]:
    for fact in dict.fromkeys(name for problem in problems.values() for name in problem.facts):
        parts: dict[str, set[str]] = {}
        for name, problem in problems.items():
            parts.setdefault(str(problem.facts.get(fact, "not told")), set()).add(name)
        if 1 < len(parts) <= MOST_PARTS:
            yield str(fact), dict(sorted(parts.items()))


def _by_length(problems: Mapping[str, GradedProblem]) -> dict[str, set[str]]:
    """Split into thirds by the characters of the question."""
    lengths = {name: len(problem.question) for name, problem in problems.items()}
    if len(set(lengths.values())) < 3:
        return {}
    low, high = np.quantile(list(lengths.values()), (1 / 3, 2 / 3))
    return {
        f"short (up to {low:.0f} characters)": {n for n, k in lengths.items() if k <= low},
        "middle": {n for n, k in lengths.items() if low < k <= high},
        f"long (over {high:.0f})": {n for n, k in lengths.items() if k > high},
    }


def _by_difficulty(study: Study) -> dict[str, set[str]]:
    """Split by how many evaluations before training solved a problem: none, some or all."""
    starts = [run.start.problems for run in study.runs if run.start is not None]
    if not starts:
        return {}
    asked = set(starts[0]).intersection(*starts[1:])
    share = {name: float(np.mean([start[name].share for start in starts])) for name in asked}
    return {
        "solved by no starting run": {n for n, s in share.items() if s == 0},
        "by some": {n for n, s in share.items() if 0 < s < 1},
        "by all": {n for n, s in share.items() if s == 1},
    }


def slices_table(study: Study) -> Table | None:
    """Return for each slice the reference's accuracy and the others' differences; a sign where Holm allows one."""
    slices, reference = slices_of(study), side_of(study.reference)
    others = [(one, side_of(one)) for one in study.settings[1:]]
    if not slices or not reference.right or not any(side.right for _, side in others):
        return None
    found = {(s, one.label): pair(side, reference, set(s.problems)) for s in slices for one, side in others}
    tested = {key: pairing for key, pairing in found.items() if pairing is not None}
    adjusted = dict(zip(tested, holm([p.difference.p for p in tested.values()]), strict=True))
    rows = []
    for s in slices:
        pairings = [found[s, one.label] for one, _ in others]
        first = next((p for p in pairings if p is not None), None)
        rows.append(
            [
                f"{s.kind}\n{s.name}",
                f"{len(s.problems):,}",
                NONE if first is None else percent(first.means[1]),
                *(_cell(found[s, one.label], adjusted.get((s, one.label), 1.0)) for one, _ in others),
            ]
        )
    return Table(
        "Accuracy by slice",
        ["problems that are", "number", study.reference.label, *(one.label for one, _ in others)],
        rows,
        frozenset(range(1, len(others) + 3)),
        "Accuracy of the reference, and differences to it in points with 95% intervals. With "
        "\N{BLACK UP-POINTING TRIANGLE} or \N{BLACK DOWN-POINTING TRIANGLE}: different by Holm over all "
        f"{len(tested)} comparisons of this table; "
        "everything else cannot be told.",
    )


def _cell(pairing: Pairing | None, p: float) -> str:
    if pairing is None:
        return NONE
    found = pairing.difference
    sure = p <= LEVEL and found.over != PROBLEMS
    sign = ("\N{BLACK UP-POINTING TRIANGLE} " if found.mean > 0 else "\N{BLACK DOWN-POINTING TRIANGLE} ") * sure
    return f"{sign}{signed(found.mean)}\n{signed(found.low)} to {signed(found.high)}"


PROBLEMS_SHOWN, STEPS, SETTINGS = 4, 3, 6  # shown at most
LONGEST = 600  # characters of a response
Found = dict[str, tuple[dict[str, Any], int]]  # problem -> its first response, and the line that it stands in


def cases_of(study: Study) -> list[Case]:
    """Select problems by a fixed rule, with responses of the smallest seed that all settings share.

    One problem that all settings solve in the end, one that none does, one that some do, and the first, in the order of
    a hash. The steps are those of the reference. [] if the runs have saved no evaluations.
    """
    runs = _one_seed(study)
    files = {label: _last_of_each_step(run) for label, run in runs.items()}
    shared = sorted(next(iter(files.values()))) if files else []
    steps = list(dict.fromkeys([shared[0], shared[len(shared) // 2], shared[-1]])) if shared else []
    if not steps:
        return []
    chosen = _chosen(list(runs.values()))
    found = {
        (label, step): _responses(files[label][step], chosen)
        for label in runs
        for step in steps
        if step in files[label]
    }
    cases = []
    for problem in chosen:
        of_steps = {step: _side_by_side(problem, step, list(runs), found, files) for step in steps}
        rows = [row for (_, _), of in found.items() if (row := of.get(problem)) is not None]
        if rows and all(of_steps.values()):
            question, gold = rows[0][0].get("question"), rows[0][0].get("gold")
            cases.append(Case(shown_text(str(question)), shown_text(str(gold)), of_steps))
    return cases


def _one_seed(study: Study) -> dict[str, StudyRun]:
    """Return a run of each of up to SETTINGS settings, with the smallest seed that they share."""
    saved = [(one, {run.seed: run for run in one.runs if run.final is not None}) for one in study.settings]
    saved = [(one, of) for one, of in saved if of][:SETTINGS]
    if not saved:
        return {}
    shared = set(saved[0][1]).intersection(*(of for _, of in saved[1:]))
    return {one.label: of[min(shared or of)] for one, of in saved}


def _last_of_each_step(run: StudyRun) -> dict[int, ResponseFile]:
    """Return step -> evaluation; of two of one step the later one, which is the final one."""
    return {file.step: file for file in response_files(run.folder, EVALS) if file.step is not None}


def _chosen(runs: Sequence[StudyRun]) -> list[str]:
    """Return the problems to show."""
    finals = [run.final.problems for run in runs if run.final is not None]
    common = set(finals[0]).intersection(*finals[1:]) if finals else set()
    for run in runs:
        common &= set(run.start.problems) if run.start is not None else common
    ordered = sorted(common, key=lambda name: (zlib.crc32(name.encode()), name))
    solved = {name: sum(final[name].share == 1 for final in finals) for name in ordered}
    kinds: list[Callable[[str], bool]] = [
        lambda name: solved[name] == len(finals),
        lambda name: solved[name] == 0,
        lambda name: 0 < solved[name] < len(finals),
    ]
    first = [next((name for name in ordered if kind(name)), None) for kind in kinds]
    return list(dict.fromkeys([name for name in first if name is not None] + ordered))[:PROBLEMS_SHOWN]


def _responses(file: ResponseFile, problems: Sequence[str]) -> Found:
    """Return the first response to each of these problems, with its line."""
    found: Found = {}
    try:
        for number, row in each_line(file.path, _wrong, lambda _: None, without_ids):
            if row["problem_id"] in problems and row["problem_id"] not in found:
                found[row["problem_id"]] = row, number
                if len(found) == len(problems):
                    break
    except ConfigError:  # reading the study has named it
        return {}
    return found


def _wrong(row: dict[str, Any]) -> str:
    names = ("problem_id", "response", "outcome")
    return "" if all(isinstance(row.get(name), str) for name in names) else "no usable response"


def _side_by_side(
    problem: str, step: int, labels: Sequence[str], found: dict[tuple[str, int], Found], files: Any
) -> list[ShownResponse]:
    shown = []
    for label in labels:
        if (one := found.get((label, step), {}).get(problem)) is not None:
            row, line = one
            where = Path(*files[label][step].path.parts[-3:])
            shown.append(ShownResponse(label, step, outcome_of(row), shown_text(row["response"]), f"{where}:{line}"))
    return shown


def outcome_of(row: dict[str, Any]) -> str:
    """Return "correct", "wrong" or "no format"."""
    if row["outcome"] == "correct":
        return "correct"
    return "wrong" if float(row.get("format_reward") or 0) > 0 else "no format"


def shown_text(text: str) -> str:
    r"""Return at most LONGEST characters of a text, with invisible characters written out.

    >>> shown_text("a\u202eb"), shown_text("x" * 601)[-23:]
    ('a\\u202eb', 'x ... 1 more characters')
    """
    cut = text[:LONGEST]
    more = f" ... {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else ""
    return visible(cut) + more


NOTE = "What the monitors find in the recorded metrics, all of them on. For one run with evidence: rlreason health RUN."


def health_of(study: Study) -> str:
    """Return in words how many of the runs have something wrong."""
    read = [run for run in study.runs if run.series]
    ill = sum(any(finding.problem for finding in run.findings) for run in read)
    return f"something is wrong in {ill} of {len(read)} runs" if ill else f"nothing is wrong in {len(read)} runs"


def health_table(study: Study) -> Table | None:
    """Return each problem of a setting's runs: how many have it, where first, why, and what to try."""
    rows = []
    for one in study.settings:
        found: dict[str, list[tuple[StudyRun, Finding]]] = {}
        for run in one.runs:
            for finding in filter(lambda finding: finding.problem, run.findings):
                found.setdefault(finding.rule, []).append((run, finding))
        for rule, of_rule in found.items():
            first = min((finding for _, finding in of_rule), key=lambda finding: finding.step or 0)
            seeds, share = ", ".join(str(run.seed) for run, _ in of_rule), f"{len(of_rule)} of {len(one.runs)}"
            rows.append(
                [
                    one.label,
                    f"{rule}\n{first.what}",
                    f"{share}\nseed {seeds}",
                    str(first.step),
                    first.causes,
                    first.cure,
                ]
            )
    head = ["setting", "what is wrong", "runs", "first at step", "commonest causes", "try"]
    return Table("Health of the runs", head, rows, frozenset({3}), NOTE, frozenset({0})) if rows else None


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
