"""Build pictures and tables that only a write-up has: other axes, pass bars, other metrics."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlreason.report.assignment.courses import Assignment, AssignmentQuestion, PublishedFigure
from rlreason.report.charts import ticks_of
from rlreason.report.content import Axis, Curves, Entry, Figure, Line, Table, counted
from rlreason.report.figures import DEPTH, GRID, STEP_TITLE, STEPS, band_of, figures_of, legend_of
from rlreason.report.remarks import late
from rlreason.report.study import Series, Setting, Study, StudyRun
from rlreason.report.tables import accuracy_of, percent
from rlreason.report.verdicts import best_of, comparing_half
from rlreason.runtime.differences import LEVEL, TIED, holm, p_value
from rlreason.runtime.intervals import Floats, mean_interval, wilson_interval
from rlreason.runtime.text import few

TITLES = {"time": "seconds, evaluations left out", "tokens": "generated tokens", "updates": "optimizer updates"}
HOURS = 4.0  # of the leaderboard's axis
SHORT = 0.1  # if all runs end before this share of the axis, a second picture has their own time
Rows = dict[str, list[dict[str, Any]]]


def against(figure: Figure, axis: str) -> Figure | None:
    """Return a figure of curves with another of AXES as x; None if no run has counted it."""
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
        x=replace(figure.x, title=title),
        curves=Curves(lines, bands),
    )


def of_budget(figure: Figure, budget: str) -> Figure:
    """Return the picture of one budget; its steps are logarithmic if one run is ten times as long as another."""
    ends = [float(line.x["step"][-1]) for line in figure.curves.lines] if figure.curves is not None else []
    x = figure.x
    if ends and max(ends) >= 10 * min(ends):
        ticks = {"values": [0, *ticks_of(1.0, max(ends))], "format": "d"}
        x = Axis(f"{STEP_TITLE}; {DEPTH}", {**x.scale, "type": "symlog"}, {**x.axis, **ticks})
    return replace(figure, title=f"{figure.title}, {budget}", x=x)


def leaderboard_figures(study: Study, figure: Figure) -> list[Figure]:
    """Plot accuracy against hours of wall clock, including evaluations, on an axis that ends at 4 h.

    If every run ends within a tenth of it, add a second picture over their own time.
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
    figures = [_over_clock(figure, lines, "hours", HOURS)]
    if longest < SHORT * HOURS:
        short = [replace(line, x={"step": 3600 * line.x["step"]}) for line in lines]
        figures.append(_over_clock(figure, short, "seconds", 3600 * longest))
    return figures


def _hours(series: Any) -> Floats | None:
    """Return the hours at which each evaluation was made, from `time/total`; None if they were not counted."""
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
    """Plot accuracy against hours or seconds since the start, on an axis to `end`."""
    bands = {}
    for label in dict.fromkeys(line.setting for line in lines):
        own = [line for line in lines if line.setting == label]
        band = band_of([line.x["step"] for line in own], [line.y for line in own], GRID, share=True)
        if band is not None:
            bands[label] = band
    title = f"{unit} since the start, evaluations included"
    return replace(
        figure,
        name=f"leaderboard/{unit}",
        title=f"Accuracy against wall clock, in {unit}",
        alt=figure.alt.replace(f"by {STEP_TITLE}", f"by {title}"),
        x=Axis(title, {**STEPS.scale, "domain": [0.0, end]}, {**STEPS.axis, "format": "~g"}),
        curves=Curves(lines, {"step": bands}),
    )


def side_by_side(name: str, title: str, sides: Sequence[tuple[str, Setting]]) -> tuple[Study, list[Entry]]:
    """Return a study of single settings of several sweeps under these labels, and its legend, without comparisons."""
    settings = [Setting((("run", label),), label, one.runs) for label, one in sides]
    study = Study(name, title, ["run"], settings)
    return study, legend_of(study, [])


