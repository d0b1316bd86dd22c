"""Compile figures for the page, and draw them as SVG or PNG, all from one Vega-Lite specification.

vl-convert compiles and draws without a browser; it is imported on first use.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.errors import ConfigError
from rlreason.report.content import Curves, Entry, Figure, all_written_out, evenly, points_each, thinned
from rlreason.report.specifications import DASHES, MARKERS, SETTING, STEP_TITLE, colour_of, variable, without_variables

Spec = dict[str, Any]
Rows = dict[str, list[dict[str, Any]]]
MEANS = "means"  # the data set that makes a picture one of curves, whose settings need a legend
TOGETHER = 2400  # points of all thin lines of a static picture
MEANS_TOGETHER = 4000  # points of all means
MOST_OF_A_MEAN = 100
WIDTH, SCALE = 760, 1.5  # of a picture by itself: pixels, and how many of a PNG's to one of them
LONGEST_BESIDE = 24  # characters of a label; with longer ones the legend stands below


def svg_of(figure: Figure, legend: Sequence[Entry], dark: bool = False) -> str:
    """Return a standalone figure as SVG: with title and legend, in plain colours on the colour of the page."""
    drawn: str = _library().vega_to_svg(_alone(figure, legend, dark))
    return _short_numbers(drawn)


def png_of(figure: Figure, legend: Sequence[Entry]) -> bytes:
    """Return the same as PNG, light."""
    drawn: bytes = _library().vega_to_png(_alone(figure, legend, dark=False), scale=SCALE)
    return drawn


def svg_in_page(compiled: Spec, rows: Rows, width: int, prefix: str) -> str:
    """Return a compiled figure as SVG for a page: no title, colours as CSS variables, ids beginning with `prefix`."""
    return with_own_ids(_short_numbers(_library().vega_to_svg(with_rows(compiled, rows, width))), prefix)


def with_own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids of an SVG and their references, since several are on one page.

    >>> with_own_ids('<clipPath id="clip0"/><g clip-path="url(#clip0)"/>', "p1")
    '<clipPath id="p1-clip0"/><g clip-path="url(#p1-clip0)"/>'
    """
    renamed = re.sub(r'\bid="([\w-]+)"', rf'id="{prefix}-\1"', svg)
    return re.sub(r"url\(#([\w-]+)\)", rf"url(#{prefix}-\1)", renamed)


def compiled(figure: Figure, legend: Sequence[Entry]) -> Spec:
    """Compile a figure's specification to Vega, for a page: the title of a switched x axis is the signal `xtitle`."""
    return _compile(coloured(figure.specification, legend))


def _compile(specification: Spec) -> Spec:
    vega: Spec = _library().vegalite_to_vega(all_written_out(specification))
    for axis in vega.get("axes", []):
        if axis.get("title") == STEP_TITLE:
            axis["title"] = {"signal": "xtitle"}
    for legend in vega.get("legends", []):
        legend.pop("strokeDash", None)  # it would fray the markers
    vega.setdefault("signals", []).append({"name": "xtitle", "value": STEP_TITLE})
    return vega


def _library() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigError(
            "a report's pictures need vl-convert, which is not installed: pip install 'rlreason[report]'"
        ) from error
    return vl_convert


def vega_version() -> str:
    """Return the version of Vega that compiles the pictures."""
    return str(_library().get_vega_version())


def _alone(figure: Figure, legend: Sequence[Entry], dark: bool) -> Spec:
    """Return the compiled figure with all that a page has around it."""
    specification = coloured(figure.specification, legend, shown=figure.curves is not None or MEANS in figure.rows)
    others = sum(entry.colour is None for entry in legend)
    subtitle = [figure.subtitle] + ([f"thin and grey: {others} other settings"] if others else [])
    if figure.note:
        subtitle.append(figure.note)
    title = {"text": figure.title, "subtitle": subtitle}
    vega = with_rows(_compile({**specification, "title": title}), rows_of(figure, legend), WIDTH)
    return {**without_variables(vega, dark), "background": without_variables(variable("page"), dark)}


