"""Write the documents of a report from their templates: one self-contained HTML file, and Markdown with pictures."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup  # for what needs no escaping: our files, pictures, JSON of `as_json`

from rlreason.report import content
from rlreason.report.charts import compiled, drawn, rows_of, standalone, svg_of, with_own_ids
from rlreason.report.content import STEP_TITLE, Figure, Report, filled
from rlreason.runtime.files import write_whole
from rlreason.runtime.statistics import Floats

RUNTIME = Path(__file__).parent / "vega" / "vega.js"
FIRST_WIDTH, OTHER_WIDTH = 640, 520  # of the pictures until the script draws them
DIGITS = 4  # of a value; an x has one more
FILES = "report_files"  # next to the Markdown
PICTURES = ("eval/accuracy", "forest", "entropy", "length", "train/grad_norm")  # of the Markdown
#: Axis -> its title, and what its counter is divided by.
AXES = {
    "step": (STEP_TITLE, 1),
    "time": ("active time (minutes)", 60),
    "tokens": ("generated tokens", 1),
    "updates": ("optimizer updates", 1),
}


# ---- Markdown ----


def write_markdown(report: Report, target: Path) -> None:
    """Write `target` and, in the folder FILES next to it, its pictures. `UnwritableError` if the system refuses."""
    by_name = {figure.name: figure for figure in report.every_figure}
    pictures = []
    for figure in (by_name[name] for name in PICTURES if name in by_name):
        stem = re.sub(r"\W+", "_", figure.name)
        write_picture(standalone(figure, report.legend), target.parent / FILES, stem)
        pictures.append((figure.alt, f"{FILES}/{stem}"))
    write_whole(target, filled("report.md.j2", report=report, pictures=pictures))


def write_picture(svg: str, folder: Path, stem: str) -> None:
    """Write a picture for light pages, and for dark ones."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{stem}.svg", content.plain_colours(svg))
    write_whole(folder / f"{stem}_dark.svg", content.plain_colours(svg, dark=True))


# ---- page ----


def page_of(report: Report) -> str:
    """Return the whole page."""
    figures, legend = report.every_figure, report.legend
    specifications = {figure.name: compiled(figure, legend) for figure in figures}
    first = report.figures[0] if report.figures else None
    pictures = {}
    for place, figure in enumerate(figures):
        width = FIRST_WIDTH if figure is first else OTHER_WIDTH
        drawn = svg_of(specifications[figure.name], rows_of(figure, legend), width)
        pictures[figure.name] = Markup(with_own_ids(drawn, f"p{place}"))
    scripts = [RUNTIME.read_text("utf-8"), (content.TEMPLATES / "page.js").read_text("utf-8")]
    return filled(
        "page.html.j2",
        report=report,
        first=first,
        pictures=pictures,
        axes=axes_of(figures),
        policy=policy_of(scripts),
        scripts=[Markup(script) for script in scripts],
        data=Markup(as_json(data_of(figures, specifications, legend))),
    )


def policy_of(scripts: Sequence[str] = ()) -> str:
    """Return the content policy of a page with these scripts: nothing is loaded, sent or evaluated."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    run = f"script-src {allowed}; " if hashes else ""
    return f"default-src 'none'; {run}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def data_of(figures: Sequence[Figure], specifications: Mapping[str, Any], legend: Sequence[str]) -> dict[str, Any]:
    """Return all data that a page draws. `specifications`: of the figures, compiled, by name."""
    out: dict[str, Any] = {}
    for figure in figures:
        curves = [
            {
                "setting": legend.index(curve.setting),
                "is_mean": curve.seed is None,
                "stopped": curve.stopped,
                "x": {axis: short(x / AXES[axis][1], DIGITS + 1) for axis, x in curve.x.items() if axis in AXES},
                "y": short(curve.y),
                "band": [short(end) for end in curve.band or ()],
            }
            for curve in drawn(figure, legend)
        ]
        rows = {} if figure.curves else rows_of(figure, legend)
        spec = specifications[figure.name]
        out[figure.name] = {"spec": spec, "format": figure.format, "rows": rows, "curves": curves}
    titles = {axis: AXES[axis][0] for axis in axes_of(figures)}
    return {"settings": list(legend), "axes": titles, "figures": out}


def short(values: Floats, digits: int = DIGITS) -> list[float | None]:
    """Round to significant digits; values that are not finite become None.

    >>> short(np.array([0.123456, 278696.0, np.nan]))
    [0.1235, 278700.0, None]
    """
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]


def axes_of(figures: Sequence[Figure]) -> list[str]:
    """Return the axes that a page can switch to: those along which its runs moved."""
    xs = [run.x for figure in figures for run in figure.curves if run.seed is not None]
    return [axis for axis in AXES if axis == "step" or any(np.ptp(x[axis]) > 0 for x in xs if axis in x)]


def as_json(data: Any) -> str:
    """Return JSON that is safe inside a <script> element, whatever its texts."""
    encoded = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    return encoded
