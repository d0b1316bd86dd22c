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

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.protocol import Protocol, differences, refuse_mixture
from rlreason.records.files import COMPLIANCE, RESPONSES, ResponseFile
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


def settings_table(state: SweepState, judged: Judgements) -> str:
    """Return the table of settings, best mean first, with the swept axes as columns.

    Intervals and verdicts are the report's, `judged`; scores of discovery, which it does not judge, have an interval
    over seeds.

    >>> runs = [RunState(f"lr={lr},seed={s}", [], {"lr": lr}, s, "finished", score=a)
    ...         for lr, s, a in (("1", 0, 5.0), ("1", 1, 6.0), ("2", 0, 7.0))]
    >>> print(settings_table(SweepState("x", "", ["lr"], {"lr": "1"}, "finished", 1, "basic", runs), {}))
    lr  seeds  score  95%, over seeds  length  status
    2       1    7.0                -       -  finished
    1       2    5.5     -0.9 to 11.9       -  finished (reference)
    """
    scores, several = any(run.score is not None for run in state.runs), max(seeds_of(state).values(), default=0) > 1
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


def seeds_of(state: SweepState) -> Counter[Key]:
    """Count the seeds of each setting that have a figure."""
    return Counter(run.key for run in state.runs if run.figure is not None)


def closing(state: SweepState, folder: Path, judged: Judgements) -> str:
    """Return the table followed by its notes, one a line. `judged`: from the report."""
    lines, seeds = [settings_table(state, judged)], set(seeds_of(state).values())
    if seeds == {1}:
        lines.append("one seed: the intervals are over problems and tell these trained models apart, not the settings")
    elif 1 in seeds:
        lines.append("a setting with one seed has no interval over seeds: nothing is to be said of it")
    lines += [f"! {r.name}: {r.status_text}" for r in state.runs if r.status not in ("finished", WAITING) or r.reason]
    if left := sum(run.status in (WAITING, "interrupted", "failed") for run in state.runs):
        lines.append(f"left: {left} of {len(state.runs)} runs; type the sweep again, and they go on")
    if any(run.score is not None for run in state.runs):
        lines.append(f"the distribution over seeds, with a picture: rlreason report {folder}")
    if any(run.shared_machine for run in state.runs):
        lines.append(
            "! runs shared the machine: their times compare with nothing, and no verdict on wall clock is given"
        )
    first_of = dict[str, str]()
    for run in state.runs:
        first_of.setdefault(run.protocol or "", run.name)
    if protocols := {name: RunFolder(folder / name).summary for hash_, name in first_of.items() if hash_}:
        lines.append(f"protocol {', '.join(filter(None, first_of))}")
        mixed = refuse_mixture({name: (of or {})["protocol"] for name, of in protocols.items()}, allow=True)
        lines += [f"! {line}" for line in mixed]
    for run in state.runs:
        card = folder / run.name / COMPLIANCE
        if card.exists() and (text := card.read_text(encoding="utf-8").splitlines()):
            lines.append(f"{run.name}: {text[-1]}; see {card}")
    return "\n".join(lines)


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
    run_folder = RunFolder(place, say) if place.is_dir() else None
    if run_folder is None or (summary := run_folder.summary) is None:
        return None
    given = summary.get("protocol")
    protocol = given if isinstance(given, dict) else None
    if summary.get("accuracy") is None and ending(run.status) is ending("diverged"):
        return Outcomes(run.name, run.seed, protocol, None, {})
    saved = run_folder.evaluations()  # of a step that ended the run twice: the last one is of its last update
    saved = saved or [ResponseFile(place / RESPONSES, RESPONSES)] * (place / RESPONSES).is_file()  # of a job
    rows = list(run_folder.rows(saved[-1], NEEDED).values()) if saved else []
    if not rows or summary.get("accuracy") is None:
        raise ConfigError(f"{place} ended as {run.status} without a final evaluation: move it away and run it again")
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
