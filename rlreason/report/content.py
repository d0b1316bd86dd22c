"""Define the content of a report, independent of page or Markdown, and reduce curves of runs to what is drawn."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlreason.runtime.differences import Difference
from rlreason.runtime.intervals import Floats

Places = NDArray[np.intp]


def thinned(y: Floats, points: int) -> Places:
    """Return the ascending indices of values to draw: first, last, and minimum and maximum of each bucket.

    All indices for at most `points` values. No peak is lost.
    """
    if len(y) <= points:
        return np.arange(len(y))
    indices = {0, len(y) - 1}
    for bucket in np.array_split(np.arange(1, len(y) - 1), max(1, (points - 2) // 2)):
        indices |= {int(bucket[y[bucket].argmin()]), int(bucket[y[bucket].argmax()])}
    return np.array(sorted(indices), dtype=np.intp)


def evenly(count: int, most: int) -> Places:
    """Return at most `most` of `count` indices, evenly spaced, including the first and the last.

    >>> evenly(5, 3), evenly(2, 3)
    (array([0, 2, 4]), array([0, 1]))
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))


#: Word of a verdict -> its sign. The first four are outcomes in `compare --json`.
SIGNS = {
    "better": "\N{BLACK UP-POINTING TRIANGLE}",
    "worse": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "cannot tell": "?",
    "same": "=",
    "diverged": "\N{MULTIPLICATION X}",
    "not compared": "\N{EN DASH}",
}
MOST_COLOURS = 8  # settings with a colour of their own


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
    headline: str = ""  # of HEADLINES, where the word alone would say too much or too little


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting in a legend. `colour`: 0 (the reference) to MOST_COLOURS - 1; None: thin and grey."""

    label: str
    colour: int | None
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """The mean over a setting's seeds where all have data, and its 95% interval. All are (points,)."""

    x: Floats
    mean: Floats
    low: Floats  # NaN for one seed
    high: Floats

    def at(self, at: Places) -> "Band":
        """Return the band at some of its points."""
        return Band(self.x[at], self.mean[at], self.low[at], self.high[at])


