"""Accuracies against an assignment's pass bar and against what others published."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlreason.report.assignment.courses import Course, Got, Question
from rlreason.report.chosen import best_of, comparing_half
from rlreason.report.content import Figure
from rlreason.report.study import Run, Setting, Study
from rlreason.report.tables import accuracy_of
from rlreason.statistics import mean_interval, wilson_interval
from rlreason.statistics.differences import TIED

#: An interval that ends below this share of the lowest published figure is far below it.
FAR = 0.8
#: Why a loop on the handout's model and data stays below what others got, the commonest first.
CAUSES = (
    "groups that hold responses to different questions (every unit test passes), a learning rate of a tenth of what "
    "the others took, the stop string cut off before it is graded, a prompt whose last line is not what the reward "
    "reads, log-probabilities of another temperature than the samples', and a loss that is summed over the prompt too"
)


def interval_of(runs: Sequence[Run], among: set[str] | None = None) -> tuple[float, float, float] | None:
    """(mean, low, high) of the final accuracies, within 0 to 1; None where no run has one.

    Several seeds: Student's interval of their mean, or where they tie that of the settings' table; one: Wilson's over
    its problems. `among`: the problems that count.
    """
    shares = [share for run in runs if (share := _share(run, among)) is not None]
    if not shares:
        return None
    if len(shares) > 1:
        mean, low, high = mean_interval(shares)
        if high - low < TIED and (found := accuracy_of(Setting((), "", list(runs)), among)):
            return found
        return mean, max(low, 0.0), min(high, 1.0)
    answers = next((run.final for run in runs if run.final is not None), None)
    n = max(1, sum(among is None or name in among for name in answers.problems)) if answers is not None else 1
    return shares[0], *wilson_interval(shares[0] * n, n)


def _share(run: Run, among: set[str] | None) -> float | None:
    if among is None or run.final is None:
        return run.accuracy
    chosen = [problem.share for name, problem in run.final.problems.items() if name in among]
    return float(np.mean(chosen)) if chosen else run.accuracy


def percent(value: float) -> str:
    """A share as a sentence has it.

    >>> percent(0.4567)
    '45.7%'
    """
    return f"{100 * value:.1f}%"


def with_interval(found: tuple[float, float, float], seeds: int) -> str:
    """'45.7% (40.1% to 51.0%, 4 seeds)'."""
    over = f"{seeds} seeds" if seeds > 1 else "one seed, over its problems"
    return f"{percent(found[0])} ({percent(found[1])} to {percent(found[2])}, {over})"


def against_bar(found: tuple[float, float, float], bar: float) -> str:
    """Whether a mean with its interval reaches a bar.

    >>> [against_bar(found, 0.25) for found in ((0.5, 0.4, 0.6), (0.3, 0.2, 0.4), (0.1, 0.0, 0.2))]
    ['reached', 'cannot tell', 'not reached']
    """
    return "reached" if found[1] >= bar else "not reached" if found[2] < bar else "cannot tell"


def bar_line(course: Course, question: Question, study: Study) -> str:
    """The best setting against the pass bar, on the problems that did not choose it; '' where there is no bar."""
    if question.bar is None:
        return ""
    best = best_of(study)
    several = len(study.settings) > 1
    found = interval_of(best.runs, comparing_half(study.settings) if several else None)
    if found is None:
        return f"Pass bar {percent(question.bar)}: no run has come to an evaluation yet."
    which = (
        f"{best.label}, the best of {len(study.settings)} settings on one half of the problems, has "
        f"{with_interval(found, _seeds(best))} on the other half"
        if several
        else f"the accuracy is {with_interval(found, _seeds(best))}"
    )
    reached = against_bar(found, question.bar)
    other = f" It is set for {course.model_name}, and says nothing of this model."
    of_theirs = _fewer(question, study) if is_of(course, study) else other
    return f"Pass bar {percent(question.bar)}, {study.name}: {reached}, as {which}.{of_theirs}"


def _fewer(question: Question, study: Study) -> str:
    """What has to be said where the runs came to fewer steps than the bar is set for."""
    ran = max((int(run.totals.get("step") or run.planned_steps or 0) for run in study.runs), default=0)
    if not 0 < ran < question.steps:
        return ""
    return f" It is set for {question.steps} steps, and these runs came to {ran}."


def _seeds(setting: Setting) -> int:
    return sum(run.accuracy is not None for run in setting.runs)


def is_of(course: Course, study: Study) -> bool:
    """Whether all runs that have begun have the model and the data of the published figures."""
    return all(course.is_of(run.settings, run.provenance) for run in study.runs if run.settings)


def what_ran(study: Study) -> str:
    """'model tiny on stories_long, 40 steps', from the runs' own settings."""
    models = sorted({str(run.settings.get("model.name", "?")) for run in study.runs})
    data = sorted({str(run.settings.get("data.name", "?")) for run in study.runs})
    steps = sorted({run.planned_steps for run in study.runs if run.planned_steps})
    planned = f", {steps[0]:,}{f' to {steps[-1]:,}' if len(steps) > 1 else ''} steps" if steps else ""
    seeds = len(study.seeds)
    return f"model {' and '.join(models)} on {' and '.join(data)}{planned}, {seeds} seed{'s' * (seeds != 1)}"


def with_bands(figure: Figure, course: Course, question: Question, study: Study) -> Figure:
    """The picture of the accuracy with the published bands of its question, where model and data are theirs."""
    bands = [{"low": got.low, "high": got.high} for got in _bands(course, question)]
    if figure.name != "eval/accuracy" or not bands or not is_of(course, study):
        return figure
    rows = {**figure.rows, "published": [_seen(band) for band in bands]}
    return replace(figure, rows=rows, note=f"{figure.note} Grey: published figures.".strip())


def _seen(band: dict[str, float]) -> dict[str, float]:
    """A band of a single number, wide enough to be seen."""
    wide = max(0.0, 0.01 - (band["high"] - band["low"])) / 2
    return {"low": band["low"] - wide, "high": band["high"] + wide}


def _bands(course: Course, question: Question) -> list[Got]:
    return [got for got in course.figures if got.question == question.id and got.band]


def published_line(course: Course, question: Question, study: Study) -> str:
    """How far the best setting is from what others got; '' where theirs is another model, or nothing is known."""
    told = [got for got in course.figures if got.question == question.id]
    if not told:
        return ""
    if not is_of(course, study):
        return ""  # the head of the write-up says so, once
    bands, found = _bands(course, question), interval_of(best_of(study).runs)
    if not bands or found is None:
        return ""
    low = min(got.low for got in bands)
    if found[2] >= low:
        return f"Others got {'; '.join(map(got_words, bands))}: this is not below it."
    right = f"A right loop is at {course.a_right_loop}" if course.a_right_loop else f"Others are at {percent(low)}"
    below = "far below" if found[2] < FAR * low else "below"
    causes = _fewer(question, study) or f" Commonest causes: {CAUSES}."
    return f"{right}; you are {below}, at {percent(found[0])}.{causes}"


def got_words(got: Got) -> str:
    """'50.5 to 71.7% (a right loop, 1e-5 to 3e-5)'."""
    number = re.sub(r"\.0$", "", f"{100 * got.low:.1f}")
    to = f" to {re.sub(r'[.]0$', '', f'{100 * got.high:.1f}')}" if got.high > got.low else ""
    return f"{number}{to}% ({got.what})"
