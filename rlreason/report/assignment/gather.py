"""Find the sweeps and runs below a folder, with what tells which of an assignment's questions they are of."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG
from rlreason.records.reader import RunFolder
from rlreason.report.assignment.courses import Course
from rlreason.report.read_run import settings_of
from rlreason.sweeps.state import FILE, read_state

DEEPEST = 5  # folders below the one given: runs/sweeps/CHAIN/SWEEP/RUN
NO_ALGORITHM = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A sweep, or a run by itself."""

    path: Path
    name: str  # what the sweep is, sweep=NAME, or else of the folder
    begun: float  # seconds since 1970, of the newest change
    is_sweep: bool
    algorithm: str  # of all its runs; NO_ALGORITHM where they differ or it is not known
    sweep: str = ""  # that was asked for by sweep=
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its first run, by dotted names
    provenance: Mapping[str, Any] = field(default_factory=dict)  # the same run's

    def nearness(self, course: Course) -> tuple[bool, int, int, float]:
        """How near it is to what is handed in: model and data, then their names, then its work, then the newest."""
        names = {"model.name": course.model, "data.name": course.data}
        named = sum(self.settings.get(key) == name for key, name in names.items())
        sizes = [self.settings.get(key) for key in ("n_steps", "rollout_batch_size", "question_batch_size")]
        work = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
        return course.is_of(self.settings, self.provenance), named, work, self.begun


def found_below(folder: Path) -> list[Found]:
    """All sweeps and runs by themselves below a folder, the newest first. `ConfigError` where there is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder} is no folder: give the folder that holds the runs, such as runs")
    return sorted(_below(folder, DEEPEST), key=lambda one: (-one.begun, str(one.path)))


def _below(folder: Path, depth: int) -> Iterator[Found]:
    if (folder / FILE).exists():
        begun = (folder / FILE).stat().st_mtime
        try:
            state = read_state(folder, lambda _: None)
        except ConfigError:  # whoever reads it says what is wrong with it
            yield Found(folder, folder.name, begun, True, NO_ALGORITHM, folder.name)
            return
        algorithms = {algorithm_of(folder / run.name) for run in state.runs} - {NO_ALGORITHM}
        only = algorithms.pop() if len(algorithms) == 1 else NO_ALGORITHM
        first = next((folder / run.name for run in state.runs if (folder / run.name / CONFIG).exists()), None)
        yield Found(folder, state.asked or folder.name, begun, True, only, state.asked, *_facts(first))
    elif (folder / CONFIG).exists():
        begun = (folder / CONFIG).stat().st_mtime
        yield Found(folder, folder.name, begun, False, algorithm_of(folder), "", *_facts(folder))
    elif depth:
        with os.scandir(folder) as entries:
            inner = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
        for path in inner:
            yield from _below(Path(path), depth - 1)


def algorithm_of(run: Path) -> str:
    """The algorithm of a run: the first word of its config, which is small."""
    try:
        lines = (run / CONFIG).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return NO_ALGORITHM
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("algorithm:")), NO_ALGORITHM)


def _facts(run: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the provenance of a run; nothing where they cannot be read."""
    try:
        reader = RunFolder(run, lambda _: None) if run is not None else None
        return (settings_of(reader), reader.provenance) if reader is not None else ({}, {})
    except ConfigError:
        return {}, {}


def last_line(path: Path) -> str:
    """The last line of a small text file, '' where there is none."""
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")
