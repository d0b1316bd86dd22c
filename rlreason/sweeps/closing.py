"""Build the table at the end of a sweep: its settings over their seeds, with the report's verdicts.

Also reads the final evaluation of each run (`Outcomes`) and checks that runs are comparable, for carry.py and the
report.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.protocol import Protocol, differences, refuse_mixture
from rlreason.records.files import COMPLIANCE, RESPONSES, SUMMARY, ResponseFile
from rlreason.records.reader import RunFolder, ending
from rlreason.runtime.intervals import Floats, mean_interval, of_clusters
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import few, question_keys
from rlreason.sweeps.state import WAITING, Key, RunState, SweepState

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class JudgedSetting:
    """The report's result for a setting: accuracy with its 95% interval, and the verdict in a word."""

    accuracy: tuple[float, float, float] | None
    verdict: str


Judgements = Mapping[Key, JudgedSetting]
NOT_JUDGED: Judgements = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting of a sweep. The interval is the report's, else over its seeds; with one seed, over its problems."""

    key: Key
    runs: list[RunState]
    values: list[float]  # accuracy, or score, of the seeds that have one
    mean: float | None
    interval: tuple[float, float] | None
    verdict: str


def rows_of(state: SweepState, judged: Judgements = NOT_JUDGED) -> list[SettingRow]:
    """Return a row for each setting, largest mean first, those without a figure last. `judged`: from the report."""
    grouped: dict[Key, list[RunState]] = {}
    for run in state.runs:
        grouped.setdefault(run.key, []).append(run)
    rows = []
    for key, runs in grouped.items():
        values = [run.figure for run in runs if run.figure is not None]
        mean, interval = (sum(values) / len(values) if values else None), None
        if values and (by_report := judged.get(key)) is not None:
            if by_report.accuracy is not None:
                mean, *ends = by_report.accuracy
                interval = (ends[0], ends[1])
        elif len(values) == 1:
            interval = next(run.accuracy_interval for run in runs if run.figure is not None)
        elif values:
            mean, low, high = mean_interval(values)
            interval = (low, high) if _scores(runs) else (max(low, 0.0), min(high, 1.0))
        rows.append(SettingRow(key, runs, values, mean, interval, judged[key].verdict if key in judged else ""))
    return sorted(rows, key=lambda row: -math.inf if row.mean is None else row.mean, reverse=True)


def _scores(runs: Iterable[RunState]) -> bool:
    """Return whether the runs have scores, as of discovery, in place of accuracies."""
    return any(run.score is not None for run in runs)


