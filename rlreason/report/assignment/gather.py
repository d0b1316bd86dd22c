"""Find the sweeps and runs below a folder that answer an assignment's questions: the newest of each name."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG
from rlreason.report.assignment.courses import Question
from rlreason.sweeps.state import FILE, read_state

DEEPEST = 5  # folders below the one given: runs/sweeps/CHAIN/SWEEP/RUN
NO_ALGORITHM = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A sweep, or a run by itself."""

    path: Path
    name: str  # of the sweep, or of the run's folder
    begun: float  # seconds since 1970, of the newest change
    is_sweep: bool
    algorithm: str  # of all its runs; NO_ALGORITHM where they differ or it is not known


def found_below(folder: Path) -> list[Found]:
    """All sweeps and runs by themselves below a folder, the newest first. `ConfigError` where there is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder} is no folder: give the folder that holds the runs, such as runs")
    return sorted(_below(folder, DEEPEST), key=lambda one: (-one.begun, str(one.path)))


def _below(folder: Path, depth: int) -> Iterator[Found]:
    if (folder / FILE).exists():
        try:
            state = read_state(folder)
        except ConfigError:  # whoever reads it says what is wrong with it
            yield Found(folder, folder.name, (folder / FILE).stat().st_mtime, True, NO_ALGORITHM)
            return
        algorithms = {_algorithm(folder / run.name) for run in state.runs} - {NO_ALGORITHM}
        only = algorithms.pop() if len(algorithms) == 1 else NO_ALGORITHM
        yield Found(folder, state.name or folder.name, (folder / FILE).stat().st_mtime, True, only)
    elif (folder / CONFIG).exists():
        yield Found(folder, folder.name, (folder / CONFIG).stat().st_mtime, False, _algorithm(folder))
    elif depth:
        with os.scandir(folder) as entries:
            inner = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
        for path in inner:
            yield from _below(Path(path), depth - 1)


def _algorithm(run: Path) -> str:
    """The algorithm of a run: the first word of its config, which is small."""
    try:
        lines = (run / CONFIG).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return NO_ALGORITHM
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("algorithm:")), NO_ALGORITHM)


def sweeps_named(found: list[Found], names: list[str]) -> dict[str, Found]:
    """Name -> the newest sweep of that name, of those that are there."""
    return {name: one for name in names if (one := _first(found, name)) is not None}


def _first(found: list[Found], name: str) -> Found | None:
    return next((one for one in found if one.is_sweep and one.name == name), None)


def by_algorithm(found: list[Found], question: Question, taken: set[str]) -> Found | None:
    """The newest run or sweep whose runs all have the question's algorithm, and which no other question names."""
    if not question.algorithm:
        return None
    others = [one for one in found if one.algorithm == question.algorithm and one.name not in taken]
    return others[0] if others else None


def last_line(path: Path) -> str:
    """The last line of a small text file, '' where there is none."""
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")