def figure_named(study: Study, name: str) -> Figure | None:
    """Return one of a study's pictures."""
    return next((figure for figure in figures_of(study) if figure.name == name), None)


#: An accuracy interval below this share of the lowest published figure is "far below".
FAR = 0.8
#: Why a loop on the handout's model and data may stay below published figures, the commonest first.
CAUSES = (
    "groups that hold responses to different questions (every unit test passes), a learning rate of a tenth of what "
    "the others took, the stop string cut off before it is graded, a prompt whose last line is not what the reward "
    "reads, log-probabilities of another temperature than the samples', and a loss that is summed over the prompt too"
)


def interval_of(runs: Sequence[StudyRun], among: set[str] | None = None) -> tuple[float, float, float] | None:
    """Return (mean, low, high) of the final accuracies, within 0 to 1; None if no run has one.

    Student's interval over several seeds (if they tie, that of the settings' table), Wilson's over the problems of one.
    `among`: the problems that count.
    """
    shares = [share for run in runs if (share := _share(run, among)) is not None]
    if not shares:
        return None
    if len(shares) > 1:
        mean, low, high = mean_interval(shares)
        if high - low < TIED and (accuracy := accuracy_of(Setting((), "", list(runs)), among)):
            return accuracy
        return mean, max(low, 0.0), min(high, 1.0)
    answers = next((run.final for run in runs if run.final is not None), None)
    n = max(1, sum(among is None or name in among for name in answers.problems)) if answers is not None else 1
    return shares[0], *wilson_interval(shares[0] * n, n)


def _share(run: StudyRun, among: set[str] | None) -> float | None:
    if among is None or run.final is None:
        return run.accuracy
    chosen = [problem.share for name, problem in run.final.problems.items() if name in among]
    return float(np.mean(chosen)) if chosen else run.accuracy


def with_interval(accuracy: tuple[float, float, float], seeds: int) -> str:
    """Return '45.7% (40.1% to 51.0%, 4 seeds)'."""
    over = f"{seeds} seeds" if seeds > 1 else "one seed, over its problems"
    mean, low, high = map(percent, accuracy)
    return f"{mean} ({low} to {high}, {over})"


def against_bar(accuracy: tuple[float, float, float], bar: float) -> str:
    """Return whether a (mean, low, high) reaches a bar.

    >>> [against_bar(accuracy, 0.25) for accuracy in ((0.5, 0.4, 0.6), (0.3, 0.2, 0.4), (0.1, 0.0, 0.2))]
    ['reached', 'cannot tell', 'not reached']
    """
    _, low, high = accuracy
    if low >= bar:
        return "reached"
    return "not reached" if high < bar else "cannot tell"


def bar_line(course: Assignment, question: AssignmentQuestion, study: Study) -> str:
    """Return the best setting against the pass bar, on the problems that did not choose it; '' without a bar."""
    if question.bar is None:
        return ""
    best = best_of(study)
    several = len(study.settings) > 1
    accuracy = interval_of(best.runs, comparing_half(study.settings) if several else None)
    if accuracy is None:
        return f"Pass bar {percent(question.bar)}: no run has come to an evaluation yet."
    text = with_interval(accuracy, sum(run.accuracy is not None for run in best.runs))
    if several:
        chosen = f"the best of {len(study.settings)} settings on one half of the problems"
        basis = f"{best.label}, {chosen}, has {text} on the other half"
    else:
        basis = f"the accuracy is {text}"
    caveat = f" It is set for {course.model_name}, and says nothing of this model."
    if is_of(course, study):
        caveat = _fewer_steps(question, study)
    return f"Pass bar {percent(question.bar)}, {study.name}: {against_bar(accuracy, question.bar)}, as {basis}.{caveat}"


def _fewer_steps(question: AssignmentQuestion, study: Study) -> str:
    """Return a caveat if the runs made fewer steps than the bar is set for."""
    ran = max((int(run.totals.get("step") or run.planned_steps or 0) for run in study.runs), default=0)
    if not 0 < ran < question.steps:
        return ""
    return f" It is set for {question.steps} steps, and these runs came to {ran}."


