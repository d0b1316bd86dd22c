"""The table at the end of a sweep: its settings, each over its seeds, best first; and what has to be said of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rlreason.evaluation.protocol import Protocol, refuse_mixture
from rlreason.records.files import COMPLIANCE, SUMMARY
from rlreason.records.reader import RunFolder
from rlreason.statistics import mean_interval
from rlreason.sweeps.design import Key, Setting
from rlreason.sweeps.state import WAITING, RunState, SweepState

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Judged:
    """What the report says of a setting: accuracy with its 95% interval, and the verdict in a word."""

    accuracy: tuple[float, float, float] | None
    verdict: str


Judgements = Mapping[Key, Judged]


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of a sweep. The interval is the report's, else over its seeds; of one seed, over its problems."""

    setting: Setting
    runs: list[RunState]
    mean: float | None  # accuracy, or score, over those seeds that have one
    interval: tuple[float, float] | None
    over_seeds: bool
    length: float | None
    verdict: str = ""

    @property
    def measured(self) -> list[RunState]:
        """The runs that came to a figure."""
        return [run for run in self.runs if run.figure is not None]


def rows_of(state: SweepState, judged: Judgements = MappingProxyType({})) -> list[Row]:
    """A row for each setting: the largest mean first, and those without any figure last. `judged`: by the report."""
    grouped: dict[Key, list[RunState]] = {}
    for run in state.runs:
        grouped.setdefault(run.key, []).append(run)
    rows = [_row(dict(setting), runs, judged.get(setting)) for setting, runs in grouped.items()]
    return sorted(rows, key=lambda row: -math.inf if row.mean is None else row.mean, reverse=True)


def _row(setting: Setting, runs: list[RunState], judged: Judged | None) -> Row:
    values = [run.figure for run in runs if run.figure is not None]
    lengths = [run.length for run in runs if run.length is not None]
    length = sum(lengths) / len(lengths) if lengths else None
    verdict = "" if judged is None else judged.verdict
    if not values:
        return Row(setting, runs, None, None, False, length, verdict)
    if judged is not None:
        mean, *ends = judged.accuracy or (sum(values) / len(values),)
        interval = (ends[0], ends[1]) if ends else None
        return Row(setting, runs, mean, interval, len(values) > 1, length, verdict)
    if len(values) == 1:
        interval = next(run.accuracy_interval for run in runs if run.figure is not None)
        return Row(setting, runs, values[0], interval, False, length, verdict)
    mean, low, high = mean_interval(values)
    if not any(run.score is not None for run in runs):
        low, high = max(low, 0.0), min(high, 1.0)
    return Row(setting, runs, mean, (low, high), True, length, verdict)


