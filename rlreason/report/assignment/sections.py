"""Build the section of each question: its state, and the figures, verdicts and words that its runs give."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.evaluation.cases import category_of, reasons
from rlreason.grading import Grader
from rlreason.records.files import COMPLIANCE, RESPONSES, each_line
from rlreason.records.rows import TO_SHOW, lacks
from rlreason.report.assignment.courses import Found, Question, Runs
from rlreason.report.assignment.figures import (
    against_bar,
    by_hours,
    by_time,
    interval_of,
    metrics_table,
    of_budget,
    with_bands,
)
from rlreason.report.compare import compared_study
from rlreason.report.content import MOST_COLOURS, Case, Entry, Figure, Table, Verdict
from rlreason.report.documents import filled
from rlreason.report.figures import figures_of, legend_of
from rlreason.report.sections import shown_text
from rlreason.report.study import Setting, Study, StudyRun
from rlreason.report.tables import percent
from rlreason.report.verdicts import best_of, comparing_half, verdicts_of
from rlreason.runtime.text import few

DONE, PARTLY, NOT_YET, IN_WORDS = "done", "partly", "not yet run", "in words"
MOST_REFUSED = 4  # runs with a reason why they do not answer a question
LIMIT = "data.limit"  # the number of examples
#: part -> the only sweep of a question that it is for.
ONLY = {"filtered": "sft_filtered", "entropy": "grpo_off_policy_focused"}
#: Category of a response -> its name in the handout.
CATEGORIES = {
    "correct": "format 1, answer 1",
    "format1_wrong": "format 1, answer 0",
    "format0": "format 0, answer 0",
}
CASES = 10  # responses of each failing category


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with the legend that gives its settings their colours."""

    stem: str  # of its file
    figure: Figure
    legend: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Quote:
    """One response to a problem, with its grade."""

    question: str
    gold: str
    response: str  # cut, free of control characters
    why: str  # a guess at the reason of its grade
    where: str  # file and line


@dataclass(slots=True)
class Section:
    """The answer to one question."""

    question: Question
    state: str = IN_WORDS  # DONE, PARTLY, NOT_YET or IN_WORDS
    reads: list[Found] = field(default_factory=list)  # its sweeps and runs
    missing: list[str] = field(default_factory=list)  # commands that are still to be run
    lines: list[str] = field(default_factory=list)  # paragraphs
    verdicts: list[tuple[str, list[Verdict]]] = field(default_factory=list)  # what is compared, and the verdicts
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    quotes: list[tuple[str, list[Quote]]] = field(default_factory=list)  # title -> responses
    cases: list[Case] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # "to keep in mind"
    problems: list[str] = field(default_factory=list)  # found in the folders

    def write(self, part: str, **values: Any) -> None:
        """Add the paragraphs that writeup_lines.txt.j2 has for a part."""
        words = filled("writeup_lines.txt.j2", part=part, question=self.question, percent=percent, few=few, **values)
        self.lines += [line for line in words.splitlines() if line]


def section_of(question: Question, runs: Runs) -> Section:
    """Return the section of one question: its state, and everything that its studies show."""
    section = Section(question, lines=[question.note] if question.note else [])
    if not (question.sweeps or question.command):
        return section
    reads, refused = [read for name in question.sweeps if (read := runs.sweep(name)) is not None], list[str]()
    names = [read.name for read in reads]
    lacking = [name for name in question.sweeps if name not in names]
    if not reads and question.algorithm:
        reads, refused = runs.of_algorithm(question)
        lacking = [] if reads else lacking
    if not reads and question.instead and (read := runs.sweep(question.instead)) is not None:
        reads = [read.reference_alone()]
        section.write("instead", reference=read.study.reference.label, source=read.name)
    values = set(question.values(question.each)).difference(*(read.values(question.each) for read in reads))
    unfinished = sum(not run.ended for read in reads for run in read.study.runs)
    section.write("missing", values=sorted(values) if reads else [], unfinished=unfinished)
    section.lines += refused[:MOST_REFUSED] if values or not reads else []
    section.missing = question.commands(lacking)
    if not section.missing and (values or unfinished or not reads):
        section.missing = question.commands()[:1]
    section.state = NOT_YET if not reads else PARTLY if section.missing else DONE
    section.reads = reads
    for read in reads:
        _add_study(section, read, runs)
    section.warnings = list(dict.fromkeys(section.warnings))
    return section


