"""Find the runs that answer an assignment's questions, and read each study once."""

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG, STATUS
from rlreason.records.reader import RunFolder, setting_in
from rlreason.report.assignment.courses import Assignment, AssignmentQuestion
from rlreason.report.build import build_report
from rlreason.report.content import Report
from rlreason.report.read import read_study, settings_of
from rlreason.report.study import Study
from rlreason.runtime.files import number
from rlreason.sweeps.state import FILE, read_state

DEEPEST = 5  # folders below the one given: runs/sweeps/CHAIN/SWEEP/RUN
NO_ALGORITHM = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sweep, or a single run, that may answer a question."""

    path: Path
    name: str  # of sweep=NAME, else of the folder
    begun: float  # time of the newest change
    is_sweep: bool
    algorithm: str  # of all its runs; NO_ALGORITHM if they differ or it is unknown
    sweep: str = ""  # of sweep=NAME
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its first run, by dotted names
    provenance: Mapping[str, Any] = field(default_factory=dict)  # the same run's

    def nearness(self, course: Assignment) -> tuple[bool, int, int, float]:
        """Return a sort key by closeness to the handout: model and data, their names, size of the run, time."""
        names = {"model.name": course.model, "data.name": course.data}
        named = sum(self.settings.get(key) == name for key, name in names.items())
        sizes = [self.settings.get(key) for key in ("n_steps", "rollout_batch_size", "question_batch_size")]
        work = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
        return course.is_of(self.settings, self.provenance), named, work, self.begun


def found_below(folder: Path) -> list[Candidate]:
    """Return all sweeps and single runs below a folder, newest first; `ConfigError` if there is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder} is no folder: give the folder that holds the runs, such as runs")
    return sorted(_below(folder, DEEPEST), key=lambda one: (-one.begun, str(one.path)))


def _below(folder: Path, depth: int) -> Iterator[Candidate]:
    if (folder / FILE).exists():
        begun = (folder / FILE).stat().st_mtime
        try:
            state = read_state(folder, lambda _: None)
        except ConfigError:  # reported when it is read
            yield Candidate(folder, folder.name, begun, True, NO_ALGORITHM, folder.name)
            return
        algorithms = {algorithm_of(folder / run.name) for run in state.runs} - {NO_ALGORITHM}
        only = algorithms.pop() if len(algorithms) == 1 else NO_ALGORITHM
        first = next((folder / run.name for run in state.runs if (folder / run.name / CONFIG).exists()), None)
        yield Candidate(folder, state.requested or folder.name, begun, True, only, state.requested, *_facts(first))
    elif (folder / CONFIG).exists():
        begun = (folder / CONFIG).stat().st_mtime
        yield Candidate(folder, folder.name, begun, False, algorithm_of(folder), "", *_facts(folder))
    elif depth:
        with os.scandir(folder) as entries:
            inner = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
        for path in inner:
            yield from _below(Path(path), depth - 1)


def algorithm_of(run: Path) -> str:
    """Return the algorithm of a run, read from the text of its config."""
    try:
        lines = (run / CONFIG).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return NO_ALGORITHM
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("algorithm:")), NO_ALGORITHM)


