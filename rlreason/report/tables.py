"""Build the tables of a report: settings, slices, pass@k, health, the experiment log, and what differs."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlreason.evaluation.accuracy import pass_at
from rlreason.health.finding import Finding
from rlreason.records.files import OBJECTIVE
from rlreason.records.reader import setting_in
from rlreason.report.content import SIGNS, Detail, Table, Verdict
from rlreason.report.read import differing_keys
from rlreason.report.study import Answers, Setting, Study, StudyRun, pair, setting_text, side_of
from rlreason.report.verdicts import p_text, signed, verdicts_of
from rlreason.runtime.differences import LEVEL, PROBLEMS, Difference, holm, paired_difference
from rlreason.runtime.text import duration, few, shorten
from rlreason.sweeps.closing import REFERENCE, JudgedSetting
from rlreason.sweeps.state import Key

NONE = "\N{EN DASH}"
LONGEST = 80  # characters of a value in a table


def percent(share: float) -> str:
    """Return a share as text: `percent(0.7468)` is '74.7%'."""
    return f"{100 * share:.1f}%"


def millions(tokens: float) -> str:
    """Return a number of tokens as text: `millions(278_696)` is '0.28 M'."""
    return f"{tokens / 1e6:.{2 if tokens < 1e7 else 1}f} M" if tokens else "0"


def _over(d: Difference) -> str:
    return f"{signed(d.mean)}\n{signed(d.low)} to {signed(d.high)}"


def _mean_of(values: Sequence[float | None], as_text: Callable[[float], str]) -> str:
    numbers = [value for value in values if value is not None]
    return as_text(sum(numbers) / len(numbers)) if numbers else NONE


def settings_table(study: Study, verdicts: Sequence[Verdict]) -> Table:
    """Return for each setting its mean, difference to the reference, seeds, best checkpoint, and cost."""
    verdict_of = {verdict.setting: verdict for verdict in verdicts}
    head = ["setting", "accuracy", "difference", "verdict", "seeds", "best checkpoint", "time a run", "tokens a run"]
    rows = []
    for one in study.settings:
        verdict, best, accuracy, difference = verdict_of.get(one.label), NONE, NONE, NONE
        curves = [run.evaluations for run in one.runs if run.accuracy is not None and len(run.evaluations) > 1]
        if curves:
            mean = float(np.mean([max(at_step for _, at_step in curve) for curve in curves]))
            best = f"{percent(mean)}*\nbest of {max(map(len, curves))}"
        if one.accuracies and side_of(one).right:
            interval = accuracy_of(one)
            accuracy = percent(0.0) if interval is None else "{}\n{} to {}".format(*map(percent, interval))
        word = "reference" if one is study.reference else f"{SIGNS[verdict.word]} {verdict.word}" if verdict else NONE
        if verdict is not None and verdict.difference is not None and verdict.adjusted_p is not None:
            difference, word = _over(verdict.difference), f"{word}\n{p_text(verdict.adjusted_p)}"
        seeds = f"{sum(run.ended for run in one.runs)} of {len(one.runs)}"
        seconds = _mean_of([run.seconds for run in one.runs], duration)
        tokens = _mean_of([run.totals.get("tokens") for run in one.runs], millions)
        rows.append([one.label, accuracy, difference, word, seeds, best, seconds, tokens])
    notes = ["Accuracy and difference: the final evaluation, with 95% intervals over seeds and problems."]
    if any(len(one.runs) == 1 for one in study.settings):
        notes.append("With one seed the interval is over problems only.")
    if any("*" in row[5] for row in rows):
        notes.append("* The best of several evaluations is biased upwards, and is never compared.")
    return Table("Settings", head, rows, frozenset({1, 2, 4, 5, 6, 7}), " ".join(notes), frozenset({0}))


def accuracy_of(one: Setting, among: set[str] | None = None) -> tuple[float, float, float] | None:
    """Return (mean, low, high) of a setting on the problems that all its runs answered (`among` them), or None.

    It is the interval of the difference from a setting that is always wrong: seeds and problems are samples. With one
    seed it is over problems only.
    """
    side = side_of(one)
    common = set.intersection(*side.answered) if side.answered else set()
    problems = sorted(common if among is None else common & among)
    if not problems:
        return None
    right = np.stack(list(side.correctness(problems, side.questions).values()))  # (seeds, problems)
    difference = paired_difference(right)
    return difference.mean, max(difference.low, 0.0), min(difference.high, 1.0)


def judged_settings(study: Study) -> dict[Key, JudgedSetting]:
    """Return each setting's accuracy and verdict for the table at the end of a sweep."""
    word_of = {verdict.setting: verdict.word for verdict in verdicts_of(study)}
    word_of[study.reference.label] = REFERENCE
    return {one.runs[0].setting: JudgedSetting(accuracy_of(one), word_of[one.label]) for one in study.settings}


