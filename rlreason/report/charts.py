"""Build the pictures of a study as Vega-Lite: curves over training, best of N, shares of time, differences."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
    variable,
)
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
    log_range = (float(values.min()), float(values.max())) if measure.log else None
    alt = _alt(study, measure, by_setting, bands["step"])
    height = FIRST_HEIGHT if measure is ACCURACY else HEIGHT
    spec = curves_spec(measure, STEP_AXIS, alt, height, log_range)
    note = f"{dropped:,} values of 0 or less have no place on a logarithmic axis." if dropped else ""
    subtitle = measure.unit
    if measure is ACCURACY:
        several = any(len(setting.runs) > 1 for setting in study.settings)
        subtitle = _seeds_text(study.settings) + (", 95% band, thin lines: seeds" if several else "")
        subtitle += ", \N{MULTIPLICATION X}: stopped early" if any(line.stopped for line in lines) else ""
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
    start = f"{measure.title} ({measure.unit}) by {STEP_TITLE} for {counted(len(last), 'setting')}"
    return f"{start}, {_seeds_text(study.settings)}{band}. Last values: {few(values, MOST_IN_ALT)}."


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
    measure = Measure(f"best_of_n/{re.sub(r'[^A-Za-z0-9]+', '_', way)}", way, "share of problems solved", PERCENT)
    alt = f"{way}: share of problems solved by responses to choose from, with a 95% band. {few([*last.values()], 8)}."
    axis = {"values": sorted({row["x"] for row in rows["means"]}), "format": "d", "labelOverlap": True}
    scale = {"type": "log", "base": 2, "nice": False, "padding": 6}
    title = "N, responses to choose from"
    x = {"field": "x", "type": "quantitative", "title": title, "scale": scale, "axis": axis}
    spec = curves_spec(measure, x, alt, HEIGHT, None)
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
    colours = {phase.replace("_", " "): variable(f"s{k}") for k, phase in enumerate(largest, 1)}
    colours["other"] = variable("rest")
    first = [f"{row['part']} {row['share']:.0%}" for row in rows if row["setting"] == rows[0]["setting"]]
    alt = f"Shares of the time by phase for {len(seconds)} settings. {rows[0]['setting']}: {', '.join(first)}."
    spec = stacked_spec(list(seconds), colours, alt)
    subtitle = "share of all seconds, by phase"
    return Figure("time", "Where the time went", subtitle, alt, spec, PERCENT, "", {"parts": rows})


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
    spec = forest_spec([v.setting for v, _ in compared], reference, 100 * same_within, alt)
    subtitle = "accuracy points, 95% intervals, ticks: seeds"
    return Figure("forest", f"Differences from {reference}", subtitle, alt, spec, "+.1f", "", rows)


Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
SETTING = "setting"  # the field that gives a mark its colour, dash and marker
STEP_TITLE = "training step"  # of an axis that a page switches
HEIGHT, FIRST_HEIGHT = 190, 370
WIDEST_LABEL, LINE_HEIGHT = 180, 14  # pixels of a setting's label next to its row
LONGEST_LINE = 20  # characters of that label on one line
FEW_ROWS = 12
LONGEST_REFERENCE = 32  # characters of a label in the title of an axis
FONT = "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
CONFIG: Spec = {
    "background": "transparent",
    "padding": {"left": 2, "right": 8, "top": 6, "bottom": 2},
    "font": FONT,
    "view": {"stroke": "transparent"},
    "axis": {
        "labelColor": variable("muted"),
        "titleColor": variable("muted"),
        "gridColor": variable("grid"),
        "domainColor": variable("axis"),
        "tickColor": variable("axis"),
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 150,
        "tickSize": 4,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False},
    "legend": {
        "labelColor": variable("fg"),
        "labelFontSize": 12,
        "labelLimit": 320,
        "symbolSize": 120,
        "symbolStrokeWidth": 2,
    },
    "title": {
        "color": variable("fg"),
        "subtitleColor": variable("muted"),
        "anchor": "start",
        "fontSize": 15,
        "subtitleFontSize": 12,
        "subtitleFontWeight": "normal",
        "subtitlePadding": 4,
        "offset": 8,
    },
}


def _nominal(field: str) -> Spec:
    return {"field": field, "type": "nominal", "legend": None}


def _layer(data_set: str, mark: Spec, encoding: Spec) -> Spec:
    return {"data": {"name": data_set}, "mark": mark, "encoding": encoding}


def _framed(alt: str, height: Any, layers: Sequence[Spec]) -> Spec:
    return {
        "$schema": SCHEMA,
        "description": alt,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": CONFIG,
        "layer": list(layers),
    }


def ticks_of(low: float, high: float) -> list[float]:
    """Return where a logarithmic axis has its lines: at powers of ten, with 2 and 5 if those are few.

    >>> ticks_of(0.02, 30.0), ticks_of(0.3, 0.8)
    ([0.1, 1.0, 10.0], [0.5])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    every = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [value for value in every if low <= value <= high] or [every[0], every[-1]]