def is_of(course: Assignment, study: Study) -> bool:
    """Return whether all runs that have begun have the course's model and data."""
    return all(course.is_of(run.settings, run.provenance) for run in study.runs if run.settings)


def what_ran(study: Study) -> str:
    """Return 'model tiny on stories_long, 40 steps', from the runs' own settings."""
    models = sorted({str(run.settings.get("model.name", "?")) for run in study.runs})
    data = sorted({str(run.settings.get("data.name", "?")) for run in study.runs})
    steps = sorted({run.planned_steps for run in study.runs if run.planned_steps})
    planned = ""
    if steps:
        planned = f", {steps[0]:,} to {steps[-1]:,} steps" if len(steps) > 1 else f", {steps[0]:,} steps"
    return f"model {' and '.join(models)} on {' and '.join(data)}{planned}, {counted(len(study.seeds), 'seed')}"


def with_bands(figure: Figure, course: Assignment, question: AssignmentQuestion, study: Study) -> Figure:
    """Add the published bands of a question to its accuracy picture, if model and data are the same."""
    bands = _bands(course, question)
    if figure.name != "eval/accuracy" or not bands or not is_of(course, study):
        return figure
    rows = {**figure.rows, "published": []}
    for band in bands:
        wider = max(0.0, 0.01 - (band.high - band.low)) / 2  # so that a single number is visible
        rows["published"] = [*rows["published"], {"low": band.low - wider, "high": band.high + wider}]
    return replace(figure, rows=rows, note=f"{figure.note} Grey: published figures.".strip())


def _bands(course: Assignment, question: AssignmentQuestion) -> list[PublishedFigure]:
    return [figure for figure in course.figures if figure.question == question.id and figure.band]


def published_line(course: Assignment, question: AssignmentQuestion, study: Study) -> str:
    """Return the distance of the best setting from published figures; "" for another model, or without figures."""
    if not is_of(course, study):
        return ""  # the head of the write-up says so
    bands, accuracy = _bands(course, question), interval_of(best_of(study).runs)
    if not bands or accuracy is None:
        return ""
    mean, _, high = accuracy
    lowest = min(band.low for band in bands)
    if high >= lowest:
        return f"Others got {'; '.join(map(published_text, bands))}: this is not below it."
    right = f"A right loop is at {course.a_right_loop}" if course.a_right_loop else f"Others are at {percent(lowest)}"
    below = "far below" if high < FAR * lowest else "below"
    causes = _fewer_steps(question, study) or f" Commonest causes: {CAUSES}."
    return f"{right}; you are {below}, at {percent(mean)}.{causes}"


def published_text(figure: PublishedFigure) -> str:
    """Return '50.5 to 71.7% (a right loop, 1e-5 to 3e-5)'."""
    low, high = (f"{100 * end:.1f}".removesuffix(".0") for end in (figure.low, figure.high))
    accuracy = f"{low} to {high}" if figure.high > figure.low else low
    return f"{accuracy}% ({figure.what})"


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


def metrics_table(study: Study, title: str = "Other metrics at the end of training") -> Table | None:
    """Return each setting's metrics over the last quarter of its steps, with intervals over seeds, or None."""
    metrics = [metric for metric in OTHERS if any(last_values(one, metric) for one in study.settings)]
    if not metrics:
        return None
    rows = [[one.label, *(cell([*last_values(one, metric).values()]) for metric in metrics)] for one in study.settings]
    head = ["setting", *(OTHERS[metric] for metric in metrics)]
    note = "Mean over seeds of the last quarter of the steps; below it the 95% interval over seeds."
    return Table(title, head, rows, frozenset(range(1, len(head))), note, frozenset({0}))