def _add_study(section: Section, read: Found, runs: Runs) -> None:
    """Add what one study shows to a section."""
    question, study, report = section.question, read.study, read.report
    _headline(section, read, runs)
    if len(study.settings) > 1:
        section.verdicts.append((f"{read.name}: {study.question}", verdicts_of(study)))
    for budget, part in by_budget(study):
        figures = {one.name: one for one in (figures_of(part) if budget else report.figures)}
        legend = legend_of(part, []) if budget else report.legend
        if "eval/accuracy" in figures:
            figures["eval/accuracy"] = with_bands(figures["eval/accuracy"], runs.course, question.id, study)
            if (timed := by_time(figures["eval/accuracy"])) is not None:
                figures["time"] = timed
        for figure in [figures[name] for name in question.figures if name in figures]:
            drawn = of_budget(figure, budget) if budget else figure
            own = [] if read.name in (question.id, question.instead) else [read.name]
            stem = "_".join([question.id, *own, re.sub(r"\W", "_", f"{figure.name}/{budget}".rstrip("/"))])
            section.pictures.append(Picture(stem, drawn, legend))
    if report.tables:
        section.tables.append(replace(report.tables[0], title=f"{report.tables[0].title}: {read.name}"))
    for name in question.parts:
        if ONLY.get(name, read.name) == read.name:
            PARTS[name](section, read, runs)
    section.warnings += report.warnings
    section.problems += report.problems


def _headline(section: Section, read: Found, runs: Runs) -> None:
    """Say what ran, how the best setting does against the pass bar, and how far it is from published figures."""
    question, study, course = section.question, read.study, runs.course
    best, several = best_of(study), len(study.settings) > 1
    fair = interval_of(best.runs, comparing_half(study.settings) if several else None)
    bands = [figure for figure in course.figures if figure.question == question.id and figure.band]
    section.write(
        "study",
        source=read.name,
        study=study,
        summary=read.report.summary,
        models=sorted({str(run.settings.get("model.name", "?")) for run in study.runs}),
        data=sorted({str(run.settings.get("data.name", "?")) for run in study.runs}),
        steps=sorted({run.planned_steps for run in study.runs if run.planned_steps}),
        course=course,
        is_of=course.has(study),
        made=max((int(run.totals.get("step") or run.planned_steps or 0) for run in study.runs), default=0),
        best=best.label,
        fair=fair,
        measured=sum(run.accuracy is not None for run in best.runs),
        reached=against_bar(fair, question.bar) if fair and question.bar is not None else "",
        whole=interval_of(best.runs),
        bands=bands,
        lowest=min((band.low for band in bands), default=0.0) / 100,
    )


def by_budget(study: Study) -> list[tuple[str, Study]]:
    """Split a sweep over numbers of examples by its other keys; return (these keys as text, study) pairs.

    The largest number of examples is the reference. Any other sweep is one study with the text "".
    """
    groups: dict[str, list[Setting]] = {}
    sizes = [(dict(one.key).get(LIMIT, "null"), one) for one in study.settings if study.axes[:1] == [LIMIT]]
    for size, one in sorted(sizes, key=lambda pair: -float(pair[0].replace("null", "inf"))):
        budget = " ".join(f"{key}={value}" for key, value in one.key if key != LIMIT and value != "null")
        groups.setdefault(budget, []).append(replace(one, label=f"{size} examples".replace("null", "all")))
    return [(budget, replace(study, settings=group)) for budget, group in groups.items()] or [("", study)]


# ---- parts that only some questions have ----


