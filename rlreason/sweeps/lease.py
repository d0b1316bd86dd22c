"""GPUs of this machine for the runs of sweeps: as many as a run asks for, none of them another run's at the same time.

There is a lock file for each GPU. Who starts a run holds it open, and so does the run itself: the kernel gives the GPU
back when both have ended, however they end. So the sweeps of one user on one machine respect each other, whoever
starts their runs: this program's own loop, joblib, or submitit on this machine. Other users are not known here.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from rlreason.errors import ConfigError
from rlreason.memory.machine import asked_driver
from rlreason.runtime.environment import GPUS_VARIABLE
from rlreason.runtime.gpus import VISIBLE, torch_has_gpus

SLURM_JOB = "SLURM_JOB_ID"  # numbers of GPUs count from 0 in each of its jobs
WAIT_S = 1.0  # between two looks at whether a GPU has become free


def machine_gpus(environ: Mapping[str, str], note: Callable[[str], object] = print) -> list[str]:
    """The GPUs that runs started from here may use, as CUDA_VISIBLE_DEVICES would name them; none: there are none.

    Those of RLREASON_GPUS, where it is set; else those of CUDA_VISIBLE_DEVICES, kept as they are (numbers or UUIDs), or
    all that nvidia-smi lists. A job of Slurm finds those that Slurm has given it. Loads no torch.

    >>> machine_gpus({"RLREASON_GPUS": "0, 2"})
    ['0', '2']
    """
    if GPUS_VARIABLE in environ:
        return _names(environ[GPUS_VARIABLE])
    visible = environ.get(VISIBLE)
    if not torch_has_gpus() or (visible is not None and not _names(visible)):
        return []
    driver = asked_driver()
    if driver.failure:
        note(f"note: {driver.failure}: the runs of this sweep are given no GPUs of their own")
    if visible is None or not driver.gpus:
        return [str(number) for number in range(len(driver.gpus))]
    return _names(visible, len(driver.gpus))


def _names(text: str, there: int | None = None) -> list[str]:
    """The entries of such a list, each once; CUDA reads it up to the first that names no GPU.

    >>> _names("GPU-ab, GPU-cd"), _names("1,0,-1,2"), _names("0,7,1", 2), _names("")
    (['GPU-ab', 'GPU-cd'], ['1', '0'], ['0'], [])
    """
    found: list[str] = []
    for name in map(str.strip, text.split(",")):
        if not name or name.startswith("-") or (there is not None and name.isdecimal() and int(name) >= there):
            break
        found.append(name)
    return list(dict.fromkeys(found))


@dataclass
class Lease:
    """GPUs that one run has to itself, until this is closed and the run has ended."""

    gpus: list[str]
    files: list[int] = field(default_factory=list)  # open and locked; a run that inherits them holds them too

    @property
    def environment(self) -> dict[str, str | None]:
        """What a run has in its environment to see these GPUs alone; nothing where none were asked for."""
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}

    def close(self) -> None:
        """Give them back, as far as this process is concerned."""
        while self.files:
            os.close(self.files.pop())  # no LOCK_UN: that would take them from the run as well


@dataclass(frozen=True, slots=True)
class Pool:
    """The GPUs of this machine that are handed out, by name."""

    names: Sequence[str]

    def lease(self, count: int, who: str) -> Lease | None:
        """`count` of them that are free now, in their order; None where fewer are. `who`: says whose they are then."""
        if not count:
            return Lease([])
        found = Lease([])
        with _looking() as place:
            for name in self.names:
                if len(found.gpus) < count and (file := _locked(place, name)) is not None:
                    found.gpus.append(name)
                    found.files.append(file)
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"{who} (process {os.getpid()})\n".encode(), 0)
            if len(found.gpus) < count:
                found.close()
                return None
        return found

    def taken(self) -> dict[str, str]:
        """GPU -> who has it, of those that are not free now."""
        found = {}
        with _looking() as place:
            for name in self.names:
                if (file := _locked(place, name)) is None:
                    with suppress(OSError):
                        found[name] = (place / _file(name)).read_text(encoding="utf-8", errors="replace").strip()
                else:
                    os.close(file)
        return found

    def waiting(self, count: int) -> str:
        """What is said where `count` GPUs are not free: who has them."""
        holders: dict[str, list[str]] = {}
        for name, who in self.taken().items():
            holders.setdefault(who, []).append(name)
        taken = "; ".join(f"{', '.join(names)} taken by {who}" for who, names in list(holders.items())[:4])
        more = f"; and {len(holders) - 4} more runs" if len(holders) > 4 else ""
        return f"waiting for {'a GPU' if count == 1 else f'{count} GPUs'}: {taken or 'none is free'}{more}"

    def when_free(
        self, count: int, who: str, say: Callable[[str], object], over: Callable[[], bool] = lambda: False
    ) -> Lease | None:
        """Wait for a lease, which is said once; None where it is `over` first."""
        said = False
        while (found := self.lease(count, who)) is None:
            if over():
                return None
            if not said:
                say(self.waiting(count))
                said = True
            time.sleep(WAIT_S)
        return found


def lock_folder() -> Path:
    """Where this user's lock files lie on this machine; in a job of Slurm those of the job.

    `ConfigError` where the folder is somebody else's, who could then read or block what is ours.
    """
    job = quote(os.environ.get(SLURM_JOB, ""), safe="")
    folder = Path(tempfile.gettempdir()) / f"rlreason-gpus-{os.getuid()}{f'-slurm-{job}' if job else ''}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or state.st_uid != os.getuid():
        raise ConfigError(f"{folder} is not a folder of yours, and GPUs are leased there: set TMPDIR to another folder")
    return folder


@contextmanager
def _looking() -> Iterator[Path]:
    """The folder of the lock files, which nobody else looks through in this block."""
    folder = lock_folder()
    guard = os.open(folder / "guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(guard)


def _file(name: str) -> str:
    return f"{quote(name, safe='')}.lock"


def _locked(folder: Path, name: str) -> int | None:
    """The open lock file of a GPU; None where somebody else has it."""
    file = os.open(folder / _file(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file