#: The x of a curve over training; a page replaces its title when another axis is chosen.
STEP_AXIS: Spec = {
    "field": "x",
    "type": "quantitative",
    "title": STEP_TITLE,
    "scale": {"zero": False, "nice": False, "padding": 4},
    "axis": {"tickCount": 6, "format": "~s", "labelOverlap": True, "labelFlush": True},
}


def curves_spec(measure: Measure, x: Spec, alt: str, height: int, log_range: tuple[float, float] | None) -> Spec:
    """Return bands, a thin line per run, means, markers at quarters, and a cross where a run was stopped.

    Data sets: `published` {low, high}, `means` {setting, x, y, low, high}, `seeds` {setting, run, x, y}, `marks` and
    `stops` {setting, x, y}. `log_range`: of the values, for a logarithmic axis.
    """
    axis: Spec = {"tickCount": 5, "format": measure.format}
    scale: Spec = {"zero": measure.share, "nice": True}
    if log_range is not None:
        axis, scale = axis | {"values": ticks_of(*log_range)}, {"type": "log", "nice": False}
    y = {"field": "y", "type": "quantitative", "title": None, "scale": scale, "axis": axis}
    line = {"x": x, "y": y, "color": _nominal(SETTING)}
    published = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    band = {"x": x, **published, "color": _nominal(SETTING)}
    area, thin = {"type": "area", "fillOpacity": 0.16}, {"type": "line", "strokeWidth": 0.9, "strokeOpacity": 0.42}
    thick = {"type": "line", "strokeWidth": 2.3, "strokeCap": "butt"}
    point = {"type": "point", "filled": True, "size": 62, "opacity": 1}
    cross = {"type": "text", "text": "\N{MULTIPLICATION X}", "fontSize": 13, "fontWeight": "bold"}
    layers = [
        _layer("published", {"type": "rect", "color": variable("strip")}, published),
        {**_layer("means", area, band), "transform": [{"filter": "isValid(datum.low)"}]},
        _layer("seeds", thin, {**line, "detail": {"field": "run"}}),
        _layer("means", thick, {**line, "strokeDash": _nominal(SETTING)}),
        _layer("marks", point, {**line, "shape": _nominal(SETTING)}),
        _layer("stops", cross, line),
    ]
    return _framed(alt, height, layers)


def lines_of(settings: Sequence[str]) -> int:
    """Return how many lines the longest label takes next to its row, a line per word if it is long."""
    return max((len(label.split(" ")) for label in settings if len(label) > LONGEST_LINE), default=1)