def categories(section: Section, read: Found, runs: Runs) -> None:
    """Count the three categories of each run, and quote ten responses of each failing one."""
    counts = {run.name: run.final.categories for run in read.study.runs if run.final and run.final.categories}
    section.write("categories", counts=counts, categories=CATEGORIES)
    rows = []
    for name, of_run in counts.items():
        whole = sum(of_run.values())
        cells = [f"{of_run.get(one, 0):,}\n{percent(of_run.get(one, 0) / max(whole, 1))}" for one in CATEGORIES]
        rows.append([name, f"{whole:,}", *cells])
    if rows:
        head = ["run", "responses", *CATEGORIES.values()]
        section.tables.append(Table("The three categories", head, rows, frozenset(range(1, len(head)))))
        _quote(section, next(run for run in read.study.runs if run.name in counts))


def _quote(section: Section, run: StudyRun) -> None:
    """Add the first responses of each failing category; add broken lines to the problems."""
    quotes: dict[str, list[Quote]] = {category: [] for category in list(CATEGORIES)[1:]}
    guesses = run.protocol is not None and run.protocol.get("reward") == "r1_zero"  # whose failures `reasons` explains
    try:
        for line, row in each_line(run.folder / RESPONSES, lambda row: lacks(row, TO_SHOW), section.problems.append):
            chosen = quotes.get(category_of(row))
            if chosen is not None and len(chosen) < CASES:
                why = "; ".join(map(str, reasons(row, Grader()))) if guesses else ""
                question, gold, response = (shown_text(str(row[name])) for name in ("question", "gold", "response"))
                where = f"{Path(run.folder.name, RESPONSES)}:{line}"
                chosen.append(Quote(question, gold, response, shown_text(why), where))
    except ConfigError as error:
        section.problems.append(str(error))
    for category, chosen in quotes.items():
        count = run.final.categories.get(category, len(chosen)) if run.final is not None else len(chosen)
        part = f"the first {len(chosen)} of {count:,}" if count > len(chosen) else f"all {len(chosen)}"
        if chosen:
            section.quotes.append((f"{CATEGORIES[category]}: {part} (seed {run.seed})", chosen))


def filtered(section: Section, read: Found, runs: Runs) -> None:
    """Add the size of the set that a filter left."""
    for one in read.study.settings:
        recorded = [run.summary.get("data_sizes") for run in one.runs]
        sizes = [size for size in recorded if isinstance(size, dict) and "train_filtered" in size]
        section.write("filtered", label=one.label, sizes=sizes[:1])


def equal_updates(section: Section, read: Found, runs: Runs) -> None:
    """Compare settings with one training budget, for each budget that the sweep's reference does not have."""
    for budget, study in by_budget(read.study):
        if len(study.settings) > 1 and read.study.reference.key not in [one.key for one in study.settings]:
            comparison = f"{study.name}, among those with {budget}, against {study.reference.label}"
            section.verdicts.append((comparison, verdicts_of(study)))


def against_sft(section: Section, read: Found, runs: Runs) -> None:
    """Compare expert iteration with SFT, on the default setting of each, and give expert iteration's own gain."""
    sft, reached = runs.sweep("sft_dataset_size"), dict[int, list[float]]()
    for step, accuracy in (pair for run in read.study.reference.runs for pair in dict(run.evaluations).items()):
        reached.setdefault(step, []).append(accuracy)
    means = {step: percent(sum(values) / len(values)) for step, values in sorted(reached.items())}
    seeds = max(map(len, reached.values()), default=0)
    section.write("against_sft", means=means, seeds=seeds, reference=read.study.reference.name, sft=sft)
    if sft is None:
        return
    sides = []
    for one in (sft, read):  # the reference of a sweep as `compare` takes it: SWEEP/KEY=VALUE,...
        overrides = [f"{key}={value}" for key, value in one.study.reference.key]
        sides.append(one.path / ",".join(overrides) if overrides else one.path)
    try:
        study = compared_study(sides)
    except ConfigError as error:
        section.problems.append(str(error))
        return
    for setting, name in zip(study.settings, ("SFT", "expert iteration"), strict=True):
        setting.label = name
    ours, theirs = read.study.reference.label, sft.study.reference.label
    comparison = f"Expert iteration ({ours}) against SFT ({theirs}), which learns from given traces"
    section.verdicts.append((comparison, verdicts_of(study)))


