"""The experiment log: which runs were made, how each ended and why, and what it came to."""

from rlreason.report.content import Table
from rlreason.report.study import Run, Study
from rlreason.report.tables import NONE, percent
from rlreason.runtime.text import duration

#: First word of a status -> what is shown.
SHOWN = {
    "finished": "\N{CHECK MARK} finished",
    "budget": "\N{CHECK MARK} budget spent",
    "stopped": "\N{BLACK SQUARE} stopped",
    "diverged": "\N{MULTIPLICATION X} diverged",
    "interrupted": "\N{BLACK SQUARE} interrupted",
    "failed": "\N{MULTIPLICATION X} failed",
    "running": "\N{HORIZONTAL ELLIPSIS} running",
    "waiting": "\N{HORIZONTAL ELLIPSIS} not begun",
}


def log_of(study: Study) -> Table:
    """A row for each run, by setting and seed."""
    head = ["setting", "seed", "state", "why", "steps", "last accuracy", "time"]
    rows = [_row(run, setting.label) for setting in study.settings for run in setting.runs]
    return Table("Experiment log", head, rows, frozenset({1, 4, 5, 6}), labels=frozenset({0}))


def _row(run: Run, label: str) -> list[str]:
    word, _, rule = run.status.partition(":")
    reached = run.totals.get("step")
    steps = NONE if reached is None else f"{reached:.0f}"
    if reached is not None and run.planned_steps and run.planned_steps != reached:
        steps += f" of {run.planned_steps}"
    return [
        label,
        str(run.seed),
        SHOWN[word],
        run.reason or (f"by the rule {rule}" if rule else NONE),
        steps,
        NONE if run.accuracy is None and not run.evaluations else percent(_last(run)),
        NONE if run.seconds is None else duration(run.seconds),
    ]


def _last(run: Run) -> float:
    return run.accuracy if run.accuracy is not None else run.evaluations[-1][1]
