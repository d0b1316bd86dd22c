"""Colours, dashes and markers of a report: for its page as CSS variables, for pictures by themselves as they are.

Settings have `s0` (the reference, neutral and solid) to `s7`. Each has a contrast of at least 3 with the page, and any
two differ by at least 9.9 (light) and 10 (dark) in OKLab x 100 for normal, protan, deutan and tritan eyes; a dash and a
marker repeat what the colour says.
"""

import json
import re
from typing import Any

LIGHT = {
    "s0": "#363B43",
    "s1": "#1895D8",
    "s2": "#C6753D",
    "s3": "#086809",
    "s4": "#975695",
    "s5": "#BA3556",
    "s6": "#6433A1",
    "s7": "#4661D7",
    "rest": "#8c959f",  # settings beyond those, all alike
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
#: Of s0 to s7, as SVG has it: lengths of line and gap.
DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2, 1, 2), (3, 3), (14, 3, 3, 3))
#: Of s0 to s7: Vega's name -> the same as the path of an SVG, around 0,0.
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
    """A colour by its name, as a page has it: `variable("s0")` is 'var(--s0)'."""
    return f"var(--{name})"


def colour_of(place: int | None) -> str:
    """The name of the colour of an `Entry`: 's2'; 'rest' where it has none of its own."""
    return "rest" if place is None else f"s{place}"


def css_variables(dark: bool = False) -> str:
    """The declarations of all colours, for one block of a style sheet.

    >>> css_variables().partition(";")[0]
    '--s0:#363B43'
    """
    return "".join(f"--{name}:{colour};" for name, colour in (DARK if dark else LIGHT).items())


def without_variables(specification: Any, dark: bool = False) -> Any:
    """The same specification with colours as they are instead of CSS variables, which only a page knows.

    >>> without_variables({"color": "var(--s1)"})
    {'color': '#1895D8'}
    """
    colours = DARK if dark else LIGHT
    return json.loads(_VARIABLE.sub(lambda found: colours[found[1]], json.dumps(specification)))
