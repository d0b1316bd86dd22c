"""Read the questions of a course from courses.yaml, and find the runs that answer them."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.leaves import flat
from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG, STATUS
from rlreason.records.reader import RunFolder, setting_in
from rlreason.report.content import Report
from rlreason.report.read import read_study
from rlreason.report.sections import build_report
from rlreason.report.study import Study, StudyRun
from rlreason.runtime.files import number
from rlreason.sweeps.state import FILE, read_state

COURSES = Path(__file__).with_name("courses.yaml")
SWEEP = "python -m rlreason -m sweep={sweep} {experiment} {data}"
BUILT_IN = "stories"  # prefix of the data that questions are rehearsed on
REHEARSED = "_short"  # suffix of the prompts for the built-in model
TRAINING = ("grpo", "sft", "ei")


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a handout; the head of courses.yaml describes its fields."""

    id: str
    title: str
    asks: str
    typed: Mapping[str, str]  # of the course
    command: str = ""
    sweeps: Sequence[str] = ()
    algorithm: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    each: str = ""
    whole: bool = False
    instead: str = ""
    bar: float | None = None  # 0 to 1
    steps: int = 0  # 0: any
    figures: Sequence[str] = ()
    parts: Sequence[str] = ()
    note: str = ""

    def values(self, key: str) -> list[str]:
        """Return the allowed values of one of its settings, as typed."""
        value = self.settings.get(key, [])
        return [plain(one) for one in (value if isinstance(value, list) else [value])]

    def commands(self, sweeps: Sequence[str] | None = None) -> list[str]:
        """Return the commands that run these of its sweeps, or all; none if it is answered in words."""
        command = self.command or (SWEEP if self.sweeps else "")
        names = (self.sweeps or [""]) if sweeps is None else sweeps
        typed = [" ".join(command.format(sweep=name, **self.typed).split()) for name in names]
        return [one for one in dict.fromkeys(typed) if one]


