"""Write a report as one self-contained HTML file, with the data that its script draws."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.errors import ConfigError
from rlreason.report.content import (
    SIGNS,
    Band,
    Curves,
    Entry,
    Figure,
    Line,
    Report,
    all_written_out,
    evenly,
    points_each,
    thinned,
    written_out,
)
from rlreason.report.pictures import MEANS, compiled, points_of_means, rows_of, svg_in_page
from rlreason.report.specifications import DASHES, MARKERS, STEP_TITLE, colour_of, css_variables
from rlreason.report.study import AXES
from rlreason.runtime.intervals import Floats
from rlreason.runtime.version import __version__

TOGETHER = 8000  # points of all thin lines of a picture
DIGITS = 4  # of a value; of a place on an axis one more
TITLES = {"step": STEP_TITLE, "tokens": "generated tokens", "updates": "optimizer updates"}
#: Longest time in seconds that an axis shows in a unit -> the unit and its seconds.
UNITS = {120.0: ("seconds", 1), 7200.0: ("minutes", 60), float("inf"): ("hours", 3600)}


def data_of(figures: Sequence[Figure], specifications: Sequence[Any], legend: Sequence[Entry]) -> dict[str, Any]:
    """Return all data for `as_json`. `specifications`: of the figures, compiled.

    The x of a line are indices into `columns`, which hold every array once: runs of one length share their steps. For a
    thinned line, `at` has the indices of its values in those columns.
    """
    columns = Columns()
    places = {entry.label: k for k, entry in enumerate(legend) if entry.colour is not None}
    everything = {entry.label: k for k, entry in enumerate(legend)}
    drawn = {}
    for figure, specification in zip(figures, specifications, strict=True):
        of_it: dict[str, Any] = {"spec": specification, "format": figure.format}
        rows = figure.rows if figure.curves is not None else rows_of(figure, legend)
        of_it["rows"] = all_written_out(rows)
        if figure.curves is not None:
            of_it["lines"] = _lines(figure.curves, places, columns)
            of_it["bands"] = _bands(figure.curves, everything)
        drawn[figure.name] = of_it
    settings = [{"label": entry.label, "colour": entry.colour} for entry in legend]
    return {
        "settings": all_written_out(settings),
        "axes": axes_of(figures),
        "columns": columns.made,
        "figures": drawn,
    }


class Columns:
    """Arrays of numbers, each stored once."""

    def __init__(self) -> None:
        self.made: list[list[float]] = []
        self._places: dict[bytes, int] = {}

    def place(self, values: Floats) -> int:
        """Return the index of the column with these values."""
        key = values.tobytes()
        if key not in self._places:
            self._places[key] = len(self.made)
            self.made.append(short(values, DIGITS + 1))
        return self._places[key]


def _lines(curves: Curves, places: dict[str, int], columns: Columns) -> list[dict[str, Any]]:
    """Return the thin lines of the settings that have a colour."""
    points = points_each(len(curves.lines), TOGETHER)
    return [_line(line, places[line.setting], points, columns) for line in curves.lines if line.setting in places]


def _line(line: Line, place: int, points: int, columns: Columns) -> dict[str, Any]:
    at = thinned(line.y, points)
    found: dict[str, Any] = {
        "setting": place,
        "seed": line.seed,
        "x": {axis: columns.place(x) for axis, x in line.x.items()},
        "y": short(line.y[at]),
    }
    if len(at) < len(line.y):
        found["at"] = at.tolist()
    if line.stopped:
        found["stopped"] = True
    return found


def _bands(curves: Curves, places: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Return axis -> mean and band of each setting; only the mean for one without a colour."""
    found: dict[str, list[dict[str, Any]]] = {}
    for axis, bands in curves.bands.items():
        points = points_of_means(len(bands))
        found[axis] = [_band(band.at(evenly(len(band.x), points)), places[label]) for label, band in bands.items()]
    return found


def _band(band: Band, place: int) -> dict[str, Any]:
    found: dict[str, Any] = {"setting": place, "x": short(band.x, DIGITS + 1), "mean": short(band.mean)}
    if band.low is not None and band.high is not None:
        found |= {"low": short(band.low), "high": short(band.high)}
    return found


