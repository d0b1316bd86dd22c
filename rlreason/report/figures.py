"""Choose the pictures of a study: curves over training with their bands, best of N, differences."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlreason.report.content import (
    MOST_COLOURS,
    Axis,
    Band,
    Curves,
    Entry,
    Figure,
    Line,
    Verdict,
    counted,
)
from rlreason.report.study import AXES, LONGEST_NAME, RUNNING, Series, Setting, Study, StudyRun
from rlreason.report.verdicts import EQUAL_WITHIN, signed
from rlreason.runtime.differences import LEVEL
from rlreason.runtime.intervals import Floats, mean_interval
from rlreason.runtime.text import few
from rlreason.sweeps.state import WAITING

GRID = 60  # points of a mean against time or tokens, which seeds do not share
LARGEST_IN_COLOUR = 5  # settings with a colour if there are more than colours
MOST_IN_ALT = 8  # settings with their last value in the alternative text
Rows = dict[str, list[dict[str, Any]]]
PERCENT, FINE_PERCENT, PLAIN, SHORT, GENERAL = ".0%", ".1%", ".2f", "~s", "~g"
DEPTH = "logarithmic axis"


@dataclass(frozen=True, slots=True)
class Measure:
    """The measure of one picture: the metric `source`, else the metric `name`, of rollouts before evaluations."""

    name: str
    title: str
    unit: str
    format: str  # of its axis and values, in d3's notation
    source: str = ""
    minus: str = ""  # a metric of the same rows to subtract
    rest: bool = False  # 1 minus the metric
    share: bool = False  # between 0 and 1
    log: bool = False  # on a logarithmic axis

    def of(self, run: StudyRun) -> Series | None:
        """Return the series of a run; None if it was not measured."""
        sources = (self.source or self.name, f"rollout/{self.name}", f"eval/{self.name}")
        series = next((run.series[source] for source in sources if source in run.series), None)
        if series is None or not self.minus:
            return Series(series.x, 1 - series.y) if series is not None and self.rest else series
        other = run.series.get(self.minus)
        return Series(series.x, series.y - other.y) if other is not None and len(other.y) == len(series.y) else None


ACCURACY = Measure("eval/accuracy", "Validation accuracy", "share of problems", PERCENT, share=True)
BATCH, TOKENS, GAP = "mean of the rollout batch", "tokens, mean", "mean gap of log-probabilities, nats a token"
OF_VALIDATION = "share of validation responses: format"

#: In the order of the page, which leaves out what no run has measured.
MEASURES = [
    ACCURACY,
    Measure("reward/mean", "Training reward", BATCH, PLAIN),
    Measure("reward/format", "Format reward", BATCH, PLAIN),
    Measure("reward/answer", "Answer reward", BATCH, PLAIN),
    Measure("entropy", "Token entropy", "nats, mean over sampled tokens", PLAIN),
    Measure("length", "Response length", TOKENS, SHORT),
    Measure("length_correct", "Length of correct responses", TOKENS, SHORT),
    Measure("length_wrong", "Length of incorrect responses", TOKENS, SHORT),
    Measure("train/grad_norm", "Gradient norm", f"before clipping; {DEPTH}", GENERAL, log=True),
    Measure("train/clip_fraction", "Clip fraction", "share of tokens", FINE_PERCENT, share=True),
    Measure("mismatch", "Train-inference mismatch", f"{GAP}; {DEPTH}", GENERAL, "rollout/mismatch_mean", log=True),
    Measure(
        "live_groups", "Live groups", "share of groups whose rewards differ", PERCENT, "reward/frac_reward_zero_std",
        rest=True, share=True,
    ),
    Measure("truncated", "Truncated responses", "share cut at the token limit", PERCENT, share=True),
    Measure(
        "wrong_with_format", "Wrong, but well-formed", f"{OF_VALIDATION} 1, answer 0", PERCENT, "eval/format",
        minus="eval/accuracy", share=True,
    ),
    Measure(
        "no_format", "Without the format", f"{OF_VALIDATION} 0, answer 0", PERCENT, "eval/format", rest=True, share=True
    ),
]  # fmt: skip

STEP_TITLE = "training step"
#: The x of a curve over training; a page replaces its title when another axis is chosen.
STEPS = Axis(
    STEP_TITLE,
    {"zero": False, "nice": False, "padding": 4},
    {"tickCount": 6, "format": "~s", "labelOverlap": True, "labelFlush": True},
)


def band_of(
    xs: Sequence[Floats], ys: Sequence[Floats], points: int = 0, share: bool = False, log: bool = False
) -> Band | None:
    """Return mean and band over seeds: mean +- t_{S-1, 0.975} s / sqrt(S), at each x inside every seed's range.

    `xs` and `ys` have an array for each seed. The grid has `points` even points, or every x of a seed in the common
    range if that is 0. Values between measurements are interpolated, never extrapolated, so a run that broke off ends
    its setting's band. `share` keeps the band within 0 and 1, `log` above a third of the mean. None if the seeds share
    no range.

    >>> x, y = np.array([1.0, 2.0, 3.0]), np.array([0.2, 0.4, 0.9])
    >>> band = band_of([x, x[:2]], [y, y[:2] + 0.02], share=True)
    >>> band.x, band.mean.round(2), band.low.round(2), band.high.round(2)
    (array([1., 2.]), array([0.21, 0.41]), array([0.08, 0.28]), array([0.34, 0.54]))
    """
    if not xs or any(len(x) == 0 for x in xs):
        return None
    start, end = max(x.min() for x in xs), min(x.max() for x in xs)
    if start > end:
        return None
    every = np.unique(np.concatenate(xs))
    grid = np.linspace(start, end, points) if points and end > start else every[(every >= start) & (every <= end)]
    values = []
    for x, y in zip(xs, ys, strict=True):
        ascending, last = np.unique(x[::-1], return_index=True)  # the last of several values at one x
        values.append(np.interp(grid, ascending, y[::-1][last]))
    mean, seeds = np.mean(values, axis=0), len(values)
    if seeds < 2:
        return Band(grid, mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    from scipy.special import stdtrit  # here: a tenth of a second to import

    half = float(stdtrit(seeds - 1, 1 - LEVEL / 2)) * np.std(values, axis=0, ddof=1) / math.sqrt(seeds)
    low, high = mean - half, mean + half
    if share:
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    return Band(grid, mean, np.maximum(low, mean / 3) if log else low, high)


def legend_of(study: Study, verdicts: Sequence[Verdict]) -> list[Entry]:
    """Return each setting's colour, in their order: 0 is the reference.

    With more settings than colours, the reference and those that differ most from it get one.
    """
    labels = [setting.label for setting in study.settings[1:]]
    coloured = labels
    if len(study.settings) > MOST_COLOURS:
        size = {v.setting: abs(v.difference.mean) for v in verdicts if v.difference is not None}
        coloured = sorted(labels, key=lambda label: -size.get(label, -1.0))[:LARGEST_IN_COLOUR]
    place = {label: k for k, label in enumerate((label for label in labels if label in coloured), 1)}
    return [Entry(study.reference.label, 0, True), *(Entry(label, place.get(label)) for label in labels)]


def figures_of(study: Study) -> list[Figure]:
    """Return all pictures of a study except the forest, validation accuracy first; those without data are left out."""
    measured = [run for run in study.runs if run.summary.get("n_list") and run.summary.get("best_of_n")]
    ways = dict.fromkeys(way for run in measured for way in run.summary["best_of_n"])
    figures = [_over_training(study, measure) for measure in MEASURES]
    figures += [_best_of_n(study, str(way)) for way in ways]
    return [figure for figure in figures if figure is not None]


def _over_training(study: Study, measure: Measure) -> Figure | None:
    """Plot one measure against step, time, tokens and updates; None if no run has two points of it."""
    lines, dropped = _lines(study, measure)
    if not any(len(line.y) > 1 for line in lines):
        return None
    by_setting = {s.label: [line for line in lines if line.setting == s.label] for s in study.settings}
    bands = {axis: _bands(by_setting, axis, measure) for axis in AXES}
    counts = sorted({len(of_setting) for of_setting in by_setting.values() if of_setting})
    several = f" to {counts[-1]}" if len(counts) > 1 else ""
    seeds = "one seed each" if counts == [1] else f"mean of {counts[0]}{several} seeds"
    subtitle = measure.unit
    if measure is ACCURACY:
        subtitle = seeds + (", 95% band, thin lines: seeds" if counts[-1] > 1 else "")
        subtitle += ", \N{MULTIPLICATION X}: stopped early" if any(line.stopped for line in lines) else ""
    last = []
    for label, of_setting in by_setting.items():
        if of_setting:
            band, ends = bands["step"].get(label), [line.y[-1] for line in of_setting]
            end, form = float(band.mean[-1] if band else np.mean(ends)), ".1%" if "%" in measure.format else ".3g"
            last.append(f"{label} {end:{form}}")
    with_band = " with a 95% band" if any(np.isfinite(band.low).any() for band in bands["step"].values()) else ""
    start = f"{measure.title} ({measure.unit}) by {STEP_TITLE} for {counted(len(last), 'setting')}, {seeds}{with_band}"
    values = np.concatenate([line.y for line in lines])
    return Figure(
        measure.name,
        measure.title,
        subtitle,
        f"{start}. Last values: {few(last, MOST_IN_ALT)}.",
        "curves",
        STEPS,
        measure.format,
        f"No place on a logarithmic axis: {counted(dropped, 'value')} of 0 or less." if dropped else "",
        {"published": []},
        Curves(lines, bands),
        measure.share,
        (float(values.min()), float(values.max())) if measure.log else None,
        large=measure is ACCURACY,
    )


def _lines(study: Study, measure: Measure) -> tuple[list[Line], int]:
    """Return a line for each run with data, and how many values do not fit on a logarithmic axis."""
    lines, dropped = [], 0
    for setting, run in study.each:
        if (series := measure.of(run)) is None:
            continue
        fits = series.y > 0 if measure.log else np.ones(len(series.y), bool)
        dropped += int((~fits).sum())
        if fits.any():
            stopped = run.state not in ("finished", RUNNING, WAITING)
            x = {axis: at[fits] for axis, at in series.x.items()}
            lines.append(Line(setting.label, run.seed, x, series.y[fits], stopped))
    return lines, dropped


def _bands(by_setting: Mapping[str, Sequence[Line]], axis: str, measure: Measure) -> dict[str, Band]:
    """Return mean and band of each setting whose runs all have this axis and share a range of it."""
    points = 0 if axis in ("step", "updates") else GRID
    bands = {}
    for label, lines in by_setting.items():
        if all(axis in line.x for line in lines):
            xs, ys = [line.x[axis] for line in lines], [line.y for line in lines]
            if (band := band_of(xs, ys, points, measure.share, measure.log)) is not None:
                bands[label] = band
    return bands


def _best_of_n(study: Study, way: str) -> Figure | None:
    """Plot the accuracy of one way to choose among N responses, against N."""
    rows: Rows = {"published": [], "means": [], "seeds": [], "marks": [], "stops": []}
    last = []
    for setting in study.settings:
        for n, (value, low, high) in _points_of_way(setting, way).items():
            rows["marks"].append({"setting": setting.label, "x": n, "y": value})
            rows["means"].append({**rows["marks"][-1], "low": max(low, 0.0), "high": min(high, 1.0)})
        if rows["marks"] and rows["marks"][-1]["setting"] == setting.label:
            last.append("{setting} {y:.1%} at N = {x}".format(**rows["marks"][-1]))
    if not last:
        return None
    alt = f"{way}: share of problems solved by responses to choose from, with a 95% band. {few(last, MOST_IN_ALT)}."
    name, subtitle = f"best_of_n/{re.sub(r'[^A-Za-z0-9]+', '_', way)}", "share of problems solved, 95% band"
    ticks = {"values": sorted({row["x"] for row in rows["means"]}), "format": "d", "labelOverlap": True}
    x = Axis("N, responses to choose from", {"type": "log", "base": 2, "nice": False, "padding": 6}, ticks)
    return Figure(name, way, subtitle, alt, "curves", x, PERCENT, rows=rows)


def _points_of_way(setting: Setting, way: str) -> dict[int, Sequence[float]]:
    """Return N -> (value, low, high): the interval over problems for one run, over seeds for several."""
    by_n: dict[int, list[Sequence[float]]] = {}
    for summary in (run.summary for run in setting.runs):
        for n, point in zip(summary.get("n_list") or [], (summary.get("best_of_n") or {}).get(way, []), strict=False):
            by_n.setdefault(int(n), []).append(point)
    return {
        n: points[0] if len(points) == 1 else mean_interval([point[0] for point in points])
        for n, points in sorted(by_n.items())
    }


def forest_of(verdicts: Sequence[Verdict]) -> Figure | None:
    """Plot the differences with their intervals and a tick per seed; None if nothing was compared."""
    compared = [(verdict, verdict.difference) for verdict in verdicts if verdict.difference is not None]
    if not compared:
        return None
    reference, within = compared[0][0].reference, 100 * EQUAL_WITHIN
    rows: Rows = {"none": [{"low": -within, "high": within}], "zero": [{"x": 0}], "pairs": [], "seeds": []}
    texts = []
    for verdict, d in compared:
        mean, low, high = (round(100 * x, 2) for x in (d.mean, d.low, d.high))
        rows["pairs"].append({"setting": verdict.setting, "x": mean, "low": low, "high": high})
        rows["seeds"] += [{"setting": verdict.setting, "x": round(100 * d, 2)} for d in verdict.by_seed.values()]
        texts.append(f"{verdict.setting} {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})")
    title, name = f"Differences from {reference}", reference if len(reference) <= LONGEST_NAME else "the reference"
    return Figure(
        "forest",
        title,
        "accuracy points, 95% intervals, ticks: seeds",
        f"{title}: {'; '.join(texts)}.",
        "forest",
        Axis(f"accuracy points against {name} (95% interval)"),
        "+.1f",
        rows=rows,
    )
