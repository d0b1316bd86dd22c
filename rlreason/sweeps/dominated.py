"""`monitors.dominated=stop`: a setting that surely loses is stopped, with all its seeds, so that others get the time.

A setting is compared with the reference, which is never stopped; in a sweep without one every two settings are
compared. It is stopped where at least three seeds of both have ended and the interval of its difference (paired, see
`statistics.differences`, on the half of the problems that chooses) lies below 0, by Holm over all comparisons that the
sweep will make.

The sweep looks again after every run, and each look could be wrong. Looks that can still stop something are those with
3 to S - 1 seeds, S being the number of seeds that are planned, so the level of 5% is shared out among these S - 3
(Bonferroni): any setting as good as the reference is stopped in at most 5% of the sweeps, however often they look. With
three seeds nothing is left to stop.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.runtime.streams import print_stderr
from rlreason.statistics import Difference, Floats, compared, holm, points
from rlreason.statistics.differences import LEVEL
from rlreason.sweeps.carry import in_words, refuse_shared_time
from rlreason.sweeps.design import FEWEST_SEEDS, Key
from rlreason.sweeps.outcomes import CHOOSING, Outcomes, asked_by_all, correctness, outcomes_of, refuse_unequal
from rlreason.sweeps.state import RunState, SweepState

Right = Mapping[Key, Mapping[int, Floats]]  # setting -> seed -> correctness (problems)


class Verdict(NamedTuple):
    """A setting that loses surely, against which, by how much, and at which level."""

    setting: Key
    better: Key
    difference: Difference  # the setting minus the better one
    adjusted_p: float
    level: float


def losers(right: Right, reference: Key | None, settings: int, planned_seeds: int) -> list[Verdict]:
    """The settings that surely lose: at each the clearest verdict. The rule is that of the module.

    `right`: of the runs that have ended. `settings`, `planned_seeds`: how many the sweep has in all.
    """
    looks = planned_seeds - FEWEST_SEEDS
    if looks < 1:
        return []
    level = LEVEL / looks
    pairs = [(key, reference) for key in right if key != reference] if reference else itertools.combinations(right, 2)
    family = settings - 1 if reference else settings * (settings - 1) // 2
    looked = [(a, b, compared(_shared(right, a, b), _shared(right, b, a))) for a, b in pairs if _enough(right, a, b)]
    found: dict[Key, Verdict] = {}
    for (a, b, d), p in zip(looked, holm([d.p for _, _, d in looked], family), strict=True):
        worse, better, minus = (a, b, d) if d.mean < 0 else (b, a, _turned(d))
        if p > level or worse == reference:
            continue
        if worse not in found or p < found[worse].adjusted_p:
            found[worse] = Verdict(worse, better, minus, p, level)
    return list(found.values())


def _enough(right: Right, a: Key, b: Key | None) -> bool:
    return b is not None and b in right and len(right[a].keys() & right[b].keys()) >= FEWEST_SEEDS


def _shared(right: Right, one: Key, other: Key | None) -> dict[int, Floats]:
    """The runs of a setting whose seeds the other one has run too."""
    assert other is not None
    return {seed: values for seed, values in right[one].items() if seed in right[other]}


def _turned(d: Difference) -> Difference:
    return Difference(
        -d.mean, d.half, -d.high, -d.low, d.p, d.seeds, d.problems, d.over, d.se_seeds, d.se_extra, d.dof
    )  # fmt: skip


def watch(folder: Path, say: Callable[[str], None] = print_stderr) -> Callable[[SweepState], list[dict[str, Any]]]:
    """What a sweep in a folder asks after each run: which settings are to be stopped, as `SweepState.stopped_settings`.

    The files of each run are read once. Settings that cannot be compared stop nothing, and why is said once.
    """
    known: dict[str, Outcomes] = {}
    said: set[str] = set()

    def after_run(state: SweepState) -> list[dict[str, Any]]:
        try:
            return to_stop(state, _outcomes(state, folder, known))
        except ConfigError as error:
            if str(error) not in said:
                said.add(str(error))
                say(f"! monitors.dominated=stop stops nothing: {error}")
            return []

    return after_run


def to_stop(state: SweepState, ended: Sequence[tuple[RunState, Outcomes]]) -> list[dict[str, Any]]:
    """The settings to stop: those that surely lose and have runs that are left. `ConfigError`: they are not alike."""
    if not ended:
        return []
    refuse_shared_time([run for run, _ in ended])
    outcomes = [one for _, one in ended]
    refuse_unequal(outcomes, state.axes)
    problems = asked_by_all(outcomes, CHOOSING)
    grouped: dict[Key, list[Outcomes]] = {}
    for run, one in ended:
        grouped.setdefault(run.key, []).append(one)
    right = {key: correctness(of, problems) for key, of in grouped.items()}
    settings = {run.key for run in state.runs}
    left = {run.key for run in state.runs if not run.of_its_own}
    reference = next((key for key in settings if dict(key) == state.reference), None)
    if state.reference is not None and reference is None:
        raise ConfigError(f"the sweep's reference {in_words(state.reference)} is none of its settings: run it as well")
    already = [one["setting"] for one in state.stopped_settings]
    seeds = len({run.seed for run in state.runs})
    return [
        {"setting": dict(verdict.setting), **_told(verdict)}
        for verdict in losers(right, reference, len(settings), seeds)
        if verdict.setting in left and dict(verdict.setting) not in already
    ]


def _told(verdict: Verdict) -> dict[str, Any]:
    d, better = verdict.difference, dict(verdict.better)
    reason = (
        f"worse than {in_words(better)} by {points(-d.mean)} ({points(-d.high)} to {points(-d.low)}) over {d.seeds} "
        f"seeds and {d.problems} problems; Holm's p {verdict.adjusted_p:.2g}, below {verdict.level:.2g}"
    )
    numbers = {"difference": d.mean, "low": d.low, "high": d.high, "seeds": d.seeds, "problems": d.problems}
    return {"reason": reason, "better": better, **numbers, "p": verdict.adjusted_p, "level": verdict.level}


def _outcomes(state: SweepState, folder: Path, known: dict[str, Outcomes]) -> list[tuple[RunState, Outcomes]]:
    """The outcomes of the runs that came to an end of their own."""
    found = []
    for run in state.runs:
        if run.name not in known and run.of_its_own and (one := outcomes_of(folder, run)) is not None:
            known[run.name] = one
        if run.name in known:
            found.append((run, known[run.name]))
    return found
