"""Draw pictures: Altair writes their specifications, vl-convert compiles them and draws SVG, PNG and PDF.

A page draws the compiled specification itself, with colours that are CSS variables, so that light, dark and paper need
no other one.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlreason.report.content import (
    DASHES,
    MARKERS,
    Band,
    Curves,
    Entry,
    Figure,
    all_written_out,
    colour_of,
    evenly,
    plain_colours,
    points_each,
    thinned,
    variable,
    written_out,
)
from rlreason.report.figures import STEP_TITLE
from rlreason.report.study import AXES
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
TOGETHER, MEANS_TOGETHER, MOST_OF_A_MEAN = 2400, 4000, 100  # points of thin lines, of means, of one mean
HEIGHT, FIRST_HEIGHT = 190, 370
WIDTH = 760  # pixels of a standalone picture
COLUMN = (400, 240)  # width of a paper's picture: as drawn in pixels, and in points (3.3 inches)
DOTS = 300  # per inch, of its PNG
WIDEST_LABEL, LINE_HEIGHT = 180, 14  # pixels of a setting's label next to its row
LONGEST_LINE = 20  # characters of that label on one line
LONGEST_BESIDE = 24  # characters; with a longer label the legend is below the picture
WIDEST_LEGEND = 56  # characters in a row of a legend below a picture, with the markers
FEW_ROWS = 12
CONFIG: Spec = {
    "background": "transparent",
    "padding": {"left": 2, "right": 8, "top": 6, "bottom": 2},
    "font": "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
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


# ---- specifications ----


def specification(
    figure: Figure, legend: Sequence[Entry], side: str = "", y_title: str | None = None, title: Spec | None = None
) -> Spec:
    """Return a picture in Vega-Lite, with named data sets. `side`: where the legend is; "": outside of the picture."""
    import altair as alt  # here and below: half a second

    draw = {"curves": _curves, "forest": _forest, "shares": _shares}[figure.kind]
    layers, height = draw(figure, _by_setting(legend, side), y_title)
    chart = alt.layer(*layers).properties(width="container", height=height)
    spec: Spec = chart.to_dict(validate=False)  # a test validates all kinds: it takes as long as the drawing
    spec["autosize"], spec["config"] = {"type": "fit-x", "contains": "padding"}, CONFIG
    return spec | ({"title": title} if title is not None else {})


def _by_setting(legend: Sequence[Entry], side: str) -> Mapping[str, Any]:
    """Return the channels color, strokeDash and shape of the settings."""
    import altair as alt

    places = [entry.colour for entry in legend]
    markers = list(MARKERS)
    ranges = {
        "color": [variable(colour_of(place)) for place in places],
        "strokeDash": [list(DASHES[place or 0]) for place in places],
        "shape": [markers[place or 0] for place in places],
    }
    named = [entry.label for entry in legend if entry.colour is not None]
    shown = None
    if side:
        longest = max(map(len, named), default=0)
        columns = {"columns": max(1, min(5, WIDEST_LEGEND // (longest + 4)))} if side == "bottom" else {}
        shown = alt.Legend(orient=side, title=None, values=named, **columns)
    channels = {"color": alt.Color, "strokeDash": alt.StrokeDash, "shape": alt.Shape}
    domain = [entry.label for entry in legend]
    return {
        name: channels[name](f"{SETTING}:N", scale=alt.Scale(domain=domain, range=values), legend=shown)
        for name, values in ranges.items()
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
    at = {"x": x, "y": y, "color": by["color"]}
    layers = [
        _data("published").mark_rect(color=variable("strip")).encode(y=low, y2="high"),
        _data(MEANS)
        .transform_filter("isValid(datum.low)")
        .mark_area(fillOpacity=0.16)
        .encode(x=x, y=low, y2="high", color=by["color"]),
        _data("seeds").mark_line(strokeWidth=0.9, strokeOpacity=0.42).encode(**at, detail="run:N"),
        _data(MEANS).mark_line(strokeWidth=2.3, strokeCap="butt").encode(**at, strokeDash=by["strokeDash"]),
        _data("marks").mark_point(filled=True, size=62, opacity=1).encode(**at, shape=by["shape"]),
        _data("stops").mark_text(text="\N{MULTIPLICATION X}", fontSize=13, fontWeight="bold").encode(**at),
    ]
    return layers, FIRST_HEIGHT if figure.large else HEIGHT


def _forest(figure: Figure, by: Mapping[str, Any], _: str | None) -> tuple[list[Any], Any]:
    """Return an interval per setting, a tick per seed, a line at 0 and a strip for what counts as no difference."""
    import altair as alt

    settings = [row[SETTING] for row in figure.rows["pairs"]]
    zero = "datum.value == 0 ? '0' : datum.label"
    axis = alt.Axis(grid=True, tickCount=7, format="+.0f", labelExpr=zero, labelOverlap=True)
    x, low = (alt.X(f"{name}:Q", title=figure.x.title, axis=axis, scale=alt.Scale(nice=True)) for name in ("x", "low"))
    row = {"y": _settings_down(settings), "color": by["color"]}
    layers = [
        _data("none").mark_rect(color=variable("strip")).encode(x=low, x2="high"),
        _data("zero").mark_rule(color=variable("axis"), strokeWidth=1.2).encode(x=x),
        _data("pairs").mark_rule(strokeWidth=3).encode(x=low, x2="high", **row),
        _data("seeds").mark_tick(thickness=1.5, size=14, opacity=0.6).encode(x=x, **row),
        _data("pairs").mark_point(filled=True, size=95, opacity=1).encode(x=x, **row, shape=by["shape"]),
    ]
    return layers, _row_height(settings, 38, 24)


def _shares(figure: Figure, by: Mapping[str, Any], _: str | None) -> tuple[list[Any], Any]:
    """Return a bar for each setting, of shares that add up to 1."""
    import altair as alt

    rows = figure.rows["parts"]
    settings, parts = (list(dict.fromkeys(row[name] for row in rows)) for name in (SETTING, "part"))
    colours = [variable("rest" if part == "other" else f"s{place}") for place, part in enumerate(parts, 1)]
    legend = alt.Legend(orient="bottom", title=None, columns=4, symbolType="square", symbolStrokeWidth=0)
    colour = alt.Color("part:N", sort=parts, scale=alt.Scale(domain=parts, range=colours), legend=legend)
    axis = alt.Axis(format=figure.format, tickCount=5, labelFlush=True)
    scale = alt.Scale(domain=[0, 1], nice=False)
    bar = (
        _data("parts")
        .mark_bar(stroke=variable("page"), strokeWidth=1, height={"band": 0.72})
        .encode(
            y=_settings_down(settings),
            x=alt.X("share:Q", stack="zero", title=figure.x.title, axis=axis, scale=scale),
            color=colour,
            order="place:Q",
        )
    )
    return [bar], _row_height(settings, 30, 20)


def ticks_of(low: float, high: float) -> list[float]:
    """Return where a logarithmic axis has its lines: at powers of ten, with 2 and 5 if those are few.

    >>> ticks_of(0.02, 30.0), ticks_of(0.3, 0.8)
    ([0.1, 1.0, 10.0], [0.5])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    every = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [value for value in every if low <= value <= high] or [every[0], every[-1]]


