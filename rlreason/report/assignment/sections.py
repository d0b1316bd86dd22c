"""Build the section of each question: its state, and the figures, verdicts and words that its runs give."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.cases import CATEGORY_TEXTS, category_of, reasons
from rlreason.grading import Grader
from rlreason.records.files import COMPLIANCE, RESPONSES, each_line
from rlreason.records.rows import TO_SHOW, lacks
from rlreason.report.assignment.courses import Course, Found, Question, Runs
from rlreason.report.charts import ticks_of
from rlreason.report.content import MOST_COLOURS, Axis, Case, Entry, Figure, Table, Verdict
from rlreason.report.documents import filled
from rlreason.report.figures import DEPTH, STEP_TITLE, STEPS, figures_of, legend_of
from rlreason.report.sections import shown_text
from rlreason.report.study import Setting, Study, StudyRun
from rlreason.report.tables import accuracy_of, percent
from rlreason.report.verdicts import best_of, comparing_half, verdicts_of
from rlreason.runtime.differences import TIED
from rlreason.runtime.intervals import mean_interval, wilson_interval
from rlreason.runtime.text import few

DONE, PARTLY, NOT_YET, IN_WORDS = "done", "partly", "not yet run", "in words"
MOST_REFUSED = 4  # runs with a reason why they do not answer a question
LIMIT = "data.limit"  # the number of examples
#: part -> the only sweep of a question that it is for.
ONLY = {"filtered": "sft_filtered", "entropy": "grpo_off_policy_focused"}
CASES = 10  # responses of each failing category
HOURS = 4.0  # of the leaderboard's axis
Interval = tuple[float, float, float]  # mean, low, high
Quote = dict[str, str]  # one response: question, gold, response, a guess at the reason of its grade, file and line


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with the legend that gives its settings their colours."""

    stem: str  # of its file
    figure: Figure
    legend: Sequence[Entry]


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
    lacking = [name for name in question.sweeps if name not in [read.name for read in reads]]
    if not reads and question.algorithm:
        reads, refused = runs.of_algorithm(question)
        lacking = [] if reads else lacking
    if not reads and question.instead and (read := runs.sweep(question.instead)) is not None:
        reads = [read.reference_alone()]
        section.write("instead", read=read)
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
            figures["time"] = by_time(figures["eval/accuracy"])
        for figure in [figures[name] for name in question.figures if name in figures]:
            own = [] if read.name in (question.id, question.instead) else [read.name]
            stem = "_".join([question.id, *own, re.sub(r"\W", "_", f"{figure.name}/{budget}".rstrip("/"))])
            section.pictures.append(Picture(stem, of_budget(figure, budget) if budget else figure, legend))
    section.tables.append(replace(report.tables[0], title=f"{report.tables[0].title}: {read.name}"))
    for name in question.parts:
        if ONLY.get(name, read.name) == read.name:
            PARTS[name](section, read, runs)
    section.warnings += report.warnings
    section.problems += report.problems


def _headline(section: Section, read: Found, runs: Runs) -> None:
    """Say what ran, how the best setting does against the pass bar, and how far it is from published figures."""
    question, study, course = section.question, read.study, runs.course
    best, half = best_of(study), comparing_half(study.settings) if len(study.settings) > 1 else None
    fair = interval_of(best.runs, half)
    bands = [figure for figure in course.published if figure.question == question.id and figure.band]
    section.write(
        "study",
        read=read,
        steps=sorted({run.planned_steps for run in study.runs if run.planned_steps}),
        course=course,
        is_of=course.has(study),
        made=max((int(run.totals.get("step") or run.planned_steps or 0) for run in study.runs), default=0),
        best=best,
        fair=fair,
        reached=against_bar(fair, question.bar) if fair and question.bar is not None else "",
        whole=interval_of(best.runs),
        bands=bands,
        lowest=min((one.band[0] for one in bands), default=0.0) / 100,
    )


# ---- numbers and pictures ----


def interval_of(runs: Sequence[StudyRun], among: set[str] | None = None) -> Interval | None:
    """Return (mean, low, high) of the final accuracies, within 0 to 1; None if no run has one.

    Student's interval over several seeds (if they tie, that of the settings' table), Wilson's over the problems of one.
    `among`: the problems that count.
    """
    shares = []
    for run in runs:
        counted = [p.share for name, p in run.final.problems.items() if name in among] if run.final and among else []
        share = float(np.mean(counted)) if counted else run.accuracy
        shares += [] if share is None else [share]
    if not shares:
        return None
    if len(shares) > 1:
        mean, low, high = mean_interval(shares)
        tied = accuracy_of(Setting((), "", list(runs)), among) if high - low < TIED else None
        return tied or (mean, max(low, 0.0), min(high, 1.0))
    problems = next((set(run.final.problems) for run in runs if run.final), {""})
    n = max(1, len(problems if among is None else problems & among))
    return shares[0], *wilson_interval(shares[0] * n, n)


