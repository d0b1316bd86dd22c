"""Two steps of one run of a sweep, tried in a folder that is thrown away: what one step takes, and so the whole run."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, cast

from rlreason.config.run import RunConfig
from rlreason.config.training import UNKNOWN_EVALUATIONS, TrainingConfig
from rlreason.records.files import METRICS, SUMMARY
from rlreason.records.reader import RunFolder
from rlreason.runtime.environment import SWEEP_VARIABLE
from rlreason.runtime.text import duration, shorten
from rlreason.sweeps.design import PlannedRun

STEPS = 2
PROBLEMS = 8  # that its evaluations ask
LIMIT_S = 1200.0
#: What makes a run short. Later words of a command line replace earlier ones of the same setting.
SHORT = (f"eval.problems={PROBLEMS}", f"eval.final_problems={PROBLEMS}", "log_generations=0", "logger=none")
SHORT_TRAINING = (
    f"n_steps={STEPS}", "eval_every=0", "save_model=false", "save_rollouts_every=0", "checkpoint.every=0",
    "lr_schedule=constant", "warmup_steps=0",
)  # fmt: skip


class Probe(NamedTuple):
    """What a whole run is estimated to take, in seconds; None where that cannot be said. `said`: by what, or why.

    `once`: seconds to teach the start model, which the first run pays for all, because it is kept.
    """

    seconds: float | None
    said: str
    once: float = 0.0


def probe(planned: PlannedRun, run: RunConfig, sources: Sequence[str] = ()) -> Probe:
    """Try two steps of a run, in a process and a folder of its own; it takes as long as a run takes to start."""
    words = short_words(planned.words, run)
    with TemporaryDirectory(prefix="rlreason-probe-") as place:
        folder = Path(place) / "run"
        argv = [sys.executable, "-m", "rlreason", *sources, *words, f"hydra.run.dir='{folder}'"]
        env = {**os.environ, SWEEP_VARIABLE: "probe"}  # a run of a sweep: it gives no hints
        try:
            done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return Probe(None, f"two steps took longer than {duration(LIMIT_S)}")
        if not (folder / METRICS).exists() and not (folder / SUMMARY).exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            return Probe(None, f"the trial of two steps failed: {shorten(lines[-1] if lines else 'no word', 200)}")
        return estimate(RunFolder(folder), run)


def short_words(words: Sequence[str], run: RunConfig) -> list[str]:
    """The words of a run, changed so that it ends after two steps."""
    short = [*SHORT, *(SHORT_TRAINING if run.trains else ())]
    if hasattr(run, "epochs"):
        short.append("epochs=null")
    changed = {
        "eval_problems",
        *(word.partition("=")[0] for word in short),
    }  # the first is another name of eval.problems
    return [*(word for word in words if word.lstrip("+").partition("=")[0] not in changed), *short]


def estimate(tried: RunFolder, run: RunConfig) -> Probe:
    """What a whole run takes: its start, its steps, and its evaluations by the number of problems.

    start + n_steps * (seconds of the second step) + problems asked * (seconds a problem)
    """
    summary = tried.summary or {}
    if not run.trains:
        asked = run.evaluation.final_problems or run.problems_there
        seconds = summary.get("seconds")
        if not asked or not isinstance(seconds, int | float):
            return Probe(None, "the number of problems is not known before they are read")
        return Probe(seconds * max(1.0, asked / PROBLEMS), f"a trial with {PROBLEMS} problems (at most)")
    training, rows = cast(TrainingConfig, run), tried.metrics
    steps = [row for row in rows if row.get("rollout_step") == STEPS or row.get("train_step") == STEPS]
    before = [row for row in rows if row not in steps]
    if not steps or not before:
        return Probe(None, f"the trial ended as {tried.status} before its second step")
    evaluation = _evaluating(rows[0])
    each = _seconds(steps[-1]) - _seconds(before[-1]) - _evaluating(steps[-1])
    each = max(each, 1e-3)
    once = start_paid_once(tried)
    start = max(0.0, _seconds(rows[0]) - evaluation - once)
    if training.n_steps is None:
        return Probe(None, f"{each:.2g} s a step and {duration(start)} to start; the steps are not known beforehand")
    every = training.eval_every
    on_the_way = 1 if every == 0 else training.n_steps // every + 1 if every else UNKNOWN_EVALUATIONS
    last = run.evaluation.final_problems or run.problems_there or PROBLEMS
    asked = on_the_way * (run.evaluation.problems or last) + last
    total = start + training.n_steps * each + asked * evaluation / PROBLEMS
    return Probe(total, f"a trial of two steps: {each:.2g} s a step, {duration(start)} to start (rough)", once)


def start_paid_once(run: RunFolder) -> float:
    """Seconds in which a run taught its start model that the next ones find in the cache."""
    start = (run.summary or {}).get("start") or {}
    made = start.get("source") == "made" and run.setting("model.cache") is not None
    return float(start.get("seconds") or 0.0) if made else 0.0


def _evaluating(row: dict[str, float]) -> float:
    return float(row.get("time/eval") or 0.0) + float(row.get("time/grading") or 0.0)


def _seconds(row: dict[str, float]) -> float:
    return float(row.get("time/total") or 0.0)
