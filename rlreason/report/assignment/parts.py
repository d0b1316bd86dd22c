"""Build the parts of a section that only some questions have: categories, entropy, the leaderboard, cases."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.evaluation.cases import category_of, reasons
from rlreason.grading import Grader
from rlreason.records.files import COMPLIANCE, RESPONSES, each_line
from rlreason.records.reader import setting_in
from rlreason.records.rows import TO_SHOW, lacks
from rlreason.report.assignment.courses import (
    TRAINING,
    Assignment,
    AssignmentQuestion,
    Candidate,
    Picture,
    Quote,
    Section,
    plain,
    trained_by,
    unfit,
)
from rlreason.report.assignment.figures import (
    cell,
    figure_named,
    interval_of,
    leaderboard_figures,
    metric_sentences,
    metrics_table,
    side_by_side,
    with_bands,
    with_interval,
)
from rlreason.report.charts import SETTING
from rlreason.report.compare import compared_study
from rlreason.report.content import MOST_COLOURS, Entry, Figure, Report, Table
from rlreason.report.read import read_study
from rlreason.report.sections import build_report, shown_text
from rlreason.report.study import Setting, Study, StudyRun
from rlreason.report.tables import percent
from rlreason.report.verdicts import best_of, comparing_half, how_chosen, verdicts_of


@dataclass(slots=True)
class ReadStudy:
    """A study with its report, and the folder that it was read from."""

    source: Candidate
    study: Study
    report: Report


def values_of(read: ReadStudy, key: str) -> set[str]:
    """Return the values of a setting among the runs of a study."""
    return {plain(run.settings.get(key)) for run in read.study.runs}


@dataclass(slots=True)
class Gathered:
    """The sweeps and runs below the runs folder, by name."""

    course: Assignment
    candidates: list[Candidate]
    problems: list[str] = field(default_factory=list)  # folders that could not be read
    carried: set[str] = field(default_factory=set)  # warnings of CARRIED that earlier sections have
    _read: dict[Path, ReadStudy | None] = field(default_factory=dict)

    @property
    def named(self) -> set[str]:
        """Return the sweeps that some question names."""
        return {name for question in self.course.questions for name in (*question.sweeps, question.instead) if name}

    @property
    def all_read(self) -> list[ReadStudy]:
        """Return the studies read so far."""
        return [read for read in self._read.values() if read is not None]

    def nearest(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Sort by closeness to the handout's model, data and steps: real runs before rehearsals."""
        return sorted(candidates, key=lambda one: one.nearness(self.course), reverse=True)

    def sweep(self, name: str) -> ReadStudy | None:
        """Return the nearest readable sweep of a name, or None."""
        named = self.nearest(one for one in self.candidates if one.is_sweep and one.sweep == name)
        return self.read(named[0]) if named else None

    def of_algorithm(self, question: AssignmentQuestion) -> tuple[list[ReadStudy], list[str]]:
        """Return the nearest runs or sweeps of the question's algorithm and settings that no question names.

        One, or one for each value of the question's `each`; and why others do not answer it, a sentence each.
        """
        reads, refused, lacking = list[ReadStudy](), list[str](), set(question.values(question.each))
        for one in self.nearest(self.candidates) if question.algorithm else ():
            if one.algorithm != question.algorithm or one.sweep in self.named:
                continue
            starts = self._starts(one)
            wrong = unfit(one.settings, one.provenance, {}, question, self.course, starts)
            read = None if wrong else self.read(one)
            for run in read.study.runs if read is not None else ():
                wrong = wrong or unfit(run.settings, run.provenance, run.summary, question, self.course, starts)
            if wrong:
                refused.append(f"{one.path.name} does not answer this: {wrong}.")
                self._read.pop(one.path, None)
            elif read is not None and (not reads or lacking & values_of(read, question.each)):
                reads.append(read)
                lacking -= values_of(read, question.each)
            if reads and not lacking:
                break
        return reads, refused

    def _starts(self, one: Candidate) -> set[str]:
        """Return hashes of the weights that training runs of its model began with, without models trained before."""
        name = one.settings.get("model.name")
        like = [f for f in self.candidates if f.algorithm in TRAINING and f.settings.get("model.name") == name]
        untrained = [f for f in like if not trained_by(f.settings, f.provenance)]
        return {str(setting_in(f.provenance, "model.start_weights")) for f in untrained} - {"None"}

    def read(self, one: Candidate) -> ReadStudy | None:
        """Read the study of a folder; add a message to `problems` if it has none."""
        if one.path not in self._read:
            try:
                study = read_study([one.path])
                if one.sweep == "pku_before_and_after":  # whose settings are long paths
                    for setting in study.settings:
                        setting.label = "after GRPO" if "pku_grpo" in setting.typed else "before GRPO"
                self._read[one.path] = ReadStudy(one, study, build_report(study))
            except ConfigError as error:
                self.problems.append(str(error))
                self._read[one.path] = None
        return self._read[one.path]


