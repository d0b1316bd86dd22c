"""Build Vega-Lite specifications as plain dicts, with the colours and markers of a report."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.report.content import Measure

LIGHT = {
    "s0": "#363B43",
    "s1": "#1895D8",
    "s2": "#C6753D",
    "s3": "#086809",
    "s4": "#975695",
    "s5": "#BA3556",
    "s6": "#6433A1",
    "s7": "#4661D7",
    "rest": "#8c959f",  # all further settings
    "page": "#ffffff",
    "card": "#ffffff",
    "soft": "#f5f6f8",
    "fg": "#1b1f24",
    "muted": "#57606a",
    "grid": "#e6e8eb",
    "axis": "#8c959f",
    "line": "#d8dce1",
    "strip": "#eef1f4",
    "link": "#0a58b0",
    "good": "#0b5c2b",
    "good-soft": "#e2f3e8",
    "bad": "#8a2c0a",
    "bad-soft": "#fbe9e0",
    "open": "#444b54",
    "open-soft": "#eceff2",
}
DARK = {
    "s0": "#CDD1D8",
    "s1": "#70A1C3",
    "s2": "#F3832D",
    "s3": "#8DF987",
    "s4": "#AA53A8",
    "s5": "#D73F65",
    "s6": "#A168F1",
    "s7": "#9EB6FF",
    "rest": "#77808a",
    "page": "#16191d",
    "card": "#1b1f24",
    "soft": "#20252b",
    "fg": "#e8eaed",
    "muted": "#a4adb8",
    "grid": "#2a3037",
    "axis": "#77808a",
    "line": "#343b44",
    "strip": "#232930",
    "link": "#7db5f5",
    "good": "#a6e3b8",
    "good-soft": "#16351f",
    "bad": "#ffc1a3",
    "bad-soft": "#40200f",
    "open": "#c8ced6",
    "open-soft": "#2b3138",
}
#: Dashes of s0 to s7: lengths of line and gap.
DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2, 1, 2), (3, 3), (14, 3, 3, 3))
#: Markers of s0 to s7: Vega's name -> SVG path around 0,0.
MARKERS = {
    "circle": "M-4.2,0a4.2,4.2 0 1,0 8.4,0a4.2,4.2 0 1,0 -8.4,0z",
    "square": "M-4,-4h8v8h-8z",
    "triangle-up": "M0,-5l5,9h-10z",
    "diamond": "M0,-6l6,6l-6,6l-6,-6z",
    "cross": "M-2,-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
    "triangle-down": "M0,5l5,-9h-10z",
    "triangle-right": "M5,0l-9,5v-10z",
    "triangle-left": "M-5,0l9,5v-10z",
}
_VARIABLE = re.compile(r"var\(--([\w-]+)\)")


def variable(name: str) -> str:
    """Return a colour as a CSS variable: `variable("s0")` is 'var(--s0)'."""
    return f"var(--{name})"


def colour_of(place: int | None) -> str:
    """Return the name of an `Entry`'s colour: 's2', or 'rest' for None."""
    return "rest" if place is None else f"s{place}"


def css_variables(dark: bool = False) -> str:
    """Return the declarations of all colours, for one block of a style sheet.

    >>> css_variables().partition(";")[0]
    '--s0:#363B43'
    """
    return "".join(f"--{name}:{colour};" for name, colour in (DARK if dark else LIGHT).items())


def without_variables(specification: Any, dark: bool = False) -> Any:
    """Return the specification with plain colours instead of CSS variables, which only a page defines.

    >>> without_variables({"color": "var(--s1)"})
    {'color': '#1895D8'}
    """
    colours = DARK if dark else LIGHT
    return json.loads(_VARIABLE.sub(lambda match: colours[match[1]], json.dumps(specification)))


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


def step_axis() -> Spec:
    """Return the x of a curve over training; a page replaces its title when another axis is chosen."""
    axis = {"tickCount": 6, "format": "~s", "labelOverlap": True, "labelFlush": True}
    scale = {"zero": False, "nice": False, "padding": 4}
    return {"field": "x", "type": "quantitative", "title": STEP_TITLE, "scale": scale, "axis": axis}


