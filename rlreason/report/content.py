"""Define the content of a report, independent of page or Markdown, its colours, and how templates are filled."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from jinja2.runtime import Context
from markupsafe import Markup, escape
from numpy.typing import NDArray

from rlreason.runtime import __version__
from rlreason.runtime.statistics import Difference, Floats
from rlreason.runtime.text import visible


def evenly(count: int, most: int) -> NDArray[np.intp]:
    """Return at most `most` of `count` indices, evenly spaced, including the first and the last.

    >>> evenly(5, 3), evenly(2, 3)
    (array([0, 2, 4]), array([0, 1]))
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))


#: Words, names, shapes and the look of pictures; the file describes them.
TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text("utf-8"))
PLUS_MINUS, MINUS, NONE = "\N{PLUS-MINUS SIGN}", "\N{MINUS SIGN}", "\N{EN DASH}"  # in cells
SIGNS: dict[str, str] = TABLES["signs"]  # word of a verdict -> its sign
MOST_COLOURS = 8  # settings in a picture
STEP_TITLE = "training step"  # of the x of curves; a page replaces it when another axis is chosen


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one setting against the reference."""

    setting: str  # labels
    reference: str
    word: str  # of SIGNS
    sentence: str  # the whole verdict, ending with a full stop
    small: str = ""  # "4 paired seeds · 256 problems · p = 0.02 (Holm, 4 comparisons)"
    difference: Difference | None = None  # None: not compared
    adjusted_p: float | None = None
    by_seed: Mapping[int, float] = field(default_factory=dict)  # seed -> mean difference, if paired
    typed: tuple[str, str] = ("", "")  # setting and reference as overrides
    outcome: str = ""  # better, worse, cannot tell or same, by the interval alone; "" if not compared
    clusters: str = ""  # "7 subjects", if the difference is by them
    headline: str = ""  # of HEADLINES, where the word alone would say too much or too little
    of_set: str = ""  # one of `eval.sets`; "" is the run's own validation


@dataclass(frozen=True, slots=True)
class Series:
    """The finite values of one metric: those that a run measured, or the mean over a setting's seeds with its band."""

    x: Mapping[str, Floats]  # axis of study.AXES -> (points,), as written, without axes that the rows lack
    y: Floats  # (points,)
    setting: str = ""  # its label in a picture
    seed: int | None = None  # None: a mean
    stopped: bool = False  # before its last step
    band: tuple[Floats, Floats] | None = None  # low and high of a mean, NaN for one seed


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture, independent of how it is drawn (documents.py). Settings get their colours from a legend.

    Either curves, drawn against one of their axes at a time, or `rows`: the data sets by name.
    """

    name: str  # "eval/accuracy", "forest" ...: letters, digits, / and _
    title: str
    subtitle: str  # measure and unit
    format: str  # of its values, in d3's notation: ".0%"
    alt: str = ""  # alternative text, with the last values
    x_title: str = STEP_TITLE
    note: str = ""  # values that are left out
    rows: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    curves: Sequence[Series] = ()
    axis: str = "step"  # of the curves, at first
    share: bool = False  # its values are between 0 and 1
    log: bool = False  # on a logarithmic axis
    large: bool = False  # the picture of the first screen
    source: str = ""  # its metric, where it has another name
    unit: str = ""  # of its values, behind the title of an axis: " (tokens)"
    limits: tuple[float, float] = (0.0, 1.0)  # its y axis ends there, or before


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first line of a cell is large, the others small; columns in `numbers` are right-aligned."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One problem with its responses over training, settings side by side."""

    question: str
    ground_truth: str
    steps: Mapping[int, Sequence[Mapping[str, str]]]  # step -> of each setting: setting, outcome, text, where


