"""Write a report as one self-contained HTML file, with the data that its script draws."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlreason.errors import ConfigError
from rlreason.report.charts import SETTING, STEP_TITLE, Spec
from rlreason.report.content import (
    DASHES,
    MARKERS,
    SIGNS,
    Curves,
    Entry,
    Figure,
    Report,
    all_written_out,
    colour_of,
    css_variables,
    evenly,
    points_each,
    thinned,
    variable,
    without_variables,
    written_out,
)
from rlreason.report.study import AXES
from rlreason.runtime.intervals import Floats
from rlreason.runtime.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template

Rows = dict[str, list[dict[str, Any]]]
MEANS = "means"  # a picture with this data set has curves, and needs a legend
STATIC_TOGETHER = 2400  # points of all thin lines of a static picture
MEANS_TOGETHER = 4000  # points of all means
MOST_OF_A_MEAN = 100
WIDTH = 760  # pixels of a standalone picture
LONGEST_BESIDE = 24  # characters; with a longer label the legend is below the picture


def svg_of(figure: Figure, legend: Sequence[Entry], dark: bool = False) -> str:
    """Return a standalone figure as SVG: with title and legend, in plain colours on the colour of the page."""
    with_legend = figure.curves is not None or MEANS in figure.rows
    specification = coloured(figure.specification, legend, with_legend)
    others = sum(entry.colour is None for entry in legend)
    subtitle = [figure.subtitle] + ([f"thin and grey: {others} other settings"] if others else [])
    if figure.note:
        subtitle.append(figure.note)
    title = {"text": figure.title, "subtitle": subtitle}
    vega = with_rows(_compile({**specification, "title": title}), rows_of(figure, legend), WIDTH)
    plain = {**without_variables(vega, dark), "background": without_variables(variable("page"), dark)}
    return _short_numbers(_library().vega_to_svg(plain))


def with_own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids of an SVG and their references, since a page holds several SVGs.

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


def coloured(specification: Mapping[str, Any], legend: Sequence[Entry], with_legend: bool = False) -> Spec:
    """Return a specification with the legend's colours, dashes and markers, and with the legend itself if asked.

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
    position = {"orient": "bottom", "columns": 2} if below else {"orient": "right"}
    legend_spec = {**position, "title": None, "values": named} if with_legend else None

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if not isinstance(value, Mapping):
            return value
        out = {key: walk(inner) for key, inner in value.items()}
        for channel, channel_range in ranges.items():
            if isinstance(encoding := out.get(channel), dict) and encoding.get("field") == SETTING:
                scale = {"domain": labels, "range": channel_range}
                out[channel] = {**encoding, "legend": legend_spec, "scale": scale}
        return out

    result: Spec = walk(specification)
    return result


def with_rows(compiled: Spec, rows: Rows, width: int) -> Spec:
    """Return a compiled specification with its data and a fixed width."""
    data = [{**one, "values": rows[one["name"]]} if one["name"] in rows else one for one in compiled["data"]]
    signals = [
        {"name": "width", "value": width} if signal["name"] == "width" else signal for signal in compiled["signals"]
    ]
    return {**compiled, "data": data, "signals": signals}


def rows_of(figure: Figure, legend: Sequence[Entry]) -> Rows:
    """Return all data sets of a figure in its initial state: curves against the step."""
    rows = {name: [dict(row) for row in data_set] for name, data_set in figure.rows.items()}
    if figure.curves is not None:
        rows |= _rows_against_step(figure.curves, legend)
    escaped: Rows = all_written_out(rows)
    return escaped


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
    points = points_each(len(curves.lines), STATIC_TOGETHER)
    for line in curves.lines:
        if in_colour.get(line.setting) and "step" in line.x:
            at, run = thinned(line.y, points), f"{line.setting}/{line.seed}"
            pairs = zip(line.x["step"][at].tolist(), line.y[at].tolist(), strict=True)
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
    return re.sub(r'(aria-label="[^"]*"|>[^<]*<)|(\d\.\d)\d+', lambda match: match[1] or match[2], svg)


