"""Warn of what a reader of the runs must know, a plain sentence each."""

import re
from collections.abc import Iterator

import numpy as np

from rlreason.health.examine import LATE
from rlreason.report.study import Setting, Study, StudyRun, side_of
from rlreason.runtime.text import few

UNEQUAL = 1.25  # a ratio of two budgets above it makes them different
COLLAPSE = 0.1  # accuracy: the smallest fall that counts
FEW_PROBLEMS = 16  # on fewer, seeds may agree by chance
CONTROL = "python -m rlreason -m sweep=controls seed=0,1,2,3"


def warnings_of(study: Study) -> list[str]:
    """Return the warnings, a sentence each."""
    return [*(line for one in study.settings for line in _of_setting(one)), *_conditions(study)]


def late(run: StudyRun, metric: str) -> float | None:
    """Return the mean of a metric over the last quarter of its points, or None."""
    series = run.series.get(metric)
    if series is None or not len(series.y):
        return None
    return float(series.y[int((1 - LATE) * len(series.y)) :].mean())


def _of_setting(one: Setting) -> Iterator[str]:
    """Warn of runs that end far below their best, of seeds that may be copies, and of what `rlreason health` notes."""
    ended = [run for run in one.runs if not run.diverged and run.accuracy is not None and run.evaluations]
    pairs = [(max(y for _, y in run.evaluations), run.accuracy or 0.0) for run in ended]
    fallen = [(best, last) for best, last in pairs if last <= best / 2 and best - last >= COLLAPSE]
    if fallen:
        best, last = (float(np.mean(values)) for values in zip(*fallen, strict=True))
        seeds = f"{len(fallen)} of {len(one.runs)} seeds"
        yield f"{one.label} collapsed in {seeds}: from {best:.1%} at its best to {last:.1%} in the end."
    answers = [shares for shares in side_of(one).right.values() if shares and len(shares) >= FEW_PROBLEMS]
    mixed = [shares for shares in answers if len({*shares.values()}) > 1]
    if len(mixed) > 1 and all(shares == mixed[0] for shares in mixed[1:]):
        yield (
            f"All {len(mixed)} seeds of {one.label} gave the same answers to every problem: if they are copies of one "
            "run, they tell no more than one seed."
        )
    for rule in ("few_live_groups", "many_cut"):
        noted = [finding.what for run in one.runs for finding in run.findings if finding.rule == rule]
        if noted:
            seeds = f" ({len(noted)} of {len(one.runs)} seeds)" if len(one.runs) > 1 else ""
            yield f"In {one.label}{seeds} {noted[0]}."


def _conditions(study: Study) -> Iterator[str]:
    """Warn of budgets, data, rewards, grading, times and code that make the runs less comparable than they look."""
    for axis, what in (("tokens", "generated tokens"), ("updates", "optimizer updates")):
        base, totals = mean_total(study.reference, axis), [mean_total(one, axis) for one in study.settings[1:]]
        ratios = [total / base if base and total else 1.0 for total in totals]
        odd = [f"{one.label}: {q:.1f} times" for one, q in zip(study.settings[1:], ratios, strict=True)
               if q > UNEQUAL or q < 1 / UNEQUAL]  # fmt: skip
        if odd:
            cure = f"read the curves against {axis} too"
            yield f"The {what} differ from those of {study.reference.name} ({few(odd, 3)}): {cure}."
    settings = [run.settings for run in study.runs]
    if any(one.get("data.overlap") == "allow" for one in settings):
        yield "Training and validation problems may overlap (data.overlap=allow): accuracy may be memory."
    models = [f"{one.get('model.name')} {one.get('model.path')} on {one.get('data.name')}".lower() for one in settings]
    is_qwen_on_math = any(re.search("qwen.* on .*math", model) for model in models)
    if is_qwen_on_math and not any(str(one.get("prompt.reward")).startswith("rlreason.grading:") for one in settings):
        yield f"No control reward was run. On Qwen models random rewards have raised MATH too: run {CONTROL}."
    failures = [run.series["eval/grading_failures"] for run in study.runs if "eval/grading_failures" in run.series]
    if failed := sum(float(series.y.sum()) for series in failures):
        yield f"{failed:.0f} responses of evaluations got no grade (timeouts or errors) and count as wrong."
    if any(run.shared_machine for run in study.runs):
        yield "Runs shared the machine, so times compare with nothing: no verdict on wall clock is given."
    names = {"code": "code", "hardware": "graphics card or processor", "packages": "library versions"}
    for key, name in names.items():
        values = {str(run.provenance[key]) for run in study.runs if run.provenance.get(key)}
        if len(values) > 1:
            yield f"Not all runs had the same {name}: {len(values)} different ones are on record."


def mean_total(one: Setting, axis: str) -> float:
    """Return the mean of a counter of AXES at the end of the setting's runs; 0 without any."""
    totals = [run.totals[axis] for run in one.runs if run.ended and not run.diverged and axis in run.totals]
    return float(np.mean(totals)) if totals else 0.0
