"""The studies that a write-up is made of, each read and built once, when a question asks for it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.records.reader import setting_in
from rlreason.report.assignment.courses import Course, Question
from rlreason.report.assignment.fit import TRAINING, plain, trained_by, unfit
from rlreason.report.assignment.gather import Found
from rlreason.report.build import build_report
from rlreason.report.content import Report
from rlreason.report.read import read_study
from rlreason.report.study import Study


@dataclass(slots=True)
class Read:
    """A study with its report."""

    found: Found
    study: Study
    report: Report


def values_of(read: Read, key: str) -> set[str]:
    """The values of a setting among the runs of a study."""
    return {plain(run.settings.get(key)) for run in read.study.runs}


@dataclass(slots=True)
class Gathered:
    """What lies below the runs folder, by name."""

    course: Course
    found: list[Found]
    problems: list[str] = field(default_factory=list)  # folders that could not be read
    carried: set[str] = field(default_factory=set)  # what earlier sections said of what the chain brought
    _read: dict[Path, Read | None] = field(default_factory=dict)

    @property
    def named(self) -> set[str]:
        """The sweeps that some question names."""
        return {name for question in self.course.questions for name in (*question.sweeps, question.instead) if name}

    @property
    def all_read(self) -> list[Read]:
        """What has been read so far."""
        return [read for read in self._read.values() if read is not None]

    def nearest(self, found: Iterable[Found]) -> list[Found]:
        """These, what is nearest to the handout's model, data and steps first: the real one before a rehearsal."""
        return sorted(found, key=lambda one: one.nearness(self.course), reverse=True)

    def sweep(self, name: str) -> Read | None:
        """The nearest sweep of a name; None where there is none that can be read."""
        named = self.nearest(one for one in self.found if one.is_sweep and one.sweep == name)
        return self.read(named[0]) if named else None

    def of_algorithm(self, question: Question) -> tuple[list[Read], list[str]]:
        """The nearest runs or sweeps of the question's algorithm that have its settings and that no question names.

        One, or one for each value of what has to be there in each; and what is wrong with others, a sentence each.
        """
        taken, refused, lacking = list[Read](), list[str](), set(question.values(question.each))
        for one in self.nearest(self.found) if question.algorithm else ():
            if one.algorithm != question.algorithm or one.sweep in self.named:
                continue
            starts = self._starts(one)
            wrong = unfit(one.settings, one.provenance, {}, question, self.course, starts)
            of = None if wrong else self.read(one)
            for run in of.study.runs if of is not None else ():
                wrong = wrong or unfit(run.settings, run.provenance, run.summary, question, self.course, starts)
            if wrong:
                refused.append(f"{one.path.name} does not answer this: {wrong}.")
                self._read.pop(one.path, None)
            elif of is not None and (not taken or lacking & values_of(of, question.each)):
                taken.append(of)
                lacking -= values_of(of, question.each)
            if taken and not lacking:
                break
        return taken, refused

    def _starts(self, one: Found) -> set[str]:
        """The weights that training runs of its model began with, but for models that were trained before."""
        name = one.settings.get("model.name")
        like = [f for f in self.found if f.algorithm in TRAINING and f.settings.get("model.name") == name]
        untrained = [f for f in like if not trained_by(f.settings, f.provenance)]
        return {str(setting_in(f.provenance, "model.start_weights")) for f in untrained} - {"None"}

    def read(self, one: Found) -> Read | None:
        """The study of a folder; what is wrong with a folder that has none stands in `problems`."""
        if one.path not in self._read:
            try:
                study = read_study([one.path])
                for setting in study.settings if one.sweep == "pku_before_and_after" else ():  # not by long paths
                    setting.label = f"{'after' if 'pku_grpo' in setting.typed else 'before'} GRPO"
                self._read[one.path] = Read(one, study, build_report(study))
            except ConfigError as error:
                self.problems.append(str(error))
                self._read[one.path] = None
        return self._read[one.path]