@dataclass(slots=True)
class Report:
    """A whole report in the order of its page."""

    name: str  # of the sweep
    question: str
    summary: str  # all verdicts in one sentence
    lead: str  # the introduction
    legend: list[str]  # labels of the settings in the pictures, each with the colour of its place
    verdicts: list[Verdict]
    facts: list[tuple[str, str]]  # below the first screen: term, description
    warnings: list[str]
    figures: list[Figure]  # the first is the first screen's
    tables: list[Table]  # settings, then pass@k, health
    log: Table
    problems: list[str]  # found in the folders
    cases: list[Case]
    details: list[tuple[str, str | Table]]  # title, and what it folds away
    forest: Figure | None = None  # the differences; None where there is one setting
    models: list[dict[str, Any]] = field(default_factory=list)  # that were measured, for JSON

    @property
    def every_figure(self) -> list[Figure]:
        """Return all figures, the forest last."""
        return [*self.figures, *([self.forest] if self.forest is not None else [])]


TEMPLATES = Path(__file__).parent / "templates"
#: Name of a colour -> its value on light pages.
LIGHT = dict(re.findall(r"--([\w-]+): light-dark\((#\w+),", (TEMPLATES / "page.css").read_text("utf-8")))


def colour_of(place: int | None) -> str:
    """Return the colour of a place in the legend as a CSS variable, grey for None."""
    return "var(--rest)" if place is None else f"var(--s{place})"


def plain_colours(svg: str) -> str:
    """Return a picture with colours instead of CSS variables, which only a page defines.

    >>> plain_colours('<path stroke="var(--s1)"/>')
    '<path stroke="#1895D8"/>'
    """
    return re.sub(r"var\(--([\w-]+)\)", lambda match: LIGHT[match[1]], svg)


def printable(text: str) -> str:
    r"""Return a text with control characters, and halves of characters, which no file can hold, as escapes.

    >>> print(printable("a\x1b[2Jb \ud800"))
    a\x1b[2Jb \ud800
    """
    return visible(text).encode("utf-8", "backslashreplace").decode()


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `counted(1228, "run")` is '1,228 runs'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# ---- templates ----


def filled(name: str, **values: Any) -> str:
    """Return a document from its template: texts are escaped for NAME.html.j2 or NAME.md.j2, not for NAME.txt.j2."""
    return ENVIRONMENT.get_template(name).render(values)


@jinja2.pass_context
def _escaped(context: Context, value: Any) -> Any:
    kind = str(context.name).split(".")[1]
    if type(value) is not str or kind == "txt":  # a number, or Markup: our own files, pictures and macros
        return value
    return Markup(text(value)) if kind == "md" else printable(value)


def text(plain: str) -> str:
    r"""Escape a text for Markdown and the HTML in it, on one line.

    >>> text("<b> a|b *c*\u202e")
    '&lt;b&gt; a\\|b \\*c\\*\\\\u202e'
    """
    line = " ".join(printable(plain).split())
    escaped = re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(line, quote=False))
    return re.sub(r"^(\d+)([.)])(\s)", r"\1\\\2\3", re.sub(r"^([#+>-])", r"\\\1", escaped))


def fenced(plain: str) -> list[str]:
    """Return text in a fence longer than any run of backticks in it."""
    visible_text = printable(plain)
    longest = max((len(run) for run in re.findall("`+", visible_text)), default=0)
    fence = "`" * max(3, 1 + longest)
    return [f"{fence}text", *visible_text.splitlines(), fence]


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=lambda name: ".txt." not in str(name),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_escaped,
)
ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
ENVIRONMENT.globals |= {"tables": TABLES, "version": __version__}
ENVIRONMENT.filters["colour"] = colour_of
ENVIRONMENT.filters["attribute"] = lambda value: Markup(html.escape(" ".join(printable(value).split())))
ENVIRONMENT.filters["breakable"] = lambda value: Markup(re.sub("([=_])", r"\1<wbr>", str(escape(printable(value)))))
ENVIRONMENT.filters["fenced"] = lambda value: Markup("\n".join(fenced(value)))