TOGETHER = 8000  # points of all thin lines of a picture
DIGITS = 4  # of a value; an x has one more
TITLES = {"step": STEP_TITLE, "tokens": "generated tokens", "updates": "optimizer updates"}
#: Longest time in seconds -> the unit of its axis, and the seconds of that unit.
UNITS = {120.0: ("seconds", 1), 7200.0: ("minutes", 60), float("inf"): ("hours", 3600)}


def data_of(figures: Sequence[Figure], specifications: Sequence[Any], legend: Sequence[Entry]) -> dict[str, Any]:
    """Return all data for `as_json`. `specifications`: of the figures, compiled.

    The x of a line are indices into `columns`, which hold every array once: runs of one length share their steps. For a
    thinned line, `at` has the indices of its values in those columns.
    """
    columns = Columns()
    places = {entry.label: k for k, entry in enumerate(legend) if entry.colour is not None}
    all_places = {entry.label: k for k, entry in enumerate(legend)}
    out = {}
    for figure, specification in zip(figures, specifications, strict=True):
        rows = figure.rows if figure.curves is not None else rows_of(figure, legend)
        data: dict[str, Any] = {"spec": specification, "format": figure.format, "rows": all_written_out(rows)}
        if figure.curves is not None:
            data["lines"] = _lines(figure.curves, places, columns)
            data["bands"] = _bands(figure.curves, all_places)
        out[figure.name] = data
    settings = [{"label": entry.label, "colour": entry.colour} for entry in legend]
    return {
        "settings": all_written_out(settings),
        "axes": axes_of(figures),
        "columns": columns.values,
        "figures": out,
    }


class Columns:
    """Arrays of numbers, each stored once."""

    def __init__(self) -> None:
        self.values: list[list[float]] = []
        self._places: dict[bytes, int] = {}

    def place(self, values: Floats) -> int:
        """Return the index of the column with these values."""
        key = values.tobytes()
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(short(values, DIGITS + 1))
        return self._places[key]


def _lines(curves: Curves, places: dict[str, int], columns: Columns) -> list[dict[str, Any]]:
    """Return the thin lines of the settings that have a colour."""
    points, lines = points_each(len(curves.lines), TOGETHER), []
    for line in (line for line in curves.lines if line.setting in places):
        at = thinned(line.y, points)
        x = {axis: columns.place(values) for axis, values in line.x.items()}
        out: dict[str, Any] = {"setting": places[line.setting], "seed": line.seed, "x": x, "y": short(line.y[at])}
        if len(at) < len(line.y):
            out["at"] = at.tolist()
        if line.stopped:
            out["stopped"] = True
        lines.append(out)
    return lines


