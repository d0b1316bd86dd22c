"""Draw the pictures of a report and write its documents: one self-contained HTML file, and Markdown with pictures.

Altair writes the pictures' specifications, vl-convert compiles them and draws SVG, PNG and PDF. A page draws the
compiled specification itself, with colours that are CSS variables, so that light, dark and paper need no other one.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import altair as alt  # half a second: this module is imported where a report is written
import matplotlib
import numpy as np
import pandas
import vl_convert
from markupsafe import Markup  # for what needs no escaping: our files and pictures

from rlreason.report import content
from rlreason.report.content import MINUS, NONE, PLUS_MINUS, STEP_TITLE, TABLES, Figure, Report, Series, Table, filled
from rlreason.report.figures import FOREST
from rlreason.runtime.files import write_whole
from rlreason.runtime.statistics import Floats

Spec = dict[str, Any]
Rows = dict[str, list[dict[str, Any]]]
SETTING = "setting"  # the field that gives a mark its colour, dash and marker
MEANS = "means"  # a picture with this data set has curves, and needs a legend
CURVES = (MEANS, "seeds", "marks", "stops")  # data sets of curves
TOGETHER, FEWEST, MOST_OF_A_MEAN = 2400, 12, 100  # points of all thin lines of a picture, of one; of a mean
HEIGHT, FIRST_HEIGHT = 190, 370
WIDTH = 760  # pixels of a standalone picture
PHONE = 350  # pixels of a picture on a narrow page
POINTS = 0.65  # of a pixel in print, where texts of 12 and 13 pixels have 8 points
COLUMN = 3.25  # inches: a paper's column
DOTS = 300  # per inch, of a PNG for a paper
LINE_HEIGHT = 14  # pixels of a setting's label next to its row
LONGEST_LINE = 20  # characters of that label on one line
LONGEST_BESIDE = 24  # characters; with a longer label the legend is below the picture
CHARACTER = 7  # pixels of one in a legend
FEW_ROWS = 12
RUNTIME = Path(__file__).parent / "vega" / "vega.js"
FIRST_WIDTH, OTHER_WIDTH = 640, 520  # of the pictures until the script draws them
DIGITS = 4  # of a value; an x has one more
FILES = "report_files"  # next to the Markdown
PICTURES = ("eval/accuracy", "forest", "entropy", "length", "train/grad_norm")  # of the Markdown
AXES: dict[str, tuple[str, int]] = TABLES["axes"]  # axis -> its title, and what its counter is divided by


# ---- specifications ----


def specification(figure: Figure, legend: Sequence[str], side: str = "", paper: int = 0, font: str = "page") -> Spec:
    """Return a picture in Vega-Lite, with named data sets. `side`: where the legend is; "": outside of the picture.

    `paper`: the width in pixels of a picture for a paper, whose y axis has a title and whose texts a `font` of
    tables.yaml.
    """
    width = paper or WIDTH
    in_a_row = width // CHARACTER // (max(map(len, legend)) + 4)
    columns = {"columns": max(1, in_a_row), "labelLimit": width - 40} if side == "bottom" else {}
    shown = alt.Legend(orient=side, title=None, values=legend, **columns) if side else None
    grey = [row[SETTING] for row in figure.rows.get("pairs", []) if row[SETTING] not in legend]
    markers = list(TABLES["markers"])
    channels = {
        "color": (alt.Color, [*map(content.colour_of, range(len(legend))), *[content.colour_of(None)] * len(grey)]),
        "strokeDash": (alt.StrokeDash, TABLES["dashes"][: len(legend)]),
        "shape": (alt.Shape, markers[: len(legend)] + markers[:1] * len(grey)),
    }
    by = {}
    for name, (channel, values) in channels.items():
        scale = alt.Scale(domain=[*legend, *grey], range=values)
        by[name] = channel(field=SETTING, type="nominal", legend=shown, scale=scale)
    layers, height = _forest(figure, by, paper) if figure.name == FOREST else _curves(figure, by, paper)
    chart = alt.layer(*layers).properties(width="container", height=height)
    spec: Spec = chart.to_dict(validate=False)  # a test validates all kinds: it takes as long as the drawing
    config = TABLES["vega"] | {"font": TABLES["fonts"][font]}
    return spec | {"autosize": {"type": "fit-x", "contains": "padding"}, "config": config}


def _data(name: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=name))


def _curves(figure: Figure, by: Mapping[str, Any], paper: int) -> tuple[list[Any], Any]:
    """Return bands, a thin line per run, means, markers at quarters, and a cross where a run was stopped.

    Runs are drawn in the order of their steps, along any x.
    """
    height, y_title = FIRST_HEIGHT if figure.large else HEIGHT, None
    if paper:
        height = paper // 2
        y_title = wrap(figure.title + figure.unit, height // CHARACTER)
    kind = "log" if figure.log else "linear"  # with ends that no band widens
    scale = alt.Scale(domain=list(figure.limits), type=kind, nice=not figure.log, clamp=True)
    axis = alt.Axis(tickCount=5, format=figure.format)
    y, low = (alt.Y(f"{name}:Q", title=y_title, scale=scale, axis=axis) for name in ("y", "low"))
    scale_x = alt.Scale(zero=False, nice=False, padding=4)
    x = alt.X("x:Q", title=figure.x_title, scale=scale_x, axis=alt.Axis(**TABLES["ticks"]))
    if figure.axis == "total":  # four hours, in seconds
        hours = alt.Axis(values=[3600 * hour for hour in range(5)], labelExpr="datum.value / 3600")
        x = alt.X("x:Q", title=figure.x_title, scale=alt.Scale(domain=[0, 4 * 3600]), axis=hours)
    at = {"x": x, "y": y, "color": by["color"], "order": alt.OrderValue(0)}
    means = _data(MEANS).transform_filter("isValid(datum.low)")
    layers = [
        means.mark_area(fillOpacity=0.16).encode(**at | {"y": low}, y2="high"),
        _data("seeds").mark_line(strokeWidth=0.9, strokeOpacity=0.42).encode(**at, detail="run:N"),
        _data(MEANS).mark_line(strokeWidth=2.3, strokeCap="butt").encode(**at, strokeDash=by["strokeDash"]),
        _data("marks").mark_point(filled=True, size=62, opacity=1).encode(**at, shape=by["shape"]),
        _data("stops").mark_text(text="\N{MULTIPLICATION X}", fontSize=13, fontWeight="bold").encode(**at),
    ]
    return layers, height


def _forest(figure: Figure, by: Mapping[str, Any], paper: int) -> tuple[list[Any], Any]:
    """Return an interval per setting, a tick per seed, a line at 0 and a strip for what counts as no difference."""
    settings = [row[SETTING] for row in figure.rows["pairs"]]
    axis, title = alt.Axis(**TABLES["points"]), wrap(figure.x_title, (paper or PHONE) // CHARACTER)
    x, low = (alt.X(f"{name}:Q", title=title, axis=axis, scale=alt.Scale(nice=True)) for name in ("x", "low"))
    # a long label has a line for each word, and others as many blank ones above as keep them in the middle
    words = [re.split(r" |(?<=[/,])", name) if len(name) > LONGEST_LINE else [name] for name in settings]
    lines = max(map(len, words))
    texts = {name: [""] * ((lines - len(of)) // 2) + of for name, of in zip(settings, words, strict=True)}
    labels = alt.Axis(
        labelExpr=f"({json.dumps(texts, ensure_ascii=False)})[datum.label]",
        labelLineHeight=LINE_HEIGHT,
        labelOffset=-LINE_HEIGHT * (lines - 1) / 2,
        labelLimit=paper // 2,
        **TABLES["settings"],
    )
    y = alt.Y(f"{SETTING}:N", sort=settings, title=None, axis=labels, scale=alt.Scale(domain=settings))
    row = {"y": y, "color": by["color"]}
    layers = [
        _data("none").mark_rect(color="var(--strip)").encode(x=low, x2="high"),
        _data("zero").mark_rule(color="var(--axis)", strokeWidth=1.2).encode(x=x),
        _data("pairs").mark_rule(strokeWidth=3).encode(x=low, x2="high", **row),
        _data("seeds").mark_tick(thickness=1.5, size=14, opacity=0.6).encode(x=x, **row),
        _data("pairs").mark_point(filled=True, size=95, opacity=1).encode(x=x, **row, shape=by["shape"]),
    ]
    return layers, {"step": max(38 if len(settings) <= FEW_ROWS else 24, lines * LINE_HEIGHT + 6)}


# ---- data ----


def drawn(figure: Figure, legend: Sequence[str]) -> list[Series]:
    """Return the curves of a figure that have a colour, with the points that are drawn."""
    curves = [curve for curve in figure.curves if curve.setting in legend]
    points = max(FEWEST, TOGETHER // max(1, sum(curve.seed is not None for curve in curves)))
    kept = []
    for curve in curves:
        at = content.evenly(len(curve.y), MOST_OF_A_MEAN if curve.seed is None else points)
        x = {axis: values[at] for axis, values in curve.x.items()}
        band = None if curve.band is None else (curve.band[0][at], curve.band[1][at])
        kept.append(replace(curve, x=x, y=curve.y[at], band=band))
    return kept


def rows_of(figure: Figure, legend: Sequence[str]) -> Rows:
    """Return all data sets of a picture in its initial state; page.js makes the same rows of the page's data."""
    rows: Rows = dict(figure.rows)
    rows |= {name: [] for name in CURVES} if figure.curves else {}
    for number, curve in enumerate(drawn(figure, legend)):
        if figure.axis not in curve.x:
            continue
        columns = [values.tolist() for values in (curve.x[figure.axis], curve.y, *(curve.band or (curve.y, curve.y)))]
        points = [
            {"x": x, "y": y, "low": low, "high": high, SETTING: curve.setting, "run": number}
            for x, y, low, high in zip(*columns, strict=True)
        ]
        if curve.seed is None:
            last = len(points) - 1
            rows[MEANS] += points
            rows["marks"] += [points[k] for k in sorted({last // 4, last // 2, 3 * last // 4, last})]
        else:
            rows["seeds"] += points
            rows["stops"] += points[-1:] if curve.stopped else []
    return rows


# ---- drawing ----


def compiled(figure: Figure, legend: Sequence[str], **options: Any) -> Spec:
    """Compile a picture to Vega; a page gives the title of a switched x axis by the signal `xtitle`.

    `options`: of `specification`.
    """
    vega: Spec = vl_convert.vegalite_to_vega(specification(figure, legend, **options))
    for axis in vega["axes"]:
        if axis.get("title") == STEP_TITLE:
            axis["title"] = {"signal": "xtitle"}
    for shown in vega.get("legends", []):
        shown.pop("strokeDash", None)  # it would fray the markers
    vega["signals"].append({"name": "xtitle", "value": STEP_TITLE})
    return vega | {"description": figure.alt}


def svg_of(vega: Spec, rows: Rows, width: int) -> str:
    """Draw a compiled specification, with colours as CSS variables."""
    data = [{**one, "values": rows[one["name"]]} if one["name"] in rows else one for one in vega["data"]]
    signals = [{"name": "width", "value": width} if one["name"] == "width" else one for one in vega["signals"]]
    svg: str = vl_convert.vega_to_svg({**vega, "data": data, "signals": signals})
    return svg


def with_own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids of an SVG and their references, since a page holds several SVGs.

    >>> with_own_ids('<clipPath id="clip0"/><g clip-path="url(#clip0)"/>', "p1")
    '<clipPath id="p1-clip0"/><g clip-path="url(#p1-clip0)"/>'
    """
    return re.sub(r'(\bid="|url\(#)([\w-]+)', rf"\1{prefix}-\2", svg)


def with_legend(figure: Figure, legend: Sequence[str], paper: int = 0, font: str = "page") -> Spec:
    """Compile a picture with its legend, and a title unless it is for a paper, which has captions."""
    side = "" if figure.name == FOREST else "bottom" if paper or max(map(len, legend)) > LONGEST_BESIDE else "right"
    vega = compiled(figure, legend, side=side, paper=paper, font=font)
    if not paper:
        subtitle = [line for line in (figure.subtitle, figure.note) if line]
        vega["title"] = {"text": figure.title, "subtitle": subtitle, "anchor": "start", "offset": 8}
    return vega


def standalone(figure: Figure, legend: Sequence[str], paper: int = 0, font: str = "page") -> str:
    """Return a picture as SVG with its legend, on the colour of the page, with colours as CSS variables."""
    vega = with_legend(figure, legend, paper, font) | {"background": "var(--page)"}
    return svg_of(vega, rows_of(figure, legend), paper or WIDTH)


def write_figures(
    figures: Sequence[Figure], legend: Sequence[str], folder: Path, width: float = COLUMN, font: str = "sans"
) -> None:
    """Write each picture for a paper, so many inches wide, as NAME.svg, .png and .pdf, and its data as NAME.csv.

    The data of curves are every value of every run, and means with their intervals along the picture's x.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vl_convert.register_font_directory(str(Path(matplotlib.get_data_path(), "fonts", "ttf")))
    for figure in figures:
        stem = re.sub(r"\W+", "_", figure.name)
        svg = content.plain_colours(standalone(figure, legend, round(72 * width / POINTS), font))
        pattern = r'\b(width|height)="([\d.]+)"'
        svg = re.sub(pattern, lambda size: f'{size[1]}="{float(size[2]) * POINTS:g}"', svg, count=2)
        write_whole(folder / f"{stem}.svg", re.sub(pattern, r'\1="\2pt"', svg, count=2))
        write_whole(folder / f"{stem}.png", vl_convert.svg_to_png(svg, scale=DOTS / 72))
        write_whole(folder / f"{stem}.pdf", vl_convert.svg_to_pdf(svg))
        frames = [pandas.DataFrame(rows).assign(data=name) for name, rows in figure.rows.items()]
        for curve in figure.curves:
            if curve.seed is not None or figure.axis in curve.x:  # no mean along another axis
                named = {"data": "mean" if curve.seed is None else "run", "seed": curve.seed, SETTING: curve.setting}
                band = dict(zip(("low", "high"), curve.band or (), strict=False))
                frames.append(pandas.DataFrame(named | dict(curve.x) | {"value": curve.y} | band))
        write_whole(folder / f"{stem}.csv", pandas.concat(frames).to_csv(index=False))


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    """Write each table without costs as NAME.tex, which needs booktabs, and NAME.csv with half widths by themselves."""
    for table in tables:
        stem = re.sub(r"\W+", "_", table.title.lower())
        cells = pandas.DataFrame(table.rows, columns=table.head)
        cells = cells.loc[:, ~cells.columns.str.endswith(" a run")]
        cells = cells.replace({r"\np [=<].*|^\W ": "", "\n": " "}, regex=True)  # no p, no sign of a verdict
        tex = cells.to_latex(index=False, escape=True, column_format="@{}l" + "r" * (cells.shape[1] - 1) + "@{}")
        tex = tex.replace(PLUS_MINUS, r"$\pm$").replace(MINUS, "$-$")
        write_whole(folder / f"{stem}.tex", f"% {table.note}\n{tex}")
        for name in cells:
            if cells[name].str.contains(PLUS_MINUS).any():
                parts = cells[name].str.replace("%", "").str.split(f" {PLUS_MINUS} ", expand=True)
                cells[[name, f"{name} {PLUS_MINUS}"]] = parts
        write_whole(folder / f"{stem}.csv", cells.replace(NONE, None).to_csv(index=False).replace(MINUS, "-"))


# ---- Markdown ----


def write_markdown(report: Report, target: Path) -> None:
    """Write `target` and, in the folder FILES next to it, its pictures. `UnwritableError` if the system refuses."""
    (target.parent / FILES).mkdir(parents=True, exist_ok=True)
    by_name = {figure.name: figure for figure in report.every_figure}
    pictures = []
    for figure in (by_name[name] for name in PICTURES if name in by_name):
        stem = re.sub(r"\W+", "_", figure.name)
        file = f"{FILES}/{stem}.svg"
        write_whole(target.parent / file, content.plain_colours(standalone(figure, report.legend, font="sans")))
        pictures.append((figure.alt, file))
    write_whole(target, filled("report.md.j2", report=report, pictures=pictures))


# ---- page ----


def page_of(report: Report) -> str:
    """Return the whole page."""
    figures, legend = report.every_figure, report.legend
    specifications, pictures = dict[str, Spec](), dict[str, Markup]()
    first = report.figures[0] if report.figures else None
    for place, figure in enumerate(figures):
        specifications[figure.name] = vega = with_legend(figure, legend)
        bare = vega | {"title": None, "legends": []}  # which the page has itself
        svg = svg_of(bare, rows_of(figure, legend), FIRST_WIDTH if figure is first else OTHER_WIDTH)
        pictures[figure.name] = Markup(with_own_ids(svg, f"p{place}"))
    scripts = [RUNTIME.read_text("utf-8"), (content.TEMPLATES / "page.js").read_text("utf-8")]
    return filled(
        "page.html.j2",
        report=report,
        first=first,
        pictures=pictures,
        axes=axes_of(figures),
        policy=policy_of(scripts),
        scripts=[Markup(script) for script in scripts],
        data=data_of(figures, specifications, legend),
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
                "seed": curve.seed,
                "stopped": curve.stopped,
                "x": {axis: short(x / AXES[axis][1], DIGITS + 1) for axis, x in curve.x.items() if axis in AXES},
                "y": short(curve.y),
                "band": [short(end) for end in curve.band or ()],
            }
            for curve in drawn(figure, legend)
        ]
        spec = specifications[figure.name]
        out[figure.name] = {"spec": spec, "rows": figure.rows, "curves": curves}
        out[figure.name] |= {"format": figure.format, "limits": figure.limits}
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
