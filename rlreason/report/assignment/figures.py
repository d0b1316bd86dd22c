"""Compute what only a write-up shows: pass bars, other metrics, directions, and pictures on other axes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlreason.report.assignment.courses import Course, Direction
from rlreason.report.charts import ticks_of
from rlreason.report.content import Axis, Curves, Figure, Line, Table, Verdict
from rlreason.report.figures import DEPTH, GRID, STEP_TITLE, STEPS, band_of
from rlreason.report.remarks import late
from rlreason.report.study import Setting, Study, StudyRun
from rlreason.report.tables import NONE, accuracy_of
from rlreason.report.verdicts import signed
from rlreason.runtime.differences import LEVEL, TIED, holm, p_value
from rlreason.runtime.intervals import mean_interval, wilson_interval

HOURS = 4.0  # of the leaderboard's axis
Interval = tuple[float, float, float]  # mean, low, high

# ---- numbers ----


def interval_of(runs: Sequence[StudyRun], among: set[str] | None = None) -> Interval | None:
    """Return (mean, low, high) of the final accuracies, within 0 to 1; None if no run has one.

    Student's interval over several seeds (if they tie, that of the settings' table), Wilson's over the problems of one.
    `among`: the problems that count.
    """
    shares = []
    for run in runs:
        counted = [p.share for name, p in run.final.problems.items() if name in among] if run.final and among else []
        share = float(np.mean(counted)) if counted else run.accuracy
        shares += [] if share is None else [share]
    if not shares:
        return None
    if len(shares) > 1:
        mean, low, high = mean_interval(shares)
        tied = accuracy_of(Setting((), "", list(runs)), among) if high - low < TIED else None
        return tied or (mean, max(low, 0.0), min(high, 1.0))
    problems = next((set(run.final.problems) for run in runs if run.final), {""})
    n = max(1, len(problems if among is None else problems & among))
    return shares[0], *wilson_interval(shares[0] * n, n)


def against_bar(accuracy: Interval, bar: float) -> str:
    """Return whether a (mean, low, high) reaches a bar.

    >>> [against_bar(accuracy, 0.25) for accuracy in ((0.5, 0.4, 0.6), (0.3, 0.2, 0.4), (0.1, 0.0, 0.2))]
    ['reached', 'cannot tell', 'not reached']
    """
    _, low, high = accuracy
    if low >= bar:
        return "reached"
    return "not reached" if high < bar else "cannot tell"


#: Metric -> its name.
OTHERS = {
    "train/grad_norm": "gradient norm",
    "rollout/entropy": "entropy, nats",
    "rollout/length": "response length, tokens",
    "train/clip_fraction": "clip fraction",
}


def last_values(setting: Setting, metric: str) -> dict[int, float]:
    """Return seed -> final value of the metric."""
    return {run.seed: value for run in setting.runs if (value := late(run, metric)) is not None}


def metrics_table(study: Study) -> Table | None:
    """Return each setting's metrics over the last quarter of its steps, and which differ from the reference's; or None.

    Pairs of the same seed, Student's t over their differences; Holm's correction over all metrics of all settings
    decides what differs.
    """
    metrics = [metric for metric in OTHERS if any(last_values(one, metric) for one in study.settings)]
    if not metrics:
        return None
    values = {(one.label, metric): last_values(one, metric) for one in study.settings for metric in metrics}
    means, p_values = dict[tuple[str, str], float](), list[float]()
    for label, metric in [(one.label, metric) for one in study.settings[1:] for metric in metrics]:
        mine, its = values[label, metric], values[study.reference.label, metric]
        differences = [mine[seed] - its[seed] for seed in sorted(mine.keys() & its.keys())]
        if len(differences) > 1:
            means[label, metric] = mean = mean_interval(differences)[0]
            se = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
            p_values.append(p_value(mean, se, 0.0, len(differences) - 1))
    words = dict.fromkeys(values, "")
    for (key, mean), p in zip(means.items(), holm(p_values), strict=True):
        if p <= LEVEL:
            words[key] = "\nhigher" if mean > 0 else "\nlower"
    cells = {key: cell([*by_seed.values()]) + words[key] for key, by_seed in values.items()}
    rows = [[one.label, *(cells[one.label, metric] for metric in metrics)] for one in study.settings]
    head = ["setting", *(OTHERS[metric] for metric in metrics)]
    note = (
        "Mean over seeds of the last quarter of the steps; below it the 95% interval over seeds, and higher or lower "
        f"than {study.reference.name}, paired by seed, where that is beyond what seeds differ by (Holm, "
        f"{len(p_values)} comparisons)."
    )
    title = f"Other metrics at the end of training: {study.name}"
    return Table(title, head, rows, frozenset(range(1, len(head))), note, frozenset({0}))


def cell(values: Sequence[float]) -> str:
    """Return a mean with its interval for a table.

    >>> cell([1.0, 2.0, 3.0]), cell([0.5]), cell([])
    ('2\\n0 to 4.48', '0.5', '\N{EN DASH}')
    """
    if not values:
        return NONE
    mean, low, high = mean_interval(values)
    low = max(low, 0.0) if min(values) >= 0 else low  # none of these metrics is ever negative
    return f"{mean:.3g}" + (f"\n{low:.3g} to {high:.3g}" if len(values) > 1 else "")


# ---- directions ----


def directions_table(course: Course, verdicts: Mapping[str, Sequence[Verdict]]) -> Table | None:
    """Return all published directions of a course, or None. `verdicts`: question -> verdicts of its sweeps."""
    rows, relations = [], list[str]()
    for direction in course.directions:
        verdict = verdict_of(direction, verdicts.get(direction.question, []))
        a, b = (direction.setting, direction.reference) if verdict is None else verdict.typed
        relation = ours = "not run"
        if verdict is not None:
            ours = verdict.outcome or verdict.word
            relation = agreement(direction.word, ours, direction.but)
            ours += ", it diverged" if verdict.word == "diverged" and ours != "diverged" else ""
            if (d := verdict.difference) is not None:
                ours += f": {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})"
        relations.append(relation)
        why = f": {direction.but}" if relation == "not comparable" and direction.but else ""
        pair = f"{_without(a, b)} against {_without(b, a)}"
        rows.append([direction.question, pair, f"{direction.word}: {direction.what}", ours, relation + why])
    if not rows:
        return None
    counts = ", ".join(f"{relation}: {relations.count(relation)}" for relation in dict.fromkeys(relations))
    note = (
        f"{counts[0].upper()}{counts[1:]}. The published figures are mostly of one seed of {course.model_name} on "
        f"{course.data_name}. Agreement in a direction is none in size; and where the runs here are of a small model "
        "on a made-up task, disagreement is no refutation."
    )
    head = ["question", "setting against reference", "published", "found here", "the two"]
    return Table("Directions: published and found here", head, rows, note=note)


def _without(typed: str, other: str) -> str:
    """Return the overrides of a setting that the other does not have."""
    return " ".join(override for override in typed.split() if override not in other.split()) or typed


def agreement(published: str, ours: str, but: str = "") -> str:
    """Return whether a verdict's word or outcome agrees with the published one.

    >>> [agreement("worse", word) for word in ("worse", "diverged", "better", "same", "cannot tell")]
    ['agrees', 'agrees', 'disagrees', 'disagrees', 'cannot tell']
    >>> agreement("cannot tell", "better"), agreement("worse", "worse", "another budget"), agreement("same", "same")
    ('cannot tell', 'not comparable', 'agrees')
    """
    if but or ours == "not compared":
        return "not comparable"
    if "cannot tell" in (published, ours):
        return "cannot tell"
    return "agrees" if published == ("worse" if ours == "diverged" else ours) else "disagrees"


def verdict_of(direction: Direction, verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict on exactly the pair of settings of a direction, or None."""
    for a, b in [(direction.setting, direction.reference), *([direction.small] if direction.small else [])]:
        wanted, against = typed_settings(a), typed_settings(b)
        for verdict in verdicts:
            setting, reference = (typed_settings(typed) for typed in verdict.typed)
            if setting - reference == wanted - against and against <= reference:
                return verdict
    return None


