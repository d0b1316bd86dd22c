"""pass@k before and after training, and what choosing among N responses came to."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlreason.evaluation.selection import pass_at
from rlreason.report.content import Table
from rlreason.report.study import Answers, Run, Study
from rlreason.report.tables import NONE, percent

ONE_SAMPLE = "Every problem was asked once, so there is no pass@k: eval.samples=8 asks each eight times."


def pass_curve(answers: Answers) -> dict[int, float]:
    """k -> pass@k over the problems, unbiased (Chen et al. 2021), for k = 1, 2, 4 ... up to the fewest samples.

    >>> from rlreason.report.study import Problem
    >>> pass_curve(Answers({"a": Problem(1, 4), "b": Problem(4, 4)}))
    {1: 0.625, 2: 0.75, 4: 1.0}
    """
    fewest = min((p.samples for p in answers.problems.values()), default=0)
    ks = [2**power for power in range(fewest.bit_length()) if 2**power <= fewest]
    problems = answers.problems.values()
    return {k: float(np.mean([pass_at(p.samples, round(p.correct), k) for p in problems])) for k in ks}


def passes_table(study: Study) -> Table | None:
    """pass@k of each setting before and after training, the mean over seeds; None where problems were asked once."""
    rows, ks, fewest = [], list[int](), None
    for one in study.settings:
        pairs = [before_and_after(run) for run in one.runs]
        before, after = _mean([start for start, _ in pairs]), _mean([final for _, final in pairs])
        asked = [len(final.problems) for start, final in pairs if start is not None and final is not None]
        fewest = min(asked if fewest is None else [fewest, *asked], default=None)
        ks = ks if len(ks) >= len(after) else list(after)
        if len(after) > 1:
            rows += [
                [one.label, when, *(percent(of[k]) for k in of)]
                for when, of in (("before", before), ("after", after))
                if of
            ]
    if not rows:
        return None
    rows = [[*row, *[NONE] * (len(ks) + 2 - len(row))] for row in rows]
    note = "The probability that at least one of k responses is right, the mean over problems and seeds."
    if fewest is not None:
        note += f" Both rows are of the same problems, those asked before and after training: {fewest:,} a run."
    return Table(
        "pass@k",
        ["setting", "training", *(f"k = {k}" for k in ks)],
        rows,
        frozenset(range(2, 2 + len(ks))),
        note,
        frozenset({0}),
    )


def before_and_after(run: Run) -> tuple[Answers | None, Answers | None]:
    """The answers before and after training, both to the problems that were asked both times.

    An evaluation before training may ask fewer than the final one does. Without either, the other is whole.
    """
    start, final = run.start, run.final
    if start is None or final is None:
        return start, final
    both = start.problems.keys() & final.problems.keys()
    if not both:
        return None, final
    a, b = ({name: p for name, p in of.problems.items() if name in both} for of in (start, final))
    return replace(start, problems=a), replace(final, problems=b)


def _mean(answers: Sequence[Answers | None]) -> dict[int, float]:
    curves = [pass_curve(one) for one in answers if one is not None]
    curves = [curve for curve in curves if curve]
    if not curves:
        return {}
    return {k: float(np.mean([curve[k] for curve in curves])) for k in curves[0] if all(k in curve for curve in curves)}


def best_of_n_table(study: Study) -> Table | None:
    """What each way to choose among N responses came to, of runs of algorithm=best_of_n; None where there is none."""
    rows: list[list[str]] = []
    numbers: list[int] = []
    for one in study.settings:
        for run in one.runs:
            ways, n_list = run.summary.get("best_of_n"), run.summary.get("n_list")
            if not isinstance(ways, dict) or not isinstance(n_list, list):
                continue
            numbers = numbers if len(numbers) >= len(n_list) else n_list
            name = one.label if len(one.runs) == 1 else f"{one.label}, seed {run.seed}"
            rows += [[name, str(way), *map(_point, values)] for way, values in ways.items()]
    if not rows:
        return None
    rows = [[*row, *[NONE] * (len(numbers) + 2 - len(row))] for row in rows]
    note = "All from one set of samples; 95% intervals over problems."
    return Table(
        "Best of N",
        ["setting", "chosen by", *(f"N = {n}" for n in numbers)],
        rows,
        frozenset(range(2, 2 + len(numbers))),
        note,
    )


def _point(value: Sequence[float]) -> str:
    try:
        middle, low, high = map(float, value)
    except (TypeError, ValueError):
        return NONE
    return f"{percent(middle)}\n{percent(low)} to {percent(high)}"