def against_bar(accuracy: Interval, bar: float) -> str:
    """Return whether a (mean, low, high) reaches a bar.

    >>> [against_bar(accuracy, 0.25) for accuracy in ((0.5, 0.4, 0.6), (0.3, 0.2, 0.4), (0.1, 0.0, 0.2))]
    ['reached', 'cannot tell', 'not reached']
    """
    _, low, high = accuracy
    if low >= bar:
        return "reached"
    return "not reached" if high < bar else "cannot tell"


def with_bands(figure: Figure, course: Course, question: str, study: Study) -> Figure:
    """Add the published bands of a question to its accuracy picture, if model and data are the same."""
    bands = [one for one in course.published if one.question == question and one.band]
    if not bands or not course.has(study):
        return figure
    rows = []
    for low, high in (one.band for one in bands):
        wider = max(0.0, 1.0 - (high - low)) / 2  # so that a single number is visible
        rows.append({"low": (low - wider) / 100, "high": (high + wider) / 100})
    return replace(figure, rows={"published": rows}, note=f"{figure.note} Grey: published figures.".strip())


def by_time(figure: Figure) -> Figure:
    """Return a figure of curves against active time."""
    title = "seconds, evaluations left out"
    return _against("time", figure, "time", f"{figure.title} against seconds", replace(figure.x, title=title))


def by_hours(figure: Figure) -> Figure | None:
    """Return a figure of curves against hours since the start, evaluations included; None if they were not counted."""
    curves = [replace(one, x={"hours": one.x["total"] / 3600}) for one in figure.curves if "total" in one.x]
    title = "hours since the start, evaluations included"
    x = Axis(title, {**STEPS.scale, "domain": [0.0, HOURS]}, {**STEPS.axis, "format": "~g"})
    over = replace(figure, curves=curves)
    return _against("hours", over, "leaderboard/hours", "Accuracy against wall clock, in hours", x) if curves else None


def _against(axis: str, figure: Figure, name: str, title: str, x: Axis) -> Figure:
    alt = figure.alt.replace(f"by {STEP_TITLE}", f"by {x.title}")
    return replace(figure, axis=axis, name=name, title=title, alt=alt, x=x)


def of_budget(figure: Figure, budget: str) -> Figure:
    """Return the picture of one budget; its steps are logarithmic if one run is ten times as long as another."""
    ends = [float(curve.x["step"][-1]) for curve in figure.curves if curve.seed is not None]
    x = figure.x
    if ends and max(ends) >= 10 * min(ends):
        ticks = {"values": [0, *ticks_of(1.0, max(ends))], "format": "d"}
        x = Axis(f"{STEP_TITLE}; {DEPTH}", {**x.scale, "type": "symlog"}, {**x.axis, **ticks})
    return replace(figure, title=f"{figure.title}, {budget}", x=x)


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
    counts: dict[str, dict[str, int]] = {}
    for run in read.study.runs:
        own, quotes = dict.fromkeys(CATEGORY_TEXTS, 0), {category: list[Quote]() for category in CATEGORY_TEXTS}
        guesses = run.protocol is not None and run.protocol.get("reward") == "r1_zero"  # which `reasons` explains
        try:
            for line, row in each_line(
                run.folder / RESPONSES, lambda row: lacks(row, TO_SHOW), section.problems.append
            ):
                category = category_of(row)
                own[category] += 1
                if category == "correct" or len(quotes[category]) == CASES:
                    continue
                texts = {name: str(row[name]) for name in ("question", "gold", "response")}
                texts["why"] = "; ".join(map(str, reasons(row, Grader()))) if guesses else ""
                where = f"{Path(run.folder.name, RESPONSES)}:{line}"
                quotes[category].append({name: shown_text(text) for name, text in texts.items()} | {"where": where})
        except ConfigError as error:
            section.problems.append(str(error))
        for category, chosen in quotes.items() if not counts else ():
            count = own[category]
            part = f"the first {len(chosen)} of {count:,}" if count > len(chosen) else f"all {count}"
            section.quotes += [(f"{CATEGORY_TEXTS[category]}: {part} (seed {run.seed})", chosen)] if chosen else []
        counts |= {run.name: own} if any(own.values()) else {}
    section.write("categories", counts=counts, categories=CATEGORY_TEXTS)
    rows = []
    for name, own in counts.items():
        whole = sum(own.values())
        rows.append([name, f"{whole:,}", *(f"{count:,}\n{percent(count / whole)}" for count in own.values())])
    if rows:
        head = ["run", "responses", *CATEGORY_TEXTS.values()]
        section.tables.append(Table("The three categories", head, rows, frozenset(range(1, len(head)))))


