"""Describe what a sweep is about to do, and estimate its time, its disk space and the differences that it can show."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlreason.config.algorithms import has_ratio_of_one
from rlreason.config.run import AnyRunConfig, RunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.model.savings import one_line, planned
from rlreason.model.shapes import shape_of
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
from rlreason.runtime.machine import believed_device
from rlreason.runtime.text import decimal_size, duration, few
from rlreason.sweeps.carry import setting_text
from rlreason.sweeps.state import FEWEST_SEEDS, FILE, Design, Key, SweepState, read_state

MEASURED = ("finished", "budget")  # statuses of runs whose time and size are used
#: Settings that must be equal for the time of another sweep's run to be used for this one.
ALIKE = (
    "algorithm", "n_steps", "model.name", "model.path", "data.name", "rollout_batch_size", "question_batch_size",
    "train_batch_size", "epochs_per_rollout", "sampling.max_tokens", "group_size", "prompt.name", "eval.card",
    "budget.hours", "budget.tokens", "budget.steps", "budget.calls", "strategy", "client.model", "problem",
)  # fmt: skip
LOOKED_AT = 6  # other sweeps, the newest first: a plan must be quick
MOST_VALUES = 12  # of an axis in a plan
ONE_ON_POLICY = ("reinforce_with_baseline", "grpo_clip", "grpo_no_clip")  # losses of one gradient where the ratio is 1


def plan_text(
    design: Design,
    settings: Mapping[str, AnyRunConfig],
    jobs: int = 1,
    together: int = 1,
    space: float | None = None,
    hands_out: Mapping[str, str] | None = None,
) -> str:
    """Return the plan of a sweep, a line for each part.

    `settings`: setting as text -> its config, of the first setting, or of all, then those that are one formula are
    named. `jobs`: runs at a time; `together`: how many of them share memory. `space`: bytes that a run may write by its
    settings, read if no run has finished. `hands_out`: lines on launcher and GPUs, by label.
    """
    run = next(iter(settings.values()))
    try:
        before = read_state(design.folder) if (design.folder / FILE).exists() else None
    except ConfigError:  # of a later version, or broken
        before = None
    names = {one.name for one in design.runs}
    ended = sum(one.of_its_own for one in before.runs if one.name in names) if before else 0
    left, cost = len(design.runs) - ended, cost_of(design, run, before)
    of_settings, seeds = len(design.settings()), design.seeds
    several = f"{_count(of_settings, 'setting')} x {_count(len(seeds), 'seed')} ({few([str(s) for s in seeds], 10)})"
    if of_settings * len(seeds) != len(design.runs):
        several = f"{_count(of_settings, 'setting')}, {_count(len(seeds), 'seed')}, not all with all"
    comparison = "with nothing: there is one setting"
    if of_settings > 1:
        none = "each: the sweep names no reference among its values, which carry= would need"
        comparison = f"each setting with {none if design.reference is None else setting_text(design.reference)}"
    memory = ""
    if works_on_a_model(run):
        peak = planned(run, believed_device())
        side = f"; {together} runs side by side take {together} times that" if together > 1 and peak.plan else ""
        memory = one_line(peak) + side
    lines = {
        "sweep": f"{design.name} in {design.folder}",
        "runs": f"{len(design.runs)}: {several}" + (f"; {ended} ended before" if ended else ""),
        "varies": _varied(design),
        "compared": comparison,
        "alike": "; ".join(one_formula(settings)),
        "time": _time(cost, left, jobs),
        "disk": _disk(cost, run, left, space),
        "memory": memory,
        **(hands_out or {}),
        "can show": _can_show(design, run, before),
    }
    return "\n".join(f"{label:<10} {line}" for label, line in lines.items() if line)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _varied(design: Design) -> str:
    """Return what differs between the runs apart from the seed: the swept settings with their values, in order."""
    parts = []
    for axis in design.axes:
        values = list(dict.fromkeys(run.setting[axis] for run in design.runs if axis in run.setting))
        more = f" and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
        parts.append(f"{axis}={','.join(values[:MOST_VALUES])}{more}")
    return "; ".join(parts) or "the seed alone"


def one_formula(settings: Mapping[str, AnyRunConfig]) -> list[str]:
    """Return a line for each group of settings that are the same formula under the rest of their settings.

    `settings`: setting as text -> its config. With one update per rollout batch the ratio is 1 wherever it is used, so
    neither it nor its clip has an effect.
    """
    called: dict[str, list[str]] = {}
    for name, run in settings.items():
        if has_ratio_of_one(run) and run.loss.loss_type in ONE_ON_POLICY:
            run = replace(run, loss=type(run.loss)(ONE_ON_POLICY[0]))
            called.setdefault(repr(run), []).append(name)
    return [
        f"{' and '.join(names)} are one formula here: with one update per rollout batch the ratio is 1, and the runs "
        "are equal; off_policy=e1_quarter would tell them apart"
        for names in called.values()
        if len(names) > 1
    ]


# What the runs cost


class RunCost(NamedTuple):
    """The cost of one run: wall clock in seconds, size on disk in bytes, and the runs that these were measured on."""

    seconds: float
    size: float
    source: str


def cost_of(design: Design, run: AnyRunConfig, before: SweepState | None) -> RunCost | None:
    """Return the mean cost of finished runs of this sweep, else of a similar sweep next to it, or None."""
    if before and (cost := _mean_cost(before, design.folder, "this sweep")):
        return cost
    files = [path for pattern in (f"*/{FILE}", f"*/*/{FILE}") for path in design.folder.parent.glob(pattern)]
    newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in [path.parent for path in newest if path.parent != design.folder][:LOOKED_AT]:
        try:
            state = read_state(folder)
            ended = [one.name for one in state.runs if one.status in MEASURED and one.seconds]
            first = next((RunFolder(folder / name, lambda _: None) for name in ended if (folder / name).is_dir()), None)
            if first and all(first.setting(key) == _setting(run, key) for key in ALIKE):
                return _mean_cost(state, folder, folder.name)
        except ConfigError:  # of a later version, or broken: try another
            continue
    return None


def _setting(run: Any, key: str) -> Any:
    for name in key.split("."):
        run = getattr(run, name, None)
    return run


def _mean_cost(state: SweepState, folder: Path, name: str) -> RunCost | None:
    """Average over the finished runs; only over those that had the machine to themselves, if there are any."""
    ended = [run for run in state.runs if run.status in MEASURED and run.seconds]
    alone = [run for run in ended if not run.shared_machine]
    if not ended:
        return None
    used, seconds = alone or ended, 0.0
    source = f"{_count(len(used), 'finished run')} of {name}" + ("" if alone else ", which shared the machine")
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


def _time(cost: RunCost | None, left: int, jobs: int) -> str:
    """Return how long the remaining runs will take, and from which runs that is known."""
    if not left:
        return "none: every run has ended"
    if cost is None:
        return "unknown: no run like these has finished"
    side = min(jobs, left)
    beside = f", {side} at a time if they do not slow each other down" if side > 1 else ""
    total = duration(cost.seconds * left / side)
    return f"about {total}: {duration(cost.seconds)} a run{beside}, by {cost.source}"


def _disk(cost: RunCost | None, run: AnyRunConfig, left: int, space: float | None) -> str:
    """Return how much the remaining runs will write."""
    if cost is not None:
        return f"about {decimal_size(cost.size * left)}: {decimal_size(cost.size)} a run, by {cost.source}"
    if space is None:
        return "unknown"
    unknown = works_on_a_model(run) and shape_of(run.model).shape is None
    without = "; without the model's weights, whose size is not known here" if unknown else ""
    total = f"at most about {decimal_size(space * left)} when all have ended"
    return f"{total}: {decimal_size(space)} a run, by its settings{without}"


# What they can show


def _can_show(design: Design, run: AnyRunConfig, before: SweepState | None) -> str:
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
    text = power_text(fewest, problems, _seen_spread(before), pairs)
    if problems:
        text += f"; carry= and monitors.dominated read half of them, about {problems // 2}"
    if run.monitors.dominated == "stop" and fewest <= FEWEST_SEEDS:
        text += (
            f"; monitors.dominated=stop stops nothing here: it looks once {FEWEST_SEEDS} seeds have ended, so give "
            "more seeds"
        )
    return text


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
    by = "assumed: seeds that spread by 0.02 to 0.05" if spread is None else spread[1]
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
    return min((number for number in (asked, there) if number is not None), default=None)


def _seen_spread(before: SweepState | None) -> tuple[Spread, str] | None:
    """Return how much the differences between settings have spread over seeds; None below two settings of two seeds.

    From the accuracies of the finished runs, each setting against the reference, or else the first: the mean variance.
    """
    grouped: dict[Key, dict[int, float]] = {}
    for run in before.runs if before else ():
        if run.of_its_own and run.accuracy is not None:
            grouped.setdefault(run.key, {})[run.seed] = run.accuracy
    if before is None or not grouped:
        return None
    base = next((key for key in grouped if dict(key) == before.reference), next(iter(grouped)))
    of_base, differences = grouped.pop(base), []
    for of_seeds in grouped.values():
        common = of_seeds.keys() & of_base.keys()
        if len(common) > 1:
            differences.append(paired_difference(np.array([[of_seeds[seed] - of_base[seed]] for seed in common])))
    if (spread := spread_of(differences)) is None:
        return None
    return spread, f"as {_count(len(differences), 'finished setting')} spread: {points(spread.seeds**0.5)} over seeds"
