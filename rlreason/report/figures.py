"""Choose the pictures of a study: curves over training with their bands, and differences."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from rlreason.errors import ConfigError
from rlreason.report.content import MOST_COLOURS, TABLES, Figure, Series, Verdict, counted
from rlreason.report.study import AXES, LONGEST_NAME, PAPER_AXES, RUNNING, Study
from rlreason.report.verdicts import EQUAL_WITHIN, signed
from rlreason.runtime.statistics import LEVEL, half_width
from rlreason.runtime.text import few
from rlreason.sweeps.state import WAITING

MOST_IN_ALT = 8  # settings with their last value in the alternative text
FOREST = "forest"  # the figure of differences


OF_ACCURACY = "thin lines: seeds, \N{MULTIPLICATION X}: stopped early"
LASTING, FAR = 5, 3.0  # see `limits_of`
FEWEST_IN_BAND = 4  # seeds: of fewer, the band of Student's t covers most of a picture, and the seeds say more
#: The curves in the order of the page, which leaves out what no run has measured.
FIGURES = [Figure(**one) for one in TABLES["figures"]]


def mean_of(runs: Sequence[Series], axis: str, share: bool = False, log: bool = False) -> Series | None:
    """Return mean and band of a setting's runs: mean +- t_{S-1, 0.975} s / sqrt(S), at each x inside every run's range.

    Values between measurements are interpolated, never extrapolated, so a run that broke off ends its setting's band.
    `share` keeps the band within 0 and 1, `log` above a third of the mean; of fewer than `FEWEST_IN_BAND` runs it is
    NaN. None if the runs share no range, or x falls.

    >>> x, y = np.array([1.0, 2.0, 3.0]), np.array([0.2, 0.4, 0.9])
    >>> runs = [Series({"step": x[:n]}, y[:n] + 0.02 * n) for n in (2, 3, 2, 3)]
    >>> mean = mean_of(runs, "step", share=True)
    >>> mean.x, mean.y.round(2), mean.band[0].round(2), mean.band[1].round(2)
    ({'step': array([1., 2.])}, array([0.25, 0.45]), array([0.23, 0.43]), array([0.27, 0.47]))
    """
    xs = [run.x[axis] for run in runs if axis in run.x and len(run.y)]
    if not runs or len(xs) < len(runs) or any((np.diff(x) < 0).any() for x in xs):
        return None
    every = np.unique(np.concatenate(xs))
    grid = every[(every >= max(x.min() for x in xs)) & (every <= min(x.max() for x in xs))]
    if not len(grid):
        return None
    values = []
    for run, x in zip(runs, xs, strict=True):
        ascending, last = np.unique(x[::-1], return_index=True)  # the last of several values at one x
        values.append(np.interp(grid, ascending, run.y[::-1][last]))
    mean, half = np.mean(values, axis=0), np.full(len(grid), np.nan)
    if len(runs) >= FEWEST_IN_BAND:
        quantile = half_width(LEVEL, 1.0, 0.0, len(runs) - 1)
        half = quantile * np.std(values, axis=0, ddof=1) / math.sqrt(len(runs))
    low, high = mean - half, mean + half
    if share:
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    band = (np.maximum(low, mean / 3) if log else low, high)
    return Series({axis: grid}, mean, runs[0].setting, band=band)


def legend_of(study: Study, verdicts: Sequence[Verdict]) -> list[str]:
    """Return the labels of the settings in the pictures, in their order: the place of each is its colour.

    With more settings than colours, these are the reference and those that differ most from it.
    """
    labels = [setting.label for setting in study.settings]
    if len(labels) <= MOST_COLOURS:
        return labels
    size = {v.setting: abs(v.difference.mean) for v in verdicts if v.difference is not None}
    largest = sorted(labels[1:], key=lambda label: -size.get(label, -1.0))[: MOST_COLOURS - 1]
    return [label for label in labels if label in (labels[0], *largest)]


def limits_of(runs: Sequence[Series], far: float) -> tuple[float, float]:
    """Return the ends of the y axis: of the values within `far` times the range of those that are not lone.

    Lone is what a running median over `LASTING` values leaves out.
    """
    from scipy.ndimage import median_filter  # here: it takes a while to import

    every = np.concatenate([run.y for run in runs])
    kept = np.concatenate([median_filter(run.y, LASTING, mode="nearest") for run in runs])
    reach = far * np.ptp(kept) / 2
    shown = every[np.abs(every - (kept.min() + kept.max()) / 2) <= reach] if reach else every
    return float(shown.min()), float(shown.max())


def figures_with_sets(study: Study) -> list[Figure]:
    """Return `FIGURES` with the accuracy on each of `eval.sets`, which come after the first."""
    first, *others = FIGURES
    named = {f"eval/{name}/accuracy": f"Accuracy on {name}" for name in study.sets}
    return [first, *(replace(first, name=key, title=title, large=False) for key, title in named.items()), *others]


def figures_for_paper(study: Study, metrics: Sequence[str], x: str, labels: Mapping[str, str]) -> list[Figure]:
    """Plot these metrics of `metrics.jsonl`, or all of the page, against x, which the study was read with.

    `labels`: name of a metric, or of x -> what its axis is called. `ConfigError` for a metric or x that no run has.
    """
    names = sorted({name for run in study.runs for name in run.series})
    if x not in (*PAPER_AXES, *names):
        raise ConfigError(f"--x {x} is no key of metrics.jsonl: give one of {few([*PAPER_AXES, *names], 99)}")
    known, wanted = {one.name: one for one in figures_with_sets(study)}, list[Figure]()
    for metric in metrics or known:
        like = known.get(metric.partition("/")[2], Figure(metric, metric, "", "~g"))
        figure = known.get(metric) or replace(like, name=metric, source=metric)
        figure = replace(figure, axis=x, x_title=labels.get(x, PAPER_AXES.get(x, (x, x, 1))[1]))
        wanted.append(replace(figure, title=labels[metric], unit="") if metric in labels else figure)
    figures = figures_of(study, wanted)
    drawn = {figure.name for figure in figures if any(x in curve.x for curve in figure.curves)}
    if missing := [name for name in metrics if name not in drawn] or ([] if drawn or x == "step" else ["a metric"]):
        raise ConfigError(f"metrics.jsonl has no two values of {missing[0]} along {x}: give one of {few(names, 99)}")
    return figures


def figures_of(study: Study, wanted: Sequence[Figure] = FIGURES) -> list[Figure]:
    """Plot every measure against step, time, tokens and updates, accuracy first; leave out what has no two points."""
    figures = []
    for figure in wanted:
        runs, outside, name = list[Series](), 0, figure.name  # outside: of the y axis
        sources = (figure.source or name, f"rollout/{name}", f"eval/{name}")  # of rollouts before evaluations
        for one, run in study.each:
            series = next((run.series[source] for source in sources if source in run.series), None)
            if series is None:
                continue
            y = 1 - series.y if name == "live_groups" else series.y
            fits = np.isfinite(series.x.get(figure.axis, y))
            if figure.log:
                outside += int((y <= 0).sum())
                fits &= y > 0
            if fits.any():
                x = {axis: at[fits] for axis, at in series.x.items()}
                runs.append(Series(x, y[fits], one.label, run.seed, run.state not in ("finished", RUNNING, WAITING)))
        if not any(len(run.y) > 1 for run in runs):
            continue
        by_setting = defaultdict[str, list[Series]](list)
        for curve in runs:
            by_setting[curve.setting].append(curve)
        axes = dict.fromkeys((*AXES, figure.axis))
        means = [mean_of(of, axis, figure.share, figure.log) for axis, of in product(axes, by_setting.values())]
        limits = limits_of(runs, 1e9 if figure.log else FAR)  # a logarithmic axis has room
        outside += sum(int((run.y != run.y.clip(*limits)).sum()) for run in runs)
        subtitle = figure.subtitle
        if figure.large:
            banded = max(map(len, by_setting.values())) >= FEWEST_IN_BAND
            subtitle = f"{'mean with its 95% band' if banded else 'mean'}, {OF_ACCURACY}"
        number = ".1%" if "%" in figure.format else ".3g"
        last = [f"{label} {np.mean([run.y[-1] for run in of]):{number}}" for label, of in by_setting.items()]
        figures.append(
            replace(
                figure,
                subtitle=subtitle,
                alt=f"{figure.title} ({figure.subtitle}). Last values: {few(last, MOST_IN_ALT)}.",
                note=f"Outside of the axis: {counted(outside, 'value')}." if outside else "",
                curves=[*filter(None, means), *runs],
                limits=limits,
                log=figure.log and limits[0] < limits[1],  # one value has no ticks
            )
        )
    return figures


def forest_of(verdicts: Sequence[Verdict]) -> Figure | None:
    """Plot the differences with their intervals and a tick per seed; None if nothing was compared."""
    compared = [(verdict, verdict.difference) for verdict in verdicts if verdict.difference is not None]
    if not compared:
        return None
    reference, within = compared[0][0].reference, 100 * EQUAL_WITHIN
    title, name = f"Differences from {reference}", reference if len(reference) <= LONGEST_NAME else "the reference"
    texts = [f"{v.setting} {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})" for v, d in compared]

    def row(setting: str, **shares: float) -> dict[str, Any]:
        return {"setting": setting, **{name: round(100 * share, 2) for name, share in shares.items()}}

    return Figure(
        FOREST,
        title,
        "accuracy points, 95% intervals, ticks: seeds",
        "+.1f",
        f"{title}: {'; '.join(texts)}.",
        f"accuracy points against {name} (95% interval)",
        rows={
            "none": [{"low": -within, "high": within}],
            "zero": [{"x": 0}],
            "pairs": [row(verdict.setting, x=d.mean, low=d.low, high=d.high) for verdict, d in compared],
            "seeds": [row(verdict.setting, x=of) for verdict, _ in compared for of in verdict.by_seed.values()],
        },
    )