def _facts(run: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the provenance of a run; empty if they cannot be read."""
    try:
        reader = RunFolder(run, lambda _: None) if run is not None else None
        return (settings_of(reader), reader.provenance) if reader is not None else ({}, {})
    except ConfigError:
        return {}, {}


BUILT_IN = "stories"  # prefix of the data that questions are rehearsed on
REHEARSED = "_short"  # suffix of the prompts for the built-in model
TRAINING = ("grpo", "sft", "ei")


def plain(value: Any) -> str:
    """Return a setting's value as in the questions, where a prompt for the built-in model counts as the prompt itself.

    >>> plain("r1_zero_short"), plain(None), plain(1.0)
    ('r1_zero', 'null', '1')
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return "null" if value is None else str(value).removesuffix(REHEARSED)


def unfit(
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    summary: Mapping[str, Any],
    question: AssignmentQuestion,
    course: Assignment,
    starts: Collection[str],
) -> str:
    """Return why a run does not answer a question; "" if it does.

    `starts`: hashes of the weights that training runs of this model began with.
    """
    for key in question.settings:
        wanted = [plain(settings.get(one[1:])) if one.startswith("$") else one for one in question.values(key)]
        if key in settings and plain(settings[key]) not in wanted:
            return f"{key}={plain(settings[key])}, and asked for is {' or '.join(wanted)}"
    data, name = str(settings.get("data.name")), str(settings.get("model.name"))
    if data != course.data and not data.startswith(BUILT_IN):
        return f"its data is {data}, and asked for is {course.data_name}"
    if not name.startswith(course.model) and name not in ("tiny", "local"):
        return f"its model is {name}, and asked for is {course.model_name}"
    if by := trained_by(settings, provenance):
        return f"its model was trained before it began, by {by}"
    weights = setting_in(provenance, "model.start_weights")
    if settings.get("model.path") and weights and starts and weights not in starts:
        return "its model is not the one that the training runs began with"
    evaluated, available = number(summary.get("eval_problems")), number(setting_in(summary, "data_sizes.validation"))
    if question.whole and evaluated is not None and available is not None and evaluated < available:
        return f"it asked {evaluated:.0f} of {available:.0f} problems, and asked for are all"
    return ""


def trained_by(settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Return the run that left the model which a run starts from; "" if no training run did."""
    path = settings.get("model.path")
    place = Path(str(provenance.get("directory") or ".")) / Path(str(path)).expanduser()
    for folder in (place, *place.parents)[:4] if path else ():
        if (folder / CONFIG).is_file() and (folder / STATUS).is_file():
            return str(folder) if algorithm_of(folder) in TRAINING else ""
    return ""


@dataclass(slots=True)
class ReadStudy:
    """A study with its report, and the folder that it was read from."""

    source: Candidate
    study: Study
    report: Report


def values_of(read: ReadStudy, key: str) -> set[str]:
    """Return the values of a setting among the runs of a study."""
    return {plain(run.settings.get(key)) for run in read.study.runs}


@dataclass(slots=True)
class Gathered:
    """The sweeps and runs below the runs folder, by name."""

    course: Assignment
    candidates: list[Candidate]
    problems: list[str] = field(default_factory=list)  # folders that could not be read
    carried: set[str] = field(default_factory=set)  # warnings of CARRIED that earlier sections have
    _read: dict[Path, ReadStudy | None] = field(default_factory=dict)

    @property
    def named(self) -> set[str]:
        """Return the sweeps that some question names."""
        return {name for question in self.course.questions for name in (*question.sweeps, question.instead) if name}

    @property
    def all_read(self) -> list[ReadStudy]:
        """Return the studies read so far."""
        return [read for read in self._read.values() if read is not None]

    def nearest(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Sort by closeness to the handout's model, data and steps: real runs before rehearsals."""
        return sorted(candidates, key=lambda one: one.nearness(self.course), reverse=True)

    def sweep(self, name: str) -> ReadStudy | None:
        """Return the nearest readable sweep of a name, or None."""
        named = self.nearest(one for one in self.candidates if one.is_sweep and one.sweep == name)
        return self.read(named[0]) if named else None

    def of_algorithm(self, question: AssignmentQuestion) -> tuple[list[ReadStudy], list[str]]:
        """Return the nearest runs or sweeps of the question's algorithm and settings that no question names.

        One, or one for each value of the question's `each`; and why others do not answer it, a sentence each.
        """
        reads, refused, lacking = list[ReadStudy](), list[str](), set(question.values(question.each))
        for one in self.nearest(self.candidates) if question.algorithm else ():
            if one.algorithm != question.algorithm or one.sweep in self.named:
                continue
            starts = self._starts(one)
            wrong = unfit(one.settings, one.provenance, {}, question, self.course, starts)
            read = None if wrong else self.read(one)
            for run in read.study.runs if read is not None else ():
                wrong = wrong or unfit(run.settings, run.provenance, run.summary, question, self.course, starts)
            if wrong:
                refused.append(f"{one.path.name} does not answer this: {wrong}.")
                self._read.pop(one.path, None)
            elif read is not None and (not reads or lacking & values_of(read, question.each)):
                reads.append(read)
                lacking -= values_of(read, question.each)
            if reads and not lacking:
                break
        return reads, refused

    def _starts(self, one: Candidate) -> set[str]:
        """Return hashes of the weights that training runs of its model began with, without models trained before."""
        name = one.settings.get("model.name")
        like = [f for f in self.candidates if f.algorithm in TRAINING and f.settings.get("model.name") == name]
        untrained = [f for f in like if not trained_by(f.settings, f.provenance)]
        return {str(setting_in(f.provenance, "model.start_weights")) for f in untrained} - {"None"}

    def read(self, one: Candidate) -> ReadStudy | None:
        """Read the study of a folder; add a message to `problems` if it has none."""
        if one.path not in self._read:
            try:
                study = read_study([one.path])
                if one.sweep == "pku_before_and_after":  # whose settings are long paths
                    for setting in study.settings:
                        setting.label = "after GRPO" if "pku_grpo" in setting.typed else "before GRPO"
                self._read[one.path] = ReadStudy(one, study, build_report(study))
            except ConfigError as error:
                self.problems.append(str(error))
                self._read[one.path] = None
        return self._read[one.path]