def _lines_of(settings: Sequence[str]) -> int:
    """Return how many lines the longest label takes next to its row, a line per word if it is long."""
    return max((len(label.split(" ")) for label in settings if len(label) > LONGEST_LINE), default=1)


def _settings_down(settings: Sequence[str]) -> Any:
    """Return the y of a picture with a row per setting; labels with fewer lines than others start with blank ones."""
    import altair as alt

    lines = _lines_of(settings)
    words = f"split(pad('', floor(({lines} - length(split(datum.label, ' '))) / 2), ' ') + datum.label, ' ')"
    whole = f"split(pad('', floor(({lines} - 1) / 2), '\\n') + datum.label, '\\n')"
    several = {
        "labelExpr": f"length(datum.label) > {LONGEST_LINE} ? {words} : {whole}",
        "labelLineHeight": LINE_HEIGHT,
        "labelOffset": -LINE_HEIGHT * (lines - 1) / 2,
    }
    axis = alt.Axis(
        labelFontSize=13,
        labelColor=variable("fg"),
        domain=False,
        ticks=False,
        labelPadding=8,
        labelLimit=WIDEST_LABEL,
        **(several if lines > 1 else {}),
    )
    names = list(settings)
    return alt.Y(f"{SETTING}:N", sort=names, title=None, axis=axis, scale=alt.Scale(domain=names))