SFT, EI, ON_POLICY = "sft_dataset_size", "expert_iteration", "grpo_learning_rate"
ENTROPY = "eval/entropy"  # of responses to validation problems, which all runs have


def against_sft(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Compare expert iteration with SFT, on the default setting of each, and give expert iteration's own gain."""
    reached: dict[int, list[float]] = {}
    for step, accuracy in (pair for run in read.study.reference.runs for pair in dict(run.evaluations).items()):
        reached.setdefault(step, []).append(accuracy)
    if len(reached) > 1:
        seeds, steps = max(map(len, reached.values())), ", ".join(map(str, sorted(reached)))
        accuracies = ", ".join(f"{100 * sum(values) / len(values):.1f}%" for _, values in sorted(reached.items()))
        over = f", mean of {seeds} seeds" if seeds > 1 else ""
        name = read.study.reference.name
        section.lines.append(f"Across its steps {name} goes {accuracies} (steps {steps}{over}).")
    sft = gathered.sweep(SFT)
    if sft is None:
        section.lines.append(f"Against SFT: the sweep {SFT} has not run, so that nothing is compared.")
        return
    try:
        study = compared_study([reference_path(sft), reference_path(read)])
    except ConfigError as error:
        section.problems.append(str(error))
        return
    for one, name in zip(study.settings, ("SFT", "expert iteration"), strict=True):
        one.label = name
    ours, theirs = read.study.reference.label, sft.study.reference.label
    comparison = f"Expert iteration ({ours}) against SFT ({theirs}), which learns from given traces"
    section.verdicts.append((comparison, verdicts_of(study)))


def reference_path(read: ReadStudy) -> Path:
    """Return the reference of a sweep as `compare` takes it: SWEEP/KEY=VALUE,..."""
    overrides = [f"{key}={value}" for key, value in read.study.reference.key]
    return read.source.path / ",".join(overrides) if overrides else read.source.path


def entropy(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Compare the entropy of GRPO's and expert iteration's responses: a picture, and first and last values."""
    sides: list[tuple[str, Setting]] = []
    on_policy = gathered.sweep(ON_POLICY)
    if on_policy is not None:
        sides.append(("GRPO, on-policy", on_policy.study.reference))
    sides += [(f"GRPO, {one.label}", one) for one in read.study.settings[1:]]
    ei = gathered.sweep(EI)
    if ei is None:
        section.lines.append(f"Entropy against expert iteration's: the sweep {EI} has not run.")
        return
    sides.append(("expert iteration", ei.study.reference))
    rows = []
    for label, one in sides:
        curves = [run.series[ENTROPY].y for run in one.runs if ENTROPY in run.series and len(run.series[ENTROPY].y)]
        if curves:
            first, last = [float(y[0]) for y in curves], [float(y[-1]) for y in curves]
            change = [b - a for a, b in zip(first, last, strict=True)]
            rows.append([label, str(len(curves)), cell(first), cell(last), cell(change)])
    if rows:
        head = ["runs", "seeds", "before training", "at the end", "change"]
        note = "Nats a token, responses to validation problems; mean over seeds, below it the 95% interval over seeds."
        title = "Entropy: GRPO and expert iteration"
        section.tables.append(Table(title, head, rows, frozenset({1, 2, 3, 4}), note))
    study, legend = side_by_side("entropy", "Entropy of GRPO and of expert iteration", sides)
    if (figure := figure_named(study, "entropy")) is not None:
        section.pictures.append(Picture(f"{section.question.id}_entropy_against_ei", figure, legend))


def leaderboard(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add its accuracy on problems that did not choose, its curve on an axis to 4 h, and its compliance."""
    study = read.study
    best = best_of(study)
    several = len(study.settings) > 1
    accuracy = interval_of(best.runs, comparing_half(study.settings) if several else None)
    if accuracy is not None:
        line = f"Accuracy: {with_interval(accuracy, len(best.runs))}."
        if several:
            line += f" {how_chosen(best.label, len(study.settings)).replace('the verdict', 'this figure')}"
        section.lines.append(line)
    problems = max((len(run.final.problems) for run in best.runs if run.final is not None), default=0)
    if several and (average := interval_of(best.runs)) is not None:
        section.lines.append(
            f"To be handed in, of {best.label}: {percent(average[0])}, the average over all {problems:,} problems."
        )
    if (figure := figure_named(study, "eval/accuracy")) is not None:
        for one in leaderboard_figures(study, with_bands(figure, gathered.course, section.question, study)):
            section.pictures.append(Picture(one.name.replace("/", "_"), one, read.report.legend))
    cards = {run.name: run.folder / COMPLIANCE for run in best.runs if (run.folder / COMPLIANCE).is_file()}
    last = {name: card.read_text("utf-8", errors="replace").strip().split("\n")[-1] for name, card in cards.items()}
    section.lines += [f"Compliance of {name}: {line}" for name, line in last.items() if line]
    if not any(last.values()):
        section.lines.append("No run has left a card of compliance: measure it with eval=leaderboard.")


#: Failing category -> its name in the handout.
FAILING = {"format1_wrong": "format 1, answer 0", "format0": "format 0, answer 0"}
CASES = 10  # responses of each failing category
GUESSED = "r1_zero"  # the reward whose failures `reasons` explains


def _quotes(run: StudyRun, problems: list[str]) -> Iterator[tuple[str, list[Quote]]]:
    """Yield (title, first ten responses) of each failing category; add broken lines to `problems`."""
    rows: dict[str, list[tuple[int, dict[str, Any]]]] = {category: [] for category in FAILING}
    try:
        for line, row in each_line(run.folder / RESPONSES, lambda row: lacks(row, TO_SHOW), problems.append):
            same_category = rows.get(category_of(row))
            if same_category is not None and len(same_category) < CASES:
                same_category.append((line, row))
            if all(len(group) == CASES for group in rows.values()):
                break
    except ConfigError as error:
        problems.append(str(error))
    guesses = run.protocol is not None and run.protocol.get("reward") == GUESSED
    for category, title in FAILING.items():
        quotes = []
        for line, row in rows[category]:
            why = "; ".join(map(str, reasons(row, Grader()))) if guesses else ""
            question, gold, response = (shown_text(str(row[name])) for name in ("question", "gold", "response"))
            where = f"{Path(run.folder.name, RESPONSES)}:{line}"
            quotes.append(Quote(question, gold, response, shown_text(why), where))
        count = run.final.categories.get(category, len(quotes)) if run.final is not None else len(quotes)
        if quotes:
            part = f"the first {len(quotes)} of {count:,}" if count > len(quotes) else f"all {len(quotes)}"
            yield f"{title}: {part} (seed {run.seed})", quotes


Part = Callable[[Section, ReadStudy, Gathered], None]
CORRECT = "correct"
LIMIT = "data.limit"  # the number of examples
CATEGORIES = {CORRECT: "format 1, answer 1", **FAILING}


def categories(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Count the three categories of each run, and quote ten responses of each failing one."""
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
    right = percent(counts.get(CORRECT, 0) / max(whole, 1))
    listed = "; ".join(f"{counts.get(name, 0):,} {title}" for name, title in CATEGORIES.items())
    section.lines.append(
        f"Of {whole:,} responses of {first.name}: {listed}. In words: {right} are right before any training. The guess "
        "beside a response says whether its model or the parser is to blame."
    )
    section.quotes += _quotes(first, section.problems)


def filtered(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add the size of the set that a filter left."""
    for one in read.study.settings:
        recorded = [run.summary.get("data_sizes") for run in one.runs]
        sizes = {
            (size["train_before_filter"], size["train_filtered"], size.get("train", size["train_filtered"]))
            for size in recorded
            if isinstance(size, dict) and {"train_before_filter", "train_filtered"} <= size.keys()
        }
        for before, left, used in sorted(sizes):
            limit = "" if used == left else f", of which data.limit lets {used:,} be trained on"
            share = percent(left / max(before, 1))
            section.lines.append(f"{one.label}: the filtered set has {left:,} of {before:,} traces ({share}){limit}.")


def equal_updates(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Compare settings with one training budget, for each budget that the sweep's reference does not have."""
    for budget, study in by_budget(read.study):
        if len(study.settings) > 1 and read.study.reference.key not in [one.key for one in study.settings]:
            comparison = f"{study.name}, among those with {budget}, against {study.reference.label}"
            section.verdicts.append((comparison, verdicts_of(study)))


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


def other_metrics(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add two or three sentences on metrics other than the accuracy, and their table."""
    if (table := metrics_table(read.study, f"Other metrics at the end of training: {read.study.name}")) is not None:
        section.lines += metric_sentences(read.study)
        section.tables.append(table)


def cases(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add responses to the same problems over training."""
    section.cases += read.report.cases


def log(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add the experiment log: what ran, what ended early, and why."""
    study, table = read.study, read.report.log
    ranges = {axis: dict.fromkeys(dict(one.key).get(axis, "-") for one in study.settings) for axis in study.axes}
    run = "; ".join(f"{axis} {', '.join(values)}" for axis, values in ranges.items())
    section.lines.append(f"Ranges that {study.name} ran: {run}.")
    section.tables.append(replace(table, title=f"{table.title}: {study.name}", labels=frozenset()))


def best_of_n(section: Section, read: ReadStudy, gathered: Gathered) -> None:
    """Add pass@N and Best@N as a picture and a table, and describe the gap between them."""
    ways = [figure for figure in read.report.figures if figure.name.startswith("best_of_n/")]
    section.pictures += _joined_pictures(section, ways, len(read.study.settings) > 1)
    section.tables += [table for table in read.report.tables if table.title == "Best of N"]
    for one in read.study.settings:
        for run in one.runs[:1]:
            section.lines += [f"{one.label}, seed {run.seed}: {line}" for line in gap_lines(run.summary)]


def _joined_pictures(section: Section, figures: Sequence[Figure], several: bool) -> list[Picture]:
    """Join figures with the same axis into one, with a curve for each figure, and for each of `several` settings."""
    if not figures:
        return []
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for figure, name in product(figures, figures[0].rows):
        for row in figure.rows[name]:
            label = f"{row[SETTING]}: {figure.title}" if several else figure.title
            rows.setdefault(name, []).append({**row, SETTING: label})
    labels = enumerate(dict.fromkeys(row[SETTING] for row in rows.get("means", ())))
    legend = [Entry(label, place if place < MOST_COLOURS else None) for place, label in labels]
    alt = " ".join(figure.alt for figure in figures)
    joined = replace(figures[0], title=section.question.title, alt=alt, rows=rows)
    return [Picture(section.question.id, joined, legend)]


def gap_lines(summary: object) -> list[str]:
    """Describe how far each way to choose one of N stays behind any of N being right.

    >>> gap_lines({"n_list": [1, 4], "best_of_n": {"pass@N": [[0.2, 0, 1], [0.6, 0, 1]], "Best@N": [[0.2], [0.3]]}})
    ['at N = 4 pass@N is 60.0% and Best@N 30.0%: a gap of 30.0 points that a better way to choose could close.']
    """
    if not isinstance(summary, dict) or not isinstance(summary.get("best_of_n"), dict):
        return []
    ways, counts = summary["best_of_n"], summary.get("n_list") or []
    passes = next((name for name in ways if "pass" in name.lower()), None)
    if passes is None or not counts:
        return []
    top = ways[passes][-1][0]
    return [
        f"at N = {counts[-1]} {passes} is {percent(top)} and {name} {percent(points[-1][0])}: a gap of "
        f"{100 * (top - points[-1][0]):.1f} points that a better way to choose could close."
        for name, points in ways.items()
        if name != passes and points
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
