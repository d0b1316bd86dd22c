"""Build the tables of a report: settings, pass@k, health, the experiment log, and what differs."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rlreason.evaluation.accuracy import pass_at
from rlreason.health.finding import Finding
from rlreason.records.files import OBJECTIVE
from rlreason.report.content import SIGNS, Table, Verdict
from rlreason.report.read import differing_keys
from rlreason.report.study import Answers, Setting, Study, StudyRun, correctness, setting_text
from rlreason.report.verdicts import p_text, signed, verdicts_of
from rlreason.runtime.statistics import paired_difference
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


def _mean_of(values: Sequence[float | None], as_text: Callable[[float], str]) -> str:
    numbers = [value for value in values if value is not None]
    return as_text(sum(numbers) / len(numbers)) if numbers else NONE


def settings_table(study: Study, verdicts: Sequence[Verdict]) -> Table:
    """Return for each setting its mean, difference to the reference, seeds, best checkpoint, and cost."""
    verdict_of = {verdict.setting: verdict for verdict in verdicts}
    head = ["setting", "accuracy", "difference", "verdict", "seeds", "best checkpoint", "time a run", "tokens a run"]
    rows = []
    for one in study.settings:
        verdict, accuracy, difference = verdict_of.get(one.label), NONE, NONE
        curves = [run.evaluations for run in one.runs if run.accuracy is not None and len(run.evaluations) > 1]
        best = _mean_of([max(at_step for _, at_step in curve) for curve in curves], percent)
        if one.accuracies and one.right:
            interval = accuracy_of(one)
            accuracy = "{}\n{} to {}".format(*map(percent, interval)) if interval else percent(0.0)
        word = "reference" if one is study.reference else f"{SIGNS[verdict.word]} {verdict.word}" if verdict else NONE
        if verdict is not None and verdict.difference is not None and verdict.adjusted_p is not None:
            d, word = verdict.difference, f"{word}\n{p_text(verdict.adjusted_p)}"
            difference = f"{signed(d.mean)}\n{signed(d.low)} to {signed(d.high)}"
        rows.append([
            one.label,
            accuracy,
            difference,
            word,
            f"{sum(run.ended for run in one.runs)} of {len(one.runs)}",
            f"{best}*\nbest of {max(map(len, curves))}" if curves else NONE,
            _mean_of([run.seconds for run in one.runs], duration),
            _mean_of([run.totals.get("tokens") for run in one.runs], millions),
        ])  # fmt: skip
    note = (
        "Accuracy and difference: the final evaluation, with 95% intervals over seeds and problems, with one seed over "
        "problems only. * The best of several evaluations is biased upwards, and is never compared."
    )
    return Table("Settings", head, rows, frozenset({1, 2, 4, 5, 6, 7}), note)


def accuracy_of(one: Setting, among: set[str] | None = None) -> tuple[float, float, float] | None:
    """Return (mean, low, high) of a setting on the problems that all its runs answered (`among` them), or None.

    It is the interval of the difference from a setting that is always wrong: seeds and problems are samples. With one
    seed it is over problems only.
    """
    answered = [set(shares) for shares in one.right.values() if shares is not None]
    common = set.intersection(*answered) if answered else set()
    problems = sorted(common if among is None else common & among)
    if not problems:
        return None
    right = np.stack(list(correctness(one.right, problems, one.questions).values()))  # (seeds, problems)
    difference = paired_difference(right)
    return difference.mean, max(difference.low, 0.0), min(difference.high, 1.0)


def judged_settings(study: Study) -> dict[Key, JudgedSetting]:
    """Return each setting's accuracy and verdict for the table at the end of a sweep."""
    word_of = {verdict.setting: verdict.word for verdict in verdicts_of(study)} | {study.reference.label: REFERENCE}
    return {one.runs[0].setting: JudgedSetting(accuracy_of(one), word_of[one.label]) for one in study.settings}


