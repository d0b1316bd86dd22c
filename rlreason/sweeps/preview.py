"""Describe what a sweep is about to do, and estimate its time, its disk space and the differences that it can show."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlreason.config.algorithms import has_ratio_of_one
from rlreason.config.run import AnyRunConfig, RunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.model.savings import one_line, planned
from rlreason.model.shapes import believed_device, decimal_size, shape_of
from rlreason.records.reader import RunFolder
from rlreason.runtime.differences import (
    ASSUMED,
    LEVEL,
    Spread,
    assumed_range,
    paired_difference,
    points,
    smallest_difference,
    spread_of,
)
from rlreason.runtime.text import duration, few
from rlreason.sweeps.carry import setting_text
from rlreason.sweeps.state import FEWEST_SEEDS, FILE, Design, Key, RunState, SweepState, read_state

MEASURED = ("finished", "budget")  # statuses of runs whose time and size are used
#: Settings that must be equal for the time of another sweep's run to be used for this one.
ALIKE = (
    "algorithm", "n_steps", "model.name", "model.path", "data.name", "rollout_batch_size", "question_batch_size",
    "train_batch_size", "epochs_per_rollout", "sampling.max_tokens", "group_size", "prompt.name", "eval.card",
    "budget.hours", "budget.tokens", "budget.steps", "budget.calls", "strategy", "client.model", "problem",
)  # fmt: skip
LOOKED_AT = 6  # other sweeps, the newest first: a plan must be quick


class RunCost(NamedTuple):
    """The cost of one run: wall clock in seconds, size on disk in bytes, and the runs that these were measured on."""

    seconds: float
    size: float
    source: str


def cost_of(design: Design, run: AnyRunConfig, before: SweepState | None) -> RunCost | None:
    """Return the mean cost of finished runs of this sweep, else of a similar sweep next to it, or None."""
    if before and (cost := _mean(before, design.folder, "this sweep")):
        return cost
    files = [path for pattern in (f"*/{FILE}", f"*/*/{FILE}") for path in design.folder.parent.glob(pattern)]
    newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in [path.parent for path in newest if path.parent != design.folder][:LOOKED_AT]:
        try:
            state = read_state(folder)
            ended = next((one for one in _measured(state) if (folder / one.name).is_dir()), None)
            if ended and alike(RunFolder(folder / ended.name, lambda _: None), run):
                return _mean(state, folder, folder.name)
        except ConfigError:  # of a later version, or broken: try another
            continue
    return None


def alike(folder: RunFolder, run: AnyRunConfig) -> bool:
    """Return whether a run in a folder had the settings that determine its time, as far as both have them."""
    return all(folder.setting(key) == _setting(run, key) for key in ALIKE)


def _setting(run: Any, key: str) -> Any:
    for name in key.split("."):
        run = getattr(run, name, None)
    return run


def _measured(state: SweepState) -> list[RunState]:
    return [run for run in state.runs if run.status in MEASURED and run.seconds]


def _mean(state: SweepState, folder: Path, name: str) -> RunCost | None:
    """Average over the finished runs; only over those that had the machine to themselves, if there are any."""
    ended = _measured(state)
    alone = [run for run in ended if not run.shared_machine]
    if not ended:
        return None
    used, seconds = alone or ended, 0.0
    source = f"{len(used)} finished {'runs' if len(used) > 1 else 'run'} of {name}"
    source += "" if alone else ", which shared the machine"
    for one in used:
        seconds += one.seconds or 0.0
        run = RunFolder(folder / one.name, lambda _: None)
        start = (run.summary or {}).get("start") or {}
        if start.get("source") == "made" and run.setting("model.cache") is not None:
            seconds -= float(start.get("seconds") or 0.0)  # later runs find the start model in the cache
    sizes = [size_of(folder / one.name) for one in used[:5]]
    return RunCost(max(seconds, 0.0) / len(used), sum(sizes) / len(sizes), source)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


UNKNOWN = "unknown: no run like these has finished"
ASSUMED_SPREAD = "assumed: seeds that spread by 0.02 to 0.05"
IDLE = (
    f"; monitors.dominated=stop stops nothing here: it looks once {FEWEST_SEEDS} seeds have ended, so give more seeds"
)
ONE_ON_POLICY = ("reinforce_with_baseline", "grpo_clip", "grpo_no_clip")  # losses of one gradient where the ratio is 1
SHOWN = 12  # values of an axis, at most


def plan_text(
    design: Design,
    runs: Sequence[AnyRunConfig],
    jobs: int = 1,
    space: Callable[[AnyRunConfig], float] | None = None,
    hands_out: Mapping[str, str] | None = None,
    apart: bool = False,
    alike: Sequence[str] = (),
) -> str:
    """Return the plan of a sweep, a line for each part.

    `runs`: their settings, at least the first. `space`: bytes that a run may write by its settings, used if no run has
    finished. `hands_out`: lines on launcher and GPUs, by label. `apart`: runs do not share memory. `alike`: see
    `one_formula`.
    """
    try:
        before = read_state(design.folder) if (design.folder / FILE).exists() else None
    except ConfigError:
        before = None
    settings, seeds = design.settings(), design.seeds
    comparison = "with nothing: there is one setting"
    if len(settings) > 1:
        none = "each: the sweep names no reference among its values, which carry= would need"
        comparison = f"each setting with {none if design.reference is None else setting_text(design.reference)}"
    ended = sum(run.of_its_own for run in before.runs if run.name in {r.name for r in design.runs}) if before else 0
    left = len(design.runs) - ended
    cost = cost_of(design, runs[0], before)
    several = f"{_count(len(settings), 'setting')} x {_count(len(seeds), 'seed')} ({few([str(s) for s in seeds], 10)})"
    if len(settings) * len(seeds) != len(design.runs):
        several = f"{_count(len(settings), 'setting')}, {_count(len(seeds), 'seed')}, not all with all"
    lines = {
        "sweep": f"{design.name} in {design.folder}",
        "runs": f"{len(design.runs)}: {several}" + (f"; {ended} ended before" if ended else ""),
        "varies": varied(design),
        "compared": comparison,
        **({"alike": "; ".join(alike)} if alike else {}),
        "time": time_line(cost, left, jobs),
        "disk": disk_line(cost, runs, left, space),
        **memory_line(runs, 1 if apart else jobs),
        **{label: line for label, line in (hands_out or {}).items() if line},
        "can show": can_show(design, runs[0], before),
    }
    return "\n".join(f"{label:<10} {line}" for label, line in lines.items())


def varied(design: Design) -> str:
    """Return what differs between the runs apart from the seed: the swept settings with their values, in order."""
    parts = []
    for axis in design.axes:
        values = list(dict.fromkeys(run.setting[axis] for run in design.runs if axis in run.setting))
        more = f" and {len(values) - SHOWN} more" if len(values) > SHOWN else ""
        parts.append(f"{axis}={','.join(values[:SHOWN])}{more}")
    return "; ".join(parts) or "the seed alone"


def one_formula(runs: Mapping[str, AnyRunConfig]) -> list[str]:
    """Return a line for each group of settings that are the same formula under the rest of their settings.

    `runs`: setting as text -> its config. With one update per rollout batch the ratio is 1 wherever it is used, so
    neither it nor its clip has an effect.
    """
    called: dict[str, list[str]] = {}
    for name, run in runs.items():
        if has_ratio_of_one(run) and run.loss.loss_type in ONE_ON_POLICY:
            run = replace(run, loss=type(run.loss)(ONE_ON_POLICY[0]))
            called.setdefault(repr(run), []).append(name)
    return [
        f"{' and '.join(names)} are one formula here: with one update per rollout batch the ratio is 1, and the runs "
        "are equal; off_policy=e1_quarter would tell them apart"
        for names in called.values()
        if len(names) > 1
    ]


def time_line(cost: RunCost | None, left: int, jobs: int) -> str:
    """Return how long the remaining runs will take, and from which runs that is known."""
    if not left:
        return "none: every run has ended"
    if cost is None:
        return UNKNOWN
    side = min(jobs, left)
    beside = f", {side} at a time if they do not slow each other down" if side > 1 else ""
    total = duration(cost.seconds * left / side)
    return f"about {total}: {duration(cost.seconds)} a run{beside}, by {cost.source}"


def disk_line(
    cost: RunCost | None, runs: Sequence[AnyRunConfig], left: int, space: Callable[[AnyRunConfig], float] | None
) -> str:
    """Return how much the remaining runs will write."""
    if cost is not None:
        return f"about {decimal_size(cost.size * left)}: {decimal_size(cost.size)} a run, by {cost.source}"
    if space is None:
        return "unknown"
    each = sum(space(run) for run in runs) / len(runs)
    unknown = any(works_on_a_model(run) and shape_of(run.model).shape is None for run in runs)
    without = "; without the model's weights, whose size is not known here" if unknown else ""
    total = f"at most about {decimal_size(each * left)} when all have ended"
    return f"{total}: {decimal_size(each)} a run, by its settings{without}"


def memory_line(runs: Sequence[AnyRunConfig], jobs: int) -> dict[str, str]:
    """Return the peak memory of the largest run, and that of `jobs` runs side by side; {} without a model."""
    device = believed_device()
    plans = [planned(run, device) for run in runs if works_on_a_model(run)]
    if not plans:
        return {}
    largest = max(plans, key=lambda one: one.plan.peak if one.plan else 0)
    side = f"; {jobs} runs side by side take {jobs} times that" if jobs > 1 and largest.plan else ""
    return {"memory": one_line(largest) + side}


def can_show(design: Design, run: AnyRunConfig, before: SweepState | None) -> str:
    """Return the smallest difference between two settings that the sweep's seeds and problems can show."""
    counts = Counter(one.key for one in design.runs)
    n, fewest = len(counts), min(counts.values())
    if not works_on_a_model(run):
        scores = f"best scores over {fewest} seeds" if fewest > 1 else "best scores, one seed each: no distribution"
        return f"{scores}; each run spends at most {run.most_spent}"
    if n == 1 and fewest == 1:
        return "one trained model: one seed has no interval over seeds"
    if n == 1:
        settles = "; two seeds never settle anything" if fewest == 2 else ""
        return f"a mean over {fewest} seeds with its interval{settles}"
    problems = problems_of(run, before)
    pairs = n - 1 if design.reference is not None else n * (n - 1) // 2
    text = power_text(fewest, problems, seen_spread(before), pairs)
    if problems:
        text += f"; carry= and monitors.dominated read half of them, about {problems // 2}"
    return text + IDLE if run.monitors.dominated == "stop" and fewest <= FEWEST_SEEDS else text