def coloured(specification: Mapping[str, Any], legend: Sequence[Entry], shown: bool = False) -> Spec:
    """Return a specification with the legend's colours, dashes and markers; `shown`: including the legend.

    >>> encoding = {"color": {"field": "setting", "type": "nominal", "legend": None}}
    >>> coloured({"encoding": encoding}, [Entry("a", 0), Entry("b", None)])["encoding"]["color"]["scale"]
    {'domain': ['a', 'b'], 'range': ['var(--s0)', 'var(--rest)']}
    """
    labels = [entry.label for entry in legend]
    places = [entry.colour for entry in legend]
    markers = list(MARKERS)
    ranges = {
        "color": [variable(colour_of(place)) for place in places],
        "strokeDash": [list(DASHES[place or 0]) for place in places],
        "shape": [markers[place or 0] for place in places],
    }
    named = [entry.label for entry in legend if entry.colour is not None]
    below = any(len(label) > LONGEST_BESIDE for label in named)
    place_of_it = {"orient": "bottom", "columns": 2} if below else {"orient": "right"}
    drawn = {**place_of_it, "title": None, "values": named} if shown else None

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(of) for of in value]
        if not isinstance(value, Mapping):
            return value
        found = {key: walk(of) for key, of in value.items()}
        for channel, of_settings in ranges.items():
            if isinstance(at := found.get(channel), dict) and at.get("field") == SETTING:
                found[channel] = {**at, "legend": drawn, "scale": {"domain": labels, "range": of_settings}}
        return found

    result: Spec = walk(specification)
    return result


def with_rows(compiled: Spec, rows: Rows, width: int) -> Spec:
    """Return a compiled specification with its data and a fixed width."""
    data = [{**of, "values": rows[of["name"]]} if of["name"] in rows else of for of in compiled["data"]]
    signals = [
        {"name": "width", "value": width} if signal["name"] == "width" else signal for signal in compiled["signals"]
    ]
    return {**compiled, "data": data, "signals": signals}


def rows_of(figure: Figure, legend: Sequence[Entry]) -> Rows:
    """Return all data sets of a figure in its initial state: curves against the step."""
    rows = {name: [dict(row) for row in of] for name, of in figure.rows.items()}
    if figure.curves is not None:
        rows |= _rows_against_step(figure.curves, legend)
    found: Rows = all_written_out(rows)
    return found


def points_of_means(settings: int) -> int:
    """Return how many points the mean of each of `settings` settings may have."""
    return min(MOST_OF_A_MEAN, points_each(settings, MEANS_TOGETHER))


def _rows_against_step(curves: Curves, legend: Sequence[Entry]) -> Rows:
    rows: Rows = {MEANS: [], "seeds": [], "marks": [], "stops": []}
    in_colour = {entry.label: entry.colour is not None for entry in legend}
    bands = curves.bands.get("step", {})
    points = points_of_means(len(bands))
    for label, whole in bands.items():
        band = whole.at(evenly(len(whole.x), points))
        x, mean = band.x.tolist(), band.mean.tolist()
        if not in_colour.get(label):
            rows["seeds"] += [{SETTING: label, "run": label, "x": a, "y": b} for a, b in zip(x, mean, strict=True)]
            continue
        low, high = ([None] * len(x) if edge is None else edge.tolist() for edge in (band.low, band.high))
        ends = zip(x, mean, low, high, strict=True)
        rows[MEANS] += [{SETTING: label, "x": a, "y": b, "low": c, "high": d} for a, b, c, d in ends]
        rows["marks"] += [{SETTING: label, "x": x[k], "y": mean[k]} for k in quarters(len(x))]
    points = points_each(len(curves.lines), TOGETHER)
    for line in curves.lines:
        if in_colour.get(line.setting) and "step" in line.x:
            kept, run = thinned(line.y, points), f"{line.setting}/{line.seed}"
            pairs = zip(line.x["step"][kept].tolist(), line.y[kept].tolist(), strict=True)
            rows["seeds"] += [{SETTING: line.setting, "run": run, "x": a, "y": b} for a, b in pairs]
            if line.stopped:
                rows["stops"].append({SETTING: line.setting, "x": float(line.x["step"][-1]), "y": float(line.y[-1])})
    return rows


def quarters(count: int) -> list[int]:
    """Return the indices of the points of a mean that have a marker.

    >>> quarters(9), quarters(2), quarters(1)
    ([2, 4, 6, 8], [0, 1], [0])
    """
    return sorted({count // 4, count // 2, 3 * count // 4, count - 1} - {count})


def _short_numbers(svg: str) -> str:
    """Round the coordinates of an SVG to one decimal, which makes it a third smaller; text keeps its digits.

    >>> _short_numbers('<path aria-label="lr 0.01" d="M1.2345,6"/><text x="1.25">lr 0.01</text>')
    '<path aria-label="lr 0.01" d="M1.2,6"/><text x="1.2">lr 0.01</text>'
    """
    return re.sub(r'(aria-label="[^"]*"|>[^<]*<)|(\d\.\d)\d+', lambda found: found[1] or found[2], svg)
