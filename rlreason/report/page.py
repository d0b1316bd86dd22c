"""A report as one HTML file that needs nothing else: no network, no server, and for its pictures no JavaScript either.

The page's own files are in `page/`. What is not ours is text: escaped by the template, and with what a browser would
obey written out. A content policy allows the page's two scripts by their hashes and nothing else.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.report.content import SIGNS, Figure, Report
from rlreason.report.page_data import as_json, axes_of, data_of
from rlreason.report.palette import DASHES, MARKERS, colour_of, css_variables
from rlreason.report.pictures import MEANS, compiled, rows_of, svg_in_page
from rlreason.report.shown import written_out
from rlreason.runtime.version import __version__

FOLDER = Path(__file__).parent / "page"
RUNTIME = FOLDER / "runtime" / "vega.js"
FIRST_WIDTH, OTHER_WIDTH = 640, 520  # of the pictures that stand until they are drawn anew
WORDS = {"same": "same within 2"}  # of a verdict's tag, where it is not the verdict's own


def page_of(report: Report) -> str:
    """The whole page. `ConfigError` where vl-convert or jinja2 are not installed."""
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
    """The content policy of a page with these scripts: nothing is loaded, sent or evaluated."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def style() -> str:
    """The style sheet: colours for light, dark and paper before the rules of style.css."""
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
    """A heading that may be broken behind = and _, as the names of settings have no spaces."""
    from markupsafe import Markup, escape

    return Markup(re.sub("([=_])", r"\1<wbr>", str(escape(written_out(text)))))


def is_curve(figure: Figure) -> bool:
    """Whether a figure has the switch of axes, a cursor and a zoom."""
    return figure.curves is not None


def _trusted(texts: dict[str, str]) -> dict[str, Any]:
    """What the template takes as it is: our own files, pictures made by vl-convert, JSON made by `as_json`."""
    from markupsafe import Markup

    return {name: Markup(text) for name, text in texts.items()}
