"""Hold what a report compares: settings, runs and answers; and pair the answers that two sides share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.evaluation.protocol import Protocol
from rlreason.health.finding import Finding
from rlreason.records.status import ending
from rlreason.runtime.differences import Difference, compared
from rlreason.runtime.intervals import Floats, of_clusters
from rlreason.runtime.text import question_keys
from rlreason.sweeps.closing import split_differences
from rlreason.sweeps.design import Key

#: What a curve may be drawn against -> the counter of `metrics.jsonl` that it is.
AXES = {"step": "rollout_step", "time": "time/active", "tokens": "tokens/generated", "updates": "train_step"}
RUNNING = "running"
LONGEST_NAME = 32  # of a reference in a sentence


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run, in the order in which it was written, without values that are not finite."""

    x: Mapping[str, Floats]  # axis of AXES -> (points,); an axis that the rows lack is not there
    y: Floats  # (points,)


@dataclass(frozen=True, slots=True)
class GradedProblem:
    """One problem of an evaluation and the grades of its responses."""

    correct: float  # number of correct responses, or the sum of their shares
    samples: int
    question: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # level, subject, source ...

    @property
    def share(self) -> float:
        """Return the share of its responses that are correct."""
        return self.correct / self.samples if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class Answers:
    """The graded responses of one evaluation, by problem."""

    problems: Mapping[str, GradedProblem]  # by problem id
    step: int | None = None  # None: of a job without steps
    categories: Mapping[str, int] = field(default_factory=dict)  # format1_wrong ... -> responses; see evaluation.tables


@dataclass(slots=True)
class StudyRun:
    """One run as read from its folder."""

    folder: Path
    name: str  # of its folder
    setting: Key  # swept key -> value as typed, without the seed
    seed: int
    status: str  # of records.status.STATUSES, with its rule; "waiting" where nothing has begun
    reason: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # every setting, by its dotted name
    series: Mapping[str, Series] = field(default_factory=dict)  # metric -> its curve
    final: Answers | None = None  # the final evaluation; of a run that was broken off, the last one that it reached
    start: Answers | None = None  # the evaluation before the first step
    accuracy: float | None = None  # of `final`, over all its responses; 0 for a diverged run that has none
    protocol: Protocol | None = None  # None where the run came to no end of its own
    planned_steps: int | None = None
    seconds: float | None = None  # wall clock, over all its parts
    shared_machine: bool = False  # its times are not comparable
    totals: Mapping[str, float] = field(default_factory=dict)  # axis of AXES -> where its counter ended
    findings: Sequence[Finding] = ()  # what is wrong with its course, by the monitors and the grader's counts
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json, or {}
    provenance: Mapping[str, Any] = field(default_factory=dict)  # provenance.json, or {}

    @property
    def ended(self) -> bool:
        """Return whether it reached an end of its own, so that its final evaluation is the planned one."""
        return self.status.partition(":")[0] != "waiting" and ending(self.status).of_its_own

    @property
    def diverged(self) -> bool:
        """Return whether a monitor called it diverged."""
        return self.status.partition(":")[0] == "diverged"

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Return (step, accuracy) of each evaluation, oldest first."""
        found = self.series.get("eval/accuracy")
        if found is None or "step" not in found.x:
            return []
        return [(int(x), float(y)) for x, y in zip(found.x["step"], found.y, strict=True)]


@dataclass(slots=True)
class Setting:
    """The varied values, and the runs that have them: one for each seed."""

    key: Key
    label: str  # short, one of its kind in a study: "3e-5", "group_size=8 sft_epochs=2"
    runs: list[StudyRun]
    best_of: int = 0  # of how many settings it was the best on these problems, where others of them are left out

    @property
    def name(self) -> str:
        """Return its name in a sentence if it is the reference; a long label is shortened."""
        return self.label if len(self.label) <= LONGEST_NAME else "the reference"

    @property
    def typed(self) -> str:
        """Return the setting as it is typed: the name in `compare --json`."""
        return " ".join(f"{key}={value}" for key, value in self.key) or self.label


@dataclass(slots=True)
class Study:
    """All that one report compares. `settings[0]` is the reference."""

    name: str  # of the sweep, or of the first folder
    question: str  # from its sweep file, else made from the differences
    axes: list[str]  # the swept keys
    settings: list[Setting]
    figure: str = "the final evaluation"  # what is compared, fixed before looking
    on_purpose: list[str] = field(
        default_factory=list
    )  # parts of the protocol that the sweep varies, see sweeps.outcomes
    problems: list[str] = field(default_factory=list)  # broken or missing parts of the folders, a line each
    notes: list[str] = field(default_factory=list)  # notes on how to read the figures
    among: set[str] | None = None  # the problems to compare on, where others have chosen a setting; None: all
    carried: list[Mapping[str, Any]] = field(default_factory=list)  # from carry=, see sweeps/carry.py
    command: str = ""  # that started the sweep
    folders: list[Path] = field(default_factory=list)  # as given

    @property
    def reference(self) -> Setting:
        """Return the setting that the others are compared with."""
        return self.settings[0]

    @property
    def runs(self) -> list[StudyRun]:
        """Return all runs, by setting."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of all runs, sorted."""
        return sorted({run.seed for run in self.runs})