def power_text(seeds: int, problems: int | None, spread: tuple[Spread, str] | None, comparisons: int = 1) -> str:
    """Return the smallest difference in words. `spread`: as measured, and on what; None: it is assumed.

    >>> power_text(2, 1024, None)[:75]
    'two seeds never settle anything: with 1024 problems a difference below abou'
    """
    assumed = problems or 1000
    on = f"{problems} problems"
    if not problems:
        on = f"about {assumed} problems (their number is not known before they are read)"
    if seeds == 1:
        apart = points(smallest_difference(1, assumed, ASSUMED[0]))
        return (
            f"no difference between settings: one seed tells two trained models apart, from about {apart} on "
            f"with {on}; add seed=0,1,2,3"
        )
    by = ASSUMED_SPREAD if spread is None else spread[1]
    width, strictest = (_width(seeds, assumed, spread, level) for level in (LEVEL, LEVEL / comparisons))
    text = f'with {on} a difference below about {width} stays "cannot tell" ({by})'
    if comparisons > 1:
        text += f"; by Holm over {comparisons} comparisons, at worst one below {strictest}"
    return f"two seeds never settle anything: {text}" if seeds == 2 else f"{seeds} seeds: {text}"


def _width(seeds: int, problems: int, spread: tuple[Spread, str] | None, level: float) -> str:
    if spread is not None:
        return points(min(1.0, smallest_difference(seeds, problems, spread[0], level)))
    low, high = assumed_range(seeds, problems, level)
    return f"{points(min(1.0, low))} to {points(min(1.0, high))}"


