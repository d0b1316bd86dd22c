"""What a sweep prints: its plan before the first run, and the table of its settings at the end."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlreason.config.algorithms import GRPOConfig
from rlreason.config.run import AnyRunConfig, RunConfig, works_on_a_model
from rlreason.model.plan import planned, verdict
from rlreason.records.files import COMPLIANCE
from rlreason.runtime.looks import levels, looks_of
from rlreason.runtime.machine import believed_device
from rlreason.runtime.statistics import ASSUMED, LEVEL, mean_interval, points, smallest_difference
from rlreason.runtime.text import aligned, duration, few, size
from rlreason.sweeps.launcher import Jobs
from rlreason.sweeps.state import (
    FEWEST_SEEDS,
    FILE,
    REFERENCE,
    WAITING,
    Judged,
    Key,
    SweepState,
    looks_text,
    read_state,
    setting_text,
)

ONE_ON_POLICY = ("reinforce_with_baseline", "grpo_clip", "grpo_no_clip")  # losses of one gradient where the ratio is 1


def plan_text(design: SweepState, folder: Path, runs: Mapping[str, AnyRunConfig], jobs: Jobs) -> str:
    """Return the plan of a sweep, a line for each part. `runs`: the config of each run, by its name."""
    from rlreason.training.preflight import RECORDS, space_needed

    run = runs[design.runs[0].name]
    before = read_state(folder, lambda _: None).runs if (folder / FILE).exists() else []
    ended = [one for one in before if one.name in runs and one.of_its_own]
    left, settings, seeds = len(design.runs) - len(ended), design.settings(), sorted({one.seed for one in design.runs})
    values = {axis: dict.fromkeys(r.setting[axis] for r in design.runs if axis in r.setting) for axis in design.axes}
    if design.reference is not None:
        compared = f"each setting with {setting_text(design.reference)}"
    else:
        other = "each" if _compares_all_pairs(run) else f"the first, {setting_text(design.runs[0].setting)}"
        compared = f"each setting with {other}: the sweep names no reference, which carry= would need"
    finished = [one for one in ended if one.status in ("finished", "budget") and one.seconds]
    used = [one for one in finished if not one.shared_machine] or finished  # alone on the machine, if any was
    time = "unknown: no run like these has finished" if left else "none: every run has ended"
    if used and left:
        each, side = sum(one.seconds or 0.0 for one in used) / len(used), min(jobs.side_by_side, left)
        time = (
            f"about {duration(each * left / side)}: {duration(each)} a run, {side} at a time, as {len(used)} have taken"
        )
    memory, space = "", float(RECORDS)
    if works_on_a_model(run):
        space += space_needed(run).left
        memory = f"of one run: {verdict(planned(run, believed_device()))}"
    asked = [one.problems for one in ended if one.problems]
    rewards, mixed = {one.evaluation.reward for one in runs.values() if works_on_a_model(one)}, ""
    if "prompt.reward" in design.axes and len(rewards) > 1:  # a sweep of prompts, or of eval.reward, means to differ
        mixed = f"accuracies by {few(sorted(rewards))} are not compared: add eval.reward=r1_zero"
    looks = [str(seeds) for seeds in looks_of(design.max_seeds)]
    same = defaultdict[str, dict[str, None]](dict)  # formula -> settings
    for state in design.runs:
        one = runs[state.name]
        if isinstance(one, GRPOConfig) and one.ratio_is_one and one.loss.loss_type in ONE_ON_POLICY:
            formula = replace(one, seed=0, loss=type(one.loss)(ONE_ON_POLICY[0]))
            same[repr(formula)][setting_text(state.setting)] = None
    why = "are one formula here: with one update per rollout batch the ratio is 1, and the runs are equal"
    at_once = "1 run" if jobs.side_by_side == 1 else f"{jobs.side_by_side} runs"
    launcher_settings = [word.removeprefix("hydra.launcher.") for word in jobs.words]
    lines = {
        "sweep": f"{design.name} in {folder}",
        "runs": f"{len(design.runs)}, of {len(settings)} settings and seeds {few([str(seed) for seed in seeds], 10)}; "
        f"{len(ended)} ended before",
        "looks": f"with {few(looks)} seeds; of these runs only those begin that can decide a verdict" if looks else "",
        "varies": "; ".join(f"{axis}={','.join(of)}" for axis, of in values.items()) or "the seed alone",
        "compared": compared if len(settings) > 1 else "",
        "alike": "; ".join(f"{' and '.join(names)} {why}" for names in same.values() if len(names) > 1),
        "! reward": mixed,
        "time": time,
        "disk": f"at most about {size(space * left)} when all have ended: {size(space)} a run",
        "memory": memory,
        "launcher": f"{jobs.launcher}, {at_once} at a time: {', '.join(launcher_settings)}",
        "can show": _can_show(design, run, min(asked, default=None)),
    }
    return "\n".join(f"{label:<10} {line}" for label, line in lines.items() if line)


def _compares_all_pairs(run: AnyRunConfig) -> bool:
    return works_on_a_model(run) and not run.trains


def _can_show(design: SweepState, run: AnyRunConfig, asked: int | None) -> str:
    """Return the smallest difference that the sweep can show. `asked`: the problems of the runs that have ended."""
    counts = Counter(one.key for one in design.runs)
    n, fewest = len(counts), min(counts.values())
    if not works_on_a_model(run):
        return f"best scores over {fewest} seeds; each run spends at most {run.most_spent}"
    if n == 1:
        return f"a mean over {fewest} seeds with its interval" if fewest > 1 else "one trained model"
    problems = asked or problems_of(run)
    comparisons = n * (n - 1) // 2 if design.reference is None and _compares_all_pairs(run) else n - 1
    text = power_text(fewest, problems, comparisons, looks=design.max_seeds > 0)
    if problems:
        text += f"; carry= and monitors.dominated read half of them, about {problems // 2}"
    if run.monitors.dominated == "stop" and fewest <= FEWEST_SEEDS:
        text += f"; monitors.dominated=stop stops nothing here: give more than {FEWEST_SEEDS} seeds"
    return text


def power_text(
    seeds: int, problems: int | None, comparisons: int = 1, spread: float | None = None, looks: bool = False
) -> str:
    """Return the smallest difference in words. `spread`: of the seeds; None: it is assumed. `looks`: after looks."""
    asked = problems or 1000
    on = f"{problems} problems" if problems else f"about {asked} problems (their number is not known before)"
    if seeds == 1:
        apart = points(smallest_difference(1, asked, ASSUMED[0]))
        return (
            f"no difference between settings: one seed tells two trained models apart, from about {apart} on "
            f"with {on}; add seed=0,1,2,3"
        )
    spreads, by = list(ASSUMED), "assumed: seeds that spread by 0.02 to 0.05"
    if spread is not None:
        spreads, by = [spread], f"seeds that spread by {spread:g}, half of it in both"
    width, strictest = (
        " to ".join(points(min(1.0, smallest_difference(seeds, asked, one, level))) for one in spreads)
        for share in (LEVEL, LEVEL / comparisons)
        for level in (float(levels(seeds, share)[-1]) if looks else share,)
    )
    text = f'with {on} a difference below about {width} stays "cannot tell" ({by})'
    if comparisons > 1:
        text += f"; by Holm over {comparisons} comparisons, at worst one below {strictest}"
    return f"two seeds say little of their own spread: {text}" if seeds == 2 else f"{seeds} seeds: {text}"


def problems_of(run: RunConfig) -> int | None:
    """Return how many problems the final evaluation asks; None if unknown before they are read."""
    asked, there = run.evaluation.final_problems, run.problems_there
    return min((number for number in (asked, there) if number is not None), default=None)


# The table at the end


def settings_table(state: SweepState, judged: Mapping[Key, Judged]) -> str:
    """Return the table of settings, best mean first, with the swept axes as columns.

    Intervals and verdicts are the report's, `judged`; scores of discovery, which it does not judge, have an interval
    over seeds.

    >>> from rlreason.sweeps.state import RunState
    >>> runs = [RunState(f"lr={lr},seed={s}", [], {"lr": lr}, s, "finished", score=a)
    ...         for lr, s, a in (("1", 0, 5.0), ("1", 1, 6.0), ("2", 0, 7.0))]
    >>> print(settings_table(SweepState("x", "", ["lr"], {"lr": "1"}, "finished", 1, "basic", runs), {}))
    lr  seeds  score  95%, over seeds  verdict  length  status
    2   1      7.0    -                -        -       finished
    1   2      5.5    -0.9 to 11.9     -        -       finished (reference)
    """
    scores, several = any(run.score is not None for run in state.runs), max(_seed_counts(state), default=0) > 1
    over = "problems" if not several else "seeds and problems" if judged else "seeds"
    digits, rows = 1 if scores else 3, list[tuple[float, list[str]]]()
    head = [*state.axes, "seeds", "score" if scores else "accuracy", f"95%, over {over}", "verdict", "length", "status"]
    for key in dict.fromkeys(run.key for run in state.runs):
        runs, setting = [run for run in state.runs if run.key == key], dict(key)
        accuracy, verdict = judged.get(key, (None, "-"))
        values = [run.figure for run in runs if run.figure is not None]
        lengths = [run.length for run in runs if run.length is not None]
        mean, *ends = mean_interval(values) if len(values) > 1 else values or [math.nan]
        if values and accuracy is not None:
            mean, *ends = accuracy
        status = ", ".join(f"{n} {name}" for name, n in Counter(run.status for run in runs).items())
        row = [
            *(setting.get(axis, "-") for axis in state.axes),
            f"{len(values)}" if len(values) == len(runs) else f"{len(values)} of {len(runs)}",
            f"{mean:.{digits}f}" if values else "-",
            " to ".join(f"{end:.{digits}f}" for end in ends) or "-",
            verdict if values else "-",
            f"{sum(lengths) / len(lengths):.1f}" if lengths else "-",
            status.removeprefix(f"{len(runs)} ") + (f" ({REFERENCE})" if setting == state.reference else ""),
        ]
        rows.append((-mean if values else math.inf, row))
    return aligned([head, *(row for _, row in sorted(rows, key=lambda one: one[0]))])


def _seed_counts(state: SweepState) -> set[int]:
    """Return how many seeds with a figure the settings have."""
    return set(Counter(run.key for run in state.runs if run.figure is not None).values())


def closing(state: SweepState, folder: Path, judged: Mapping[Key, Judged], measured: str = "") -> str:
    """Return the table followed by its notes, one a line.

    From the report: `judged`, and in place of the table `measured`, where models were measured and none was trained.
    """
    lines = [measured or settings_table(state, judged)]
    if not measured and 1 in _seed_counts(state):
        lines.append("of a setting with one seed nothing is to be said: its interval is that of one trained model")
    lines += [f"! {r.name}: {r.status_text}" for r in state.runs if r.status not in ("finished", WAITING) or r.reason]
    if left := sum(run.status in (WAITING, "interrupted", "failed") for run in state.runs):
        lines.append(f"left: {left} of {len(state.runs)} runs; type the sweep again, and they go on")
    lines += filter(None, [looks_text(state)])
    if any(run.shared_machine for run in state.runs):
        lines.append("! runs shared the machine: no verdict on wall clock is given")
    if len(protocols := sorted({run.protocol for run in state.runs if run.protocol})) > 1:
        lines.append(f"! the runs were measured differently: python -m rlreason compare {folder} says how")
    if protocols:
        lines.append(f"protocol {', '.join(protocols)}")
    for card in [folder / run.name / COMPLIANCE for run in state.runs]:
        if card.exists() and (text := card.read_text(encoding="utf-8").splitlines()):
            lines.append(f"{card.parent.name}: {text[-1]}; see {card}")
    return "\n".join(lines)
