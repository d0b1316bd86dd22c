"""What a sweep is about to do, and what it will take in time and disk."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rlreason.sweeps.carry import in_words
from rlreason.sweeps.design import FEWEST_SEEDS, Design, Key
from rlreason.sweeps.state import FILE, RunState, SweepState, read_state

MEASURED = ("finished", "budget")  # ends that a run's time and size may be taken from
#: What must be equal in a run of another sweep for its time to say something of this one's.
ALIKE = (
    "algorithm", "n_steps", "model.name", "model.path", "data.name", "rollout_batch_size", "question_batch_size",
    "train_batch_size", "epochs_per_rollout", "sampling.max_tokens", "group_size", "prompt.name", "eval.card",
    "budget.hours", "budget.tokens", "budget.steps", "budget.calls", "strategy", "client.model", "problem",
)  # fmt: skip
LOOKED_AT = 6  # other sweeps, the newest first: a plan is to come at once


class Cost(NamedTuple):
    """Of one run: its wall clock in seconds, what it leaves in bytes, and which runs these come from."""

    seconds: float
    size: float
    source: str


def state_so_far(design: Design) -> SweepState | None:
    """What is known of the sweep from an earlier start; None where there was none."""
    if not (design.folder / FILE).exists():
        return None
    try:
        return read_state(design.folder)
    except ConfigError:
        return None


def cost_of(design: Design, run: AnyRunConfig, before: SweepState | None) -> Cost | None:
    """The mean cost of finished runs of this sweep, else of one beside it that is alike; None where there are none."""
    if before and (found := _mean(before, design.folder, "this sweep")):
        return found
    for folder in _others(design.folder):
        try:
            state = read_state(folder)
            ended = next((one for one in _measured(state) if (folder / one.name).is_dir()), None)
            if ended and alike(RunFolder(folder / ended.name, lambda _: None), run):
                return _mean(state, folder, folder.name)
        except ConfigError:  # of a later version, or broken: another one may tell
            continue
    return None


def alike(folder: RunFolder, run: AnyRunConfig) -> bool:
    """Whether a run in a folder had the settings that decide over its time, as far as both have them."""
    return all(folder.setting(key) == _setting(run, key) for key in ALIKE)


def _setting(run: Any, key: str) -> Any:
    for name in key.split("."):
        run = getattr(run, name, None)
    return run


def _others(folder: Path) -> Iterator[Path]:
    """Sweeps beside this one and the stages of such, the newest first."""
    here = folder.parent
    files = [path for pattern in (f"*/{FILE}", f"*/*/{FILE}") for path in here.glob(pattern)]
    newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    yield from [path.parent for path in newest if path.parent != folder][:LOOKED_AT]


def _measured(state: SweepState) -> list[RunState]:
    return [run for run in state.runs if run.status in MEASURED and run.seconds]


def _mean(state: SweepState, folder: Path, name: str) -> Cost | None:
    """Over the finished runs; those that had the machine for themselves where there are any."""
    ended = _measured(state)
    alone = [run for run in ended if not run.shared_machine]
    if not ended:
        return None
    used = alone or ended
    source = f"{len(used)} finished run{'s' * (len(used) > 1)} of {name}"
    source += ", which shared the machine" * (not alone)
    sizes = [size_of(folder / run.name) for run in used[:5]]
    seconds = sum((run.seconds or 0.0) - start_paid_once(RunFolder(folder / run.name, lambda _: None)) for run in used)
    return Cost(max(seconds, 0.0) / len(used), sum(sizes) / len(sizes), source)


def start_paid_once(run: RunFolder) -> float:
    """Seconds in which a run taught its start model that the next ones find in the cache."""
    start = (run.summary or {}).get("start") or {}
    made = start.get("source") == "made" and run.setting("model.cache") is not None
    return float(start.get("seconds") or 0.0) if made else 0.0


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
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
    """The plan of a sweep, a line for each of its parts.

    `runs`: their settings, the first at least. `space`: bytes that a run may write, by its settings; counts where no
    run has finished. `hands_out`: what is to be said of launcher and GPUs, by label. `apart`: runs share no memory with
    each other. `alike`: see `one_formula`.
    """
    before = state_so_far(design)
    settings, seeds = design.settings(), design.seeds
    ended = sum(run.of_its_own for run in before.runs if run.name in {r.name for r in design.runs}) if before else 0
    left = len(design.runs) - ended
    cost = cost_of(design, runs[0], before)
    several = f"{_count(len(settings), 'setting')} x {_count(len(seeds), 'seed')} ({few([str(s) for s in seeds], 10)})"
    if len(settings) * len(seeds) != len(design.runs):
        several = f"{_count(len(settings), 'setting')}, {_count(len(seeds), 'seed')}, not all with all"
    lines = {
        "sweep": f"{design.name} in {design.folder}",
        "runs": f"{len(design.runs)}: {several}" + (f"; {ended} ended before" if ended else ""),
        **varied(design),
        "compared": _compared(design),
        **({"alike": "; ".join(alike)} if alike else {}),
        "time": time_line(cost, left, jobs),
        "disk": disk_line(cost, runs, left, space),
        **memory_line(runs, 1 if apart else jobs),
        **{label: line for label, line in (hands_out or {}).items() if line},
        "can show": can_show(design, runs[0], before),
    }
    return "\n".join(f"{label:<10} {line}" for label, line in lines.items())


def varied(design: Design) -> dict[str, str]:
    """What differs between the runs, beside the seed: the swept settings with their values, in their order."""
    lines = []
    for axis in design.axes:
        values = list(dict.fromkeys(run.setting[axis] for run in design.runs if axis in run.setting))
        lines.append(f"{axis}={','.join(values[:SHOWN])}" + f" and {len(values) - SHOWN} more" * (len(values) > SHOWN))
    return {"varies": "; ".join(lines) or "the seed alone"}


def one_formula(runs: Mapping[str, AnyRunConfig]) -> list[str]:
    """The settings, by what they are called, that are one formula under the rest of their settings, a line each.

    With one update per rollout batch the ratio is 1 where it is used, so that neither it nor its clip does anything.
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


