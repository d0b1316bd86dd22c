"""Sections that one question has and others have not: each adds to a section what its study shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from rlreason.report.assignment.bars import percent
from rlreason.report.assignment.gathered import Gathered, Read
from rlreason.report.assignment.metrics import metric_sentences, metrics_table
from rlreason.report.assignment.parts_of_algorithms import against_sft, entropy
from rlreason.report.assignment.parts_of_leaderboard import leaderboard
from rlreason.report.assignment.quotes import FAILING, quotes_of
from rlreason.report.assignment.section import Picture, Section
from rlreason.report.content import MOST_COLOURS, Entry, Figure, Table
from rlreason.report.specifications import SETTING
from rlreason.report.study import Setting, Study
from rlreason.report.verdicts import verdicts_of

Part = Callable[[Section, Read, Gathered], None]
CORRECT = "correct"
LIMIT = "data.limit"  # the number of examples
CATEGORIES = {CORRECT: "format 1, answer 1", **FAILING}


def categories(section: Section, read: Read, gathered: Gathered) -> None:
    """The three categories of each run, in figures and in words, and ten responses of each failing one."""
    rows, runs = [], [run for run in read.study.runs if run.final is not None and run.final.categories]
    for run in runs:
        assert run.final is not None
        counts, whole = run.final.categories, sum(run.final.categories.values())
        cells = [f"{counts.get(name, 0):,}\n{percent(counts.get(name, 0) / max(whole, 1))}" for name in CATEGORIES]
        rows.append([run.name, f"{whole:,}", *cells])
    if not rows:
        section.lines.append("No run has kept its graded responses: the categories cannot be counted.")
        return
    head = ["run", "responses", *CATEGORIES.values()]
    section.tables.append(Table("The three categories", head, rows, frozenset(range(1, len(head)))))
    first = runs[0]
    assert first.final is not None
    counts, whole = first.final.categories, sum(first.final.categories.values())
    said = "; ".join(f"{counts.get(name, 0):,} {title}" for name, title in CATEGORIES.items())
    section.lines.append(
        f"Of {whole:,} responses of {first.name}: {said}. In words: {percent(counts.get(CORRECT, 0) / max(whole, 1))} "
        "are right before any training. The guess beside a response says whether its model or the parser is to blame."
    )
    section.quotes += quotes_of(first, section.problems)


def filtered(section: Section, read: Read, gathered: Gathered) -> None:
    """The size of the set that a filter left."""
    for one in read.study.settings:
        sizes = [run.summary.get("data_sizes") for run in one.runs]
        told = {
            (of["train_before_filter"], of["train_filtered"], of.get("train", of["train_filtered"]))
            for of in sizes
            if isinstance(of, dict) and {"train_before_filter", "train_filtered"} <= of.keys()
        }
        for before, kept, used in sorted(told):
            left = "" if used == kept else f", of which data.limit lets {used:,} be trained on"
            share = percent(kept / max(before, 1))
            section.lines.append(f"{one.label}: the filtered set has {kept:,} of {before:,} traces ({share}){left}.")


def equal_updates(section: Section, read: Read, gathered: Gathered) -> None:
    """Verdicts among the settings of a sweep that differ from its reference in how long they train."""
    for budget, study in by_budget(read.study):
        if len(study.settings) > 1 and read.study.reference.key not in [one.key for one in study.settings]:
            asked = f"{study.name}, among those with {budget}, against {study.reference.label}"
            section.verdicts.append((asked, verdicts_of(study)))


def by_budget(study: Study) -> list[tuple[str, Study]]:
    """A sweep of numbers of examples as a study of each budget, with that in words; else the study itself and ''.

    The largest number of examples stands first, as what the others are compared with.
    """
    groups: dict[str, list[Setting]] = {}
    sizes = [(dict(one.key).get(LIMIT, "null"), one) for one in study.settings if study.axes[:1] == [LIMIT]]
    for size, one in sorted(sizes, key=lambda pair: -float(pair[0].replace("null", "inf"))):
        budget = " ".join(f"{key}={value}" for key, value in one.key if key != LIMIT and value != "null")
        groups.setdefault(budget, []).append(replace(one, label=f"{size} examples".replace("null", "all")))
    return [(budget, replace(study, settings=of)) for budget, of in groups.items()] or [("", study)]


def other_metrics(section: Section, read: Read, gathered: Gathered) -> None:
    """Two or three sentences on metrics other than the accuracy, and the table behind them."""
    if (table := metrics_table(read.study, f"Other metrics at the end of training: {read.study.name}")) is not None:
        section.lines += metric_sentences(read.study)
        section.tables.append(table)


def cases(section: Section, read: Read, gathered: Gathered) -> None:
    """The same problems' responses over training."""
    section.cases += read.report.cases