def settings_table(state: SweepState, judged: Judgements = NOT_JUDGED) -> str:
    """Return the table of settings, with the swept axes as columns.

    >>> runs = [RunState(f"lr={lr},seed={s}", [], {"lr": lr}, s, "finished", accuracy=a, length=9.0)
    ...         for lr, s, a in (("1", 0, 0.5), ("1", 1, 0.6), ("2", 0, 0.7))]
    >>> print(settings_table(SweepState("x", "", ["lr"], {"lr": "1"}, "finished", 1, "basic", runs)))
    lr  seeds  accuracy  95%, over seeds  length  status
    2       1     0.700                -     9.0  finished
    1       2     0.550   0.000 to 1.000     9.0  finished (reference)
    """
    rows, scores = rows_of(state, judged), _scores(state.runs)
    several, digits = any(len(row.values) > 1 for row in rows), 1 if scores else 3
    over = "problems" if not several else "seeds and problems" if judged else "seeds"
    verdict = ["verdict"] if judged else []
    figure = "score" if scores else "accuracy"
    lines = [[*state.axes, "seeds", figure, f"95%, over {over}", *verdict, "length", "status"]]
    for row in rows:
        setting, lengths = dict(row.key), [run.length for run in row.runs if run.length is not None]
        seeds = f"{len(row.values)}" if len(row.values) == len(row.runs) else f"{len(row.values)} of {len(row.runs)}"
        interval = "-"
        if row.interval is not None and (len(row.values) > 1 or judged or not several):
            interval = f"{row.interval[0]:.{digits}f} to {row.interval[1]:.{digits}f}"
        counts = Counter(run.status for run in row.runs)
        status = ", ".join(name if len(counts) == 1 else f"{n} {name}" for name, n in counts.items())
        status += f" ({REFERENCE})" if setting == state.reference else ""
        lines.append([
            *(setting.get(axis, "-") for axis in state.axes), seeds,
            "-" if row.mean is None else f"{row.mean:.{digits}f}", interval,
            *([row.verdict or "-"] if judged else []),
            f"{sum(lengths) / len(lengths):.1f}" if lengths else "-", status,
        ])  # fmt: skip
    columns = []
    for column in zip(*lines, strict=True):
        width, to_left = max(map(len, column)), column[0] in (*state.axes, "verdict", "status")
        columns.append([cell.ljust(width) if to_left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def closing(state: SweepState, folder: Path, judged: Judgements = NOT_JUDGED) -> str:
    """Return the table followed by its notes, one a line. `judged`: from the report."""
    lines = [settings_table(state, judged)]
    seeds = [len(row.values) for row in rows_of(state, judged) if row.values]
    if seeds and max(seeds) == 1:
        lines.append("one seed: the intervals are over problems and tell these trained models apart, not the settings")
    elif 1 in seeds:
        lines.append("a setting with one seed has no interval over seeds: nothing is to be said of it")
    lines += [f"! {r.name}: {r.status_text}" for r in state.runs if r.status not in ("finished", WAITING) or r.reason]
    if left := sum(run.status in (WAITING, "interrupted", "failed") for run in state.runs):
        waiting = sum(run.status == WAITING for run in state.runs)
        wait = "" if not waiting else "1 run waits; " if waiting == 1 else f"{waiting} runs wait; "
        lines.append(f"{wait}type the sweep again, and {'it goes' if left == 1 else 'they go'} on")
    if _scores(state.runs):
        lines.append(f"the distribution over seeds, with a picture: rlreason report {folder}")
    if any(run.shared_machine for run in state.runs):
        lines.append(
            "! runs shared the machine: their times compare with nothing, and no verdict on wall clock is given"
        )
    lines += _protocols(state, folder)
    for run in state.runs:
        card = folder / run.name / COMPLIANCE
        if card.exists() and (text := card.read_text(encoding="utf-8").splitlines()):
            lines.append(f"{run.name}: {text[-1]}; see {card}")
    return "\n".join(lines)


def _protocols(state: SweepState, folder: Path) -> list[str]:
    """Return the protocol hashes, and a line for each difference between protocols."""
    by_hash: dict[str, tuple[str, Protocol]] = {}
    for run in state.runs:
        if run.protocol is None or run.protocol in by_hash or not (folder / run.name / SUMMARY).exists():
            continue
        summary = RunFolder(folder / run.name).summary or {}
        if isinstance(protocol := summary.get("protocol"), dict):
            by_hash[run.protocol] = run.name, protocol
    if not by_hash:
        return []
    mixed = refuse_mixture(dict(by_hash.values()), allow=True)
    return [f"protocol {', '.join(by_hash)}", *(f"! {line}" for line in mixed)]


CHOOSING, COMPARING = "choosing", "comparing"
NEEDED = ("problem_id", "question", "outcome")
RIGHT = "correct"
#: Swept settings -> the parts of the protocol that they change on purpose; a name ending in a dot stands for its group.
ON_PURPOSE = {
    "prompt": ("prompt", "chat.", "reward", "stop"),
    "eval.prompt": ("prompt", "chat.", "reward", "stop"),
    "eval.reward": ("reward",),
    "sampling": ("sampling.",),
    "eval.sampling": ("sampling.",),
    "eval": ("prompt", "chat.", "reward", "stop", "sampling."),
    "grading": ("grading.",),
}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The final evaluation of one run. `right`: problem -> share of its responses that are correct.

    None: it diverged without an evaluation, and counts as wrong on every problem.
    """

    name: str
    seed: int
    protocol: Protocol | None
    right: dict[str, float] | None
    half: dict[str, str]  # problem -> CHOOSING or COMPARING
    questions: Mapping[str, str] = field(default_factory=dict)  # problem -> what it asks


def half_of(question: str) -> str:
    """Return the half of the problems that a question is in: crc32 of its text, even or odd.

    >>> half_of("What is 1+1?"), half_of("What is 1+2?")
    ('comparing', 'choosing')
    """
    return COMPARING if zlib.crc32(question.encode()) % 2 else CHOOSING


def outcomes_of(folder: Path, run: RunState, say: Callable[[str], None] = print_stderr) -> Outcomes | None:
    """Return the outcomes of a run in a sweep's folder; None if it did not reach an end of its own.

    `ConfigError` if it did and its final evaluation cannot be read.
    """
    place = folder / run.name
    if not place.is_dir():
        return None
    run_folder = RunFolder(place, say)
    if (summary := run_folder.summary) is None:
        return None
    given = summary.get("protocol")
    protocol = given if isinstance(given, dict) else None
    if summary.get("accuracy") is None:
        if ending(run.status) is not ending("diverged"):
            raise ConfigError(f"{place} ended as {run.status} without an accuracy: move it away and run it again")
        return Outcomes(run.name, run.seed, protocol, None, {})
    saved = run_folder.evaluations()  # of a step that ended the run twice: the last one is of its last update
    if not saved and not (place / RESPONSES).is_file():  # that of a job without steps
        raise ConfigError(f"{place} has lost the responses of its final evaluation: move it away and run it again")
    final = saved[-1] if saved else ResponseFile(place / RESPONSES, RESPONSES)
    rows = list(run_folder.rows(final, NEEDED).values())
    if not rows:
        raise ConfigError(f"{place} holds no response of its final evaluation: move it away and run it again")
    hits: dict[str, list[bool]] = {}
    for row in rows:
        hits.setdefault(row["problem_id"], []).append(row["outcome"] == RIGHT)
    half = {row["problem_id"]: half_of(row["question"]) for row in rows}
    questions = question_keys((row["problem_id"], row["question"]) for row in rows)
    return Outcomes(run.name, run.seed, protocol, {k: sum(h) / len(h) for k, h in hits.items()}, half, questions)


def purposes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the parts of the protocol that sweeping these settings changes on purpose.

    >>> purposes(["eval.sampling.temperature", "learning_rate"]), purposes(["prompt"])[:2]
    (('sampling.temperature',), ('prompt', 'chat.'))
    """
    meant: list[str] = []
    for axis in axes:
        group = max((key for key in ON_PURPOSE if axis == key or axis.startswith(f"{key}.")), key=len, default=None)
        if group is None:
            continue
        rest = axis.removeprefix(group).lstrip(".")
        parts = ON_PURPOSE[group]
        meant += [f"{parts[0]}{rest}"] if rest and len(parts) == 1 and parts[0].endswith(".") else parts
    return tuple(dict.fromkeys(meant))


def split_differences(one: Protocol, two: Protocol, meant: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (unintended differences between two protocols, a line each; the differing parts that were `meant` to)."""
    others, intended = list[str](), list[str]()
    for line in differences(one, two):
        name = line.partition(":")[0]
        on_purpose = any(name == part or (part.endswith(".") and name.startswith(part)) for part in meant)
        (intended if on_purpose else others).append(name if on_purpose else line)
    return others, intended


def refuse_unequal(outcomes: Sequence[Outcomes], axes: Iterable[str]) -> list[str]:
    """Return the parts of the protocol that the sweep varied on purpose; `ConfigError` for any other difference."""
    meant, varied = purposes(axes), list[str]()
    measured = [one for one in outcomes if one.protocol is not None]
    for one in measured[1:]:
        first = measured[0]
        others, intended = split_differences(first.protocol or {}, one.protocol or {}, meant)
        varied += intended
        if others:
            raise ConfigError(
                f"{first.name} and {one.name} were measured differently ({'; '.join(others)}) and cannot be compared: "
                "evaluate all settings of a sweep in one way"
            )
    return list(dict.fromkeys(varied))


def common_problems(outcomes: Sequence[Outcomes], half: str) -> list[str]:
    """Return the problems of a half, sorted; `ConfigError` if the runs asked different problems, or there are none."""
    measured = [one for one in outcomes if one.right is not None]
    if not measured:
        return ["none"]  # every run diverged: wrong on every problem
    first = measured[0]
    for one in measured[1:]:
        if one.half != first.half:
            odd = sorted(one.half.keys() ^ first.half.keys()) or ["their questions differ"]
            raise ConfigError(
                f"{first.name} and {one.name} did not ask the same problems ({few(odd, 3)}) and cannot be compared: "
                "evaluate all settings of a sweep on the same problems"
            )
    problems = sorted(name for name, of in first.half.items() if of == half)
    if not problems:
        raise ConfigError(
            f"{first.name}: none of its {len(first.half)} problems is in the half for {half}: ask more of them "
            "(eval.final_problems)"
        )
    return problems


def correctness(outcomes: Sequence[Outcomes], problems: Sequence[str]) -> dict[int, Floats]:
    """Return seed -> correctness on each question of the problems (`of_clusters`), for the runs of one setting."""
    questions = next((one.questions for one in outcomes if one.questions), {})
    clusters = [questions.get(name, name) for name in problems]
    return {
        one.seed: of_clusters(np.array([(one.right or {}).get(name, 0.0) for name in problems]), clusters)
        for one in outcomes
    }


def mean_of(of_seeds: Mapping[int, Floats]) -> float:
    """Return the mean accuracy over the seeds of a setting."""
    return float(np.mean([values.mean() for values in of_seeds.values()]))
