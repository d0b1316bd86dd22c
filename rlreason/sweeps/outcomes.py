"""Which problems the runs of a sweep got right in their final evaluations, in a form that settings can be compared in.

Problems come in two halves, by a hash of their question, so that it is the same in every sweep: those that *choose* a
setting, as `carry=` does, and those kept apart, on which what was chosen may be compared without that choice in it.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.protocol import Protocol, differences
from rlreason.records.files import RESPONSES, ResponseFile
from rlreason.records.reader import RunFolder
from rlreason.records.status import ending
from rlreason.runtime.questions import question_keys
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import few
from rlreason.statistics import Floats, of_clusters
from rlreason.sweeps.state import RunState

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

    None: it diverged and no evaluation tells of it; it counts as wrong on every problem.
    """

    name: str
    seed: int
    protocol: Protocol | None
    right: dict[str, float] | None
    half: dict[str, str]  # problem -> CHOOSING or COMPARING
    questions: Mapping[str, str] = field(default_factory=dict)  # problem -> what it asks


def half_of(question: str) -> str:
    """Which half of the problems a question is in: crc32 of its text, even or odd.

    >>> half_of("What is 1+1?"), half_of("What is 1+2?")
    ('comparing', 'choosing')
    """
    return COMPARING if zlib.crc32(question.encode()) % 2 else CHOOSING


def outcomes_of(folder: Path, run: RunState, say: Callable[[str], None] = print_stderr) -> Outcomes | None:
    """The outcomes of a run below the folder of its sweep; None where it did not come to an end of its own.

    `ConfigError` where it did and its final evaluation cannot be read.
    """
    place = folder / run.name
    summary = None if not place.is_dir() else RunFolder(place, say).summary
    if summary is None:
        return None
    given = summary.get("protocol")
    protocol = given if isinstance(given, dict) else None
    if summary.get("accuracy") is None:
        if ending(run.status) is not ending("diverged"):
            raise ConfigError(f"{place} ended as {run.status} without an accuracy: move it away and run it again")
        return Outcomes(run.name, run.seed, protocol, None, {})
    rows = list(RunFolder(place, say).rows(_final(place, say), NEEDED).values())
    if not rows:
        raise ConfigError(f"{place} holds no response of its final evaluation: move it away and run it again")
    hits: dict[str, list[bool]] = {}
    for row in rows:
        hits.setdefault(row["problem_id"], []).append(row["outcome"] == RIGHT)
    half = {row["problem_id"]: half_of(row["question"]) for row in rows}
    questions = question_keys((row["problem_id"], row["question"]) for row in rows)
    return Outcomes(run.name, run.seed, protocol, {k: sum(h) / len(h) for k, h in hits.items()}, half, questions)


def _final(place: Path, say: Callable[[str], None]) -> ResponseFile:
    """The file of the final evaluation: the last one of a training, or all responses of a job without steps.

    Where the evaluation that was due behind a step has ended the run, the final one bears that step's last update.
    """
    if saved := RunFolder(place, say).evaluations():
        return saved[-1]
    if (place / RESPONSES).is_file():
        return ResponseFile(place / RESPONSES, RESPONSES)
    raise ConfigError(f"{place} has lost the responses of its final evaluation: move it away and run it again")


def purposes(axes: Iterable[str]) -> tuple[str, ...]:
    """The parts of the protocol that sweeping these settings changes on purpose.

    >>> purposes(["eval.sampling.temperature", "learning_rate"]), purposes(["prompt"])[:2]
    (('sampling.temperature',), ('prompt', 'chat.'))
    """
    found: list[str] = []
    for axis in axes:
        group = max((key for key in ON_PURPOSE if axis == key or axis.startswith(f"{key}.")), key=len, default=None)
        if group is None:
            continue
        rest = axis.removeprefix(group).lstrip(".")
        parts = ON_PURPOSE[group]
        found += [f"{parts[0]}{rest}"] if rest and len(parts) == 1 and parts[0].endswith(".") else parts
    return tuple(dict.fromkeys(found))


def told_apart(one: Protocol, two: Protocol, meant: Iterable[str]) -> tuple[list[str], list[str]]:
    """(what differs between two protocols and should not, a line each; the parts that differ and were `meant` to)."""
    others, intended = list[str](), list[str]()
    for line in differences(one, two):
        name = line.partition(":")[0]
        on_purpose = any(name == part or (part.endswith(".") and name.startswith(part)) for part in meant)
        (intended if on_purpose else others).append(name if on_purpose else line)
    return others, intended


def refuse_unequal(outcomes: Sequence[Outcomes], axes: Iterable[str]) -> list[str]:
    """Which parts of the protocol the sweep varied on purpose; `ConfigError` for everything else that differs."""
    meant, varied = purposes(axes), list[str]()
    measured = [one for one in outcomes if one.protocol is not None]
    for one in measured[1:]:
        first = measured[0]
        others, intended = told_apart(first.protocol or {}, one.protocol or {}, meant)
        varied += intended
        if others:
            raise ConfigError(
                f"{first.name} and {one.name} were measured differently ({'; '.join(others)}) and cannot be compared: "
                "evaluate all settings of a sweep in one way"
            )
    return list(dict.fromkeys(varied))


def asked_by_all(outcomes: Sequence[Outcomes], half: str) -> list[str]:
    """The problems of a half, sorted; `ConfigError` where the runs did not ask the same ones, or there are none."""
    measured = [one for one in outcomes if one.right is not None]
    if not measured:
        return ["none"]  # every run diverged: wrong on whatever there was to ask
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
    """Seed -> correctness on each question that the problems ask (`of_clusters`), of the runs of one setting."""
    asked = next(([one.questions.get(name, name) for name in problems] for one in outcomes if one.questions), problems)
    return {
        one.seed: of_clusters(np.array([(one.right or {}).get(name, 0.0) for name in problems]), asked)
        for one in outcomes
    }


def mean_of(of_seeds: Mapping[int, Floats]) -> float:
    """The mean accuracy over the seeds of a setting."""
    return float(np.mean([values.mean() for values in of_seeds.values()]))