def _row_height(settings: Sequence[str], few: int, many: int) -> Spec:
    """Return the pixels of each setting's row: fewer if there are many, more for labels of several lines."""
    return {"step": max(few if len(settings) <= FEW_ROWS else many, _lines_of(settings) * LINE_HEIGHT + 6)}


# ---- data ----


def columns_of(curves: Curves, legend: Sequence[Entry], axis: str) -> Columns:
    """Return curves against an axis, by data set: columns of equal length, a setting being its place in the legend.

    A setting without a colour of its own has its mean as a thin line.
    """
    places = {entry.label: k for k, entry in enumerate(legend)}
    parts: dict[str, list[tuple[int, int, Band]]] = {name: [] for name in CURVES[1:]}  # (setting, line, its points)
    bands = curves.bands.get(axis, {})
    most = min(MOST_OF_A_MEAN, points_each(len(bands), MEANS_TOGETHER))
    for label, every in bands.items():
        band, place = every.at(evenly(len(every.x), most)), places[label]
        if legend[place].colour is None:
            parts["seeds"].append((place, -1 - place, Band(band.x, band.mean)))
        else:
            parts[MEANS].append((place, 0, band))
            parts["marks"].append((place, 0, band.at(quarters(len(band.x)))))
    most = points_each(len(curves.lines), TOGETHER)
    for number, line in enumerate(curves.lines):
        place = places[line.setting]
        if legend[place].colour is not None and axis in line.x:
            points = Band(line.x[axis], line.y)
            parts["seeds"].append((place, number, points.at(thinned(line.y, most))))
            if line.stopped:
                parts["stops"].append((place, number, points.at(np.array([len(line.y) - 1]))))
    return {name: _concatenated(some, name == MEANS) for name, some in parts.items()}


def _concatenated(parts: Sequence[tuple[int, int, Band]], with_ends: bool) -> dict[str, Floats]:
    sizes = [len(band.x) for _, _, band in parts]

    def joined(arrays: Sequence[Floats | None]) -> Floats:
        known = [np.full(n, np.nan) if one is None else one for n, one in zip(sizes, arrays, strict=True)]
        return np.concatenate(known or [np.empty(0)])

    columns = {
        SETTING: np.repeat([float(place) for place, _, _ in parts], sizes),
        "run": np.repeat([float(number) for _, number, _ in parts], sizes),
        "x": joined([band.x for _, _, band in parts]),
        "y": joined([band.mean for _, _, band in parts]),
    }
    if with_ends:
        columns["low"] = joined([band.low for _, _, band in parts])
        columns["high"] = joined([band.high for _, _, band in parts])
    return columns


