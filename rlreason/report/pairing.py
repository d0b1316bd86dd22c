"""Two sides of a comparison: which answers of which seeds they share, and the difference between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlreason.report.study import RUNNING, Run, Setting
from rlreason.runtime.questions import question_keys
from rlreason.statistics import Difference, Floats, compared, of_clusters
from rlreason.sweeps.outcomes import told_apart

#: Settings that decide how an accuracy is measured, for runs that left no protocol: by name or by group.
MEASURED_BY = ("prompt", "eval.prompt", "eval.sampling", "eval.data", "eval.samples", "eval.reward", "sampling")
DATA = ("name", "path", "validation")  # of the group data
NO_TRAINING = ("evaluate", "best_of_n")  # algorithms


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of a comparison answered: seed -> problem -> share of correct responses.

    None: a diverged run that can answer nothing; it is wrong on every problem. `fixed`: models that were not trained
    here, so that the side is a model and no setting. `questions`: problem -> what it asks, by which repeated rows are
    one problem.
    """

    right: Mapping[int, Mapping[str, float] | None]
    fixed: bool = False
    questions: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> set[str] | None:
        """Those that all its runs answered; None where none answered any."""
        answered = [set(of) for of in self.right.values() if of is not None]
        return set.intersection(*answered) if answered else None

    def correctness(self, problems: Sequence[str], questions: Mapping[str, str]) -> dict[int, Floats]:
        """Seed -> correctness on each question that these problems ask (`of_clusters`)."""
        asked = [questions.get(name, name) for name in problems]
        return {
            seed: np.zeros(len(set(asked))) if of is None else of_clusters(np.array([of[p] for p in problems]), asked)
            for seed, of in self.right.items()
        }


@dataclass(frozen=True, slots=True)
class Pairing:
    """The difference of a side to the reference, and what it rests on."""

    difference: Difference
    problems: Sequence[str]
    asked: int  # the most problems that a run of either side was asked
    by_seed: Mapping[int, float] = field(default_factory=dict)  # of the seeds that both sides have
    means: tuple[float, float] = (0.0, 0.0)  # accuracy of the side, of the reference


def side_of(setting: Setting) -> Side:
    """The final answers of a setting's runs; runs under way have none."""
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
    """The difference over the problems that every run of both sides answered (`among` them); None without any.

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
    """(how two settings were measured differently, a line each; the parts of the protocol that differ on purpose)."""
    runs = [run for one in (reference, setting) for run in one.runs if _measured(run) and _says_how(run)]
    others, intended = list[str](), list[str]()
    for run in runs[1:]:
        if runs[0].protocol is not None and run.protocol is not None:
            found = told_apart(runs[0].protocol, run.protocol, on_purpose)
        else:
            found = told_apart(_measuring(runs[0]), _measuring(run), on_purpose)
        others += found[0]
        intended += found[1]
    others += _asked_otherwise(setting, reference)
    return list(dict.fromkeys(others)), list(dict.fromkeys(intended))


def _asked_otherwise(setting: Setting, reference: Setting) -> list[str]:
    """Whether one problem id stands for two questions."""
    first, second = (next((r.final.problems for r in s.runs if r.final is not None), {}) for s in (reference, setting))
    for name in sorted(first.keys() & second.keys()):
        if first[name].question != second[name].question:
            return [f"what problem {name} asks: one thing and another"]
    return []


def _measured(run: Run) -> bool:
    return run.final is not None and run.status != RUNNING


def _says_how(run: Run) -> bool:
    """Whether anything is known of how a run was measured: nothing is of a file of results."""
    return run.protocol is not None or bool(run.settings)


def _measuring(run: Run) -> dict[str, Any]:
    """The settings that decide how a run's accuracy is measured."""
    found = {key: value for key, value in run.settings.items() if key.startswith(tuple(f"{m}." for m in MEASURED_BY))}
    found |= {key: run.settings[key] for key in MEASURED_BY if key in run.settings}
    return found | {f"data.{key}": run.settings.get(f"data.{key}") for key in DATA}
