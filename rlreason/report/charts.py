"""Build the pictures of a study: curves over training, accuracy of N responses, shares of time, differences."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlreason.report import specifications
from rlreason.report.content import (
    ACCURACY,
    GRID,
    MEASURES,
    MOST_COLOURS,
    PERCENT,
    Band,
    Curves,
    Entry,
    Figure,
    Line,
    Measure,
    Verdict,
    band_of,
    counted,
    value_text,
)
from rlreason.report.specifications import variable
from rlreason.report.study import AXES, RUNNING, Setting, Study
from rlreason.report.verdicts import EQUAL_WITHIN, signed
from rlreason.runtime.intervals import mean_interval
from rlreason.runtime.text import few
from rlreason.sweeps.state import WAITING

LARGEST_IN_COLOUR = 5  # settings with a colour if there are more than colours
MOST_IN_ALT = 8  # settings with their last value in the alternative text
COUNTERS = ("time/active", "time/total")  # metrics time/* that are no phase
MOST_PHASES = 6  # with a colour; the others are summed
Rows = dict[str, list[dict[str, Any]]]


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
    over_training = [figure for measure in MEASURES if (figure := _over_training(study, measure)) is not None]
    phases = _phases(study)
    return [*over_training, *_best_of_n(study), *([phases] if phases is not None else [])]


def _over_training(study: Study, measure: Measure) -> Figure | None:
    """Plot one measure against step, time, tokens and updates; None if no run has two points of it."""
    lines, dropped = _lines(study, measure)
    if not any(len(line.y) > 1 for line in lines):
        return None
    by_setting = {s.label: [line for line in lines if line.setting == s.label] for s in study.settings}
    bands = {axis: _bands(by_setting, axis, measure) for axis in AXES}
    values = np.concatenate([line.y for line in lines])
    log_range = (float(values.min()), float(values.max())) if measure.log else None
    alt = _alt(study, measure, by_setting, bands["step"])
    height = specifications.FIRST_HEIGHT if measure is ACCURACY else specifications.HEIGHT
    spec = specifications.curves(measure, specifications.step_axis(), alt, height, log_range)
    note = f"{dropped:,} values of 0 or less have no place on a logarithmic axis." if dropped else ""
    subtitle = _accuracy_subtitle(study, lines) if measure is ACCURACY else measure.unit
    return Figure(
        measure.name, measure.title, subtitle, alt, spec, measure.format, note, {"published": []}, Curves(lines, bands)
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


def _seeds_text(settings: Sequence[Setting]) -> str:
    """Return 'mean of 4 seeds', 'mean of 2 to 4 seeds' or 'one seed each'."""
    counts = sorted({len(setting.runs) for setting in settings})
    if counts == [1]:
        return "one seed each"
    return f"mean of {counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} seeds"


def _accuracy_subtitle(study: Study, lines: Sequence[Line]) -> str:
    parts = [_seeds_text(study.settings)]
    if any(len(setting.runs) > 1 for setting in study.settings):
        parts += ["95% band", "thin lines: seeds"]
    if any(line.stopped for line in lines):
        parts.append("\N{MULTIPLICATION X}: stopped early")
    return ", ".join(parts)


def _alt(study: Study, measure: Measure, by_setting: Mapping[str, Sequence[Line]], bands: Mapping[str, Band]) -> str:
    """Return the alternative text of a picture, with the last values."""
    last = {}
    for label, lines in by_setting.items():
        if label in bands:
            last[label] = float(bands[label].mean[-1])
        elif lines:
            last[label] = float(np.mean([line.y[-1] for line in lines]))
    values = [f"{label} {value_text(value, measure.format)}" for label, value in last.items()]
    band = " with a 95% band" if any(b.low is not None for b in bands.values()) else ""
    start = f"{measure.title} ({measure.unit}) by {specifications.STEP_TITLE} for {counted(len(last), 'setting')}"
    return f"{start}, {_seeds_text(study.settings)}{band}. Last values: {few(values, MOST_IN_ALT)}."


def _best_of_n(study: Study) -> list[Figure]:
    """Plot the accuracy of N responses by each way to choose among them, if runs have measured it."""
    measured = [run for run in study.runs if run.summary.get("n_list") and run.summary.get("best_of_n")]
    ways = list(dict.fromkeys(way for run in measured for way in run.summary["best_of_n"]))
    return [figure for way in ways if (figure := _figure_of_way(study, str(way))) is not None]


def _figure_of_way(study: Study, way: str) -> Figure | None:
    """Plot the accuracy against N of one way to choose."""
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
    measure = Measure(f"best_of_n/{re.sub(r'[^A-Za-z0-9]+', '_', way)}", way, "share of problems solved", PERCENT, [])
    alt = f"{way}: share of problems solved by responses to choose from, with a 95% band. {few([*last.values()], 8)}."
    counts = sorted({row["x"] for row in rows["means"]})
    x = specifications.count_axis("N, responses to choose from", counts)
    spec = specifications.curves(measure, x, alt, specifications.HEIGHT, None)
    return Figure(measure.name, way, "share of problems solved, 95% band", alt, spec, PERCENT, "", rows)


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
    seconds = {setting.label: _seconds_of(setting) for setting in study.settings}
    seconds = {label: phases for label, phases in seconds.items() if sum(phases.values()) > 0}
    if not seconds:
        return None
    total: dict[str, float] = {}
    for phases in seconds.values():
        for phase, spent in phases.items():
            total[phase] = total.get(phase, 0.0) + spent / sum(phases.values())
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
    colours = {phase.replace("_", " "): variable(f"s{k}") for k, phase in enumerate(largest, 1)}
    colours["other"] = variable("rest")
    first = [f"{row['part']} {row['share']:.0%}" for row in rows if row["setting"] == rows[0]["setting"]]
    alt = f"Shares of the time by phase for {len(seconds)} settings. {rows[0]['setting']}: {', '.join(first)}."
    spec = specifications.stacked(list(seconds), colours, alt)
    subtitle = "share of all seconds, by phase"
    return Figure("time", "Where the time went", subtitle, alt, spec, PERCENT, "", {"parts": rows})


def _seconds_of(setting: Setting) -> dict[str, float]:
    """Return phase -> seconds, over all runs of a setting."""
    seconds: dict[str, float] = {}
    for run in setting.runs:
        for name, series in run.series.items():
            if name.startswith("time/") and name not in COUNTERS:
                phase = name.removeprefix("time/")
                seconds[phase] = seconds.get(phase, 0.0) + float(series.y.sum())
    return seconds


def forest_of(verdicts: Sequence[Verdict], same_within: float = EQUAL_WITHIN) -> Figure | None:
    """Plot the differences with their intervals and a tick per seed; None if nothing was compared."""
    compared = [(verdict, verdict.difference) for verdict in verdicts if verdict.difference is not None]
    if not compared:
        return None
    reference = compared[0][0].reference
    rows: Rows = {"pairs": [], "seeds": []}
    texts = []
    for verdict, d in compared:
        mean, low, high = (round(100 * x, 2) for x in (d.mean, d.low, d.high))
        rows["pairs"].append({"setting": verdict.setting, "x": mean, "low": low, "high": high})
        rows["seeds"] += [{"setting": verdict.setting, "x": round(100 * d, 2)} for d in verdict.by_seed.values()]
        texts.append(f"{verdict.setting} {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})")
    alt = f"Differences from {reference}: {'; '.join(texts)}."
    spec = specifications.forest([v.setting for v, _ in compared], reference, 100 * same_within, alt)
    subtitle = "accuracy points, 95% intervals, ticks: seeds"
    return Figure("forest", f"Differences from {reference}", subtitle, alt, spec, "+.1f", "", rows)