def quarters(count: int) -> "np.ndarray[Any, Any]":
    """Return the indices of the points of a mean that have a marker.

    >>> quarters(9), quarters(2), quarters(1)
    (array([2, 4, 6, 8]), array([0, 1]), array([0]))
    """
    return np.array(sorted({count // 4, count // 2, 3 * count // 4, count - 1} - {count}), dtype=np.intp)


def rows_of(figure: Figure, legend: Sequence[Entry]) -> Rows:
    """Return all data sets of a picture in its initial state: curves against the step."""
    rows: Rows = {name: [] for name in CURVES} if figure.kind == "curves" else {}
    rows |= {name: [dict(row) for row in data_set] for name, data_set in figure.rows.items()}
    if figure.curves is not None:
        for name, columns in columns_of(figure.curves, legend, "step").items():
            values = zip(*(column.tolist() for column in columns.values()), strict=True)
            rows[name] = [dict(zip(columns, one, strict=True)) for one in values]
            for row in rows[name]:
                row[SETTING] = legend[int(row[SETTING])].label
    escaped: Rows = all_written_out(rows)
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
        spec = specification(figure, legend, **options)
        vega: Spec = vl_convert.vegalite_to_vega(all_written_out(spec))
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
    svg: str = vl_convert.vega_to_svg({**vega, "data": data, "signals": signals})
    return _short_numbers(svg)


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
    renamed = re.sub(r'\bid="([\w-]+)"', rf'id="{prefix}-\1"', svg)
    return re.sub(r"url\(#([\w-]+)\)", rf"url(#{prefix}-\1)", renamed)


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
        grey = [f"thin and grey: {others} other settings"] if others else []
        subtitle = [figure.subtitle, *grey, *([figure.note] if figure.note else [])]
        vega = compiled(figure, legend, side=side, title={"text": figure.title, "subtitle": subtitle})
    vega["background"] = variable("page")
    return svg_of(vega, rows_of(figure, legend), COLUMN[0] if paper else WIDTH)


def write_figures(figures: Sequence[Figure], legend: Sequence[Entry], folder: Path) -> list[Path]:
    """Write each picture for a paper as NAME.svg, .png and .pdf, and its data as NAME.csv; return the PDFs."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    pdfs = []
    for figure in figures:
        stem = re.sub(r"\W+", "_", figure.name)
        svg = _narrowed(plain_colours(standalone(figure, legend, paper=True)))
        write_whole(folder / f"{stem}.svg", svg)
        with whole(folder / f"{stem}.png") as partial:
            partial.write_bytes(vl_convert.svg_to_png(svg, scale=DOTS / 72))
        with whole(folder / f"{stem}.pdf") as partial:
            partial.write_bytes(vl_convert.svg_to_pdf(svg))
        pdfs.append(folder / f"{stem}.pdf")
        write_whole(folder / f"{stem}.csv", csv_of(figure))
    return pdfs


def _narrowed(svg: str) -> str:
    """Scale a picture to the width of a column.

    >>> _narrowed('<svg width="400" height="250.0" viewBox="0 0 400 250"><rect width="400"/></svg>')
    '<svg width="240" height="150" viewBox="0 0 400 250"><rect width="400"/></svg>'
    """
    pixels, points = COLUMN

    def scaled(match: re.Match[str]) -> str:
        return f'{match[1]}="{float(match[2]) * points / pixels:g}"'

    return re.sub(r'\b(width|height)="([\d.]+)"', scaled, svg, count=2)


def csv_of(figure: Figure) -> str:
    """Return a picture's data: of curves every value of every run, then means with their intervals by step."""
    rows: list[dict[str, Any]] = []
    if figure.curves is None:
        rows = [{"data": name, **row} for name, data_set in figure.rows.items() for row in data_set]
        return _csv(rows)
    for line in figure.curves.lines:
        axes = [axis for axis in AXES if axis in line.x]
        for value, *xs in zip(line.y.tolist(), *(line.x[axis].tolist() for axis in axes), strict=True):
            at = dict(zip(axes, xs, strict=True))
            rows.append({"data": "run", SETTING: line.setting, "seed": line.seed, **at, "value": value})
    for label, band in figure.curves.bands.get("step", {}).items():
        for k in range(len(band.x)):
            row = {"data": "mean", SETTING: label, "step": float(band.x[k]), "value": float(band.mean[k])}
            if band.low is not None and band.high is not None:
                row |= {"low": float(band.low[k]), "high": float(band.high[k])}
            rows.append(row)
    return _csv(rows)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written_out(out.getvalue())