def short(values: Floats, digits: int = DIGITS) -> list[float]:
    """Round to significant digits, whole numbers without a point; values that are not finite become None.

    >>> short(np.array([0.123456, 278696.0, 3.0]))
    [0.1235, 278700, 3]
    """
    rounded = [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [int(value) if value.is_integer() else value for value in rounded]


def axes_of(figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """Return the axes of a page's switch, along which its runs moved: title and unit of each."""
    ends = dict.fromkeys(AXES, 0.0)
    for curves in (figure.curves for figure in figures if figure.curves is not None):
        for line in curves.lines:
            for axis, x in line.x.items():
                ends[axis] = max(ends[axis], float(np.ptp(x))) if len(x) else ends[axis]
    found = {}
    for axis in (axis for axis, end in ends.items() if end > 0 or axis == "step"):
        unit, seconds = next(of for most, of in UNITS.items() if ends[axis] <= most) if axis == "time" else ("", 1)
        title = f"active time ({unit})" if axis == "time" else TITLES[axis]
        found[axis] = {"title": title, "divide": seconds}
    return found


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
FIRST_WIDTH, OTHER_WIDTH = 640, 520  # of the pictures that stand until they are drawn anew
WORDS = {"same": "same within 2"}  # of a verdict's tag, where it is not the verdict's own


def page_of(report: Report) -> str:
    """Return the whole page. `ConfigError` if vl-convert or jinja2 are not installed."""
    figures = [*report.figures, *([report.forest] if report.forest is not None else [])]
    specifications = [compiled(figure, report.legend) for figure in figures]
    pictures = {}
    for place, (figure, specification) in enumerate(zip(figures, specifications, strict=True)):
        width = FIRST_WIDTH if place == 0 and report.figures else OTHER_WIDTH
        pictures[figure.name] = svg_in_page(specification, rows_of(figure, report.legend), width, f"p{place}")
    scripts = [RUNTIME.read_text("utf-8"), (FOLDER / "app.js").read_text("utf-8")]
    places = {entry.label: entry.colour for entry in report.legend}
    first = next((figure for figure in report.figures[:1] if MEANS in figure.rows or is_curve(figure)), None)
    page: str = _template().render(
        report=report,
        first=first,
        others=[figure for figure in report.figures if figure is not first],
        verdicts=[v for v in report.verdicts if places.get(v.setting) is not None],
        more_verdicts=[v for v in report.verdicts if places.get(v.setting) is None],
        pictures=_trusted(pictures),
        places=places,
        axes=axes_of(figures),
        any_curve=any(is_curve(figure) for figure in figures),
        policy=policy_of(scripts),
        style=_trusted({"css": style()})["css"],
        scripts=[_trusted({"script": script})["script"] for script in scripts],
        data=_trusted({"json": as_json(data_of(figures, specifications, report.legend))})["json"],
    )
    return page


def policy_of(scripts: list[str]) -> str:
    """Return the content policy of a page with these scripts: nothing is loaded, sent or evaluated."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def style() -> str:
    """Return the style sheet: colours for light, dark and paper, then the rules of style.css."""
    light, dark = (f"{css_variables(dark)}color-scheme:{('light', 'dark')[dark]};" for dark in (False, True))
    return "\n".join(
        [
            f":root{{{light}}}",
            f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
            f":root[data-theme=dark]{{{dark}}}",
            f"@media print{{:root,:root[data-theme=dark],:root:not([data-theme=light]){{{light}}}}}",
            (FOLDER / "style.css").read_text("utf-8"),
        ]
    )


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("a report needs jinja2, which is not installed: pip install 'rlreason[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: written_out(value) if type(value) is str else value,
    )
    environment.globals.update(
        version=__version__,
        signs=SIGNS,
        words=WORDS,
        dashes=DASHES,
        markers=list(MARKERS.values()),
        colour_of=colour_of,
        is_curve=is_curve,
    )
    environment.filters["breakable"] = breakable
    return environment.get_template("report.html.j2")


def breakable(text: str) -> Any:
    """Return a heading that may be broken after = and _, since names of settings have no spaces."""
    from markupsafe import Markup, escape

    return Markup(re.sub("([=_])", r"\1<wbr>", str(escape(written_out(text)))))


def is_curve(figure: Figure) -> bool:
    """Return whether a figure has the switch of axes, a cursor and a zoom."""
    return figure.curves is not None


def _trusted(texts: dict[str, str]) -> dict[str, Any]:
    """Mark as safe what the template does not escape: our own files, pictures of vl-convert, JSON of `as_json`."""
    from markupsafe import Markup

    return {name: Markup(text) for name, text in texts.items()}