def cell(values: Sequence[float]) -> str:
    """Return a mean with its interval for a table.

    >>> cell([1.0, 2.0, 3.0]), cell([0.5]), cell([])
    ('2\\n0 to 4.48', '0.5', '\N{EN DASH}')
    """
    if not values:
        return "\N{EN DASH}"
    mean, low, high = mean_interval(values)
    low = max(low, 0.0) if min(values) >= 0 else low  # none of these metrics is ever negative
    return f"{mean:.3g}" + (f"\n{low:.3g} to {high:.3g}" if len(values) > 1 else "")


def metric_sentences(study: Study, most: int = 3) -> list[str]:
    """Return a sentence per setting on the metrics whose difference from the reference excludes zero over seeds.

    Pairs of the same seed, Student's 95% interval of their differences; Holm's correction over all metrics of all
    settings decides what counts. With fewer than two pairs the two curves are described without a verdict.
    """
    reference, others = study.reference, study.settings[1:]
    differences = {
        (one.label, metric): difference
        for one in others
        for metric in OTHERS
        if (difference := _difference(one, reference, metric)) is not None
    }
    adjusted = holm([p for _, p in differences.values()])
    sure = {key for key, p in zip(differences, adjusted, strict=True) if p <= LEVEL}
    unpaired = [one for one in others if not any(label == one.label for label, _ in differences)]
    sentences, equal = list[str](), list[str]()
    for one in others:
        texts = [differences[one.label, metric][0] for metric in OTHERS if (one.label, metric) in sure]
        if texts:
            sentences.append(f"{one.label} against {reference.name} at the end of training: {'; '.join(texts)}.")
        elif one not in unpaired:
            equal.append(one.label)
    if (more := len(sentences) - most) > 0:
        differ = "1 more setting differs" if more == 1 else f"{more} more settings differ"
        sentences[most:] = [f"{differ} in such a metric: see the table."]
    if equal:
        names = few(equal, 4)
        sentences.append(
            f"None of these metrics of {names} differs from {reference.name}'s beyond what seeds differ by."
        )
    if unpaired:
        sentences += [f"{one.label}: {_course(one)}." for one in (reference, *unpaired[: most + 1])]
        names = few([one.label for one in unpaired], 4)
        sentences.append(
            f"With fewer than two seeds in common {names} cannot be judged: seeds alone may differ by as much."
        )
    return sentences


def _course(one: Setting) -> str:
    """Describe where the curves of a setting began and ended, and how its unfinished runs ended."""
    parts = []
    curves = [[accuracy for _, accuracy in run.evaluations] for run in one.runs if run.evaluations]
    if curves:
        first, last = (100 * float(np.mean([curve[at] for curve in curves])) for at in (0, -1))
        parts.append(f"accuracy from {first:.1f}% to {last:.1f}%")
    for metric, name in OTHERS.items():
        if values := list(last_values(one, metric).values()):
            parts.append(f"{name.partition(',')[0]} {float(np.mean(values)):.3g} at the end")
    parts += [f"seed {run.seed} {run.status}" for run in one.runs if run.status != "finished"]
    return "; ".join(parts) or "no curve"


def _difference(one: Setting, reference: Setting, metric: str) -> tuple[str, float] | None:
    """Return (the difference in words, its p-value by Student's t over pairs); None with fewer than two pairs."""
    mine, its = last_values(one, metric), last_values(reference, metric)
    seeds = sorted(mine.keys() & its.keys())
    if len(seeds) < 2:
        return None
    differences = [mine[seed] - its[seed] for seed in seeds]
    mean, low, high = mean_interval(differences)
    word = "higher" if mean > 0 else "lower"
    edges = sorted((abs(low), abs(high)))
    before = float(np.mean([its[seed] for seed in seeds]))
    name = OTHERS[metric].partition(",")[0]
    text = f"{name} {word} by {abs(mean):.2g} ({edges[0]:.2g} to {edges[1]:.2g}), from {before:.2g}"
    se = float(np.std(differences, ddof=1)) / math.sqrt(len(seeds))
    return text, p_value(mean, se, 0.0, len(seeds) - 1)