def typed_settings(typed: str) -> set[tuple[str, str | float]]:
    """Return the overrides of a line as (key, value), with equal numbers equal: 1e-2 is 0.01.

    >>> typed_settings("learning_rate=1e-2 loss=grpo_clip") == typed_settings("loss=grpo_clip learning_rate=0.01")
    True
    """
    settings: set[tuple[str, str | float]] = set()
    for override in typed.split():
        key, _, value = override.partition("=")
        try:
            settings.add((key, float(value)))
        except ValueError:
            settings.add((key, value))
    return settings


# ---- pictures ----


def with_bands(figure: Figure, course: Course, question: str, study: Study) -> Figure:
    """Add the published bands of a question to its accuracy picture, if model and data are the same."""
    bands = [one for one in course.figures if one.question == question and one.band]
    if not bands or not course.has(study):
        return figure
    rows = []
    for band in bands:
        wider = max(0.0, 1.0 - (band.high - band.low)) / 2  # so that a single number is visible
        rows.append({"low": (band.low - wider) / 100, "high": (band.high + wider) / 100})
    note = f"{figure.note} Grey: published figures.".strip()
    return replace(figure, rows={**figure.rows, "published": rows}, note=note)


def by_time(figure: Figure) -> Figure | None:
    """Return a figure of curves against time; None if no run has counted it."""
    lines, bands = (figure.curves.lines, figure.curves.bands) if figure.curves is not None else ((), {})
    timed = Curves(
        [replace(one, x={"step": one.x["time"]}) for one in lines if "time" in one.x], {"step": bands.get("time", {})}
    )
    title = "seconds, evaluations left out"
    return _over(figure, timed, "time", f"{figure.title} against seconds", replace(figure.x, title=title))