def settings_table(state: SweepState, judged: Judgements = MappingProxyType({})) -> str:
    """The settings with the swept axes as columns.

    >>> runs = [RunState(f"lr={lr},seed={s}", [], {"lr": lr}, s, "finished", accuracy=a, length=9.0)
    ...         for lr, s, a in (("1", 0, 0.5), ("1", 1, 0.6), ("2", 0, 0.7))]
    >>> print(settings_table(SweepState("x", "", ["lr"], {"lr": "1"}, "finished", 1, "basic", runs)))
    lr  seeds  accuracy  95%, over seeds  length  status
    2       1     0.700                -     9.0  finished
    1       2     0.550   0.000 to 1.000     9.0  finished (reference)
    """
    rows = rows_of(state, judged)
    several = any(row.over_seeds for row in rows)
    heading = "95%, over " + ("seeds" + " and problems" * bool(judged) if several else "problems")
    scored = any(run.score is not None for run in state.runs)
    head = [
        *state.axes,
        "seeds",
        "score" if scored else "accuracy",
        heading,
        *["verdict"] * bool(judged),
        "length",
        "status",
    ]
    lines = [_cells(row, state, several, bool(judged)) for row in rows]
    widths = [max(len(line[k]) for line in [head, *lines]) for k in range(len(head))]
    left = {*range(len(state.axes)), len(head) - 1, *([head.index("verdict")] if judged else [])}

    def set_out(line: Sequence[str]) -> str:
        cells = (c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join(map(set_out, [head, *lines]))


def _cells(row: Row, state: SweepState, several: bool, judged: bool) -> list[str]:
    values = [row.setting.get(axis, "-") for axis in state.axes]
    shown = "{:.1f}".format if any(run.score is not None for run in row.runs) else "{:.3f}".format
    interval = "-"
    if row.interval is not None and (row.over_seeds or judged or not several):
        interval = f"{shown(row.interval[0])} to {shown(row.interval[1])}"
    seeds = len(row.measured)
    of_all = "" if seeds == len(row.runs) else f" of {len(row.runs)}"
    counts = Counter(run.status for run in row.runs)
    status = ", ".join(name if len(counts) == 1 else f"{n} {name}" for name, n in counts.items())
    mark = f" ({REFERENCE})" if state.reference is not None and row.setting == state.reference else ""
    mean = "-" if row.mean is None else shown(row.mean)
    return [
        *values,
        f"{seeds}{of_all}",
        mean,
        interval,
        *[row.verdict or "-"] * judged,
        "-" if row.length is None else f"{row.length:.1f}",
        status + mark,
    ]


def closing(state: SweepState, folder: Path, judged: Judgements = MappingProxyType({})) -> str:
    """The table with all that has to be said with it: one line each. `judged`: what the report says of the settings."""
    lines = [settings_table(state, judged)]
    rows = rows_of(state, judged)
    measured = [row for row in rows if row.mean is not None]
    if measured and not any(row.over_seeds for row in measured):
        lines.append("one seed: the intervals are over problems and tell these trained models apart, not the settings")
    elif not all(row.over_seeds for row in measured):
        lines.append("a setting with one seed has no interval over seeds: nothing is to be said of it")
    lines += [f"! {r.name}: {r.shown}" for r in state.runs if r.status not in ("finished", WAITING) or r.reason]
    if left := sum(run.status in (WAITING, "interrupted", "failed") for run in state.runs):
        waiting = sum(run.status == WAITING for run in state.runs)
        wait = f"{waiting} run{'s' * (waiting > 1)} wait{'s' * (waiting == 1)}; " * bool(waiting)
        lines.append(f"{wait}type the sweep again, and {'it goes' if left == 1 else 'they go'} on")
    if any(run.score is not None for run in state.runs):
        lines.append(f"the distribution over seeds, with a picture: rlreason report {folder}")
    if any(run.shared_machine for run in state.runs):
        lines.append(
            "! runs shared the machine: their times compare with nothing, and no verdict on wall clock is given"
        )
    return "\n".join([*lines, *_protocols(state, folder), *_cards(state, folder)])


def _cards(state: SweepState, folder: Path) -> list[str]:
    """The verdict of each run that was held to the rules of a leaderboard."""
    cards = {run.name: folder / run.name / COMPLIANCE for run in state.runs}
    verdicts = {name: path.read_text(encoding="utf-8").splitlines() for name, path in cards.items() if path.exists()}
    return [f"{name}: {lines[-1]}; see {cards[name]}" for name, lines in verdicts.items() if lines]


def _protocols(state: SweepState, folder: Path) -> list[str]:
    """How the accuracies were measured; what differs, once for each way."""
    found: dict[str, tuple[str, Protocol]] = {}
    for run in state.runs:
        if run.protocol is None or run.protocol in found or not (folder / run.name / SUMMARY).exists():
            continue
        summary = RunFolder(folder / run.name).summary or {}
        if isinstance(protocol := summary.get("protocol"), dict):
            found[run.protocol] = run.name, protocol
    if not found:
        return []
    mixed = refuse_mixture(dict(found.values()), allow=True)
    return [f"protocol {', '.join(found)}", *(f"! {line}" for line in mixed)]
