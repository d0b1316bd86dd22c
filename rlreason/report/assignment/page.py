"""A write-up as one HTML file: no script, no network, the style of a report's page."""

from collections.abc import Mapping
from pathlib import Path

import rlreason
from rlreason.errors import ConfigError
from rlreason.report.assignment.section import WriteUp
from rlreason.report.content import SIGNS
from rlreason.report.page import style
from rlreason.report.shown import written_out

TEMPLATE = "writeup.html.j2"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page_of(document: WriteUp, pictures: Mapping[str, str]) -> str:
    """The whole page. `pictures`: stem -> SVG as it was drawn. `ConfigError` where jinja2 is not installed."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError("a write-up needs jinja2, which is not installed: pip install 'rlreason[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: written_out(value) if type(value) is str else value,
    )
    return environment.get_template(TEMPLATE).render(
        document=document,
        pictures={stem: Markup(svg) for stem, svg in pictures.items()},  # made by vl-convert
        policy=POLICY,
        style=Markup(style()),
        signs=SIGNS,
        version=rlreason.__version__,
    )
