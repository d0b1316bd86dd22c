"""What a report shows, before it is known whether as a page or as Markdown: both are written from these alone.

Texts are plain: whoever renders them escapes them. Differences are in accuracy points (0 to 100), accuracies and
shares in 0 to 1, times in seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlreason.report.curves import Curves
from rlreason.statistics import Difference

#: Words of a verdict -> the sign before it. The first four are those of `compare --json`.
SIGNS = {
    "better": "\N{BLACK UP-POINTING TRIANGLE}",
    "worse": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "cannot tell": "?",
    "same": "=",
    "diverged": "\N{MULTIPLICATION X}",
    "not compared": "\N{EN DASH}",
}
MOST_COLOURS = 8  # settings that have a colour of their own


@dataclass(frozen=True, slots=True)
class Verdict:
    """One setting against the reference."""

    setting: str  # labels
    reference: str
    word: str  # of SIGNS: how it is tagged
    sentence: str  # the whole verdict, ending with a full stop
    small: str = ""  # "4 paired seeds · 256 problems · p = 0.02 (Holm, 4 comparisons)"
    difference: Difference | None = None  # None: not compared
    adjusted_p: float | None = None
    by_seed: Mapping[int, float] = field(default_factory=dict)  # seed -> its mean difference, where seeds are paired
    typed: tuple[str, str] = ("", "")  # setting and reference as they are typed
    outcome: str = ""  # better, worse, cannot tell or same, by the interval alone; "" where not compared


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting in a legend. `colour`: 0 (the reference) to MOST_COLOURS - 1; None: thin and grey."""

    label: str
    colour: int | None
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture, from one description: `specification` is Vega-Lite, with colours as CSS variables.

    Its data sets have names. `rows` has them; where they are made of `curves`, what they hold depends on the axis, and
    `rows` has only the others. Settings get their colours from the legend when it is drawn (pictures.py).
    """

    name: str  # "eval/accuracy", "forest" ...: letters, digits, / and _
    title: str
    subtitle: str  # what is on it, with units
    alt: str  # the same for who cannot see it, with the last values
    specification: Mapping[str, Any]
    format: str = ""  # of its values, as d3 has it: ".0%"
    note: str = ""  # what was left out of it
    rows: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # name of a data set -> its rows
    curves: Curves | None = None  # against step, time, tokens or updates


@dataclass(frozen=True, slots=True)
class Table:
    """A table. A cell may hold several lines, the later ones small; columns in `numbers` stand right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    note: str = ""
    labels: frozenset[int] = frozenset()  # columns that hold a setting's label, which gets its line sample


@dataclass(frozen=True, slots=True)
class Shown:
    """One response of a setting to a problem at a step. `text` is cut and free of control characters."""

    setting: str
    step: int
    outcome: str  # "correct", "wrong", "no format"
    text: str
    where: str  # file and line


@dataclass(frozen=True, slots=True)
class Case:
    """One problem whose responses are shown over training, settings side by side."""

    question: str
    ground_truth: str
    steps: Mapping[int, Sequence[Shown]]  # step -> a response of each setting


@dataclass(frozen=True, slots=True)
class Detail:
    """Something to be opened: a table, or text that keeps its line breaks."""

    title: str
    text: str = ""
    table: Table | None = None


@dataclass(slots=True)
class Report:
    """A whole report in the order of its page."""

    name: str  # of the sweep
    question: str
    summary: str  # one sentence
    lead: str  # what was compared with what
    legend: list[Entry]
    verdicts: list[Verdict]
    facts: list[tuple[str, str]]  # the strip below the first screen: term, description
    warnings: list[str]
    figures: list[Figure]  # the first is the first screen's
    tables: list[Table]  # settings, then two axes, slices, pass@k
    log: Table
    problems: list[str]  # found in the folders
    cases: list[Case]
    details: list[Detail]
    forest: Figure | None = None  # the differences; None where there is one setting
    published: list[Any] = field(default_factory=list)  # bands of published figures, of a write-up