def _compared(design: Design) -> str:
    if len(design.settings()) < 2:
        return "with nothing: there is one setting"
    if design.reference is None:
        return "each setting with each: the sweep names no reference"
    return f"each setting with {in_words(design.reference)}"


def time_line(cost: Cost | None, left: int, jobs: int) -> str:
    """How long the runs that are left will take, and by what that is known."""
    if not left:
        return "none: every run has ended"
    if cost is None:
        return UNKNOWN
    side = min(jobs, left)
    beside = f", {side} at a time if they do not slow each other down" if side > 1 else ""
    total = duration(cost.seconds * left / side)
    return f"about {total}: {duration(cost.seconds)} a run{beside}, by {cost.source}"


def disk_line(
    cost: Cost | None, runs: Sequence[AnyRunConfig], left: int, space: Callable[[AnyRunConfig], float] | None
) -> str:
    """What the runs that are left will write."""
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
    """What the largest of these runs takes at its peak, and that `jobs` run side by side; nothing without a model."""
    device = believed_device()
    told = [planned(run, device) for run in runs if works_on_a_model(run)]
    if not told:
        return {}
    largest = max(told, key=lambda one: one.plan.peak if one.plan else 0)
    side = f"; {jobs} runs side by side take {jobs} times that" if jobs > 1 and largest.plan else ""
    return {"memory": one_line(largest) + side}


def can_show(design: Design, run: AnyRunConfig, before: SweepState | None) -> str:
    """The smallest difference between two settings that the seeds and problems of a sweep can show."""
    counts = Counter(one.key for one in design.runs)
    if not works_on_a_model(run):
        return _best_scores(run, min(counts.values()))
    problems = problems_of(run, before)
    if len(counts) < 2:
        return _one_setting(min(counts.values()))
    spread = seen_spread(before)
    n = len(counts)
    pairs = n - 1 if design.reference is not None else n * (n - 1) // 2
    fewest = min(counts.values())
    idle = run.monitors.dominated == "stop" and fewest <= FEWEST_SEEDS
    return shown_by(fewest, problems, spread, pairs) + halves(problems) + IDLE * idle