def labels_of(keys: Sequence[Key]) -> list[str]:
    """Return a short name for each setting, the reference first: only the value if one key differs.

    If every other setting differs from the reference in one key, that key; else all that differ, by the last parts of
    their names.

    >>> labels_of([(("learning_rate", "1e-5"),), (("learning_rate", "3e-5"),)])
    ['1e-5', '3e-5']
    >>> labels_of([(("a.limit", "8"), ("epochs", "1")), (("a.limit", "9"), ("epochs", "1"))])
    ['8', '9']
    >>> labels_of([(("g", "4"), ("q", "8")), (("g", "2"), ("q", "8")), (("g", "4"), ("q", "9"))])
    ['g=4 q=8', 'g=2', 'q=9']
    >>> labels_of([()])
    ['the default']
    """
    names = list(dict.fromkeys(name for key in keys for name, _ in key))
    differing = [name for name in names if len({dict(key).get(name) for key in keys}) > 1] or names
    if len(differing) == 1 and all(differing[0] in dict(key) for key in keys):
        return [dict(key)[differing[0]] for key in keys]
    reference = dict(keys[0])
    own = [[(n, v) for n, v in key if n in differing and reference.get(n) != v] for key in keys[1:]]
    of_each = [[pair for pair in key if pair[0] in differing] for key in keys]
    if all(len(pairs) == 1 for pairs in own):
        of_each[1:] = own
    for short in (True, False):
        made = [" ".join(f"{n.rpartition('.')[2] if short else n}={v}" for n, v in pairs) for pairs in of_each]
        if len(set(made)) == len(made):
            break
    return [label or "the default" for label in made]


#: Settings that decide how an accuracy is measured, for runs that left no protocol: by name or by group.
MEASURED_BY = ("prompt", "eval.prompt", "eval.sampling", "eval.data", "eval.samples", "eval.reward", "sampling")
DATA = ("name", "path", "validation")  # of the group data
NO_TRAINING = ("evaluate", "best_of_n")  # algorithms


@dataclass(frozen=True, slots=True)
class Side:
    """The answers of one side of a comparison: seed -> problem -> share of correct responses.

    None: a diverged run without answers; it is wrong on every problem. `fixed`: models that were not trained here, so
    that the side is a model and no setting. `questions`: problem -> what it asks; repeated rows are one problem.
    """

    right: Mapping[int, Mapping[str, float] | None]
    fixed: bool = False
    questions: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> set[str] | None:
        """Return the problems that all its runs answered; None if none answered any."""
        answered = [set(of) for of in self.right.values() if of is not None]
        return set.intersection(*answered) if answered else None

    def correctness(self, problems: Sequence[str], questions: Mapping[str, str]) -> dict[int, Floats]:
        """Return seed -> correctness on each question that these problems ask (`of_clusters`)."""
        asked = [questions.get(name, name) for name in problems]
        return {
            seed: np.zeros(len(set(asked))) if of is None else of_clusters(np.array([of[p] for p in problems]), asked)
            for seed, of in self.right.items()
        }


