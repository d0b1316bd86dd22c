"""Build every section of a report from a study."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.cases import category_of
from rlreason.health.finding import Finding
from rlreason.records.files import EVALS, ResponseFile, each_line, response_files
from rlreason.records.rows import lacks
from rlreason.report.content import SIGNS, Case, Report, ShownResponse, Table, counted
from rlreason.report.figures import figures_of, forest_of, legend_of
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
from rlreason.runtime.text import few, visible

MOST_PARTS = 40  # a fact with more values distinguishes single problems, not kinds
FEWEST_PROBLEMS = 8  # in a slice


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
    finals = [run.final.problems for run in study.runs if run.final is not None]
    if not finals:
        return []
    problems = {name: finals[0][name] for name in sorted(set(finals[0]).intersection(*finals[1:]))}
    kinds: list[tuple[str, dict[str, set[str]]]] = []
    for fact in dict.fromkeys(name for problem in problems.values() for name in problem.facts):
        values: dict[str, set[str]] = {}
        for name, problem in problems.items():
            values.setdefault(str(problem.facts.get(fact, "not told")), set()).add(name)
        if 1 < len(values) <= MOST_PARTS:
            kinds.append((str(fact), dict(sorted(values.items()))))
    kinds.append(("question length", _by_length(problems)))
    kinds.append(("difficulty for the starting model", _by_difficulty(study)))
    slices = []
    for kind, parts in kinds:
        common = {name: frozenset(part & problems.keys()) for name, part in parts.items()}
        large = [Slice(kind, name, part) for name, part in common.items() if len(part) >= FEWEST_PROBLEMS]
        if len(large) > 1:
            slices += large
    return slices


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
    common = set(starts[0]).intersection(*starts[1:])
    share = {name: float(np.mean([start[name].share for start in starts])) for name in common}
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
    pairings = {(s, one.label): pair(side, reference, set(s.problems)) for s in slices for one, side in others}
    tested = {key: pairing for key, pairing in pairings.items() if pairing is not None}
    adjusted = dict(zip(tested, holm([pairing.difference.p for pairing in tested.values()]), strict=True))
    rows = []
    for s in slices:
        keys = [(s, one.label) for one, _ in others]
        first = next((pairing for key in keys if (pairing := pairings[key]) is not None), None)
        accuracy = NONE if first is None else percent(first.means[1])
        cells = [_cell(pairings[key], adjusted.get(key, 1.0)) for key in keys]
        rows.append([f"{s.kind}\n{s.name}", f"{len(s.problems):,}", accuracy, *cells])
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


def _cell(pairing: Pairing | None, adjusted_p: float) -> str:
    if pairing is None:
        return NONE
    difference, sign = pairing.difference, ""
    if adjusted_p <= LEVEL and difference.over != PROBLEMS:
        sign = f"{SIGNS['better' if difference.mean > 0 else 'worse']} "
    return f"{sign}{signed(difference.mean)}\n{signed(difference.low)} to {signed(difference.high)}"


PROBLEMS_SHOWN, SETTINGS = 4, 6  # shown at most
SHOWN = ("problem_id", "response", "outcome")  # fields of a response
OUTCOMES = {"correct": "correct", "format1_wrong": "wrong", "format0": "no format"}
LONGEST = 600  # characters of a response
Rows = dict[str, tuple[dict[str, Any], int]]  # problem -> the row of its first response, and its line


def cases_of(study: Study) -> list[Case]:
    """Select problems by a fixed rule, with responses of the smallest seed that all settings share.

    One problem that all settings solve in the end, one that none does, one that some do, and the first, in the order of
    a hash. The steps are those of the reference. [] if the runs have saved no evaluations.
    """
    by_seed = {one.label: {run.seed: run for run in one.runs if run.final is not None} for one in study.settings}
    by_seed = dict([(label, of_seeds) for label, of_seeds in by_seed.items() if of_seeds][:SETTINGS])
    seeds = set.intersection(*map(set, by_seed.values())) if by_seed else set()
    runs = {label: of_seeds[min(seeds or of_seeds)] for label, of_seeds in by_seed.items()}
    files = {  # of two evaluations of one step the later one, which is the final one
        label: {file.step: file for file in response_files(run.folder, EVALS) if file.step is not None}
        for label, run in runs.items()
    }
    shared = sorted(next(iter(files.values()))) if files else []
    if not shared:
        return []
    steps = list(dict.fromkeys([shared[0], shared[len(shared) // 2], shared[-1]]))
    chosen = _choose(list(runs.values()))
    rows = {
        (label, step): _responses(files[label][step], chosen)
        for label in runs
        for step in steps
        if step in files[label]
    }
    cases = []
    for problem in chosen:
        by_step: dict[int, list[ShownResponse]] = {step: [] for step in steps}
        for label, step in ((label, step) for step in steps for label in runs):
            if problem in rows.get((label, step), {}):
                row, line = rows[label, step][problem]
                where = f"{Path(*files[label][step].path.parts[-3:])}:{line}"
                outcome = OUTCOMES[category_of(row | {"format_reward": row.get("format_reward") or 0})]
                by_step[step].append(ShownResponse(label, step, outcome, shown_text(row["response"]), where))
        if all(by_step.values()):
            first = next(by_problem[problem][0] for by_problem in rows.values() if problem in by_problem)
            cases.append(Case(shown_text(str(first.get("question"))), shown_text(str(first.get("gold"))), by_step))
    return cases


def _choose(runs: Sequence[StudyRun]) -> list[str]:
    """Choose the problems to show."""
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


def _responses(file: ResponseFile, problems: Sequence[str]) -> Rows:
    """Return the first response to each of these problems, with its line."""
    rows: Rows = {}
    try:
        for number, row in each_line(file.path, lambda row: lacks(row, SHOWN), lambda _: None, without_ids):
            if row["problem_id"] in problems and row["problem_id"] not in rows:
                rows[row["problem_id"]] = row, number
                if len(rows) == len(problems):
                    break
    except ConfigError:  # reading the study has reported it
        return {}
    return rows


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
    runs = [run for run in study.runs if run.series]
    ill = sum(any(finding.problem for finding in run.findings) for run in runs)
    return f"something is wrong in {ill} of {len(runs)} runs" if ill else f"nothing is wrong in {len(runs)} runs"


def health_table(study: Study) -> Table | None:
    """Return each problem of a setting's runs: how many have it, where first, why, and what to try."""
    rows = []
    for one in study.settings:
        by_rule: dict[str, list[tuple[StudyRun, Finding]]] = {}
        for run in one.runs:
            for finding in run.findings:
                if finding.problem:
                    by_rule.setdefault(finding.rule, []).append((run, finding))
        for rule, pairs in by_rule.items():
            first = min((finding for _, finding in pairs), key=lambda finding: finding.step or 0)
            seeds = f"{len(pairs)} of {len(one.runs)}\nseed {', '.join(str(run.seed) for run, _ in pairs)}"
            rows.append([one.label, f"{rule}\n{first.what}", seeds, str(first.step), first.causes, first.cure])
    head = ["setting", "what is wrong", "runs", "first at step", "commonest causes", "try"]
    return Table("Health of the runs", head, rows, frozenset({3}), NOTE, frozenset({0})) if rows else None


