"""What a page's script needs to draw its pictures: specifications, and each run's values as columns of numbers."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlreason.report.content import Entry, Figure
from rlreason.report.curves import Band, Curves, Line, evenly, points_each, thinned
from rlreason.report.pictures import points_of_means, rows_of
from rlreason.report.shown import all_written_out
from rlreason.report.specifications import STEP_TITLE
from rlreason.report.study import AXES
from rlreason.statistics import Floats

TOGETHER = 8000  # points of all thin lines of a picture
DIGITS = 4  # of a value; of a place on an axis one more
TITLES = {"step": STEP_TITLE, "tokens": "generated tokens", "updates": "optimizer updates"}
#: Longest time in seconds that an axis shows in a unit -> the unit and its seconds.
UNITS = {120.0: ("seconds", 1), 7200.0: ("minutes", 60), float("inf"): ("hours", 3600)}


def data_of(figures: Sequence[Figure], specifications: Sequence[Any], legend: Sequence[Entry]) -> dict[str, Any]:
    """All of it, for `as_json`. `specifications`: of the figures, compiled.

    A line's x are numbers of `columns`, which hold every array once: runs of one length share their steps. Where a line
    is thinned, `at` says which places of its columns its values are of.
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
    """Arrays of numbers, each once."""

    def __init__(self) -> None:
        self.made: list[list[float]] = []
        self._places: dict[bytes, int] = {}

    def place(self, values: Floats) -> int:
        """The number of the column with these values."""
        key = values.tobytes()
        if key not in self._places:
            self._places[key] = len(self.made)
            self.made.append(short(values, DIGITS + 1))
        return self._places[key]


def _lines(curves: Curves, places: dict[str, int], columns: Columns) -> list[dict[str, Any]]:
    """The thin lines of the settings that have a colour."""
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
    """Axis -> the mean and band of each setting; of one without a colour the mean alone."""
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
    """Numbers with so many significant digits, whole ones without a point; none that is not finite.

    >>> short(np.array([0.123456, 278696.0, 3.0]))
    [0.1235, 278700, 3]
    """
    rounded = [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [int(value) if value.is_integer() else value for value in rounded]


def axes_of(figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """The axes that a page's switch offers, those along which its runs moved: title and unit of each."""
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
    r"""JSON that can stand inside a <script> element, whatever its texts are.

    >>> print(as_json({"a": "</script>"}))
    {"a":"\u003c/script\u003e"}
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