def against_sft(section: Section, read: Found, runs: Runs) -> None:
    """Compare expert iteration with SFT, on the default setting of each, and give expert iteration's own gain."""
    sft, own, reached = runs.sweep("sft_dataset_size"), read.study.reference, dict[int, list[float]]()
    for step, accuracy in (pair for run in own.runs for pair in dict(run.evaluations).items()):
        reached.setdefault(step, []).append(accuracy)
    means = {step: percent(sum(values) / len(values)) for step, values in sorted(reached.items())}
    section.write("against_sft", means=means, runs=own.runs, reference=own.name, sft=sft)
    if sft is None:
        return
    theirs = sft.study.reference
    sides = [Setting((), "SFT", theirs.runs), Setting((), "expert iteration", own.runs)]
    comparison = f"Expert iteration ({own.label}) against SFT ({theirs.label}), which learns from given traces"
    section.verdicts.append((comparison, verdicts_of(Study("against_sft", comparison, [], sides))))


def cases(section: Section, read: Found, runs: Runs) -> None:
    """Add responses to the same problems over training."""
    section.cases += read.report.cases


def log(section: Section, read: Found, runs: Runs) -> None:
    """Add the experiment log: what ran, what ended early, and why."""
    study, table = read.study, read.report.log
    ranges = {axis: dict.fromkeys(dict(one.key).get(axis, "-") for one in study.settings) for axis in study.axes}
    section.write("log", source=study.name, ranges=ranges)
    section.tables.append(replace(table, title=f"{table.title}: {study.name}"))


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
    half = comparing_half(study.settings) if len(study.settings) > 1 else None
    cards = {run.name: run.folder / COMPLIANCE for run in best.runs if (run.folder / COMPLIANCE).is_file()}
    section.write(
        "leaderboard",
        accuracy=interval_of(best.runs, half),
        average=interval_of(best.runs) if half is not None else None,
        best=best,
        settings=len(study.settings),
        problems=max((len(run.final.problems) for run in best.runs if run.final is not None), default=0),
        cards={name: card.read_text("utf-8", errors="replace").split("\n") for name, card in cards.items()},
    )
    for figure in read.report.figures[:1]:
        if figure.name == "eval/accuracy" and (over := by_hours(figure)) is not None:
            drawn = with_bands(over, runs.course, section.question.id, study)
            section.pictures.append(Picture("leaderboard_hours", drawn, read.report.legend))


def best_of_n(section: Section, read: Found, runs: Runs) -> None:
    """Add pass@N and Best@N as one picture and a table, and describe the gap between them."""
    section.tables += [table for table in read.report.tables if table.title == "Best of N"]
    ways = [figure for figure in read.report.figures if figure.name.startswith("best_of_n/")]
    several = len(read.study.settings) > 1
    rows: dict[str, list[dict[str, Any]]] = {"published": [], "means": [], "seeds": [], "marks": [], "stops": []}
    for way in ways:
        for row in way.rows["means"]:
            label = f"{row['setting']}: {way.title}" if several else way.title
            rows["means"].append({**row, "setting": label})
            rows["marks"].append({"setting": label, "x": row["x"], "y": row["y"]})
    if ways:
        labels = enumerate(dict.fromkeys(row["setting"] for row in rows["means"]))
        legend = [Entry(label, place if place < MOST_COLOURS else None) for place, label in labels]
        alt = " ".join(figure.alt for figure in ways)
        joined = replace(ways[0], title=section.question.title, alt=alt, rows=rows)
        section.pictures.append(Picture(section.question.id, joined, legend))
    section.write("best_of_n", settings=read.study.settings)


def filtered(section: Section, read: Found, runs: Runs) -> None:
    """Add the size of the set that a filter left."""
    section.write("filtered", settings=read.study.settings)


PARTS: dict[str, Callable[[Section, Found, Runs], None]] = {
    part.__name__: part
    for part in (categories, filtered, against_sft, cases, log, entropy, leaderboard, best_of_n)
}  # fmt: skip