def _bands(curves: Curves, places: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Return axis -> mean and band of each setting."""
    out: dict[str, list[dict[str, Any]]] = {}
    for axis, bands in curves.bands.items():
        points, out[axis] = points_of_means(len(bands)), []
        for label, whole in bands.items():
            band = whole.at(evenly(len(whole.x), points))
            values = {"setting": places[label], "x": short(band.x, DIGITS + 1), "mean": short(band.mean)}
            if band.low is not None and band.high is not None:
                values |= {"low": short(band.low), "high": short(band.high)}
            out[axis].append(values)
    return out


def short(values: Floats, digits: int = DIGITS) -> list[float]:
    """Round to significant digits, whole numbers without a point; values that are not finite become None.

    >>> short(np.array([0.123456, 278696.0, 3.0]))
    [0.1235, 278700, 3]
    """
    rounded = [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [int(value) if value.is_integer() else value for value in rounded]


def axes_of(figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """Return title and unit of each axis that a page can switch to: those along which its runs moved."""
    ends = dict.fromkeys(AXES, 0.0)
    for curves in (figure.curves for figure in figures if figure.curves is not None):
        for line in curves.lines:
            for axis, x in line.x.items():
                ends[axis] = max(ends[axis], float(np.ptp(x))) if len(x) else ends[axis]
    axes = {}
    for axis in (axis for axis, end in ends.items() if end > 0 or axis == "step"):
        unit, seconds = (
            next(unit for longest, unit in UNITS.items() if ends[axis] <= longest) if axis == "time" else ("", 1)
        )
        title = f"active time ({unit})" if axis == "time" else TITLES[axis]
        axes[axis] = {"title": title, "divide": seconds}
    return axes


def as_json(data: Any) -> str:
    r"""Return JSON that is safe inside a <script> element, whatever its texts.

    >>> print(as_json({"a": "</script>"}))
    {"a":"\u003c/script\u003e"}
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


FOLDER = Path(__file__).parent / "page"
RUNTIME = FOLDER / "runtime" / "vega.js"
FIRST_WIDTH, OTHER_WIDTH = 640, 520  # of the pictures until the script draws them
WORDS = {"same": "same within 2"}  # the tag of a verdict, if not its word


def page_of(report: Report) -> str:
    """Return the whole page. `ConfigError` if vl-convert or jinja2 are not installed."""
    figures = [*report.figures, *([report.forest] if report.forest is not None else [])]
    specifications = [compiled(figure, report.legend) for figure in figures]
    pictures = {}
    for place, (figure, specification) in enumerate(zip(figures, specifications, strict=True)):
        width = FIRST_WIDTH if place == 0 and report.figures else OTHER_WIDTH
        svg = _library().vega_to_svg(with_rows(specification, rows_of(figure, report.legend), width))
        pictures[figure.name] = with_own_ids(_short_numbers(svg), f"p{place}")
    page = template(FOLDER, "report.html.j2")
    from markupsafe import Markup  # for what needs no escaping: our files, vl-convert's pictures, JSON of `as_json`

    scripts = [RUNTIME.read_text("utf-8"), (FOLDER / "app.js").read_text("utf-8")]
    places = {entry.label: entry.colour for entry in report.legend}
    first = next((figure for figure in report.figures[:1] if MEANS in figure.rows or figure.curves is not None), None)
    return page.render(
        version=__version__,
        signs=SIGNS,
        words=WORDS,
        dashes=DASHES,
        markers=list(MARKERS.values()),
        colour_of=colour_of,
        report=report,
        first=first,
        others=[figure for figure in report.figures if figure is not first],
        verdicts=[v for v in report.verdicts if places.get(v.setting) is not None],
        more_verdicts=[v for v in report.verdicts if places.get(v.setting) is None],
        pictures={name: Markup(svg) for name, svg in pictures.items()},
        places=places,
        axes=axes_of(figures),
        any_curve=any(figure.curves is not None for figure in figures),
        policy=policy_of(scripts),
        style=Markup(style()),
        scripts=[Markup(script) for script in scripts],
        data=Markup(as_json(data_of(figures, specifications, report.legend))),
    )


def policy_of(scripts: list[str]) -> str:
    """Return the content policy of a page with these scripts: nothing is loaded, sent or evaluated."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def style() -> str:
    """Return the style sheet: colours for light, dark and paper, then the rules of style.css."""
    light, dark = f"{css_variables()}color-scheme:light;", f"{css_variables(dark=True)}color-scheme:dark;"
    return "\n".join(
        [
            f":root{{{light}}}",
            f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
            f":root[data-theme=dark]{{{dark}}}",
            f"@media print{{:root,:root[data-theme=dark],:root:not([data-theme=light]){{{light}}}}}",
            (FOLDER / "style.css").read_text("utf-8"),
        ]
    )


def template(folder: Path, name: str) -> "Template":
    """Return a template that escapes every text. `ConfigError` if jinja2 is not installed."""
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("a report needs jinja2, which is not installed: pip install 'rlreason[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: written_out(value) if type(value) is str else value,
    )
    environment.filters["breakable"] = breakable
    return environment.get_template(name)


def breakable(text: str) -> Any:
    """Return a heading that may be broken after = and _, since names of settings have no spaces."""
    from markupsafe import Markup, escape

    return Markup(re.sub("([=_])", r"\1<wbr>", str(escape(written_out(text)))))
