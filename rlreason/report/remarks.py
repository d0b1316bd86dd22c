"""Warn of what a reader of the runs must know, a plain sentence each."""

import re
from collections.abc import Iterator

import numpy as np

from rlreason.health.examine import LATE
from rlreason.report.content import counted
from rlreason.report.study import RUNNING, Setting, Study, StudyRun, side_of
from rlreason.report.tables import NONE, millions
from rlreason.report.verdicts import SATURATED
from rlreason.runtime.text import duration, few
from rlreason.sweeps.state import WAITING

UNEQUAL = 1.25  # a ratio of two budgets above it makes them different
LARGE_MISMATCH = 0.05  # nats a token, between engine and trainer
COLLAPSE = 0.1  # accuracy: the smallest fall that counts
FEW_PROBLEMS = 16  # on fewer, seeds may agree by chance
CONTROL = "python -m rlreason -m sweep=controls seed=0,1,2,3"


def warnings_of(study: Study) -> list[str]:
    """Return the warnings, a sentence each."""
    checks = (_seeds, _ends, _collapsed, _copies, _saturated, _unequal_budgets, _at_the_end, _noise, _conditions)
    return [line for check in checks for line in check(study)]


def late(run: StudyRun, metric: str) -> float | None:
    """Return the mean of a metric over the last quarter of its points, or None."""
    series = run.series.get(metric)
    if series is None or not len(series.y):
        return None
    return float(series.y[int((1 - LATE) * len(series.y)) :].mean())


def _seeds(study: Study) -> Iterator[str]:
    trained = any(run.series.get("train/loss") is not None for run in study.runs)
    seeds = {len(one.runs) for one in study.settings}
    if not trained or len(study.settings) < 2:
        return
    if max(seeds) == 1:
        yield "One seed each: this compares trained models, not settings."
    elif max(seeds) == 2:
        yield "Two seeds never settle anything but very large differences."
    if len({tuple(run.seed for run in one.runs) for one in study.settings}) > 1:
        yield "The settings did not all run the same seeds."


def _ends(study: Study) -> Iterator[str]:
    by_status: dict[str, list[str]] = {}
    for one in study.settings:
        for run in one.runs:
            status = run.status.partition(":")[0]
            if status != "finished":
                by_status.setdefault(status, []).append(f"{one.label} seed {run.seed}")
    texts = {
        "diverged": "diverged and count as they are",
        "stopped": "were stopped by a rule and count with what they had reached",
        "budget": "ended when their budget was spent",
        "interrupted": "were interrupted",
        "failed": "failed",
        "running": "are still running and are not compared yet",
        "waiting": "have not begun",
    }
    for status, names in by_status.items():
        yield f"{len(names)} of {len(study.runs)} runs {texts[status]}: {few(names, 3)}."


def _collapsed(study: Study) -> Iterator[str]:
    """Warn of runs that end at half of their best accuracy or less, and at least ten points below it."""
    for one in study.settings:
        ended = [run for run in one.runs if not run.diverged and run.accuracy is not None and run.evaluations]
        pairs = [(max(y for _, y in run.evaluations), run.accuracy or 0.0) for run in ended]
        fallen = [(best, last) for best, last in pairs if last <= best / 2 and best - last >= COLLAPSE]
        if fallen:
            best, last = (float(np.mean(values)) for values in zip(*fallen, strict=True))
            yield (
                f"{one.label} collapsed in {len(fallen)} of {len(one.runs)} seeds: from {best:.1%} at its best to "
                f"{last:.1%} in the end."
            )


def _copies(study: Study) -> Iterator[str]:
    """Warn of seeds with the same answers to every problem, which may be copies of one run."""
    for one in study.settings:
        answers = side_of(one).right.values()
        mixed = [shares for shares in answers if shares and len(shares) >= FEW_PROBLEMS and len({*shares.values()}) > 1]
        if len(mixed) > 1 and all(shares == mixed[0] for shares in mixed[1:]):
            yield (
                f"All {len(mixed)} seeds of {one.label} gave the same answers to every problem: if they are copies of "
                "one run, they tell no more than one seed."
            )


def _saturated(study: Study) -> Iterator[str]:
    accuracies = [run.accuracy for run in study.runs if run.accuracy is not None]
    if len(accuracies) < len(study.runs) or len(study.settings) < 2 or not accuracies:
        return
    if min(accuracies) > SATURATED[1]:
        yield f"Every run is above {SATURATED[1]:.0%}: this task cannot separate the settings."
    if max(accuracies) < SATURATED[0]:
        yield f"Every run is below {SATURATED[0]:.0%}: this task cannot separate the settings."