def by_hours(figure: Figure, study: Study) -> Figure | None:
    """Return accuracy against hours since the start, evaluations included, to HOURS; None if they were not counted."""
    lines, bands = list[Line](), {}
    for one in study.settings:
        own = []
        for run in one.runs:
            accuracy, total = run.series.get("eval/accuracy"), run.series.get("time/total")
            if accuracy and total and "time" in accuracy.x and "time" in total.x:
                rows = np.searchsorted(total.x["time"], accuracy.x["time"], side="right") - 1  # the last of that moment
                hours = total.y[np.maximum(rows, 0)] / 3600
                own.append(Line(one.label, run.seed, {"step": hours}, accuracy.y))
        if band := band_of([line.x["step"] for line in own], [line.y for line in own], GRID, share=True):
            bands[one.label] = band
        lines += own
    title = "hours since the start, evaluations included"
    x = Axis(title, {**STEPS.scale, "domain": [0.0, HOURS]}, {**STEPS.axis, "format": "~g"})
    return _over(
        figure, Curves(lines, {"step": bands}), "leaderboard/hours", "Accuracy against wall clock, in hours", x
    )


def _over(figure: Figure, curves: Curves, name: str, title: str, x: Axis) -> Figure | None:
    """Return a figure with other curves on another axis; None without any."""
    alt = figure.alt.replace(f"by {STEP_TITLE}", f"by {x.title}")
    return replace(figure, curves=curves, name=name, title=title, alt=alt, x=x) if curves.lines else None


def of_budget(figure: Figure, budget: str) -> Figure:
    """Return the picture of one budget; its steps are logarithmic if one run is ten times as long as another."""
    ends = [float(line.x["step"][-1]) for line in figure.curves.lines] if figure.curves is not None else []
    x = figure.x
    if ends and max(ends) >= 10 * min(ends):
        ticks = {"values": [0, *ticks_of(1.0, max(ends))], "format": "d"}
        x = Axis(f"{STEP_TITLE}; {DEPTH}", {**x.scale, "type": "symlog"}, {**x.axis, **ticks})
    return replace(figure, title=f"{figure.title}, {budget}", x=x)
