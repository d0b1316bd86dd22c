"""Draw pictures: Altair writes their specifications, vl-convert compiles them and draws SVG, PNG and PDF.

A page draws the compiled specification itself, with colours that are CSS variables, so that light, dark and paper need
no other one.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlreason.report import content
from rlreason.report.content import Band, Curves, Entry, Figure, written_out
from rlreason.report.figures import STEP_TITLE
from rlreason.runtime.files import whole, write_whole
from rlreason.runtime.intervals import Floats

if TYPE_CHECKING:
    import altair as alt

Spec = dict[str, Any]
Rows = dict[str, list[dict[str, Any]]]
Columns = dict[str, dict[str, Floats]]  # data set -> field -> values
SETTING = "setting"  # the field that gives a mark its colour, dash and marker
MEANS = "means"  # a picture with this data set has curves, and needs a legend
CURVES = ("published", MEANS, "seeds", "marks", "stops")  # data sets of curves
TOGETHER, FEWEST, MOST_OF_A_MEAN = 2400, 12, 100  # points of all thin lines of a picture, of one; of a mean
HEIGHT, FIRST_HEIGHT = 190, 370
WIDTH = 760  # pixels of a standalone picture
COLUMN = (400, 240)  # width of a paper's picture: as drawn in pixels, and in points (3.3 inches)
DOTS = 300  # per inch, of its PNG
WIDEST_LABEL, LINE_HEIGHT = 180, 14  # pixels of a setting's label next to its row
LONGEST_LINE = 20  # characters of that label on one line
LONGEST_BESIDE = 24  # characters; with a longer label the legend is below the picture
WIDEST_LEGEND = 56  # characters in a row of a legend below a picture, with the markers
FEW_ROWS = 12
MUTED, TEXT, STRIP = "var(--muted)", "var(--fg)", "var(--strip)"
LABELS = {"labelColor": MUTED, "titleColor": MUTED, "labelFontSize": 12, "titleFontSize": 12}
LINES = {"gridColor": "var(--grid)", "domainColor": "var(--axis)", "tickColor": "var(--axis)", "tickSize": 4}
SUBTITLE = {"subtitleColor": MUTED, "subtitleFontSize": 12, "subtitleFontWeight": "normal", "subtitlePadding": 4}
SYMBOLS = {"symbolSize": 120, "symbolStrokeWidth": 2}
CONFIG: Spec = {
    "background": "transparent",
    "padding": {"left": 2, "right": 8, "top": 6, "bottom": 2},
    "font": "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
    "view": {"stroke": "transparent"},
    "axis": {**LABELS, **LINES, "titleFontWeight": "normal", "labelLimit": 150},
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False},
    "legend": {"labelColor": TEXT, "labelFontSize": 12, "labelLimit": 320, **SYMBOLS},
    "title": {"color": TEXT, "anchor": "start", "fontSize": 15, "offset": 8, **SUBTITLE},
}


# ---- specifications ----


def specification(
    figure: Figure, legend: Sequence[Entry], side: str = "", y_title: str | None = None, title: Spec | None = None
) -> Spec:
    """Return a picture in Vega-Lite, with named data sets. `side`: where the legend is; "": outside of the picture."""
    import altair as alt  # here and below: half a second

    by = _by_setting(legend, side)
    layers, height = _forest(figure, by) if figure.kind == "forest" else _curves(figure, by, y_title)
    chart = alt.layer(*layers).properties(width="container", height=height)
    spec: Spec = chart.to_dict(validate=False)  # a test validates all kinds: it takes as long as the drawing
    spec["autosize"], spec["config"] = {"type": "fit-x", "contains": "padding"}, CONFIG
    return spec | ({"title": title} if title is not None else {})


def _by_setting(legend: Sequence[Entry], side: str) -> dict[str, Any]:
    """Return the channels color, strokeDash and shape of the settings."""
    import altair as alt

    named = [entry.label for entry in legend if entry.colour is not None]
    shown = None
    if side:
        fitting = WIDEST_LEGEND // (max(map(len, named), default=0) + 4)
        columns = {"columns": max(1, min(5, fitting))} if side == "bottom" else {}
        shown = alt.Legend(orient=side, title=None, values=named, **columns)
    domain, markers = [entry.label for entry in legend], list(content.MARKERS)

    def channel(kind: Any, values: list[Any]) -> Any:
        return kind(f"{SETTING}:N", scale=alt.Scale(domain=domain, range=values), legend=shown)

    return {
        "color": channel(alt.Color, [content.colour_of(entry.colour) for entry in legend]),
        "strokeDash": channel(alt.StrokeDash, [list(content.DASHES[entry.colour or 0]) for entry in legend]),
        "shape": channel(alt.Shape, [markers[entry.colour or 0] for entry in legend]),
    }


def _data(name: str) -> "alt.Chart":
    import altair as alt

    return alt.Chart(alt.NamedData(name=name))


def _curves(figure: Figure, by: Mapping[str, Any], y_title: str | None) -> tuple[list[Any], Any]:
    """Return bands, a thin line per run, means, markers at quarters, and a cross where a run was stopped."""
    import altair as alt

    scale, values = alt.Scale(zero=figure.share, nice=True), {}
    if figure.log_range is not None:
        scale, values = alt.Scale(type="log", nice=False), {"values": ticks_of(*figure.log_range)}
    axis = alt.Axis(tickCount=5, format=figure.format, **values)
    y, low = (alt.Y(f"{name}:Q", title=y_title, scale=scale, axis=axis) for name in ("y", "low"))
    x = alt.X("x:Q", title=figure.x.title, scale=alt.Scale(**figure.x.scale), axis=alt.Axis(**figure.x.axis))
    band, at = {"y": low, "y2": "high"}, {"x": x, "y": y, "color": by["color"]}
    means = _data(MEANS).transform_filter("isValid(datum.low)")
    layers = [
        _data("published").mark_rect(color=STRIP).encode(**band),
        means.mark_area(fillOpacity=0.16).encode(x=x, color=by["color"], **band),
        _data("seeds").mark_line(strokeWidth=0.9, strokeOpacity=0.42).encode(**at, detail="run:N"),
        _data(MEANS).mark_line(strokeWidth=2.3, strokeCap="butt").encode(**at, strokeDash=by["strokeDash"]),
        _data("marks").mark_point(filled=True, size=62, opacity=1).encode(**at, shape=by["shape"]),
        _data("stops").mark_text(text="\N{MULTIPLICATION X}", fontSize=13, fontWeight="bold").encode(**at),
    ]
    return layers, FIRST_HEIGHT if figure.large else HEIGHT


def _forest(figure: Figure, by: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return an interval per setting, a tick per seed, a line at 0 and a strip for what counts as no difference."""
    import altair as alt

    settings = [row[SETTING] for row in figure.rows["pairs"]]
    zero = "datum.value == 0 ? '0' : datum.label"
    axis = alt.Axis(grid=True, tickCount=7, format="+.0f", labelExpr=zero, labelOverlap=True)
    x, low = (alt.X(f"{name}:Q", title=figure.x.title, axis=axis, scale=alt.Scale(nice=True)) for name in ("x", "low"))
    # a long label has a line for each word, and others as many blank ones above as keep them in the middle
    names = [written_out(label) for label in settings]
    words = [name.split(" ") if len(name) > LONGEST_LINE else [name] for name in names]
    lines = max(map(len, words))
    texts = {name: [""] * ((lines - len(of)) // 2) + of for name, of in zip(names, words, strict=True)}
    labels = alt.Axis(
        labelExpr=f"({json.dumps(texts, ensure_ascii=False)})[datum.label]",
        labelFontSize=13,
        labelColor=TEXT,
        labelLimit=WIDEST_LABEL,
        labelLineHeight=LINE_HEIGHT,
        labelOffset=-LINE_HEIGHT * (lines - 1) / 2,
        labelPadding=8,
        domain=False,
        ticks=False,
    )
    y = alt.Y(f"{SETTING}:N", sort=settings, title=None, axis=labels, scale=alt.Scale(domain=settings))
    row = {"y": y, "color": by["color"]}
    layers = [
        _data("none").mark_rect(color=STRIP).encode(x=low, x2="high"),
        _data("zero").mark_rule(color="var(--axis)", strokeWidth=1.2).encode(x=x),
        _data("pairs").mark_rule(strokeWidth=3).encode(x=low, x2="high", **row),
        _data("seeds").mark_tick(thickness=1.5, size=14, opacity=0.6).encode(x=x, **row),
        _data("pairs").mark_point(filled=True, size=95, opacity=1).encode(x=x, **row, shape=by["shape"]),
    ]
    return layers, {"step": max(38 if len(settings) <= FEW_ROWS else 24, lines * LINE_HEIGHT + 6)}


def ticks_of(low: float, high: float) -> list[float]:
    """Return where a logarithmic axis has its lines: at powers of ten, with 2 and 5 if those are few.

    >>> ticks_of(0.02, 30.0), ticks_of(0.3, 0.8)
    ([0.1, 1.0, 10.0], [0.5])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    every = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [value for value in every if low <= value <= high] or [every[0], every[-1]]


# ---- data ----


def columns_of(curves: Curves, legend: Sequence[Entry], axis: str) -> Columns:
    """Return curves against an axis, by data set: columns of equal length, a setting being its place in the legend.

    A setting without a colour of its own has its mean as a thin line.
    """
    places = {entry.label: k for k, entry in enumerate(legend)}
    parts: dict[str, list[tuple[int, int, Band]]] = {name: [] for name in CURVES[1:]}  # (setting, line, its points)
    for label, every in curves.bands.get(axis, {}).items():
        band, place = every.at(content.evenly(len(every.x), MOST_OF_A_MEAN)), places[label]
        if legend[place].colour is None:
            parts["seeds"].append((place, -1 - place, band))
        else:
            last = len(band.x) - 1
            parts[MEANS].append((place, 0, band))
            parts["marks"].append((place, 0, band.at(np.unique([last // 4, last // 2, 3 * last // 4, last]))))
    most = max(FEWEST, TOGETHER // max(len(curves.lines), 1))
    for number, line in enumerate(curves.lines):
        place = places[line.setting]
        if legend[place].colour is not None and axis in line.x:
            points = Band(line.x[axis], line.y, line.y, line.y)
            parts["seeds"].append((place, number, points.at(content.thinned(line.y, most))))
            if line.stopped:
                parts["stops"].append((place, number, points.at(np.array([len(line.y) - 1]))))
    return {name: _concatenated(some, with_ends=name == MEANS) for name, some in parts.items()}


def _concatenated(parts: Sequence[tuple[int, int, Band]], with_ends: bool) -> dict[str, Floats]:
    fields = {"x": "x", "y": "mean"} | ({"low": "low", "high": "high"} if with_ends else {})
    sizes = [len(band.x) for _, _, band in parts]
    return {
        SETTING: np.repeat(np.array([place for place, _, _ in parts], float), sizes),
        "run": np.repeat(np.array([number for _, number, _ in parts], float), sizes),
        **{name: np.concatenate([getattr(band, of) for *_, band in parts] or [[]]) for name, of in fields.items()},
    }


def rows_of(figure: Figure, legend: Sequence[Entry]) -> Rows:
    """Return all data sets of a picture in its initial state: curves against the step."""
    rows: Rows = {name: [] for name in CURVES} if figure.kind == "curves" else {}
    rows |= {name: [dict(row) for row in data_set] for name, data_set in figure.rows.items()}
    if figure.curves is not None:
        for name, columns in columns_of(figure.curves, legend, "step").items():
            for values in zip(*(column.tolist() for column in columns.values()), strict=True):
                row = {key: None if math.isnan(value) else value for key, value in zip(columns, values, strict=True)}
                rows[name].append(row | {SETTING: legend[int(values[0])].label})
    escaped: Rows = content.all_written_out(rows)
    return escaped


# ---- drawing ----

_compiled: dict[str, Spec] = {}  # by what it depends on


def compiled(figure: Figure, legend: Sequence[Entry], **options: Any) -> Spec:
    """Compile a picture to Vega; a page gives the title of a switched x axis by the signal `xtitle`.

    Curves that differ in their words and values alone are compiled once. `options`: of `specification`.
    """
    import vl_convert

    shape = replace(figure, name="", title="", subtitle="", alt="", note="", curves=None)
    key = repr((replace(shape, rows={}) if figure.kind == "curves" else shape, legend, options))
    if key not in _compiled:
        vega: Spec = vl_convert.vegalite_to_vega(content.all_written_out(specification(figure, legend, **options)))
        for axis in vega.get("axes", []):
            if axis.get("title") == STEP_TITLE:
                axis["title"] = {"signal": "xtitle"}
        for shown in vega.get("legends", []):
            shown.pop("strokeDash", None)  # it would fray the markers
        vega.setdefault("signals", []).append({"name": "xtitle", "value": STEP_TITLE})
        _compiled[key] = vega
    return {**_compiled[key], "description": written_out(figure.alt)}


def svg_of(vega: Spec, rows: Rows, width: int) -> str:
    """Draw a compiled specification, with colours as CSS variables."""
    import vl_convert

    data = [{**one, "values": rows[one["name"]]} if one["name"] in rows else one for one in vega["data"]]
    signals = [{"name": "width", "value": width} if one["name"] == "width" else one for one in vega["signals"]]
    return _short_numbers(vl_convert.vega_to_svg({**vega, "data": data, "signals": signals}))


def _short_numbers(svg: str) -> str:
    """Round the coordinates of an SVG to one decimal, which makes it a third smaller; text keeps its digits.

    >>> _short_numbers('<path aria-label="lr 0.01" d="M1.2345,6"/><text x="1.25">lr 0.01</text>')
    '<path aria-label="lr 0.01" d="M1.2,6"/><text x="1.2">lr 0.01</text>'
    """
    return re.sub(r'(aria-label="[^"]*"|>[^<]*<)|(\d\.\d)\d+', lambda match: match[1] or match[2], svg)


def with_own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids of an SVG and their references, since a page holds several SVGs.

    >>> with_own_ids('<clipPath id="clip0"/><g clip-path="url(#clip0)"/>', "p1")
    '<clipPath id="p1-clip0"/><g clip-path="url(#p1-clip0)"/>'
    """
    return re.sub(r'(\bid="|url\(#)([\w-]+)', rf"\1{prefix}-\2", svg)


def standalone(figure: Figure, legend: Sequence[Entry], paper: bool = False) -> str:
    """Return a picture as SVG with its legend, on the colour of the page, with colours as CSS variables.

    It has a title, or (`paper`) the width of a column and a title at its y axis, as its caption comes from the paper.
    """
    side = ""
    if figure.curves is not None or MEANS in figure.rows:
        below = paper or any(len(entry.label) > LONGEST_BESIDE for entry in legend if entry.colour is not None)
        side = "bottom" if below else "right"
    if paper:
        vega = compiled(replace(figure, large=False), legend, side=side, y_title=figure.title)
    else:
        others = sum(entry.colour is None for entry in legend)
        grey = f"thin and grey: {others} other settings" if others else ""
        subtitle = [line for line in (figure.subtitle, grey, figure.note) if line]
        vega = compiled(figure, legend, side=side, title={"text": figure.title, "subtitle": subtitle})
    vega["background"] = "var(--page)"
    return svg_of(vega, rows_of(figure, legend), COLUMN[0] if paper else WIDTH)


def write_figures(figures: Sequence[Figure], legend: Sequence[Entry], folder: Path) -> None:
    """Write each picture for a paper as NAME.svg, .png and .pdf, and its data as NAME.csv."""
    import vl_convert

    def narrowed(size: re.Match[str]) -> str:
        return f'{size[1]}="{float(size[2]) * COLUMN[1] / COLUMN[0]:g}"'

    for figure in figures:
        stem = re.sub(r"\W+", "_", figure.name)
        svg = content.plain_colours(standalone(figure, legend, paper=True))
        svg = re.sub(r'\b(width|height)="([\d.]+)"', narrowed, svg, count=2)
        write_whole(folder / f"{stem}.svg", svg)
        with whole(folder / f"{stem}.png") as partial:
            partial.write_bytes(vl_convert.svg_to_png(svg, scale=DOTS / 72))
        with whole(folder / f"{stem}.pdf") as partial:
            partial.write_bytes(vl_convert.svg_to_pdf(svg))
        rows, out = list(_csv_rows(figure)), io.StringIO()
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(folder / f"{stem}.csv", written_out(out.getvalue()))


def _csv_rows(figure: Figure) -> Iterator[dict[str, Any]]:
    """Yield a picture's data: of curves every value of every run, then means with their intervals by step."""
    if figure.curves is None:
        yield from ({"data": name, **row} for name, data_set in figure.rows.items() for row in data_set)
        return
    for line in figure.curves.lines:
        for k, value in enumerate(line.y.tolist()):
            at = {axis: float(x[k]) for axis, x in line.x.items()}
            yield {"data": "run", SETTING: line.setting, "seed": line.seed, **at, "value": value}
    for label, band in figure.curves.bands.get("step", {}).items():
        for x, mean, low, high in zip(band.x, band.mean, band.low, band.high, strict=True):
            ends = {} if np.isnan(low) else {"low": float(low), "high": float(high)}
            yield {"data": "mean", SETTING: label, "step": float(x), "value": float(mean), **ends}
