"""Choose the pictures of a study: curves over training with their bands, best of N, shares of time, differences."""

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
    value_text,
)
from rlreason.report.study import AXES, RUNNING, Series, Study, StudyRun
from rlreason.report.verdicts import EQUAL_WITHIN, signed
from rlreason.runtime.differences import LEVEL
from rlreason.runtime.intervals import Floats, mean_interval
from rlreason.runtime.text import few
from rlreason.sweeps.state import WAITING

GRID = 60  # points of a mean against time or tokens, which seeds do not share
LARGEST_IN_COLOUR = 5  # settings with a colour if there are more than colours
MOST_IN_ALT = 8  # settings with their last value in the alternative text
COUNTERS = ("time/active", "time/total")  # metrics time/* that are no phase
MOST_PHASES = 6  # with a colour; the others are summed
LONGEST_REFERENCE = 32  # characters of a label in the title of an axis
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
    minus: str = ""  # a metric to subtract
    rest: bool = False  # 1 minus the metric
    share: bool = False  # between 0 and 1
    log: bool = False  # on a logarithmic axis

    def of(self, run: StudyRun) -> Series | None:
        """Return the series of a run; None if it was not measured."""
        sources = (self.source or self.name, f"rollout/{self.name}", f"eval/{self.name}")
        series = next((run.series[source] for source in sources if source in run.series), None)
        if series is None:
            return None
        if self.minus:
            return difference_of(series, run.series[self.minus]) if self.minus in run.series else None
        return Series(series.x, 1 - series.y) if self.rest else series


def difference_of(a: Series, b: Series) -> Series | None:
    """Return one metric minus another, in the rows that agree on every axis.

    >>> import numpy as np
    >>> at = {"step": np.array([0.0, 1.0])}
    >>> difference_of(Series(at, np.array([0.5, 0.75])), Series({"step": at["step"][1:]}, np.array([0.25]))).y
    array([0.5])
    """
    axes = [axis for axis in a.x if axis in b.x]
    places = {at: k for k, at in enumerate(zip(*(b.x[axis] for axis in axes), strict=True))}
    pairs = [(i, places[at]) for i, at in enumerate(zip(*(a.x[axis] for axis in axes), strict=True)) if at in places]
    if not pairs:
        return None
    mine, its = (list(side) for side in zip(*pairs, strict=True))
    return Series({axis: a.x[axis][mine] for axis in axes}, a.y[mine] - b.y[its])


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
    low, high = max(x.min() for x in xs), min(x.max() for x in xs)
    if low > high:
        return None
    every = np.unique(np.concatenate(xs))
    grid = np.linspace(low, high, points) if points and high > low else every[(every >= low) & (every <= high)]
    values = np.array([np.interp(grid, *last_of_each(x, y)) for x, y in zip(xs, ys, strict=True)])  # (seeds, points)
    mean = values.mean(axis=0)
    seeds = len(values)
    if seeds < 2:
        return Band(grid, mean)
    from scipy.special import stdtrit  # here: a tenth of a second to import

    half = float(stdtrit(seeds - 1, 1 - LEVEL / 2)) * values.std(axis=0, ddof=1) / math.sqrt(seeds)
    bottom, top = mean - half, mean + half
    if share:
        bottom, top = np.clip(bottom, 0.0, 1.0), np.clip(top, 0.0, 1.0)
    if log:
        bottom = floored(bottom, mean)
    return Band(grid, mean, bottom, top)


def floored(low: Floats, mean: Floats) -> Floats:
    """Return the lower edge of a band on a logarithmic axis, which has no 0: at least a third of the mean.

    >>> floored(np.array([-1.0, 0.5]), np.array([0.3, 0.6])).round(2)
    array([0.1, 0.5])
    """
    return np.maximum(low, mean / 3)


