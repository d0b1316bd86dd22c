"""Build the table at the end of a sweep: its settings over their seeds, with the report's verdicts."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlreason.records.files import COMPLIANCE
from rlreason.runtime.statistics import mean_interval
from rlreason.sweeps.state import WAITING, Key, SweepState

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class JudgedSetting:
    """The report's result for a setting: accuracy with its 95% interval, and the verdict in a word."""

    accuracy: tuple[float, float, float] | None
    verdict: str


def settings_table(state: SweepState, judged: Mapping[Key, JudgedSetting]) -> str:
    """Return the table of settings, best mean first, with the swept axes as columns.

    Intervals and verdicts are the report's, `judged`; scores of discovery, which it does not judge, have an interval
    over seeds.

    >>> from rlreason.sweeps.state import RunState
    >>> runs = [RunState(f"lr={lr},seed={s}", [], {"lr": lr}, s, "finished", score=a)
    ...         for lr, s, a in (("1", 0, 5.0), ("1", 1, 6.0), ("2", 0, 7.0))]
    >>> print(settings_table(SweepState("x", "", ["lr"], {"lr": "1"}, "finished", 1, "basic", runs), {}))
    lr  seeds  score  95%, over seeds  length  status
    2       1    7.0                -       -  finished
    1       2    5.5     -0.9 to 11.9       -  finished (reference)
    """
    scores, several = any(run.score is not None for run in state.runs), max(_seed_counts(state), default=0) > 1
    over = "problems" if not several else "seeds and problems" if judged else "seeds"
    digits, verdict = 1 if scores else 3, ["verdict"] if judged else []
    head = [*state.axes, "seeds", "score" if scores else "accuracy", f"95%, over {over}", *verdict, "length", "status"]
    rows = list[tuple[float, list[str]]]()
    for key in dict.fromkeys(run.key for run in state.runs):
        runs, setting, by_report = [run for run in state.runs if run.key == key], dict(key), judged.get(key)
        values = [run.figure for run in runs if run.figure is not None]
        lengths = [run.length for run in runs if run.length is not None]
        mean, *ends = mean_interval(values) if len(values) > 1 else values or [math.nan]
        if values and by_report is not None and by_report.accuracy is not None:
            mean, *ends = by_report.accuracy
        counts = Counter(run.status for run in runs)
        status = ", ".join(name if len(counts) == 1 else f"{n} {name}" for name, n in counts.items())
        row = [
            *(setting.get(axis, "-") for axis in state.axes),
            f"{len(values)}" if len(values) == len(runs) else f"{len(values)} of {len(runs)}",
            f"{mean:.{digits}f}" if values else "-",
            " to ".join(f"{end:.{digits}f}" for end in ends) or "-",
            *([by_report.verdict if by_report else "-"] if judged else []),
            f"{sum(lengths) / len(lengths):.1f}" if lengths else "-",
            status + (f" ({REFERENCE})" if setting == state.reference else ""),
        ]
        rows.append((-mean if values else math.inf, row))
    lines = [head, *(row for _, row in sorted(rows, key=lambda one: one[0]))]
    columns = []
    for column in zip(*lines, strict=True):
        width, to_left = max(map(len, column)), column[0] in (*state.axes, "verdict", "status")
        columns.append([cell.ljust(width) if to_left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _seed_counts(state: SweepState) -> set[int]:
    """Return how many seeds with a figure the settings have."""
    return set(Counter(run.key for run in state.runs if run.figure is not None).values())


def closing(state: SweepState, folder: Path, judged: Mapping[Key, JudgedSetting]) -> str:
    """Return the table followed by its notes, one a line. `judged`: from the report."""
    lines, seeds = [settings_table(state, judged)], _seed_counts(state)
    if seeds == {1}:
        lines.append("one seed: the intervals are over problems and tell these trained models apart, not the settings")
    elif 1 in seeds:
        lines.append("a setting with one seed has no interval over seeds: nothing is to be said of it")
    lines += [f"! {r.name}: {r.status_text}" for r in state.runs if r.status not in ("finished", WAITING) or r.reason]
    if left := sum(run.status in (WAITING, "interrupted", "failed") for run in state.runs):
        lines.append(f"left: {left} of {len(state.runs)} runs; type the sweep again, and they go on")
    if any(run.shared_machine for run in state.runs):
        lines.append(
            "! runs shared the machine: their times compare with nothing, and no verdict on wall clock is given"
        )
    if protocols := sorted({run.protocol for run in state.runs if run.protocol}):
        lines.append(f"protocol {', '.join(protocols)}")
    if len(protocols) > 1:
        lines.append(f"! the runs were measured differently: python -m rlreason compare {folder} says how")
    for card in [folder / run.name / COMPLIANCE for run in state.runs]:
        if card.exists() and (text := card.read_text(encoding="utf-8").splitlines()):
            lines.append(f"{card.parent.name}: {text[-1]}; see {card}")
    lines.append(f"verdicts, curves and tables as a page: rlreason report {folder}")
    return "\n".join(lines)