def problems_of(run: RunConfig, before: SweepState | None) -> int | None:
    """Return how many problems the final evaluation asks; None if unknown before they are read."""
    if before and (seen := [one.problems for one in before.runs if one.problems]):
        return min(seen)
    asked, there = run.evaluation.final_problems, run.problems_there
    numbers = [number for number in (asked, there) if number is not None]
    return min(numbers) if numbers else None


def seen_spread(before: SweepState | None) -> tuple[Spread, str] | None:
    """Return how much the differences between settings have spread over seeds; None below two settings of two seeds.

    From the accuracies of the finished runs, each setting against the reference, or else the first: the mean variance.
    """
    if before is None:
        return None
    grouped: dict[Key, dict[int, float]] = {}
    for run in before.runs:
        if run.of_its_own and run.accuracy is not None:
            grouped.setdefault(run.key, {})[run.seed] = run.accuracy
    base = next((key for key in grouped if dict(key) == before.reference), next(iter(grouped), None))
    differences = []
    for key, of_seeds in grouped.items():
        common = of_seeds.keys() & grouped[base].keys() if base is not None and key != base else set()
        if base is not None and len(common) > 1:
            differences.append(paired_difference(np.array([[of_seeds[seed] - grouped[base][seed]] for seed in common])))
    if (spread := spread_of(differences)) is None:
        return None
    settings = f"{len(differences)} finished setting{'s' * (len(differences) > 1)}"
    return spread, f"as {settings} spread: {points(spread.seeds**0.5)} over seeds"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