def axes_table(study: Study, verdicts: Sequence[Verdict]) -> Table | None:
    """Return one swept key against another, with the mean accuracy and the difference to the reference."""
    if len(study.varied) != 2:
        return None
    down, across = study.varied
    cells: dict[tuple[str, str], str] = defaultdict(str)
    verdict_of = {verdict.setting: verdict for verdict in verdicts}
    for one in study.settings:
        cell, verdict = _mean_of(one.accuracies, percent), verdict_of.get(one.label)
        if one is study.reference:
            cell += "\nreference"
        elif verdict is not None and verdict.difference is not None:
            cell += f"\n{SIGNS[verdict.word]} {signed(verdict.difference.mean)}"
        cells[dict(one.key).get(down, NONE), dict(one.key).get(across, NONE)] = cell
    lines, columns = (sorted({place[k] for place in cells}, key=_numbers_first) for k in (0, 1))
    return Table(
        f"{down} against {across}",
        ["", *(f"{across}={value}" for value in columns)],
        [[f"{down}={line}", *(cells[line, column] for column in columns)] for line in lines],
        frozenset(range(1, len(columns) + 1)),
        "Mean accuracy, and below it the difference to the reference in points with the verdict's sign.",
    )


def _numbers_first(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


MOST_PARTS = 40  # a fact with more values distinguishes single problems, not kinds
FEWEST_PROBLEMS = 8  # in a slice


def slices_of(study: Study) -> dict[tuple[str, str], set[str]]:
    """Split the problems that all runs answered by their facts, and by how many starting runs solved them.

    Return (kind, part) -> problems, without parts of fewer than FEWEST_PROBLEMS and kinds with one part.
    """
    finals = [run.final.problems for run in study.runs if run.final is not None]
    common = sorted(set(finals[0]).intersection(*finals[1:])) if finals else []
    facts = {name: {str(k): str(v) for k, v in finals[0][name].facts.items()} for name in common}
    starts = [run.start.problems for run in study.runs if run.start is not None]
    for name in set(common).intersection(*starts) if starts else ():
        share = np.mean([start[name].share for start in starts])
        part = "solved by no starting run" if share == 0 else "by all" if share == 1 else "by some"
        facts[name]["difficulty for the starting model"] = part
    slices: dict[tuple[str, str], set[str]] = {}
    for kind in dict.fromkeys(kind for name in common for kind in facts[name]):
        parts: dict[tuple[str, str], set[str]] = defaultdict(set)
        for name in common:
            if (value := facts[name].get(kind)) is not None:
                parts[kind, value].add(name)
        large = {part: parts[part] for part in sorted(parts) if len(parts[part]) >= FEWEST_PROBLEMS}
        if len(large) > 1 and len(parts) <= MOST_PARTS:
            slices |= large
    return slices


def slices_table(study: Study) -> Table | None:
    """Return for each slice the reference's accuracy and the others' differences; a sign where Holm allows one."""
    slices, reference = slices_of(study), side_of(study.reference)
    others = [side_of(one) for one in study.settings[1:]]
    if not slices or not reference.right or not any(side.right for side in others):
        return None
    pairings = [[pair(side, reference, problems) for side in others] for problems in slices.values()]
    adjusted = holm([pairing.difference.p for row in pairings for pairing in row if pairing is not None])
    p_of, rows = iter(adjusted), []
    for (kind, part), row in zip(slices, pairings, strict=True):
        accuracy = next((percent(pairing.means[1]) for pairing in row if pairing is not None), NONE)
        cells = [f"{kind}\n{part}", f"{len(slices[kind, part]):,}", accuracy]
        for pairing in row:
            told_apart = pairing is not None and next(p_of) <= LEVEL and pairing.difference.over != PROBLEMS
            sign = f"{SIGNS['better' if pairing.difference.mean > 0 else 'worse']} " if told_apart and pairing else ""
            cells.append(NONE if pairing is None else sign + _over(pairing.difference))
        rows.append(cells)
    head = ["problems that are", "number", *(one.label for one in study.settings)]
    note = (
        f"Differences in points, with 95% intervals. {SIGNS['better']} or {SIGNS['worse']}: different by Holm over all "
    )
    note += f"{len(adjusted)} comparisons of this table; everything else cannot be told."
    return Table("Accuracy by slice", head, rows, frozenset(range(1, len(head))), note)


def pass_curve(answers: Answers) -> dict[int, float]:
    """Return k -> pass@k over the problems, unbiased (Chen et al. 2021), k = 1, 2, 4 ... to the fewest samples.

    >>> from rlreason.report.study import GradedProblem
    >>> pass_curve(Answers({"a": GradedProblem(1, 4), "b": GradedProblem(4, 4)}))
    {1: 0.625, 2: 0.75, 4: 1.0}
    """
    problems = answers.problems.values()
    fewest = min((p.samples for p in problems), default=0)
    ks = [2**power for power in range(fewest.bit_length())]
    return {k: float(np.mean([pass_at(p.samples, round(p.correct), k) for p in problems])) for k in ks}


def passes_table(study: Study) -> Table | None:
    """Return pass@k of each setting before and after training, the mean over seeds; None with one sample a problem."""
    rows, asked = [], list[int]()
    for one in study.settings:
        pairs = [before_and_after(run) for run in one.runs]
        asked += [len(final.problems) for start, final in pairs if start is not None and final is not None]
        for k, when in enumerate(("before", "after")):
            curves = [curve for both in pairs if (answers := both[k]) and (curve := pass_curve(answers))]
            means = [np.mean(of_k) for of_k in zip(*(curve.values() for curve in curves), strict=False)]
            rows.append([one.label, when, *map(percent, means)])
    rows = [row for row in rows if len(row) > 3]
    if not rows:
        return None
    longest = max(map(len, rows))
    rows = [[*row, *[NONE] * (longest - len(row))] for row in rows]
    note = "The probability that at least one of k responses is right, the mean over problems and seeds."
    if asked:
        note += f" Both rows are of the same problems, those asked before and after training: {min(asked):,} a run."
    head = ["setting", "training", *(f"k = {2**power}" for power in range(longest - 2))]
    return Table("pass@k", head, rows, frozenset(range(2, longest)), note, frozenset({0}))


def before_and_after(run: StudyRun) -> tuple[Answers | None, Answers | None]:
    """Return the answers before and after training to the problems that were asked both times.

    An evaluation before training may ask fewer problems than the final one. If one is missing, the other is whole.
    """
    start, final = run.start, run.final
    if start is None or final is None:
        return start, final
    both = start.problems.keys() & final.problems.keys()
    a, b = ({name: p for name, p in answers.problems.items() if name in both} for answers in (start, final))
    return (replace(start, problems=a), replace(final, problems=b)) if both else (None, final)


def best_of_n_table(study: Study) -> Table | None:
    """Return the accuracy of each way to choose among N responses, of runs of algorithm=best_of_n, or None."""
    rows, numbers = list[list[str]](), list[int]()
    for one, run in study.each:
        ways, n_list = run.summary.get("best_of_n"), run.summary.get("n_list")
        if isinstance(ways, dict) and isinstance(n_list, list):
            numbers = max(numbers, n_list, key=len)
            name = one.label if len(one.runs) == 1 else f"{one.label}, seed {run.seed}"
            rows += [
                [name, str(way), *("{}\n{} to {}".format(*map(percent, point)) for point in points)]
                for way, points in ways.items()
            ]
    if not rows:
        return None
    rows = [[*row, *[NONE] * (len(numbers) + 2 - len(row))] for row in rows]
    head = ["setting", "chosen by", *(f"N = {n}" for n in numbers)]
    note = "All from one set of samples; 95% intervals over problems."
    return Table("Best of N", head, rows, frozenset(range(2, len(head))), note)


def health_table(study: Study) -> Table | None:
    """Return each problem of a setting's runs: how many have it, where first, why, and what to try."""
    rows = []
    for one in study.settings:
        by_rule: dict[str, list[tuple[int, Finding]]] = defaultdict(list)
        for run in one.runs:
            for finding in run.findings:
                if finding.problem:
                    by_rule[finding.rule].append((run.seed, finding))
        for rule, found in by_rule.items():
            first = min((finding for _, finding in found), key=lambda finding: finding.step or 0)
            seeds = f"{len(found)} of {len(one.runs)}\nseed {', '.join(str(seed) for seed, _ in found)}"
            rows.append([one.label, f"{rule}\n{first.what}", seeds, str(first.step), first.causes, first.cure])
    head = ["setting", "what is wrong", "runs", "first at step", "commonest causes", "try"]
    note = "What the monitors find in the recorded metrics, all of them on. With evidence: rlreason health RUN."
    return Table("Health of the runs", head, rows, frozenset({3}), note, frozenset({0})) if rows else None


#: Signs of how a run ended: of its own, by a rule or a signal, badly; the others are under way.
STATE_SIGNS = {
    "\N{CHECK MARK}": ("finished", "budget"),
    "\N{BLACK SQUARE}": ("stopped", "interrupted"),
    "\N{MULTIPLICATION X}": ("diverged", "failed"),
}


def log_of(study: Study) -> Table:
    """Return a row for each run, by setting and seed."""
    head, rows = ["setting", "seed", "state", "why", "steps", "last accuracy", "time"], []
    for one, run in study.each:
        rule, reached = run.status.partition(":")[2], run.totals.get("step")
        last = run.accuracy if run.accuracy is not None or not run.evaluations else run.evaluations[-1][1]
        steps = NONE if reached is None else f"{reached:.0f}"
        if reached is not None and run.planned_steps and run.planned_steps != reached:
            steps += f" of {run.planned_steps}"
        sign = next((sign for sign, states in STATE_SIGNS.items() if run.state in states), "\N{HORIZONTAL ELLIPSIS}")
        why, time = run.reason or (f"by the rule {rule}" if rule else NONE), _mean_of([run.seconds], duration)
        rows.append([one.label, str(run.seed), f"{sign} {run.state}", why, steps, _mean_of([last], percent), time])
    return Table("Experiment log", head, rows, frozenset({1, 4, 5, 6}), labels=frozenset({0}))


def configs_table(study: Study) -> Table | None:
    """Return the settings in which the runs' configs differ, except the seed, or None."""
    firsts = [one.runs[0].settings for one in study.settings]
    swept = {axis.partition(".")[0] for axis in study.axes}
    rows = [
        [
            name + ("" if name.partition(".")[0] in swept else "\nnot swept by name"),
            *(shorten(setting_text(settings.get(name)), LONGEST) for settings in firsts),
        ]
        for name in differing_keys([settings for settings in firsts if settings])
    ]
    head = ["setting", *(one.label for one in study.settings)]
    return Table("What differs between the settings", head, rows) if rows else None


def details_of(study: Study) -> list[Detail]:
    """Return the collapsible sections: configs, protocol, objectives, code and machine, command."""
    names = dict.fromkeys(name for run in study.runs for name in run.protocol or ())
    rows = [[name, _values(study, [(run.protocol or {}).get(name) for run in study.runs])] for name in names]
    protocol = Table("How accuracy was measured", ["part", "value"], rows)
    keys = ["rlreason", "commit", "python", "platform", "hardware.cpu", "hardware.gpus"]
    keys += [f"packages.{name}" for name in ("torch", "transformers", "vllm", "math-verify")]
    rows = [[key, _values(study, [setting_in(run.provenance, key) for run in study.runs])] for key in keys]
    machine = Table("Code and machine", ["", "value"], [row for row in rows if row[1]])
    cards: dict[str, list[str]] = defaultdict(list)
    for one in study.settings:
        path = one.runs[0].folder / OBJECTIVE
        if path.is_file():
            cards[path.read_text(encoding="utf-8", errors="replace")].append(one.label)
    return [
        *(Detail(table.title, table=table) for table in (configs_table(study), protocol) if table and table.rows),
        *(Detail(f"Objective: {few(of)}" if len(cards) > 1 else "Objective", text=text) for text, of in cards.items()),
        Detail(machine.title, table=machine),
        *([Detail("Command", text=study.command)] if study.command else []),
    ]


def _values(study: Study, values: Sequence[Any]) -> str:
    """Return what all runs have on record, or each value with the settings that have it."""
    labels: dict[str, dict[str, None]] = defaultdict(dict)
    for (one, _), value in zip(study.each, values, strict=True):
        if value not in (None, "", [], {}):
            labels[shorten(str(value), 4 * LONGEST)][one.label] = None
    if len(labels) < 2:
        return next(iter(labels), "")
    return "; ".join(f"{few(list(of))}: {text}" for text, of in labels.items())
