"""A write-up as one HTML file: no script, no network, the style of a report's page."""

import re
from collections.abc import Mapping
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.report.assignment.section import WriteUp
from rlreason.report.content import SIGNS
from rlreason.report.page import breakable, style
from rlreason.report.palette import LIGHT, variable
from rlreason.report.shown import written_out
from rlreason.runtime.version import __version__

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
    environment.filters["breakable"] = breakable
    return environment.get_template(TEMPLATE).render(
        document=document,
        pictures={stem: Markup(themed(svg, stem)) for stem, svg in pictures.items()},  # made by vl-convert
        policy=POLICY,
        style=Markup(style()),
        signs=SIGNS,
        version=__version__,
    )


def themed(svg: str, prefix: str) -> str:
    """A light picture whose colours follow the page's, and whose ids are its own.

    >>> themed('<g id="a" clip-path="url(#a)" fill="#1895D8"/>', "p")
    '<g id="p-a" clip-path="url(#p-a)" fill="var(--s1)"/>'
    """
    svg = re.sub(r'\bid="([\w-]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([\w-]+)\)", rf"url(#{prefix}-\1)", svg)
    names = {colour.lower(): name for name, colour in reversed(LIGHT.items())}
    return re.sub(r'"(#[0-9a-fA-F]{6})"', lambda found: f'"{_named(found[1], names)}"', svg)


def _named(colour: str, names: Mapping[str, str]) -> str:
    name = names.get(colour.lower())
    return variable(name) if name is not None else colour