def last_of_each(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return x in ascending order, and y with the last of several values at one x.

    >>> last_of_each(np.array([0.0, 1.0, 1.0]), np.array([5.0, 6.0, 7.0]))
    (array([0., 1.]), array([5., 7.]))
    """
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    last = np.append(np.diff(x) > 0, True)
    return x[last], y[last]


def legend_of(study: Study, verdicts: Sequence[Verdict]) -> list[Entry]:
    """Return each setting's colour, in their order: 0 is the reference.

    With more settings than colours, the reference and those that differ most from it get one.
    """
    others = [setting.label for setting in study.settings[1:]]
    if len(study.settings) > MOST_COLOURS:
        size = {v.setting: abs(v.difference.mean) for v in verdicts if v.difference is not None}
        largest = sorted(others, key=lambda label: -size.get(label, -1.0))[:LARGEST_IN_COLOUR]
        in_colour = [label for label in others if label in largest]
    else:
        in_colour = others
    place = {label: k for k, label in enumerate(in_colour, 1)}
    return [Entry(study.reference.label, 0, True), *(Entry(label, place.get(label)) for label in others)]


def figures_of(study: Study) -> list[Figure]:
    """Return all pictures of a study except the forest, validation accuracy first; those without data are left out."""
    measured = [run for run in study.runs if run.summary.get("n_list") and run.summary.get("best_of_n")]
    ways = dict.fromkeys(way for run in measured for way in run.summary["best_of_n"])
    figures = [_over_training(study, measure) for measure in MEASURES]
    figures += [_best_of_n(study, str(way)) for way in ways]
    return [figure for figure in [*figures, _phases(study)] if figure is not None]


def _over_training(study: Study, measure: Measure) -> Figure | None:
    """Plot one measure against step, time, tokens and updates; None if no run has two points of it."""
    lines, dropped = _lines(study, measure)
    if not any(len(line.y) > 1 for line in lines):
        return None
    by_setting = {s.label: [line for line in lines if line.setting == s.label] for s in study.settings}
    bands = {axis: _bands(by_setting, axis, measure) for axis in AXES}
    values = np.concatenate([line.y for line in lines])
    note = f"No place on a logarithmic axis: {counted(dropped, 'value')} of 0 or less." if dropped else ""
    subtitle = measure.unit
    if measure is ACCURACY:
        several = any(len(of_setting) > 1 for of_setting in by_setting.values())
        subtitle = _seeds_text(by_setting) + (", 95% band, thin lines: seeds" if several else "")
        subtitle += ", \N{MULTIPLICATION X}: stopped early" if any(line.stopped for line in lines) else ""
    return Figure(
        measure.name,
        measure.title,
        subtitle,
        _alt(measure, by_setting, bands["step"]),
        "curves",
        STEPS,
        measure.format,
        note,
        {"published": []},
        Curves(lines, bands),
        measure.share,
        (float(values.min()), float(values.max())) if measure.log else None,
        large=measure is ACCURACY,
    )


def _lines(study: Study, measure: Measure) -> tuple[list[Line], int]:
    """Return a line for each run with data, and how many values do not fit on a logarithmic axis."""
    lines, dropped = [], 0
    for setting in study.settings:
        for run in setting.runs:
            series = measure.of(run)
            if series is None:
                continue
            x, y = series.x, series.y
            if measure.log and (y <= 0).any():
                dropped += int((y <= 0).sum())
                x, y = {axis: at[y > 0] for axis, at in x.items()}, y[y > 0]
            if len(y):
                stopped = run.status.partition(":")[0] not in ("finished", RUNNING, WAITING)
                lines.append(Line(setting.label, run.seed, x, y, stopped))
    return lines, dropped


def _bands(by_setting: Mapping[str, Sequence[Line]], axis: str, measure: Measure) -> dict[str, Band]:
    """Return mean and band of each setting whose runs all have this axis and share a range of it."""
    points = 0 if axis in ("step", "updates") else GRID
    bands = {}
    for label, lines in by_setting.items():
        if lines and all(axis in line.x for line in lines):
            xs = [line.x[axis] for line in lines]
            band = band_of(xs, [line.y for line in lines], points, measure.share, measure.log)
            if band is not None:
                bands[label] = band
    return bands


def _seeds_text(by_setting: Mapping[str, Sequence[Line]]) -> str:
    """Return 'mean of 4 seeds', 'mean of 2 to 4 seeds' or 'one seed each', of the runs that have data."""
    counts = sorted({len(lines) for lines in by_setting.values() if lines})
    if counts == [1]:
        return "one seed each"
    return f"mean of {counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} seeds"


def _alt(measure: Measure, by_setting: Mapping[str, Sequence[Line]], bands: Mapping[str, Band]) -> str:
    """Return the alternative text of a picture, with the last values."""
    last = {}
    for label, lines in by_setting.items():
        if label in bands:
            last[label] = float(bands[label].mean[-1])
        elif lines:
            last[label] = float(np.mean([line.y[-1] for line in lines]))
    values = [f"{label} {value_text(value, measure.format)}" for label, value in last.items()]
    band = " with a 95% band" if any(b.low is not None for b in bands.values()) else ""
    start = f"{measure.title} ({measure.unit}) by {STEP_TITLE} for {counted(len(last), 'setting')}"
    return f"{start}, {_seeds_text(by_setting)}{band}. Last values: {few(values, MOST_IN_ALT)}."


def _best_of_n(study: Study, way: str) -> Figure | None:
    """Plot the accuracy of one way to choose among N responses, against N."""
    rows: Rows = {"published": [], "means": [], "seeds": [], "marks": [], "stops": []}
    for setting in study.settings:
        points = _points_of_way([run.summary for run in setting.runs], way)
        for n, (value, low, high) in points.items():
            rows["means"].append({"setting": setting.label, "x": n, "y": value, "low": low, "high": high})
            rows["marks"].append({"setting": setting.label, "x": n, "y": value})
    if not rows["means"]:
        return None
    last = {
        row["setting"]: f"{row['setting']} {value_text(row['y'], PERCENT)} at N = {row['x']}" for row in rows["means"]
    }
    alt = f"{way}: share of problems solved by responses to choose from, with a 95% band. {few([*last.values()], 8)}."
    name, subtitle = f"best_of_n/{re.sub(r'[^A-Za-z0-9]+', '_', way)}", "share of problems solved, 95% band"
    x = Axis(
        "N, responses to choose from",
        {"type": "log", "base": 2, "nice": False, "padding": 6},
        {"values": sorted({row["x"] for row in rows["means"]}), "format": "d", "labelOverlap": True},
    )
    return Figure(name, way, subtitle, alt, "curves", x, PERCENT, rows=rows)


def _points_of_way(summaries: Sequence[Mapping[str, Any]], way: str) -> dict[int, tuple[float, float, float]]:
    """Return N -> (value, low, high): the interval over problems for one run, over seeds for several."""
    by_n: dict[int, list[Sequence[float]]] = {}
    for summary in summaries:
        for n, point in zip(summary.get("n_list") or [], (summary.get("best_of_n") or {}).get(way, []), strict=False):
            by_n.setdefault(int(n), []).append(point)
    intervals = {}
    for n, points in sorted(by_n.items()):
        if len(points) == 1:
            value, low, high = points[0]
        else:
            value, low, high = mean_interval([point[0] for point in points])
        intervals[n] = (value, max(low, 0.0), min(high, 1.0))
    return intervals


def _phases(study: Study) -> Figure | None:
    """Plot the shares of time that each setting's runs spent in each phase."""
    seconds: dict[str, dict[str, float]] = {}  # label of a setting -> phase -> seconds of its runs
    for setting in study.settings:
        spent: dict[str, float] = {}
        for name, series in ((name, series) for run in setting.runs for name, series in run.series.items()):
            if name.startswith("time/") and name not in COUNTERS:
                phase = name.removeprefix("time/")
                spent[phase] = spent.get(phase, 0.0) + float(series.y.sum())
        if sum(spent.values()) > 0:
            seconds[setting.label] = spent
    if not seconds:
        return None
    total: dict[str, float] = {}
    for phases in seconds.values():
        for phase, of_phase in phases.items():
            total[phase] = total.get(phase, 0.0) + of_phase / sum(phases.values())
    largest = sorted((p for p in total if p != "other"), key=lambda phase: -total[phase])[:MOST_PHASES]
    rows = []
    for label, phases in seconds.items():
        whole = sum(phases.values())
        shares = {phase: phases.get(phase, 0.0) / whole for phase in largest}
        shares["other"] = 1 - sum(shares.values())
        rows += [
            {"setting": label, "part": part.replace("_", " "), "share": float(f"{share:.4g}"), "place": place}
            for place, (part, share) in enumerate(shares.items())
        ]
    first = [f"{row['part']} {row['share']:.0%}" for row in rows if row["setting"] == rows[0]["setting"]]
    alt = f"Shares of the time by phase for {len(seconds)} settings. {rows[0]['setting']}: {', '.join(first)}."
    subtitle, x = "share of all seconds, by phase", Axis("share of the time")
    return Figure("time", "Where the time went", subtitle, alt, "shares", x, PERCENT, rows={"parts": rows})


def forest_of(verdicts: Sequence[Verdict], same_within: float = EQUAL_WITHIN) -> Figure | None:
    """Plot the differences with their intervals and a tick per seed; None if nothing was compared."""
    compared = [(verdict, verdict.difference) for verdict in verdicts if verdict.difference is not None]
    if not compared:
        return None
    reference = compared[0][0].reference
    within = 100 * same_within
    rows: Rows = {"none": [{"low": -within, "high": within}], "zero": [{"x": 0}], "pairs": [], "seeds": []}
    texts = []
    for verdict, d in compared:
        mean, low, high = (round(100 * x, 2) for x in (d.mean, d.low, d.high))
        rows["pairs"].append({"setting": verdict.setting, "x": mean, "low": low, "high": high})
        rows["seeds"] += [{"setting": verdict.setting, "x": round(100 * d, 2)} for d in verdict.by_seed.values()]
        texts.append(f"{verdict.setting} {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})")
    name = reference if len(reference) <= LONGEST_REFERENCE else "the reference"
    return Figure(
        "forest",
        f"Differences from {reference}",
        "accuracy points, 95% intervals, ticks: seeds",
        f"Differences from {reference}: {'; '.join(texts)}.",
        "forest",
        Axis(f"accuracy points against {name} (95% interval)"),
        "+.1f",
        rows=rows,
    )