@dataclass(frozen=True, slots=True)
class Pairing:
    """The difference of a side to the reference, and the data behind it."""

    difference: Difference
    problems: Sequence[str]
    asked: int  # the largest number of problems that a run of either side answered
    by_seed: Mapping[int, float] = field(default_factory=dict)  # of the seeds that both sides have
    means: tuple[float, float] = (0.0, 0.0)  # accuracy of the side, of the reference


def side_of(setting: Setting) -> Side:
    """Return the final answers of a setting's runs; runs in progress have none."""
    right: dict[int, Mapping[str, float] | None] = {}
    for run in setting.runs:
        if run.final is not None:
            right[run.seed] = {name: problem.share for name, problem in run.final.problems.items()}
        elif run.diverged and run.accuracy is not None:
            right[run.seed] = None
    fixed = all(run.settings.get("algorithm") in NO_TRAINING for run in setting.runs)
    asked = (run.final.problems for run in setting.runs if run.final is not None)
    questions = {name: problem.question for of in asked for name, problem in of.items()}
    return Side(right, fixed, question_keys(questions.items()))


def pair(side: Side, reference: Side, among: set[str] | None = None) -> Pairing | None:
    """Return the difference over the problems that every run of both sides answered (`among` them), or None.

    >>> found = pair(Side({0: {"a": 1.0, "b": 1.0}}), Side({0: {"a": 0.0, "b": 1.0}}))
    >>> found.difference.mean, found.problems, found.by_seed
    (0.5, ['a', 'b'], {0: 0.5})
    """
    if not side.right or not reference.right:
        return None
    both = [found for one in (side, reference) if (found := one.problems) is not None]
    common = set.intersection(*both) if both else {"whatever was asked"}
    problems = sorted(common if among is None else common & among)
    if not problems:
        return None
    questions = {**side.questions, **reference.questions}
    a, b = side.correctness(problems, questions), reference.correctness(problems, questions)
    asked = max((len(of) for one in (side, reference) for of in one.right.values() if of is not None), default=0)
    means = tuple(float(np.mean([values.mean() for values in of.values()])) for of in (a, b))
    by_seed = {seed: float((a[seed] - b[seed]).mean()) for seed in sorted(a.keys() & b.keys())}
    return Pairing(compared(a, b), problems, asked, by_seed, (means[0], means[1]))


def unequal(setting: Setting, reference: Setting, on_purpose: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (how two settings were measured differently, a line each; the parts that differ on purpose)."""
    runs = [run for one in (reference, setting) for run in one.runs if _measured(run) and _says_how(run)]
    others, intended = list[str](), list[str]()
    for run in runs[1:]:
        if runs[0].protocol is not None and run.protocol is not None:
            found = split_differences(runs[0].protocol, run.protocol, on_purpose)
        else:
            found = split_differences(_measuring(runs[0]), _measuring(run), on_purpose)
        others += found[0]
        intended += found[1]
    others += _asks_other_questions(setting, reference)
    return list(dict.fromkeys(others)), list(dict.fromkeys(intended))


def _asks_other_questions(setting: Setting, reference: Setting) -> list[str]:
    """Return whether one problem id stands for two questions."""
    first, second = (next((r.final.problems for r in s.runs if r.final is not None), {}) for s in (reference, setting))
    for name in sorted(first.keys() & second.keys()):
        if first[name].question != second[name].question:
            return [f"what problem {name} asks: one thing and another"]
    return []


def _measured(run: StudyRun) -> bool:
    return run.final is not None and run.status != RUNNING


def _says_how(run: StudyRun) -> bool:
    """Return whether it is known how a run was measured; for a file of results it is not."""
    return run.protocol is not None or bool(run.settings)


def _measuring(run: StudyRun) -> dict[str, Any]:
    """Return the settings that determine how a run's accuracy is measured."""
    found = {key: value for key, value in run.settings.items() if key.startswith(tuple(f"{m}." for m in MEASURED_BY))}
    found |= {key: run.settings[key] for key in MEASURED_BY if key in run.settings}
    return found | {f"data.{key}": run.settings.get(f"data.{key}") for key in DATA}