def count_axis(title: str, counts: Sequence[int]) -> Spec:
    """Return the x of a curve over counts that double, such as responses to choose from."""
    axis = {"values": list(counts), "format": "d", "labelOverlap": True}
    scale = {"type": "log", "base": 2, "nice": False, "padding": 6}
    return {"field": "x", "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def curves(measure: Measure, x: Spec, alt: str, height: int, log_range: tuple[float, float] | None) -> Spec:
    """Return bands, a thin line per run, means, markers at quarters, and a cross where a run was stopped.

    Data sets: `published` {low, high}, `means` {setting, x, y, low, high}, `seeds` {setting, run, x, y}, `marks` and
    `stops` {setting, x, y}. `log_range`: of the values, for a logarithmic axis.
    """
    axis: Spec = {"tickCount": 5, "format": measure.format}
    scale: Spec = {"zero": measure.share, "nice": True}
    if log_range is not None:
        axis, scale = axis | {"values": ticks_of(*log_range)}, {"type": "log", "nice": False}
    y = {"field": "y", "type": "quantitative", "title": None, "scale": scale, "axis": axis}
    colour, dash, marker = {"color": _nominal(SETTING)}, {"strokeDash": _nominal(SETTING)}, {"shape": _nominal(SETTING)}
    line = {"x": x, "y": y, **colour}
    published = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    band = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, **colour}
    layers: list[Spec] = [
        {"data": {"name": "published"}, "mark": {"type": "rect", "color": variable("strip")}, "encoding": published},
        {
            "data": {"name": "means"},
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "area", "fillOpacity": 0.16},
            "encoding": band,
        },
        {
            "data": {"name": "seeds"},
            "mark": {"type": "line", "strokeWidth": 0.9, "strokeOpacity": 0.42},
            "encoding": {**line, "detail": {"field": "run"}},
        },
        {
            "data": {"name": "means"},
            "mark": {"type": "line", "strokeWidth": 2.3, "strokeCap": "butt"},
            "encoding": {**line, **dash},
        },
        {
            "data": {"name": "marks"},
            "mark": {"type": "point", "filled": True, "size": 62, "opacity": 1},
            "encoding": {**line, **marker},
        },
        {
            "data": {"name": "stops"},
            "mark": {"type": "text", "text": "\N{MULTIPLICATION X}", "fontSize": 13, "fontWeight": "bold"},
            "encoding": line,
        },
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
    axis = {
        "labelFontSize": 13,
        "labelColor": variable("fg"),
        "domain": False,
        "ticks": False,
        "labelPadding": 8,
        "labelLimit": WIDEST_LABEL,
    }
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


def forest(settings: Sequence[str], reference: str, same_within: float, alt: str) -> Spec:
    """Return an interval per setting, a tick per seed, a line at 0 and a strip for what counts as no difference.

    Data sets: `pairs` {setting, x, low, high} and `seeds` {setting, x}, in accuracy points.
    """
    axis = {
        "grid": True,
        "tickCount": 7,
        "format": "+.0f",
        "labelExpr": "datum.value == 0 ? '0' : datum.label",
        "labelOverlap": True,
    }
    name = reference if len(reference) <= LONGEST_REFERENCE else "the reference"
    title = f"accuracy points against {name} (95% interval)"

    def x(field: str) -> Spec:
        return {"field": field, "type": "quantitative", "title": title, "axis": axis, "scale": {"nice": True}}

    row = {"y": _settings_down(settings), "color": _nominal(SETTING)}
    layers: list[Spec] = [
        {
            "data": {"values": [{"low": -same_within, "high": same_within}]},
            "mark": {"type": "rect", "color": variable("strip")},
            "encoding": {"x": x("low"), "x2": {"field": "high"}},
        },
        {
            "data": {"values": [{"x": 0}]},
            "mark": {"type": "rule", "color": variable("axis"), "strokeWidth": 1.2},
            "encoding": {"x": x("x")},
        },
        {
            "data": {"name": "pairs"},
            "mark": {"type": "rule", "strokeWidth": 3},
            "encoding": {"x": x("low"), "x2": {"field": "high"}, **row},
        },
        {
            "data": {"name": "seeds"},
            "mark": {"type": "tick", "thickness": 1.5, "size": 14, "opacity": 0.6},
            "encoding": {"x": x("x"), **row},
        },
        {
            "data": {"name": "pairs"},
            "mark": {"type": "point", "filled": True, "size": 95, "opacity": 1},
            "encoding": {"x": x("x"), **row, "shape": _nominal(SETTING)},
        },
    ]
    return _framed(alt, row_height(settings, 38, 24), layers)


def stacked(settings: Sequence[str], parts: Mapping[str, str], alt: str) -> Spec:
    """Return a bar of shares for each setting. `parts`: name of a part -> its colour.

    Data set: `parts` {setting, part, share, place}, place being the order within a bar.
    """
    legend = {"orient": "bottom", "title": None, "columns": 4, "symbolType": "square", "symbolStrokeWidth": 0}
    colour = {
        "field": "part",
        "type": "nominal",
        "sort": list(parts),
        "scale": {"domain": list(parts), "range": list(parts.values())},
        "legend": legend,
    }
    x = {
        "field": "share",
        "type": "quantitative",
        "stack": "zero",
        "title": "share of the time",
        "axis": {"format": ".0%", "tickCount": 5, "labelFlush": True},
        "scale": {"domain": [0, 1], "nice": False},
    }
    encoding = {"y": _settings_down(settings), "x": x, "color": colour, "order": {"field": "place"}}
    mark = {"type": "bar", "stroke": variable("page"), "strokeWidth": 1, "height": {"band": 0.72}}
    layer: Spec = {"data": {"name": "parts"}, "mark": mark, "encoding": encoding}
    return _framed(alt, row_height(settings, 30, 20), [layer])