def build_report(study: Study, equal_within: float = EQUAL_WITHIN) -> Report:
    """Build the whole report of a study."""
    verdicts = verdicts_of(study, equal_within)
    carried = [f"Carried from an earlier sweep: {one['sentence']}" for one in study.carried if one.get("sentence")]
    settings, passes = settings_table(study, verdicts), passes_table(study)
    if passes is None and any(run.final is not None for run in study.runs):
        settings = replace(settings, note=f"{settings.note} {ONE_SAMPLE}")
    tables = [settings, axes_table(study, verdicts), slices_table(study), passes]
    tables += [best_of_n_table(study), health_table(study)]
    return Report(
        name=study.name,
        question=study.question,
        summary=summary_of(verdicts, study),
        lead=introduction_of(study),
        legend=legend_of(study, verdicts),
        verdicts=verdicts,
        facts=facts_of(study),
        warnings=[*warnings_of(study), *study.notes, *carried],
        figures=figures_of(study),
        tables=[table for table in tables if table is not None],
        log=log_of(study),
        problems=study.problems,
        cases=cases_of(study),
        details=details_of(study),
        forest=forest_of(verdicts),
    )


def introduction_of(study: Study) -> str:
    """Return what was compared with what, in two sentences."""
    n, seeds = len(study.settings), {len(one.runs) for one in study.settings}
    each = f"{counted(min(seeds), 'seed')} each" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    answered = max((len(run.final.problems) for run in study.runs if run.final is not None), default=0)
    problems = f" of {counted(answered, 'validation problem')}" if answered else ""
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
    protocols = [run.protocol for run in study.runs if run.protocol is not None]
    hashes = list(dict.fromkeys(str(protocol.get("hash")) for protocol in protocols))
    if len(hashes) == 1:
        protocol = f"{hashes[0]}, one for all {len(protocols)} runs"
    else:
        protocol = f"{few(hashes, 3)}: they differ" if hashes else "none on record yet"
    overlaps = {str(run.settings.get("data.overlap")) for run in study.runs if run.settings.get("data.overlap")}
    overlap = {"refuse": "none: it is refused", "drop": "dropped from training"}
    return [
        ("Compared", f"each run's {study.figure.removeprefix('the ')}"),
        ("Differs between settings", what_differs(study)),
        ("Budget", budget_of(study)),
        ("Protocol", protocol),
        ("Training and validation overlap", few([overlap.get(how, how) for how in sorted(overlaps)]) or "not known"),
        ("Health", health_of(study)),
        ("Cost", cost_of(study).rstrip(".")),
    ]
