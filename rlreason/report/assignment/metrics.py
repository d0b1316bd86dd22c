"""Other metrics than the accuracy: where each setting ended, and which of them differ from the reference's."""

import math
from collections.abc import Sequence

import numpy as np

from rlreason.report.content import Table
from rlreason.report.remarks import late
from rlreason.report.study import Setting, Study
from rlreason.runtime.text import few
from rlreason.statistics import holm, mean_interval
from rlreason.statistics.differences import LEVEL, p_value

#: Metric -> what it is called; the first that a run has of each group is taken.
OTHERS = {
    "train/grad_norm": "gradient norm",
    "rollout/entropy": "entropy, nats",
    "rollout/length": "response length, tokens",
    "train/clip_fraction": "clip fraction",
}


def values_of(setting: Setting, metric: str) -> dict[int, float]:
    """Seed -> where the metric ended."""
    return {run.seed: value for run in setting.runs if (value := late(run, metric)) is not None}


def metrics_table(study: Study, title: str = "Other metrics at the end of training") -> Table | None:
    """Each setting's metrics over the last quarter of its steps, mean and interval over seeds; None without any."""
    known = [metric for metric in OTHERS if any(values_of(one, metric) for one in study.settings)]
    if not known:
        return None
    rows = [[one.label, *(cell(list(values_of(one, metric).values())) for metric in known)] for one in study.settings]
    head = ["setting", *(OTHERS[metric] for metric in known)]
    note = "Mean over seeds of the last quarter of the steps; below it the 95% interval over seeds."
    return Table(title, head, rows, frozenset(range(1, len(head))), note, frozenset({0}))


def cell(values: Sequence[float]) -> str:
    """A mean with its interval, as a table has it.

    >>> cell([1.0, 2.0, 3.0]), cell([0.5]), cell([])
    ('2\\n0 to 4.48', '0.5', '\N{EN DASH}')
    """
    if not values:
        return "\N{EN DASH}"
    mean, low, high = mean_interval(values)
    low = max(low, 0.0) if min(values) >= 0 else low  # none of these metrics is ever negative
    return f"{mean:.3g}" + (f"\n{low:.3g} to {high:.3g}" if len(values) > 1 else "")


def metric_sentences(study: Study, most: int = 3) -> list[str]:
    """A sentence for each setting, of the metrics whose difference from the reference's excludes zero over seeds.

    Pairs of the same seed, Student's 95% interval of their differences; what is said counts by Holm's correction over
    all metrics of all settings. With fewer than two pairs the two curves are described, and nothing is judged.
    """
    reference, told, silent = study.reference, list[str](), list[str]()
    tested = [
        (one.label, metric, _difference(one, reference, metric)) for one in study.settings[1:] for metric in OTHERS
    ]
    known = {(label, metric): of for label, metric, of in tested if of is not None}
    alone = [one for one in study.settings[1:] if not any(label == one.label for label, _ in known)]
    adjusted = holm([p for _, p in known.values()])
    sure = {key for key, p in zip(known, adjusted, strict=True) if p <= LEVEL}
    for one in study.settings[1:]:
        if one in alone:
            continue
        differing = [known[one.label, metric][0] for metric in OTHERS if (one.label, metric) in sure]
        if differing:
            told.append(f"{one.label} against {reference.name} at the end of training: {'; '.join(differing)}.")
        else:
            silent.append(one.label)
    if (more := len(told) - most) > 0:
        told[most:] = [f"{more} more setting{' differs' if more == 1 else 's differ'} in such a metric: see the table."]
    if silent:
        names = few(silent, 4)
        told.append(f"None of these metrics of {names} differs from {reference.name}'s beyond what seeds differ by.")
    if alone:
        told += [f"{one.label}: {_described(one)}." for one in (reference, *alone[: most + 1])]
        names = few([one.label for one in alone], 4)
        told.append(f"With fewer than two seeds in common {names} cannot be judged: seeds alone may differ by as much.")
    return told


def _described(one: Setting) -> str:
    """Where the curves of a setting began and ended, and how its runs did where they did not finish."""
    said = []
    curves = [[accuracy for _, accuracy in run.evaluations] for run in one.runs if run.evaluations]
    if curves:
        first, last = (100 * float(np.mean([curve[at] for curve in curves])) for at in (0, -1))
        said.append(f"accuracy from {first:.1f}% to {last:.1f}%")
    for metric, name in OTHERS.items():
        if values := list(values_of(one, metric).values()):
            said.append(f"{name.partition(',')[0]} {float(np.mean(values)):.3g} at the end")
    said += [f"seed {run.seed} {run.status}" for run in one.runs if run.status != "finished"]
    return "; ".join(said) or "no curve"


def _difference(one: Setting, reference: Setting, metric: str) -> tuple[str, float] | None:
    """(the difference in words, its p-value by Student's t over pairs); None with fewer than two pairs."""
    mine, its = values_of(one, metric), values_of(reference, metric)
    seeds = sorted(mine.keys() & its.keys())
    if len(seeds) < 2:
        return None
    differences = [mine[seed] - its[seed] for seed in seeds]
    mean, low, high = mean_interval(differences)
    word = "higher" if mean > 0 else "lower"
    edges = sorted((abs(low), abs(high)))
    before = float(np.mean([its[seed] for seed in seeds]))
    name = OTHERS[metric].partition(",")[0]
    text = f"{name} {word} by {abs(mean):.2g} ({edges[0]:.2g} to {edges[1]:.2g}), from {before:.2g}"
    se = float(np.std(differences, ddof=1)) / math.sqrt(len(seeds))
    return text, p_value(mean, se, 0.0, len(seeds) - 1)
