"""The tables of a report: each setting with its interval, verdict and cost; two axes against each other; best of N."""

from collections.abc import Sequence

import numpy as np

from rlreason.report.content import SIGNS, Table, Verdict
from rlreason.report.pairing import side_of
from rlreason.report.study import Run, Setting, Study
from rlreason.report.verdicts import verdicts_of
from rlreason.report.words import p_word, signed
from rlreason.runtime.text import duration
from rlreason.statistics import Floats, paired_difference
from rlreason.sweeps.closing import REFERENCE, Judged
from rlreason.sweeps.design import Key

NONE = "\N{EN DASH}"


def percent(share: float) -> str:
    """A level: `percent(0.7468)` is '74.7%'."""
    return f"{100 * share:.1f}%"


def millions(tokens: float) -> str:
    """A number of tokens.

    >>> millions(278_696), millions(12_345_678), millions(0)
    ('0.28 M', '12.3 M', '0')
    """
    return "0" if not tokens else f"{tokens / 1e6:.2f} M" if tokens < 1e7 else f"{tokens / 1e6:.1f} M"


def mean_of_setting(right: Floats) -> tuple[float, float, float]:
    """(mean, low, high) of a setting's accuracy, from its answers (seeds, problems), by the interval of differences.

    It is the interval of a difference to a setting that is always wrong: seeds and problems are samples. One seed: over
    problems only.

    >>> mean, low, high = mean_of_setting(np.array([[1, 0, 1, 1], [1, 0, 1, 0.0]]))
    >>> mean, low, high
    (0.625, 0.0, 1.0)
    """
    found = paired_difference(right)
    return found.mean, max(found.low, 0.0), min(found.high, 1.0)


def settings_table(study: Study, verdicts: Sequence[Verdict]) -> Table:
    """Each setting: its mean, what it differs by from the reference, its seeds, its best checkpoint, and its cost."""
    of = {verdict.setting: verdict for verdict in verdicts}
    head = ["setting", "accuracy", "difference", "verdict", "seeds", "best checkpoint", "time a run", "tokens a run"]
    rows = [_row(one, of.get(one.label), one is study.reference) for one in study.settings]
    notes = [f"Accuracy and difference: {study.figure}, with 95% intervals over seeds and problems."]
    if any(len(one.runs) == 1 for one in study.settings):
        notes.append("With one seed the interval is over problems only.")
    if any("*" in row[5] for row in rows):
        notes.append("* The best of several evaluations is biased upwards, and is never compared.")
        if any(_on_fewer(run) for run in study.runs):
            notes.append(
                "Evaluations during training ask fewer problems than the final one: the best may lie below it."
            )
    if any(run.shared_machine for run in study.runs):
        notes.append("Runs shared the machine, so their times compare with nothing.")
    return Table("Settings", head, rows, frozenset({1, 2, 4, 5, 6, 7}), " ".join(notes), frozenset({0}))


def _row(one: Setting, verdict: Verdict | None, is_reference: bool) -> list[str]:
    measured = [run for run in one.runs if run.accuracy is not None]
    done = sum(run.ended for run in one.runs)
    difference, word = NONE, "reference" if is_reference else NONE
    if verdict is not None:
        word = f"{SIGNS[verdict.word]} {verdict.word}"
        if verdict.difference is not None and verdict.adjusted_p is not None:
            found = verdict.difference
            difference = f"{signed(found.mean)}\n{signed(found.low)} to {signed(found.high)}"
            word += f"\n{p_word(verdict.adjusted_p)}"
    return [
        one.label,
        _accuracy(one, measured),
        difference,
        word,
        f"{done} of {len(one.runs)}",
        best_checkpoint(measured),
        _mean_of([run.seconds for run in one.runs], duration),
        _mean_of([run.totals.get("tokens") for run in one.runs], millions),
    ]


def _accuracy(one: Setting, measured: Sequence[Run]) -> str:
    side = side_of(one)
    if not measured or not side.right:
        return NONE
    if (found := accuracy_of(one)) is None:
        return percent(0.0)
    return f"{percent(found[0])}\n{percent(found[1])} to {percent(found[2])}"


def accuracy_of(one: Setting, among: set[str] | None = None) -> tuple[float, float, float] | None:
    """`mean_of_setting` of the problems that all its runs answered (`among` them); None where they answered none."""
    side = side_of(one)
    problems = side.problems if among is None or side.problems is None else side.problems & among
    if not problems:
        return None
    return mean_of_setting(np.stack(list(side.correctness(sorted(problems), side.questions).values())))


def in_brief(study: Study) -> dict[Key, Judged]:
    """Each setting's accuracy and verdict as the report has them, for the table that ends a sweep."""
    words = {verdict.setting: verdict.word for verdict in verdicts_of(study)}
    first = study.reference
    return {
        one.runs[0].setting: Judged(accuracy_of(one), REFERENCE if one is first else words[one.label])
        for one in study.settings
    }


def best_checkpoint(runs: Sequence[Run]) -> str:
    """The mean over runs of their best evaluation, and of how many it is the best."""
    found = [run.evaluations for run in runs if len(run.evaluations) > 1]
    if not found:
        return NONE
    best = float(np.mean([max(accuracy for _, accuracy in of) for of in found]))
    return f"{percent(best)}*\nbest of {max(map(len, found))}"


def _on_fewer(run: Run) -> bool:
    """Whether the evaluations of the curve asked fewer problems than the final one."""
    interim = run.settings.get("interim_eval_problems") or run.settings.get("eval_problems")
    return isinstance(interim, int) and run.final is not None and interim < len(run.final.problems)


def _mean_of(values: Sequence[float | None], shown: object) -> str:
    known = [value for value in values if value is not None]
    return shown(sum(known) / len(known)) if known and callable(shown) else NONE


def axes_table(study: Study, verdicts: Sequence[Verdict]) -> Table | None:
    """Where two keys were swept: one against the other, with the mean accuracy and the difference to the reference."""
    varied = [axis for axis in study.axes if len({dict(one.key).get(axis) for one in study.settings}) > 1]
    if len(varied) != 2:
        return None
    of = {verdict.setting: verdict for verdict in verdicts}
    down, across = varied
    values = [list(dict.fromkeys(dict(one.key).get(axis, NONE) for one in study.settings)) for axis in varied]
    values = [sorted(each, key=_in_order) for each in values]
    cells = {(dict(one.key).get(down, NONE), dict(one.key).get(across, NONE)): one for one in study.settings}
    rows = [
        [f"{down}={row}", *(_cell(cells.get((row, column)), of, study) for column in values[1])] for row in values[0]
    ]
    return Table(
        f"{down} against {across}",
        ["", *(f"{across}={value}" for value in values[1])],
        rows,
        frozenset(range(1, len(values[1]) + 1)),
        "Mean accuracy, and below it the difference to the reference in points with the verdict's sign.",
    )


def _in_order(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _cell(one: Setting | None, of: dict[str, Verdict], study: Study) -> str:
    if one is None:
        return ""
    accuracies = [run.accuracy for run in one.runs if run.accuracy is not None]
    mean = percent(float(np.mean(accuracies))) if accuracies else NONE
    verdict = of.get(one.label)
    if one is study.reference:
        return f"{mean}\nreference"
    if verdict is None or verdict.difference is None:
        return mean
    return f"{mean}\n{SIGNS[verdict.word]} {signed(verdict.difference.mean)}"