@dataclass(frozen=True, slots=True)
class Course:
    """A course's assignment, and what others got with its model on its data."""

    title: str
    questions: Sequence[Question]
    model: str  # names as in conf/
    model_name: str
    data: str
    data_name: str
    published: Sequence[Mapping[str, str]]  # question, text (a figure, or a verdict on a setting), source
    lacks: str = ""

    def is_of(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a run has the course's model and data, by their names."""
        is_model = settings.get("model.name") in (self.model, f"{self.model}_base")
        return is_model and settings.get("data.name") == self.data

    def has(self, study: Study) -> bool:
        """Return whether all runs that have begun have the course's model and data."""
        return all(self.is_of(run.settings) for run in study.runs if run.settings)


def course_of(name: str) -> Course:
    """Return the course of this name; `KeyError` if there is none."""
    course = yaml.safe_load(COURSES.read_text("utf-8"))[name]
    typed = course.pop("typed")
    questions = [Question(typed=typed, **one) for one in course.pop("questions")]
    return Course(questions=questions, **course)


@dataclass(eq=False)
class Found:
    """A sweep, or a run by itself, that may answer a question; study and report are read when they are needed."""

    path: Path
    changed: float  # time of its newest change
    sweep: str = ""  # of sweep=NAME; "" of a run, or of a sweep without
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its first run, by dotted names
    provenance: Mapping[str, Any] = field(default_factory=dict)  # of its first run

    @property
    def name(self) -> str:
        """Return the name of the sweep, else that of the folder."""
        return self.sweep or self.path.name

    @cached_property
    def study(self) -> Study:
        """Its runs; `ConfigError` if they cannot be read."""
        return read_study([self.path])

    @cached_property
    def report(self) -> Report:
        """The report of its study."""
        return build_report(self.study)

    def reference_alone(self) -> "Found":
        """Return its reference as a study by itself."""
        alone = replace(self)
        alone.study = replace(self.study, axes=[], settings=[self.study.reference])
        return alone

    def values(self, key: str) -> set[str]:
        """Return the values of a setting among its runs."""
        return {plain(run.settings.get(key)) for run in self.study.runs}


def found_below(folder: Path) -> list[Found]:
    """Return all sweeps and single runs below a folder, newest first; `ConfigError` if there is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder} is no folder: give the folder that holds the runs, such as runs")
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if FILE in files or CONFIG in files:
            found.append(_found_at(Path(place)))
            folders.clear()
    return sorted(found, key=lambda one: (-one.changed, str(one.path)))


def _found_at(path: Path) -> Found:
    """Return a sweep or a run with what its first run recorded, as far as that can be read."""
    is_sweep, first = (path / FILE).exists(), path
    found = Found(path, (path / (FILE if is_sweep else CONFIG)).stat().st_mtime, path.name if is_sweep else "")
    try:
        if is_sweep:
            state = read_state(path, lambda _: None)
            found.sweep = state.sweep
            first = next((path / run.name for run in state.runs if (path / run.name / CONFIG).exists()), path)
        reader = RunFolder(first, lambda _: None)
        found.settings, found.provenance = flat(reader.settings), reader.provenance
    except ConfigError:  # reported when its question reads it
        pass
    return found


@dataclass(slots=True)
class Runs:
    """The sweeps and runs below one folder."""

    course: Course
    found: list[Found]  # newest first
    problems: list[str] = field(default_factory=list)  # folders that could not be read

    def sweep(self, name: str) -> Found | None:
        """Return the nearest sweep of a name, or None."""
        named = [one for one in self._nearest() if one.sweep == name]
        return named[0] if named and self._readable(named[0]) else None

    def of_algorithm(self, question: Question) -> tuple[list[Found], list[str]]:
        """Return the nearest runs or sweeps of the question's algorithm and settings that no question names.

        One, or one for each value of the question's `each`; and why others do not answer it, a sentence each.
        """
        named = {name for one in self.course.questions for name in (*one.sweeps, one.instead) if name}
        answers, refused, lacking = list[Found](), list[str](), set(question.values(question.each))
        for one in self._nearest():
            if one.settings.get("algorithm") != question.algorithm or one.sweep in named or (answers and not lacking):
                continue
            if not self._readable(one):
                continue
            if why := next((why for run in one.study.runs if (why := self._unfit(question, run))), ""):
                refused.append(f"{one.path.name} does not answer this: {why}.")
            elif not answers or lacking & one.values(question.each):
                answers.append(one)
                lacking -= one.values(question.each)
        return answers, refused

    def _nearest(self) -> list[Found]:
        """Sort by closeness to the handout: model and data, size of the run, then the newest."""

        def nearness(one: Found) -> tuple[bool, int]:
            sizes = [one.settings.get(key) for key in ("n_steps", "rollout_batch_size", "question_batch_size")]
            work = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
            return self.course.is_of(one.settings), work

        return sorted(self.found, key=nearness, reverse=True)

    def _starts(self, model: str) -> set[str]:
        """Return hashes of the weights that training runs of a model began with, without models trained before."""
        begun = [one for one in self.found if one.settings.get("algorithm") in TRAINING]
        like = [one for one in begun if str(one.settings.get("model.name")) == model]
        untrained = [one for one in like if not trained_by(one.settings, one.provenance)]
        return {str(setting_in(one.provenance, "model.start_weights")) for one in untrained} - {"None"}

    def _readable(self, one: Found) -> bool:
        """Return whether a folder has a study; add a message to `problems` if not."""
        try:
            return bool(one.study.runs)
        except ConfigError as error:
            self.problems.append(str(error))
            return False

    def _unfit(self, question: Question, run: StudyRun) -> str:
        """Return why a run does not answer a question; "" if it does."""
        settings, course = run.settings, self.course
        asked = {"algorithm": [question.algorithm]} | {key: question.values(key) for key in question.settings}
        for key, values in asked.items():
            wanted = [plain(settings.get(one[1:])) if one.startswith("$") else one for one in values]
            if key in settings and plain(settings[key]) not in wanted:
                return f"{key}={plain(settings[key])}, and asked for is {' or '.join(wanted)}"
        data, name = str(settings.get("data.name")), str(settings.get("model.name"))
        if data != course.data and not data.startswith(BUILT_IN):
            return f"its data is {data}, and asked for is {course.data_name}"
        if not name.startswith(course.model) and name not in ("tiny", "local"):
            return f"its model is {name}, and asked for is {course.model_name}"
        if by := trained_by(settings, run.provenance):
            return f"its model was trained before it began, by {by}"
        weights, starts = setting_in(run.provenance, "model.start_weights"), self._starts(name)
        if settings.get("model.path") and weights and starts and weights not in starts:
            return "its model is not the one that the training runs began with"
        sizes = [number(setting_in(run.summary, key)) for key in ("eval_problems", "data_sizes.validation")]
        if question.whole and None not in sizes and (sizes[0] or 0) < (sizes[1] or 0):
            return f"it asked {sizes[0]:.0f} of {sizes[1]:.0f} problems, and asked for are all"
        return ""


def plain(value: Any) -> str:
    """Return a setting's value as in the questions, where a prompt for the built-in model counts as the prompt itself.

    >>> plain("r1_zero_short"), plain(None), plain(1.0)
    ('r1_zero', 'null', '1')
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return "null" if value is None else str(value).removesuffix(REHEARSED)


def trained_by(settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Return the run that left the model which a run starts from; "" if no training run did."""
    path = settings.get("model.path")
    place = Path(str(provenance.get("directory") or ".")) / Path(str(path)).expanduser()
    for folder in (place, *place.parents)[:4] if path else ():
        if (folder / CONFIG).is_file() and (folder / STATUS).is_file():
            return str(folder) if _found_at(folder).settings.get("algorithm") in TRAINING else ""
    return ""
