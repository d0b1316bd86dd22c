"""The studies that a write-up is made of, each read and built once, when a question asks for it."""

from dataclasses import dataclass, field
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.report.assignment.courses import Course, Question
from rlreason.report.assignment.gather import Found, by_algorithm, sweeps_named
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

    def sweep(self, name: str) -> Read | None:
        """The newest sweep of a name; None where there is none that can be read."""
        one = sweeps_named(self.found, [name]).get(name)
        return self.read(one) if one is not None else None

    def of_algorithm(self, question: Question) -> Read | None:
        """The newest run or sweep of the question's algorithm that no question names."""
        one = by_algorithm(self.found, question, self.named)
        return self.read(one) if one is not None else None

    def read(self, one: Found) -> Read | None:
        """The study of a folder; what is wrong with a folder that has none stands in `problems`."""
        if one.path not in self._read:
            try:
                study = read_study([one.path])
                self._read[one.path] = Read(one, study, build_report(study))
            except ConfigError as error:
                self.problems.append(str(error))
                self._read[one.path] = None
        return self._read[one.path]