def _settings_down(settings: Sequence[str]) -> Spec:
    """Return the y of a picture with a row per setting; labels with fewer lines than others start with blank ones."""
    lines = lines_of(settings)
    words = f"split(pad('', floor(({lines} - length(split(datum.label, ' '))) / 2), ' ') + datum.label, ' ')"
    whole = f"split(pad('', floor(({lines} - 1) / 2), '\\n') + datum.label, '\\n')"
    axis: Spec = {"labelFontSize": 13, "labelColor": variable("fg"), "domain": False, "ticks": False}
    axis |= {"labelPadding": 8, "labelLimit": WIDEST_LABEL}
    if lines > 1:
        axis |= {
            "labelExpr": f"length(datum.label) > {LONGEST_LINE} ? {words} : {whole}",
            "labelLineHeight": LINE_HEIGHT,
            "labelOffset": -LINE_HEIGHT * (lines - 1) / 2,
        }
    names = list(settings)
    return {"field": SETTING, "type": "nominal", "sort": names, "title": None, "axis": axis, "scale": {"domain": names}}


def row_height(settings: Sequence[str], few: int, many: int) -> Spec:
    """Return the pixels of each setting's row: fewer if there are many, more for labels of several lines."""
    return {"step": max(few if len(settings) <= FEW_ROWS else many, lines_of(settings) * LINE_HEIGHT + 6)}


def forest_spec(settings: Sequence[str], reference: str, same_within: float, alt: str) -> Spec:
    """Return an interval per setting, a tick per seed, a line at 0 and a strip for what counts as no difference.

    Data sets: `pairs` {setting, x, low, high} and `seeds` {setting, x}, in accuracy points.
    """
    zero = "datum.value == 0 ? '0' : datum.label"
    axis = {"grid": True, "tickCount": 7, "format": "+.0f", "labelExpr": zero, "labelOverlap": True}
    name = reference if len(reference) <= LONGEST_REFERENCE else "the reference"
    title = f"accuracy points against {name} (95% interval)"

    def x(field: str) -> Spec:
        return {"field": field, "type": "quantitative", "title": title, "axis": axis, "scale": {"nice": True}}

    row = {"y": _settings_down(settings), "color": _nominal(SETTING)}
    interval = {"x": x("low"), "x2": {"field": "high"}}
    strip, rule = {"type": "rect", "color": variable("strip")}, {"type": "rule", "color": variable("axis")}
    point = {"type": "point", "filled": True, "size": 95, "opacity": 1}
    layers = [
        {**_layer("", strip, interval), "data": {"values": [{"low": -same_within, "high": same_within}]}},
        {**_layer("", rule | {"strokeWidth": 1.2}, {"x": x("x")}), "data": {"values": [{"x": 0}]}},
        _layer("pairs", {"type": "rule", "strokeWidth": 3}, {**interval, **row}),
        _layer("seeds", {"type": "tick", "thickness": 1.5, "size": 14, "opacity": 0.6}, {"x": x("x"), **row}),
        _layer("pairs", point, {"x": x("x"), **row, "shape": _nominal(SETTING)}),
    ]
    return _framed(alt, row_height(settings, 38, 24), layers)


def stacked_spec(settings: Sequence[str], parts: Mapping[str, str], alt: str) -> Spec:
    """Return a bar of shares for each setting. `parts`: name of a part -> its colour.

    Data set: `parts` {setting, part, share, place}, place being the order within a bar.
    """
    legend = {"orient": "bottom", "title": None, "columns": 4, "symbolType": "square", "symbolStrokeWidth": 0}
    scale = {"domain": list(parts), "range": list(parts.values())}
    colour = {"field": "part", "type": "nominal", "sort": list(parts), "scale": scale, "legend": legend}
    axis = {"format": ".0%", "tickCount": 5, "labelFlush": True}
    x: Spec = {"field": "share", "type": "quantitative", "stack": "zero", "title": "share of the time"}
    x |= {"axis": axis, "scale": {"domain": [0, 1], "nice": False}}
    encoding = {"y": _settings_down(settings), "x": x, "color": colour, "order": {"field": "place"}}
    mark = {"type": "bar", "stroke": variable("page"), "strokeWidth": 1, "height": {"band": 0.72}}
    return _framed(alt, row_height(settings, 30, 20), [_layer("parts", mark, encoding)])