@dataclass(frozen=True, slots=True)
class Line:
    """The values that one run measured."""

    setting: str  # its label
    seed: int
    x: Mapping[str, Floats]  # axis of study.AXES -> (points,)
    y: Floats  # (points,)
    stopped: bool = False  # before its last step


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of one picture: a line for each run, a band for each setting."""

    lines: Sequence[Line]
    bands: Mapping[str, Mapping[str, Band]]  # axis -> label of a setting -> its band there


@dataclass(frozen=True, slots=True)
class Axis:
    """The x of a picture: its title, and what its scale and its axis have besides, in Vega-Lite's words."""

    title: str
    scale: Mapping[str, Any] = field(default_factory=dict)
    axis: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture, independent of how it is drawn (charts.py). Settings get their colours from a legend.

    `rows` has the data sets, without those that `curves` gives for an axis.
    """

    name: str  # "eval/accuracy", "forest" ...: letters, digits, / and _
    title: str
    subtitle: str  # measure and unit
    alt: str  # alternative text, with the last values
    kind: str  # curves or forest
    x: Axis
    format: str  # of its values, in d3's notation: ".0%"
    note: str = ""  # values that are left out
    rows: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # name of a data set -> its rows
    curves: Curves | None = None  # against step, time, tokens or updates
    share: bool = False  # its values are between 0 and 1
    log_range: tuple[float, float] | None = None  # of its values, on a logarithmic axis
    large: bool = False  # the picture of the first screen


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first line of a cell is large, the others small; columns in `numbers` are right-aligned."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    note: str = ""
    labels: frozenset[int] = frozenset()  # columns of settings' labels, which get a line sample


@dataclass(frozen=True, slots=True)
class ShownResponse:
    """One response of a setting to a problem at a step. `text` is cut and free of control characters."""

    setting: str
    outcome: str  # "correct", "wrong", "no format"
    text: str
    where: str  # file and line


@dataclass(frozen=True, slots=True)
class Case:
    """One problem with its responses over training, settings side by side."""

    question: str
    ground_truth: str
    steps: Mapping[int, Sequence[ShownResponse]]  # step -> a response of each setting


@dataclass(frozen=True, slots=True)
class Detail:
    """A collapsible section: a table, or text with its line breaks."""

    title: str
    text: str = ""
    table: Table | None = None


@dataclass(slots=True)
class Report:
    """A whole report in the order of its page."""

    name: str  # of the sweep
    question: str
    summary: str  # all verdicts in one sentence
    lead: str  # the introduction
    legend: list[Entry]
    verdicts: list[Verdict]
    facts: list[tuple[str, str]]  # below the first screen: term, description
    warnings: list[str]
    figures: list[Figure]  # the first is the first screen's
    tables: list[Table]  # settings, then two axes, slices, pass@k
    log: Table
    problems: list[str]  # found in the folders
    cases: list[Case]
    details: list[Detail]
    forest: Figure | None = None  # the differences; None where there is one setting

    @property
    def every_figure(self) -> list[Figure]:
        """Return all figures, the forest last."""
        return [*self.figures, *([self.forest] if self.forest is not None else [])]


#: Name of a colour -> its value on light and on dark pages: s0 to s7 are settings, `rest` all further ones.
COLOURS = {
    "s0": ("#363B43", "#CDD1D8"), "s1": ("#1895D8", "#70A1C3"), "s2": ("#C6753D", "#F3832D"),
    "s3": ("#086809", "#8DF987"), "s4": ("#975695", "#AA53A8"), "s5": ("#BA3556", "#D73F65"),
    "s6": ("#6433A1", "#A168F1"), "s7": ("#4661D7", "#9EB6FF"), "rest": ("#8c959f", "#77808a"),
    "page": ("#ffffff", "#16191d"), "card": ("#ffffff", "#1b1f24"), "soft": ("#f5f6f8", "#20252b"),
    "fg": ("#1b1f24", "#e8eaed"), "muted": ("#57606a", "#a4adb8"), "grid": ("#e6e8eb", "#2a3037"),
    "axis": ("#8c959f", "#77808a"), "line": ("#d8dce1", "#343b44"), "strip": ("#eef1f4", "#232930"),
    "link": ("#0a58b0", "#7db5f5"), "good": ("#0b5c2b", "#a6e3b8"), "good-soft": ("#e2f3e8", "#16351f"),
    "bad": ("#8a2c0a", "#ffc1a3"), "bad-soft": ("#fbe9e0", "#40200f"), "open": ("#444b54", "#c8ced6"),
    "open-soft": ("#eceff2", "#2b3138"),
}  # fmt: skip
LIGHT, DARK = ({name: pair[k] for name, pair in COLOURS.items()} for k in (0, 1))
#: Dashes of s0 to s7: lengths of line and gap.
DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2, 1, 2), (3, 3), (14, 3, 3, 3))
#: Markers of s0 to s7: Vega's name -> SVG path around 0,0.
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


def colour_of(place: int | None) -> str:
    """Return an `Entry`'s colour as a CSS variable, grey for None."""
    return "var(--rest)" if place is None else f"var(--s{place})"


def plain_colours(svg: str, dark: bool = False) -> str:
    """Return a picture with colours instead of CSS variables, which only a page defines.

    >>> plain_colours('<path stroke="var(--s1)"/>')
    '<path stroke="#1895D8"/>'
    """
    colours = DARK if dark else LIGHT
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], svg)


#: Control characters but tab and new line, bidirectional controls, invisible separators, surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)


def written_out(text: str) -> str:
    r"""Return the text with control characters as their code points.

    >>> written_out("a\u202eb\x1b[2J"), written_out("two\n\tlines")
    ('a⟨U+202E⟩b⟨U+001B⟩[2J', 'two\n\tlines')
    """
    left, right = "\N{MATHEMATICAL LEFT ANGLE BRACKET}", "\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
    return _CONTROLS.sub(lambda match: f"{left}U+{ord(match[0]):04X}{right}", text)


def all_written_out(value: Any) -> Any:
    """Apply `written_out` to every text in lists and dicts."""
    if isinstance(value, str):
        return written_out(value)
    if isinstance(value, dict):
        return {written_out(str(key)): all_written_out(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [all_written_out(inner) for inner in value]
    return value


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `counted(1228, "run")` is '1,228 runs'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