def other_metrics(section: Section, read: Found, runs: Runs) -> None:
    """Add a table of metrics other than the accuracy."""
    if (table := metrics_table(read.study)) is not None:
        section.tables.append(table)


def cases(section: Section, read: Found, runs: Runs) -> None:
    """Add responses to the same problems over training."""
    section.cases += read.report.cases


def log(section: Section, read: Found, runs: Runs) -> None:
    """Add the experiment log: what ran, what ended early, and why."""
    study, table = read.study, read.report.log
    ranges = {axis: dict.fromkeys(dict(one.key).get(axis, "-") for one in study.settings) for axis in study.axes}
    section.write("log", source=study.name, ranges=ranges)
    section.tables.append(replace(table, title=f"{table.title}: {study.name}", labels=frozenset()))


def entropy(section: Section, read: Found, runs: Runs) -> None:
    """Draw the entropy of GRPO's and expert iteration's responses in one picture."""
    on_policy, ei = runs.sweep("grpo_learning_rate"), runs.sweep("expert_iteration")
    section.write("entropy", ei=ei)
    sides = [("GRPO, on-policy", on_policy.study.reference)] if on_policy is not None else []
    sides += [(f"GRPO, {one.label}", one) for one in read.study.settings[1:]]
    sides += [("expert iteration", ei.study.reference)] if ei is not None else []
    settings = [Setting((("run", label),), label, one.runs) for label, one in sides]
    study = Study("entropy", "Entropy of GRPO and of expert iteration", ["run"], settings)
    for figure in figures_of(study) if ei is not None else ():
        if figure.name == "entropy":
            section.pictures.append(Picture(f"{section.question.id}_entropy_against_ei", figure, legend_of(study, [])))


def leaderboard(section: Section, read: Found, runs: Runs) -> None:
    """Add its accuracy on problems that did not choose, its curve on an axis to 4 h, and its compliance."""
    study, best = read.study, best_of(read.study)
    several = len(study.settings) > 1
    cards = {run.name: run.folder / COMPLIANCE for run in best.runs if (run.folder / COMPLIANCE).is_file()}
    section.write(
        "leaderboard",
        accuracy=interval_of(best.runs, comparing_half(study.settings) if several else None),
        average=interval_of(best.runs) if several else None,
        best=best,
        settings=len(study.settings),
        problems=max((len(run.final.problems) for run in best.runs if run.final is not None), default=0),
        cards={name: card.read_text("utf-8", errors="replace").split("\n") for name, card in cards.items()},
    )
    for figure in read.report.figures:
        if figure.name == "eval/accuracy" and (over := by_hours(figure, study)) is not None:
            drawn = with_bands(over, runs.course, section.question.id, study)
            section.pictures.append(Picture("leaderboard_hours", drawn, read.report.legend))


def best_of_n(section: Section, read: Found, runs: Runs) -> None:
    """Add pass@N and Best@N as one picture and a table, and describe the gap between them."""
    section.tables += [table for table in read.report.tables if table.title == "Best of N"]
    ways = [figure for figure in read.report.figures if figure.name.startswith("best_of_n/")]
    rows: dict[str, list[dict[str, Any]]] = {}
    for way, data_set in product(ways, ways[0].rows if ways else ()):
        for row in way.rows[data_set]:
            label = f"{row['setting']}: {way.title}" if len(read.study.settings) > 1 else way.title
            rows.setdefault(data_set, []).append({**row, "setting": label})
    if ways:
        labels = enumerate(dict.fromkeys(row["setting"] for row in rows["means"]))
        legend = [Entry(label, place if place < MOST_COLOURS else None) for place, label in labels]
        alt = " ".join(figure.alt for figure in ways)
        joined = replace(ways[0], title=section.question.title, alt=alt, rows={**ways[0].rows, **rows})
        section.pictures.append(Picture(section.question.id, joined, legend))
    for one in read.study.settings:
        section.write("best_of_n", label=one.label, run=one.runs[0])


PARTS: dict[str, Callable[[Section, Found, Runs], None]] = {
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
