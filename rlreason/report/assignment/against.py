"""Pictures that only a write-up has: a curve against another axis than the step, the leaderboard's, two algorithms."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlreason.report.charts import figures_of, legend_of
from rlreason.report.content import Entry, Figure
from rlreason.report.curves import GRID, Curves, Line, band_of
from rlreason.report.measures import DEPTH
from rlreason.report.specifications import STEP_TITLE, Spec, ticks_of
from rlreason.report.study import Series, Setting, Study
from rlreason.statistics import Floats

TITLES = {"time": "seconds, evaluations left out", "tokens": "generated tokens", "updates": "optimizer updates"}
HOURS = 4.0  # of the leaderboard
SHORT = 0.1  # of the axis: a run that ends before is drawn over its own time too
Rows = dict[str, list[dict[str, Any]]]


def against(figure: Figure, axis: str) -> Figure | None:
    """A figure of curves with another of AXES as its x; None where its runs have not counted it."""
    if figure.curves is None or not any(axis in line.x for line in figure.curves.lines):
        return None
    lines = [replace(line, x={"step": line.x[axis]}) for line in figure.curves.lines if axis in line.x]
    bands = {"step": figure.curves.bands.get(axis, {})}
    title = TITLES[axis]
    return replace(
        figure,
        name=f"{figure.name}/{axis}",
        title=f"{figure.title} against {title.partition(',')[0]}",
        alt=figure.alt.replace(f"by {STEP_TITLE}", f"by {title}"),
        specification=with_x(figure.specification, title),
        curves=Curves(lines, bands),
    )


def of_budget(figure: Figure, budget: str) -> Figure:
    """A picture of runs of one budget; its steps on a logarithmic axis where one is a tenth as long as another."""
    ends = [float(line.x["step"][-1]) for line in figure.curves.lines] if figure.curves is not None else []
    drawn = figure.specification
    if ends and max(ends) >= 10 * min(ends):
        axis = {"values": [0, *ticks_of(1.0, max(ends))], "format": "d"}
        drawn = with_x(drawn, f"{STEP_TITLE}; {DEPTH}", {"type": "symlog"}, axis)
    return replace(figure, title=f"{figure.title}, {budget}", specification=drawn)


def with_x(specification: Any, title: str, scale: Spec | None = None, axis: Spec | None = None) -> Spec:
    """A specification of curves whose x has this title and, where given, this of its scale and axis."""

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("title") == STEP_TITLE:
                value["title"] = title
                value["scale"], value["axis"] = value["scale"] | (scale or {}), value["axis"] | (axis or {})
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    found: Spec = copy.deepcopy(dict(specification))
    walk(found)
    return found


def leaderboard_figures(study: Study, figure: Figure) -> list[Figure]:
    """Accuracy against hours of wall clock, evaluations and all, on an axis that ends at 4 h.

    Where every run ends within a tenth of it, a second picture over their own time.
    """
    lines = [
        Line(one.label, run.seed, {"step": hours}, run.series["eval/accuracy"].y[-len(hours) :])
        for one in study.settings
        for run in one.runs
        if (hours := _hours(run.series)) is not None
    ]
    if not lines:
        return []
    longest = max(float(line.x["step"][-1]) for line in lines)
    found = [_over_clock(figure, lines, "hours", HOURS)]
    if longest < SHORT * HOURS:
        short = [replace(line, x={"step": 3600 * line.x["step"]}) for line in lines]
        found.append(_over_clock(figure, short, "seconds", 3600 * longest))
    return found


def _hours(series: Any) -> Floats | None:
    """The hours at which each evaluation was made, from `time/total`; None where they were not counted."""
    accuracy: Series | None = series.get("eval/accuracy")
    total: Series | None = series.get("time/total")
    if accuracy is None or total is None or "time" not in accuracy.x or "time" not in total.x:
        return None
    if not len(accuracy.y):
        return None
    places = np.searchsorted(total.x["time"], accuracy.x["time"], side="right") - 1  # the last row of that moment
    hours: Floats = total.y[np.maximum(places, 0)] / 3600
    return hours


def _over_clock(figure: Figure, lines: Sequence[Line], unit: str, end: float) -> Figure:
    """Accuracy against hours or seconds since the start; `end`: where the axis ends."""
    bands = {}
    for label in dict.fromkeys(line.setting for line in lines):
        of = [line for line in lines if line.setting == label]
        if (band := band_of([one.x["step"] for one in of], [one.y for one in of], GRID, share=True)) is not None:
            bands[label] = band
    title = f"{unit} since the start, evaluations included"
    return replace(
        figure,
        name=f"leaderboard/{unit}",
        title=f"Accuracy against wall clock, in {unit}",
        alt=figure.alt.replace(f"by {STEP_TITLE}", f"by {title}"),
        specification=with_x(figure.specification, title, {"domain": [0.0, end]}, {"format": "~g"}),
        curves=Curves(lines, {"step": bands}),
    )


def side_by_side(name: str, title: str, sides: Sequence[tuple[str, Setting]]) -> tuple[Study, list[Entry]]:
    """A study of single settings of several sweeps under these labels, and its legend; nothing is compared."""
    settings = [Setting((("run", label),), label, one.runs) for label, one in sides]
    study = Study(name, title, ["run"], settings)
    return study, legend_of(study, [])


def figure_named(study: Study, name: str) -> Figure | None:
    """One of a study's pictures."""
    return next((figure for figure in figures_of(study) if figure.name == name), None)
