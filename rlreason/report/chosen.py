"""A setting that a sweep has chosen is compared on problems that did not choose it.

One half of the problems, by a hash of their questions, chooses the best setting; the other half compares. The false
verdicts of a comparison on the problems that chose grow with the number of settings tried.
"""

from collections.abc import Sequence

import numpy as np

from rlreason.report.study import Run, Setting, Study
from rlreason.sweeps.design import Key
from rlreason.sweeps.outcomes import CHOOSING, COMPARING, half_of
from rlreason.sweeps.state import RunState


def best_of(study: Study) -> Setting:
    """The setting with the best mean over its seeds on the half that chooses; the reference where they tie."""
    return max(study.settings, key=lambda one: (_mean(one), one is study.reference))


def _mean(setting: Setting) -> float:
    accuracies = [share_on(run, CHOOSING) for run in setting.runs if run.accuracy is not None]
    return float(np.mean(accuracies)) if accuracies else -1.0


def share_on(run: Run, half: str) -> float:
    """The accuracy of a run's final evaluation on one half of its problems; 0 for a diverged run without one."""
    shares = [p.share for p in run.final.problems.values() if half_of(p.question) == half] if run.final else []
    return float(np.mean(shares)) if shares else 0.0


def comparing_half(settings: Sequence[Setting]) -> set[str]:
    """The problems that chose nothing."""
    found: set[str] = set()
    for run in (run for setting in settings for run in setting.runs):
        if run.final is not None:
            found |= {name for name, p in run.final.problems.items() if half_of(p.question) == COMPARING}
    return found


def how_chosen(label: str, of: int) -> str:
    """Said with a comparison of a setting that was chosen."""
    return (
        f"{label} was the best of {of} settings on one half of the problems; the verdict is on the other half, which "
        "did not choose."
    )


def picked(runs: Sequence[RunState], everyone: Sequence[RunState]) -> int:
    """Of how many settings of its sweep, `everyone`, the one of `runs` was the best, if of three or more; else 0."""
    means = {key: np.mean([run.accuracy or 0.0 for run in of]) for key, of in _by_setting(everyone).items()}
    mine = _by_setting(runs)
    if len(mine) != 1 or len(means) < 3 or max(means, key=lambda key: means[key]) not in mine:
        return 0
    return len(means)


def flattered(name: str, of: int) -> str:
    """Said of a setting that was the best of so many on the problems that it is compared on."""
    return (
        f"{name} was the best of {of} settings on these problems: if it is compared for that, its lead is "
        "flattered. Fresh seeds would settle it; the whole sweep, given alone, is corrected for all its settings."
    )


def _by_setting(runs: Sequence[RunState]) -> dict[Key, list[RunState]]:
    found: dict[Key, list[RunState]] = {}
    for run in runs:
        found.setdefault(run.key, []).append(run)
    return found


def unequal_tuning(a: str, of_a: int, b: str, of_b: int) -> str:
    """Said where one side was tuned over more settings than the other; else nothing."""
    return "" if of_a == of_b else f"{a} was tuned over {of_a} setting{'s' * (of_a > 1)}, {b} over {of_b}."