def pass_curve(answers: Answers) -> dict[int, float]:
    """Return k -> pass@k over the problems, unbiased (Chen et al. 2021), k = 1, 2, 4 ... to the fewest samples.

    >>> from rlreason.report.study import GradedProblem
    >>> pass_curve(Answers({"a": GradedProblem(1, 4), "b": GradedProblem(4, 4)}))
    {1: 0.625, 2: 0.75, 4: 1.0}
    """
    problems = answers.problems.values()
    ks = [2**power for power in range(min((p.samples for p in problems), default=0).bit_length())]
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
    note = "The probability that at least one of k responses is right, the mean over problems and seeds."
    if asked:
        note += f" Both rows are of the same problems, those asked before and after training: {min(asked):,} a run."
    rows = [row for row in rows if len(row) > 3]
    powers = [f"k = {2**power}" for power in range(max(map(len, rows), default=2) - 2)]
    head = ["setting", "training", *powers]
    whole = [[*row, *[NONE] * (len(head) - len(row))] for row in rows]
    return Table("pass@k", head, whole, frozenset(range(2, len(head))), note) if rows else None


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


def health_table(study: Study) -> Table | None:
    """Return each problem of a setting's runs: how many have it, where first, why, and what to try."""
    by_rule: dict[tuple[str, str], list[tuple[int, Finding]]] = defaultdict(list)
    for one, run in study.each:
        for finding in (finding for finding in run.findings if finding.problem):
            by_rule[one.label, finding.rule].append((run.seed, finding))
    runs, rows = {one.label: len(one.runs) for one in study.settings}, []
    for (label, rule), found in by_rule.items():
        first = min((finding for _, finding in found), key=lambda finding: finding.step or 0)
        seeds = f"{len(found)} of {runs[label]}\nseed {', '.join(str(seed) for seed, _ in found)}"
        rows.append([label, f"{rule}\n{first.what}", seeds, str(first.step), first.causes, first.cure])
    head = ["setting", "what is wrong", "runs", "first at step", "commonest causes", "try"]
    note = "What the monitors find in the recorded metrics, all of them on. With evidence: rlreason health RUN."
    return Table("Health of the runs", head, rows, frozenset({3}), note) if rows else None


def log_of(study: Study) -> Table:
    """Return a row for each run, by setting and seed."""
    head, rows = ["setting", "seed", "state", "why", "steps", "last accuracy", "time"], []
    for one, run in study.each:
        rule, reached = run.status.partition(":")[2], run.totals.get("step")
        last = run.accuracy if run.accuracy is not None or not run.evaluations else run.evaluations[-1][1]
        steps = NONE if reached is None else f"{reached:.0f} of {run.planned_steps or NONE}"
        why, time = run.reason or (f"by the rule {rule}" if rule else NONE), _mean_of([run.seconds], duration)
        rows.append([one.label, str(run.seed), run.state, why, steps, _mean_of([last], percent), time])
    return Table("Experiment log", head, rows, frozenset({1, 4, 5, 6}))


def configs_table(study: Study) -> Table:
    """Return the settings in which the runs' configs differ though no one swept them, except the seed."""
    firsts = [one.runs[0].settings for one in study.settings]
    swept = {axis.partition(".")[0] for axis in study.axes}
    names = differing_keys([settings for settings in firsts if settings])
    rows = [
        [name, *(shorten(setting_text(settings.get(name)), LONGEST) for settings in firsts)]
        for name in names
        if name.partition(".")[0] not in swept
    ]
    return Table("What differs without being swept", ["setting", *(one.label for one in study.settings)], rows)


def details_of(study: Study) -> list[tuple[str, str | Table]]:
    """Return the collapsible sections: what differs besides, protocol, objectives, command."""
    measured = next((run.protocol for run in study.runs if run.protocol is not None), {})
    rows = [[name, shorten(str(value), 4 * LONGEST)] for name, value in measured.items()]
    note = "Of the first run that has one; a verdict is refused, or says so, where another part differs."
    protocol = Table("How accuracy was measured", ["part", "value"], rows, note=note)
    cards: dict[str, list[str]] = defaultdict(list)
    for one in study.settings:
        path = one.runs[0].folder / OBJECTIVE
        if path.is_file():
            cards[path.read_text(encoding="utf-8", errors="replace")].append(one.label)
    return [
        *((table.title, table) for table in (configs_table(study), protocol) if table.rows),
        *((f"Objective: {few(of)}" if len(cards) > 1 else "Objective", text) for text, of in cards.items()),
        *([("Command", study.command)] if study.command else []),
    ]
