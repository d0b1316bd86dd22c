"""Choose the pictures of a study: curves over training with their bands, and differences."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from rlreason.report.content import MOST_COLOURS, Figure, Series, Verdict, counted
from rlreason.report.study import AXES, LONGEST_NAME, RUNNING, Study
from rlreason.report.verdicts import EQUAL_WITHIN, signed
from rlreason.runtime.statistics import LEVEL
from rlreason.runtime.text import few
from rlreason.sweeps.state import WAITING

MOST_IN_ALT = 8  # settings with their last value in the alternative text
PERCENT, FINE_PERCENT, PLAIN, SHORT, GENERAL = ".0%", ".1%", ".2f", "~s", "~g"
DEPTH = "logarithmic axis"
FOREST = "forest"  # the figure of differences


ACCURACY = Figure("eval/accuracy", "Validation accuracy", "share of problems", PERCENT, share=True, large=True)
BATCH, TOKENS, GAP = "mean of the rollout batch", "tokens, mean", "mean gap of log-probabilities, nats a token"
OF_ACCURACY = "mean with its 95% band, thin lines: seeds, \N{MULTIPLICATION X}: stopped early"

#: In the order of the page, which leaves out what no run has measured.
FIGURES = [
    ACCURACY,
    Figure("reward/mean", "Training reward", BATCH, PLAIN),
    Figure("reward/format", "Format reward", BATCH, PLAIN),
    Figure("reward/answer", "Answer reward", BATCH, PLAIN),
    Figure("entropy", "Token entropy", "nats, mean over sampled tokens", PLAIN),
    Figure("length", "Response length", TOKENS, SHORT),
    Figure("length_correct", "Length of correct responses", TOKENS, SHORT),
    Figure("length_wrong", "Length of incorrect responses", TOKENS, SHORT),
    Figure("train/grad_norm", "Gradient norm", f"before clipping; {DEPTH}", GENERAL, log=True),
    Figure("train/clip_fraction", "Clip fraction", "share of tokens", FINE_PERCENT, share=True),
    Figure("mismatch", "Train-inference mismatch", f"{GAP}; {DEPTH}", GENERAL, log=True),
    Figure("live_groups", "Live groups", "share of groups whose rewards differ", PERCENT, share=True),
    Figure("truncated", "Truncated responses", "share cut at the token limit", PERCENT, share=True),
    Figure("eval/format", "Validation format", "share of validation responses with the format", PERCENT, share=True),
]  # fmt: skip

#: Name of a figure -> its metric, where it has another name.
SOURCES = {"mismatch": "rollout/mismatch_mean", "live_groups": "reward/frac_reward_zero_std"}


def mean_of(runs: Sequence[Series], axis: str, share: bool = False, log: bool = False) -> Series | None:
    """Return mean and band of a setting's runs: mean +- t_{S-1, 0.975} s / sqrt(S), at each x inside every run's range.

    Values between measurements are interpolated, never extrapolated, so a run that broke off ends its setting's band.
    `share` keeps the band within 0 and 1, `log` above a third of the mean. None if the runs share no range.

    >>> x, y = np.array([1.0, 2.0, 3.0]), np.array([0.2, 0.4, 0.9])
    >>> mean = mean_of([Series({"step": x}, y), Series({"step": x[:2]}, y[:2] + 0.02)], "step", share=True)
    >>> mean.x, mean.y.round(2), mean.band[0].round(2), mean.band[1].round(2)
    ({'step': array([1., 2.])}, array([0.21, 0.41]), array([0.08, 0.28]), array([0.34, 0.54]))
    """
    xs = [run.x[axis] for run in runs if axis in run.x and len(run.y)]
    if not runs or len(xs) < len(runs):
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
    if len(runs) > 1:
        from scipy.special import stdtrit  # here: a tenth of a second to import

        half = float(stdtrit(len(runs) - 1, 1 - LEVEL / 2)) * np.std(values, axis=0, ddof=1) / math.sqrt(len(runs))
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


def figures_of(study: Study) -> list[Figure]:
    """Return all curves of a study, validation accuracy first; those without data are left out."""
    return [drawn for figure in FIGURES if (drawn := _over_training(study, figure)) is not None]


def _over_training(study: Study, figure: Figure) -> Figure | None:
    """Plot one measure against step, time, tokens and updates; None if no run has two points of it."""
    runs = list[Series]()
    dropped = 0  # values that do not fit on a logarithmic axis
    name = figure.name
    sources = (SOURCES.get(name, name), f"rollout/{name}", f"eval/{name}")  # of rollouts before evaluations
    for one, run in study.each:
        series = next((run.series[source] for source in sources if source in run.series), None)
        if series is None:
            continue
        y = 1 - series.y if name == "live_groups" else series.y
        fits = y > 0 if figure.log else np.full(len(y), True)
        dropped += int((~fits).sum())
        if fits.any():
            x = {axis: at[fits] for axis, at in series.x.items()}
            stopped = run.state not in ("finished", RUNNING, WAITING)
            runs.append(Series(x, y[fits], one.label, run.seed, stopped))
    if not any(len(run.y) > 1 for run in runs):
        return None
    by_setting = {one.label: of for one in study.settings if (of := [r for r in runs if r.setting == one.label])}
    means = list[Series]()
    for axis, of in product(AXES, by_setting.values()):
        if (mean := mean_of(of, axis, figure.share, figure.log)) is not None:
            means.append(mean)
    ends = {label: float(np.mean([run.y[-1] for run in of])) for label, of in by_setting.items()}
    ends |= {mean.setting: float(mean.y[-1]) for mean in means if "step" in mean.x}
    last = [f"{label} {end:{'.1%' if '%' in figure.format else '.3g'}}" for label, end in ends.items()]
    return replace(
        figure,
        subtitle=OF_ACCURACY if figure is ACCURACY else figure.subtitle,
        alt=f"{figure.title} ({figure.subtitle}). Last values: {few(last, MOST_IN_ALT)}.",
        note=f"No place on a logarithmic axis: {counted(dropped, 'value')} of 0 or less." if dropped else "",
        curves=means + runs,
        log=figure.log and len({*np.concatenate([run.y for run in runs]).tolist()}) > 1,  # one value has no ticks
    )


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