def _best_scores(run: AnyRunConfig, seeds: int) -> str:
    """What a sweep of discovery shows, and may spend."""
    shown = "best scores, one seed each: no distribution" if seeds == 1 else f"best scores over {seeds} seeds"
    return f"{shown}; each run spends at most {run.most_spent}"


def _one_setting(seeds: int) -> str:
    if seeds == 1:
        return "one trained model: one seed has no interval over seeds"
    return f"a mean over {seeds} seeds with its interval" + "; two seeds never settle anything" * (seeds == 2)


def shown_by(seeds: int, problems: int | None, spread: tuple[Spread, str] | None, comparisons: int = 1) -> str:
    """The same in words, by numbers. `spread`: what has been seen, and where; None: it is assumed.

    >>> shown_by(2, 1024, None)[:75]
    'two seeds never settle anything: with 1024 problems a difference below abou'
    """
    asked = problems or 1000
    on = f"{asked} problems" if problems else f"about {asked} problems (their number is not known before they are read)"
    if seeds == 1:
        apart = points(smallest_difference(1, asked, ASSUMED[0]))
        return (
            f"no difference between settings: one seed tells two trained models apart, from about {apart} on "
            f"with {on}; add seed=0,1,2,3"
        )
    by = ASSUMED_SPREAD if spread is None else spread[1]
    width, strictest = (_width(seeds, asked, spread, level) for level in (LEVEL, LEVEL / comparisons))
    text = f'with {on} a difference below about {width} stays "cannot tell" ({by})'
    if comparisons > 1:
        text += f"; by Holm over {comparisons} comparisons, at worst one below {strictest}"
    return f"two seeds never settle anything: {text}" if seeds == 2 else f"{seeds} seeds: {text}"


def _width(seeds: int, problems: int, spread: tuple[Spread, str] | None, level: float) -> str:
    if spread is not None:
        return points(min(1.0, smallest_difference(seeds, problems, spread[0], level)))
    low, high = assumed_range(seeds, problems, level)
    return f"{points(min(1.0, low))} to {points(min(1.0, high))}"


def halves(problems: int | None) -> str:
    """What is left for carry= and monitors.dominated, which read the half of the problems that chooses."""
    return f"; carry= and monitors.dominated read half of them, about {problems // 2}" if problems else ""


def problems_of(run: RunConfig, before: SweepState | None) -> int | None:
    """How many problems the final evaluation asks; None where nobody knows before they are read."""
    if before and (seen := [one.problems for one in before.runs if one.problems]):
        return min(seen)
    asked, there = run.evaluation.final_problems, run.problems_there
    known = [number for number in (asked, there) if number is not None]
    return min(known) if known else None


def seen_spread(before: SweepState | None) -> tuple[Spread, str] | None:
    """How much the differences between settings have spread over seeds so far; None with fewer than two seeds of two.

    By the accuracies of the finished runs, each setting against the reference, or else the first: the mean variance.
    """
    if before is None:
        return None
    grouped: dict[Key, dict[int, float]] = {}
    for run in before.runs:
        if run.of_its_own and run.accuracy is not None:
            grouped.setdefault(run.key, {})[run.seed] = run.accuracy
    base = next((key for key in grouped if dict(key) == before.reference), next(iter(grouped), None))
    found = []
    for key, of_seeds in grouped.items():
        common = of_seeds.keys() & grouped[base].keys() if base is not None and key != base else set()
        if base is not None and len(common) > 1:
            found.append(paired_difference(np.array([[of_seeds[seed] - grouped[base][seed]] for seed in common])))
    if (spread := spread_of(found)) is None:
        return None
    settings = f"{len(found)} finished setting{'s' * (len(found) > 1)}"
    return spread, f"as {settings} spread: {points(spread.seeds**0.5)} over seeds"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
