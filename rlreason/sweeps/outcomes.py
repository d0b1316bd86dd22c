"""Read the final evaluations of a sweep's runs, refuse those that cannot be compared, and split their problems.

One half of the problems chooses a setting, the other half judges it.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.protocol import Protocol, differences
from rlreason.records.files import RESPONSES, ResponseFile
from rlreason.records.reader import RunFolder, ending
from rlreason.runtime.statistics import Floats, of_clusters
from rlreason.runtime.text import few, question_keys
from rlreason.sweeps.state import Key, RunState, SweepState

Right = Mapping[Key, Mapping[int, Floats]]  # setting -> seed -> correctness (questions)

CHOOSING, COMPARING = "choosing", "comparing"
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
    """The final evaluation of one run; empty where it diverged without one, and counts as wrong on every problem."""

    run: RunState
    protocol: Protocol | None
    right: Mapping[str, float]  # problem -> share of its responses that are correct
    half: Mapping[str, str]  # problem -> CHOOSING or COMPARING
    questions: Mapping[str, str]  # problem -> the key of what it asks


def half_of(question: str) -> str:
    """Return the half of the problems that a question is in: crc32 of its text, even or odd.

    >>> half_of("What is 1+1?"), half_of("What is 1+2?")
    ('comparing', 'choosing')
    """
    return COMPARING if zlib.crc32(question.encode()) % 2 else CHOOSING


def _outcomes_of(folder: Path, run: RunState) -> Outcomes | None:
    """Return the outcomes of a run that has ended; None if it left no summary."""
    place = folder / run.name
    reader = RunFolder(place) if place.is_dir() else None
    if reader is None or (summary := reader.summary) is None:
        return None
    protocol = summary.get("protocol") if isinstance(summary.get("protocol"), dict) else None
    if summary.get("accuracy") is None and ending(run.status) is ending("diverged"):
        return Outcomes(run, protocol, {}, {}, {})
    saved = reader.evaluations()  # of a step that ended the run twice: the last one is of its last update
    saved = saved or [ResponseFile(place / RESPONSES, RESPONSES)] * (place / RESPONSES).is_file()  # of a job
    rows = list(reader.rows(saved[-1], ("problem_id", "question", "outcome")).values()) if saved else []
    if not rows or summary.get("accuracy") is None:
        raise ConfigError(f"{place} ended as {run.status} without a final evaluation: move it away and run it again")
    hits: dict[str, list[bool]] = {}
    for row in rows:
        hits.setdefault(row["problem_id"], []).append(row["outcome"] == RIGHT)
    half = {row["problem_id"]: half_of(row["question"]) for row in rows}
    questions = question_keys((row["problem_id"], row["question"]) for row in rows)
    return Outcomes(run, protocol, {name: sum(of) / len(of) for name, of in hits.items()}, half, questions)


def comparable(state: SweepState, folder: Path) -> tuple[list[Outcomes], list[str]]:
    """Return the outcomes of the runs that have ended, and the parts of the protocol that the sweep varies on purpose.

    `ConfigError` if they were measured differently, or shared the machine and were ended by the clock.
    """
    read = [_outcomes_of(folder, run) for run in state.runs if run.of_its_own]
    outcomes = [one for one in read if one is not None]
    shared = [one.run for one in outcomes if one.run.shared_machine and one.run.status == "budget"]
    if late := [run.name for run in shared if "budget.hours" in run.reason]:
        why = "shared the machine and were ended by budget.hours, so what they reached says nothing of their settings"
        raise ConfigError(f"{few(late, 3)} {why}: run them with jobs=1 in another folder, or by a budget of tokens")
    meant, varied = purposes(state.axes), list[str]()
    protocols = [(one.run.name, one.protocol) for one in outcomes if one.protocol is not None]
    for name, protocol in protocols[1:]:
        others, intended = split_differences(protocols[0][1], protocol, meant)
        varied += intended
        if others:
            raise ConfigError(
                f"{protocols[0][0]} and {name} were measured differently ({'; '.join(others)}) and cannot be compared: "
                "evaluate all settings of a sweep in one way"
            )
    return outcomes, list(dict.fromkeys(varied))


def purposes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the parts of the protocol that sweeping these settings changes on purpose.

    >>> purposes(["eval.sampling.temperature", "learning_rate"]), purposes(["prompt"])[:2]
    (('sampling.temperature',), ('prompt', 'chat.'))
    """
    meant: list[str] = []
    for axis in axes:
        groups = [key for key in ON_PURPOSE if f"{axis}.".startswith(f"{key}.")]
        parts = ON_PURPOSE[group] if (group := max(groups, key=len, default="")) else ()
        rest = axis.removeprefix(group).lstrip(".")
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


def correctness(outcomes: Sequence[Outcomes], half: str) -> Right:
    """Return setting -> seed -> correctness on each question of a half (`of_clusters`).

    `ConfigError` if the runs were asked different problems, or none of that half.
    """
    asked = [one for one in outcomes if one.right]
    problems, clusters = ["none"], ["none"]  # where every run diverged: wrong on every problem
    if asked:
        first = asked[0]
        for one in asked[1:]:
            if one.half != first.half:
                odd = sorted(one.half.keys() ^ first.half.keys()) or ["their questions differ"]
                names = f"{first.run.name} and {one.run.name}"
                raise ConfigError(f"{names} did not ask the same problems ({few(odd, 3)}): evaluate all on the same")
        problems = sorted(name for name, of in first.half.items() if of == half)
        clusters = [first.questions[name] for name in problems]
        if not problems:
            raise ConfigError(f"{first.run.name} has no problem in the half for {half}: raise eval.final_problems")
    right: dict[Key, dict[int, Floats]] = {}
    for one in outcomes:
        values = of_clusters(np.array([one.right.get(name, 0.0) for name in problems]), clusters)
        right.setdefault(one.run.key, {})[one.run.seed] = values
    return right


def mean_of(of_seeds: Mapping[int, Floats]) -> float:
    """Return the mean accuracy over the seeds of a setting."""
    return float(np.mean([values.mean() for values in of_seeds.values()]))
