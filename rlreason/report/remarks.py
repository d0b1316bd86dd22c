"""Say what a reader of the runs must know: facts of the comparison, and warnings, a plain sentence each."""

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from rlreason.health.examine import LATE
from rlreason.report.content import counted
from rlreason.report.study import RUNNING, Setting, Study, StudyRun, side_of
from rlreason.report.tables import NONE, millions
from rlreason.runtime.text import duration, few
from rlreason.sweeps.state import WAITING

UNEQUAL = 1.25  # a ratio of two budgets above it makes them different
COLLAPSE = 0.1  # accuracy: the smallest fall that counts
FEW_PROBLEMS = 16  # on fewer, seeds may agree by chance
CONTROL = "python -m rlreason -m sweep=controls seed=0,1,2,3"
ENDED = {
    "diverged": "diverged and count as they are",
    "stopped": "were stopped by a rule and count with what they had reached",
    "budget": "ended when their budget was spent",
    "interrupted": "were interrupted",
    "failed": "failed",
    "running": "are still running and are not compared yet",
    "waiting": "have not begun",
}


def warnings_of(study: Study) -> list[str]:
    """Return the warnings, a sentence each."""
    return [*_ends(study), *(line for one in study.settings for line in _of_setting(one)), *_conditions(study)]


def late(run: StudyRun, metric: str) -> float | None:
    """Return the mean of a metric over the last quarter of its points, or None."""
    series = run.series.get(metric)
    if series is None or not len(series.y):
        return None
    return float(series.y[int((1 - LATE) * len(series.y)) :].mean())


def _ends(study: Study) -> Iterator[str]:
    by_state: dict[str, list[str]] = defaultdict(list)
    for one, run in study.each:
        by_state[run.state].append(f"{one.label} seed {run.seed}")
    for state, names in by_state.items():
        if state != "finished":
            yield f"{len(names)} of {len(study.runs)} runs {ENDED[state]}: {few(names, 3)}."


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
        base, totals = _mean_total(study.reference, axis), [_mean_total(one, axis) for one in study.settings[1:]]
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


def _mean_total(one: Setting, axis: str) -> float:
    """Return the mean of a counter of AXES at the end of the setting's runs; 0 without any."""
    totals = [run.totals[axis] for run in one.runs if run.ended and not run.diverged and axis in run.totals]
    return float(np.mean(totals)) if totals else 0.0


def facts_of(study: Study) -> list[tuple[str, str]]:
    """Return the facts below the first screen."""
    protocols = [run.protocol for run in study.runs if run.protocol is not None]
    hashes = list(dict.fromkeys(str(protocol.get("hash")) for protocol in protocols))
    protocol = f"{few(hashes, 3)}: they differ" if hashes else "none on record yet"
    overlaps = {str(run.settings.get("data.overlap")) for run in study.runs if run.settings.get("data.overlap")}
    overlap = {"refuse": "none: it is refused", "drop": "dropped from training"}
    return [
        ("Compared", "each run's final evaluation"),
        ("Differs between settings", what_differs(study)),
        ("Budget", budget_of(study)),
        ("Protocol", f"{hashes[0]}, one for all {len(protocols)} runs" if len(hashes) == 1 else protocol),
        ("Training and validation overlap", few([overlap.get(how, how) for how in sorted(overlaps)]) or "not known"),
        ("Health", health_of(study)),
        ("Cost", cost_of(study)),
    ]


def what_differs(study: Study) -> str:
    """Return the swept keys that vary, in words."""
    return few(study.varied or study.axes, 3) or "see below" if len(study.settings) > 1 else "the seed alone"


def budget_of(study: Study) -> str:
    """Return steps and tokens of the runs in words, and whether they are equal."""
    steps = sorted({run.planned_steps for run in study.runs if run.planned_steps})
    tokens = sorted(total for one in study.settings if (total := _mean_total(one, "tokens")))
    parts = []
    if steps:
        parts.append(f"{steps[0]} to {steps[-1]} steps" if len(steps) > 1 else f"{steps[0]} steps")
    if tokens:
        equal = tokens[-1] <= UNEQUAL * tokens[0]
        about = f"about {millions(tokens[0])}" if equal else f"{millions(tokens[0])} to {millions(tokens[-1])}"
        parts.append(f"{about} tokens a run")
    running = sum(run.status == RUNNING for run in study.runs)
    early = sum(run.status not in (WAITING, RUNNING) and (not run.ended or run.diverged) for run in study.runs)
    parts += [f"{counted(early, 'run')} ended early"] if early else []
    parts += [f"{counted(running, 'run')} still running"] if running else []
    return "; ".join(parts) or NONE


def health_of(study: Study) -> str:
    """Return in words how many of the runs have something wrong."""
    examined = [run for run in study.runs if run.series]
    ill = sum(any(finding.problem for finding in run.findings) for run in examined)
    return (
        f"something is wrong in {ill} of {len(examined)} runs" if ill else f"nothing is wrong in {len(examined)} runs"
    )


def cost_of(study: Study) -> str:
    """Return time and tokens of all runs, in words."""
    seconds = duration(sum(run.seconds or 0.0 for run in study.runs))
    tokens = millions(sum(run.totals.get("tokens", 0.0) for run in study.runs))
    timed = sum(run.seconds is not None for run in study.runs)
    text = f"{counted(timed, 'run')} took {seconds} in all and sampled {tokens} tokens to learn from"
    if any(run.status == RUNNING for run in study.runs):
        text = f"{tokens} tokens sampled so far; {timed} ended, after {seconds}"
    return f"{text}; some ran side by side" if any(run.shared_machine for run in study.runs) else text
