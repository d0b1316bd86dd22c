"""A start that failed leaves its run folder as it found it: no empty folders, and what it set aside is back in place.

Only what this start made is removed, and only while it recorded nothing that anyone would want.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlreason.errors import ConfigError, DataError, ResourceError
from rlreason.records import files
from rlreason.records.files import CONTENTS, SET_ASIDE
from rlreason.records.status import exit_code
from rlreason.runtime.atomic_files import removed
from rlreason.runtime.environment import SWEEP_VARIABLE

MISTAKES = (ConfigError.exit_code, DataError.exit_code, ResourceError.exit_code)
HYDRAS = ".hydra"  # a folder with its own view of the config
MADE = {*CONTENTS, HYDRAS}
#: What is worth keeping of a run that failed, where there is anything in it.
WANTED = {
    files.METRICS, files.SUMMARY, files.ROLLOUTS, files.EVALS, files.MODEL, files.RESPONSES, files.UNFINISHED,
    files.ENGINE_LOG, files.CALLS,
}  # fmt: skip


class Ended(BaseException):
    """Carries what ended a job past Hydra's runner, which would print it in its own way; and the run's folder."""

    def __init__(self, error: Exception, folder: Path) -> None:
        super().__init__(error)
        self.error, self.folder = error, folder


@contextmanager
def undone_when_refused(planned: Path) -> Iterator[None]:
    """Undo what was done to the run folder when the run inside ends with an error whose exit code means a mistake.

    `planned` is the folder that was asked for; a name that holds the time may have moved on by a second.
    """
    planned = planned.absolute()
    parent = planned.parent
    above = [path for path in planned.parents if not path.exists()]
    names, siblings = _names(planned), _names(parent)
    hydras = {path: path.read_bytes() for path in (planned / HYDRAS).glob("*.yaml")}  # which Hydra writes anew
    new = not planned.exists() or (SWEEP_VARIABLE in os.environ and names <= {HYDRAS})  # its sweep has just made it
    try:
        yield
    except (Ended, Exception) as end:
        error, folder = (end.error, end.folder.absolute()) if isinstance(end, Ended) else (end, planned)
        if folder != planned:
            new, names = True, set[str]()
            if folder.parent != parent or folder.name in siblings:
                raise
        if exit_code(error) in MISTAKES:
            with contextlib.suppress(OSError):  # what happened is said; this is no reason to say more
                _undo(folder, set() if new else names, [folder, *above] if new else [])
                for path, before in hydras.items():
                    path.write_bytes(before)
        raise


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _undo(folder: Path, names: set[str], new: list[Path]) -> None:
    """`names` were there before, and the folders that are `new`, from the run folder upwards, were not."""
    now = _names(folder)
    aside = [folder / name for name in sorted(now - names) if name.startswith(SET_ASIDE)]
    ours = {name for name in now & MADE if aside or name not in names}
    if any(_holds_something(folder / name) for name in ours & WANTED) or (names & set(CONTENTS) and not aside):
        return  # worth keeping; or the folder of an earlier run that this one went on with, or was refused
    for name in ours:
        removed(folder / name)
    for place in aside:
        for path in place.iterdir():
            os.replace(path, folder / path.name)
        place.rmdir()
    for path in new:  # while they are empty
        path.rmdir()


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0