def _mean_total(one: Setting, axis: str) -> float | None:
    """Return the mean of a counter of AXES at the end of the setting's runs."""
    totals = [run.totals[axis] for run in one.runs if run.ended and not run.diverged and axis in run.totals]
    return float(np.mean(totals)) if totals else None


def _unequal_budgets(study: Study) -> Iterator[str]:
    for axis, what in (("tokens", "generated tokens"), ("updates", "optimizer updates")):
        base = _mean_total(study.reference, axis)
        if not base:
            continue
        odd = [(one, total / base) for one in study.settings[1:] if (total := _mean_total(one, axis))]
        odd = [(one, q) for one, q in odd if q > UNEQUAL or q < 1 / UNEQUAL]
        if odd:
            names = few([f"{one.label}: {q:.1f} times" for one, q in odd], 3)
            cure = f"read the curves against {axis} too"
            yield f"The {what} differ from those of {study.reference.name} ({names}): {cure}."


def budget_of(study: Study) -> str:
    """Return steps and tokens of the runs in words, and whether they are equal."""
    steps = {run.planned_steps for run in study.runs if run.planned_steps}
    per_setting = [total for one in study.settings if (total := _mean_total(one, "tokens"))]
    parts = []
    if steps:
        parts.append(f"{min(steps)} steps" if len(steps) == 1 else f"{min(steps)} to {max(steps)} steps")
    if per_setting:
        low, high = min(per_setting), max(per_setting)
        tokens = f"about {millions(low)}" if high <= UNEQUAL * low else f"{millions(low)} to {millions(high)}"
        parts.append(f"{tokens} tokens a run")
    running = sum(run.status == RUNNING for run in study.runs)
    early = sum(run.status not in (WAITING, RUNNING) and (not run.ended or run.diverged) for run in study.runs)
    if early:
        parts.append(f"{counted(early, 'run')} ended early")
    if running:
        parts.append(f"{counted(running, 'run')} still running")
    return "; ".join(parts) or NONE


def _at_the_end(study: Study) -> Iterator[str]:
    """Warn of what `rlreason health` notes of the end of runs, and of weights that the engine may not have."""
    for one in study.settings:
        for rule in ("few_live_groups", "many_cut"):
            noted = [finding.what for run in one.runs for finding in run.findings if finding.rule == rule]
            if noted:
                seeds = f" ({len(noted)} of {len(one.runs)} seeds)" if len(one.runs) > 1 else ""
                yield f"In {one.label}{seeds} {noted[0]}."
        mismatches = [value for run in one.runs if (value := late(run, "rollout/mismatch_mean")) is not None]
        if mismatches and (mean := float(np.mean(mismatches))) > LARGE_MISMATCH:
            yield f"In {one.label} engine and trainer disagree by {mean:.2g} nats a token: are its weights old?"


def _noise(study: Study) -> Iterator[str]:
    groups = [[run.accuracy for run in one.runs if run.accuracy is not None] for one in study.settings]
    spreads = [float(np.std(group, ddof=1)) for group in groups if len(group) > 1]
    means = [float(np.mean(group)) for group in groups if group]
    if len(means) < 2 or not spreads:
        return
    effect, spread = max(means) - min(means), float(np.mean(spreads))
    if effect < 2 * spread:
        yield (
            f"Seeds of one setting spread by {100 * spread:.1f} points, and the settings' means by "
            f"{100 * effect:.1f} in all: the noise is as large as the effect."
        )


def _conditions(study: Study) -> Iterator[str]:
    """Warn of data, rewards, grading, times and code that make the runs less comparable than they look."""
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
        times = [run.seconds for run in study.runs if run.seconds]
        longest = f" (up to {duration(max(times))} a run)" if times else ""
        yield f"Runs shared the machine, so times{longest} compare with nothing: no verdict on wall clock is given."
    names = {"code": "code", "hardware": "graphics card or processor", "packages": "library versions"}
    for key, name in names.items():
        values = {str(run.provenance[key]) for run in study.runs if run.provenance.get(key)}
        if len(values) > 1:
            yield f"Not all runs had the same {name}: {len(values)} different ones are on record."