def log(section: Section, read: Read, gathered: Gathered) -> None:
    """The experiment log: what ran, what ended early, and why."""
    study, table = read.study, read.report.log
    ranges = {axis: dict.fromkeys(dict(one.key).get(axis, "-") for one in study.settings) for axis in study.axes}
    run = "; ".join(f"{axis} {', '.join(values)}" for axis, values in ranges.items())
    section.lines.append(f"Ranges that {study.name} ran: {run}.")
    section.tables.append(Table(f"{table.title}: {study.name}", table.head, table.rows, table.numbers, table.note))


def best_of_n(section: Section, read: Read, gathered: Gathered) -> None:
    """pass@N and Best@N in one picture and in a table, and the gap between them in words."""
    ways = [figure for figure in read.report.figures if figure.name.startswith("best_of_n/")]
    section.pictures += in_one(section, ways, len(read.study.settings) > 1)
    section.tables += [table for table in read.report.tables if table.title == "Best of N"]
    for one in read.study.settings:
        for run in one.runs[:1]:
            section.lines += [f"{one.label}, seed {run.seed}: {line}" for line in gap_lines(run.summary)]


def in_one(section: Section, figures: Sequence[Figure], several: bool) -> list[Picture]:
    """Figures over one axis as one picture, with a curve for each, of each setting where there are `several`."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for one, name in product(figures, figures[0].rows if figures else ()):
        named = [{**row, SETTING: f"{row[SETTING]}: " * several + one.title} for row in one.rows[name]]
        rows.setdefault(name, []).extend(named)
    labels = enumerate(dict.fromkeys(row[SETTING] for row in rows.get("means", ())))
    legend = [Entry(label, place if place < MOST_COLOURS else None) for place, label in labels]
    title, alt = section.question.title, " ".join(one.alt for one in figures)
    drawn = [replace(one, title=title, alt=alt, rows=rows) for one in figures[:1]]
    return [Picture(section.question.id, one, legend) for one in drawn]


def gap_lines(summary: object) -> list[str]:
    """How far the likeliest of N stays behind any of N being right.

    >>> gap_lines({"n_list": [1, 4], "best_of_n": {"pass@N": [[0.2, 0, 1], [0.6, 0, 1]], "Best@N": [[0.2], [0.3]]}})
    ['at N = 4 pass@N is 60.0% and Best@N 30.0%: a gap of 30.0 points that a better way to choose could close.']
    """
    if not isinstance(summary, dict) or not isinstance(summary.get("best_of_n"), dict):
        return []
    ways, counts = summary["best_of_n"], summary.get("n_list") or []
    names = [name for name in ways if "pass" in name.lower()]
    if not names or not counts:
        return []
    top = ways[names[0]][-1][0]
    return [
        f"at N = {counts[-1]} {names[0]} is {percent(top)} and {name} {percent(points[-1][0])}: a gap of "
        f"{100 * (top - points[-1][0]):.1f} points that a better way to choose could close."
        for name, points in ways.items()
        if name != names[0] and points
    ]


PARTS: dict[str, Part] = {
    "categories": categories,
    "equal_updates": equal_updates,
    "filtered": filtered,
    "against_sft": against_sft,
    "other_metrics": other_metrics,
    "cases": cases,
    "log": log,
    "entropy": entropy,
    "leaderboard": leaderboard,
    "best_of_n": best_of_n,
}
