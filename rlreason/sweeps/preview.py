"""Describe what a sweep is about to do, and estimate its time, its disk space and the differences that it can show."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlreason.config.algorithms import has_ratio_of_one
from rlreason.config.run import AnyRunConfig, RunConfig, works_on_a_model
from rlreason.model.savings import planned, verdict
from rlreason.model.shapes import shape_of
from rlreason.runtime.machine import believed_device
from rlreason.runtime.statistics import ASSUMED, LEVEL, Spread, points, smallest_difference
from rlreason.runtime.text import duration, few, size
from rlreason.sweeps.launcher import Jobs
from rlreason.sweeps.state import FEWEST_SEEDS, FILE, RunState, SweepState, read_state, setting_text

MEASURED = ("finished", "budget")  # statuses of runs whose time is used
ONE_ON_POLICY = ("reinforce_with_baseline", "grpo_clip", "grpo_no_clip")  # losses of one gradient where the ratio is 1


def plan_text(design: SweepState, folder: Path, runs: Mapping[str, AnyRunConfig], jobs: Jobs) -> str:
    """Return the plan of a sweep, a line for each part. `runs`: the config of each run, by its name."""
    from rlreason.training.preflight import RECORDS, space_needed

    run = runs[design.runs[0].name]
    before = read_state(folder, lambda _: None) if (folder / FILE).exists() else None
    ended = [one for one in before.runs if one.name in runs and one.of_its_own] if before else []
    left, of_settings = len(design.runs) - len(ended), len(design.settings())
    seeds = sorted({one.seed for one in design.runs})
    several = f"{_count(of_settings, 'setting')} x {_count(len(seeds), 'seed')} ({few([str(s) for s in seeds], 10)})"
    if of_settings * len(seeds) != len(design.runs):
        several = f"{_count(of_settings, 'setting')}, {_count(len(seeds), 'seed')}, not all with all"
    values = {axis: dict.fromkeys(r.setting[axis] for r in design.runs if axis in r.setting) for axis in design.axes}
    varied = [f"{axis}={','.join(of)}" for axis, of in values.items()]
    comparison = "with nothing: there is one setting"
    if of_settings > 1:
        none = "each: the sweep names no reference among its values, which carry= would need"
        comparison = f"each setting with {none if design.reference is None else setting_text(design.reference)}"
    memory, unknown, space = "", "", float(RECORDS)
    if works_on_a_model(run):
        space += space_needed(run).left
        peak = planned(run, believed_device())
        memory = verdict(peak)
        if peak.plan and (n := jobs.sharing) > 1:
            memory += f"; {n} runs side by side take {n} times that"
        unknown = "; without the model's weights, whose size is not known here" * (shape_of(run.model).shape is None)
    disk = f"at most about {size(space * left)} when all have ended: {size(space)} a run, by its "
    disk += f"settings{unknown}"
    asked = [one.problems for one in ended if one.problems]
    lines = {
        "sweep": f"{design.name} in {folder}",
        "runs": f"{len(design.runs)}: {several}" + (f"; {len(ended)} ended before" if ended else ""),
        "varies": "; ".join(varied) or "the seed alone",
        "compared": comparison,
        "alike": "; ".join(one_formula(design, runs)),
        "time": _time(ended, left, jobs.side_by_side),
        "disk": disk if left else "",
        "memory": memory,
        **jobs.lines(),
        "can show": _can_show(design, run, min(asked, default=None)),
    }
    return "\n".join(f"{label:<10} {line}" for label, line in lines.items() if line)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_formula(design: SweepState, runs: Mapping[str, AnyRunConfig]) -> list[str]:
    """Return a line for each group of settings that are the same formula under the rest of their settings.

    With one update per rollout batch the ratio is 1 wherever it is used, so neither it nor its clip has an effect.
    """
    called: dict[str, dict[str, None]] = {}
    for name, run in ((setting_text(one.setting), runs[one.name]) for one in design.runs):
        if works_on_a_model(run) and has_ratio_of_one(run) and run.loss.loss_type in ONE_ON_POLICY:
            run = replace(run, seed=0, loss=type(run.loss)(ONE_ON_POLICY[0]))
            called.setdefault(repr(run), {})[name] = None
    return [
        f"{' and '.join(names)} are one formula here: with one update per rollout batch the ratio is 1, and the runs "
        "are equal; off_policy=e1_quarter would tell them apart"
        for names in called.values()
        if len(names) > 1
    ]


def _time(ended: Sequence[RunState], left: int, jobs: int) -> str:
    """Return how long the remaining runs will take, by those that have finished: alone on the machine, if any did."""
    if not left:
        return "none: every run has ended"
    finished = [one for one in ended if one.status in MEASURED and one.seconds]
    used = [one for one in finished if not one.shared_machine] or finished
    if not used:
        return "unknown: no run like these has finished"
    each, side = sum(one.seconds or 0.0 for one in used) / len(used), min(jobs, left)
    beside = f", {side} at a time if they do not slow each other down" if side > 1 else ""
    total = duration(each * left / side)
    return f"about {total}: {duration(each)} a run{beside}, by {_count(len(used), 'finished run')} of this sweep"


def _can_show(design: SweepState, run: AnyRunConfig, asked: int | None) -> str:
    """Return the smallest difference between two settings that the sweep's seeds and problems can show.

    `asked`: the problems of the runs that have ended.
    """
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
    problems = asked or problems_of(run)
    text = power_text(fewest, problems, n - 1 if design.reference is not None else n * (n - 1) // 2)
    if problems:
        text += f"; carry= and monitors.dominated read half of them, about {problems // 2}"
    if run.monitors.dominated == "stop" and fewest <= FEWEST_SEEDS:
        text += (
            f"; monitors.dominated=stop stops nothing here: it looks once {FEWEST_SEEDS} seeds have ended, so give "
            "more seeds"
        )
    return text


def power_text(seeds: int, problems: int | None, comparisons: int = 1, spread: Spread | None = None) -> str:
    """Return the smallest difference in words. `spread`: of the seeds; None: it is assumed.

    >>> power_text(2, 1024)[:75]
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
    spreads, by = list(ASSUMED), "assumed: seeds that spread by 0.02 to 0.05"
    if spread is not None:
        spreads, by = [spread], f"seeds that spread by {spread.seeds**0.5:g}, half of it in both"
    width, strictest = (
        " to ".join(points(min(1.0, smallest_difference(seeds, assumed, one, level))) for one in spreads)
        for level in (LEVEL, LEVEL / comparisons)
    )
    text = f'with {on} a difference below about {width} stays "cannot tell" ({by})'
    if comparisons > 1:
        text += f"; by Holm over {comparisons} comparisons, at worst one below {strictest}"
    return f"two seeds never settle anything: {text}" if seeds == 2 else f"{seeds} seeds: {text}"


def problems_of(run: RunConfig) -> int | None:
    """Return how many problems the final evaluation asks; None if unknown before they are read."""
    asked, there = run.evaluation.final_problems, run.problems_there
    return min((number for number in (asked, there) if number is not None), default=None)
