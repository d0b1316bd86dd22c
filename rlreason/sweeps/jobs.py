"""The jobs of a sweep whose runs Hydra's own launcher or sweeper starts, in whichever process and on whichever machine.

Each job starts its run as a process, as the sweep's own loop does, and tells the sweep by a line in a common file.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.reader import RunFolder
from rlreason.runtime import signals
from rlreason.sweeps.before import Composed
from rlreason.sweeps.gpus import own_gpus
from rlreason.sweeps.processes import PATIENCE_S, POLL_S, Child, Start, stop
from rlreason.sweeps.table import SweepRun

SWEEP = "RLREASON_SWEEP"  # environment: a `Sweep` as JSON, for the processes that a launcher starts


@dataclass(frozen=True, slots=True)
class Sweep:
    """What every job of a sweep needs, in whichever process a launcher runs it."""

    sources: list[str]  # flags by which a run finds the same options
    log: str  # a file, to which each job adds lines; those on another machine add theirs to one beside it
    consoles: str | None = None  # the folder for the output of each run; None: it goes where the job's goes
    threads: int | None = None  # of each run, at most
    environment: dict[str, str | None] = field(default_factory=dict)  # what each run has otherwise than its job
    gpus: Sequence[str] = ()  # of this machine, which its runs get in turn
    gpus_per_run: int | None = None  # None: as many as each asks for
    locks: str = ""  # the folder of this machine in which jobs lock the GPUs of their runs
    outlives: bool = False  # its jobs go on where the process of the sweep is killed
    kills: bool = False  # the launcher kills all jobs and their runs as soon as one of them raises
    parent: int = field(default_factory=os.getpid)  # the process of the sweep, with which its jobs end
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def of_environment(cls) -> "Sweep":
        """The sweep that this process belongs to; `KeyError` where there is none."""
        return cls(**json.loads(os.environ[SWEEP]))

    def announce(self) -> None:
        """Put the sweep into the environment of the processes to come."""
        os.environ[SWEEP] = json.dumps(asdict(self))

    def note(self, run: SweepRun) -> None:
        """Add a run that has ended to the log."""
        self._add(asdict(run))

    def _add(self, line: dict[str, Any]) -> None:
        log, host = Path(self.log), socket.gethostname()
        if host != self.host:  # lines that two machines add to one file may overwrite each other on NFS
            log = log.with_name(f"{host}-{log.name}")
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def new_lines(self, read: dict[str, int]) -> list[dict[str, Any]]:
        """The lines that have been added since. `read`: file -> how many of its lines are known, kept up to date here.

        {"begun", "pid", "host", "gpus"} at a start, a `SweepRun` at an end.
        """
        found = []
        for path in sorted(Path(self.log).parent.glob(f"*{Path(self.log).name}")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            found += [json.loads(line) for line in lines[read.get(path.name, 0) :]]
            read[path.name] = len(lines)
        return found

    def runs(self) -> list[SweepRun]:
        """The runs that have ended, in the order of their ends."""
        return [SweepRun(**line) for line in self.new_lines({}) if "name" in line]

    @property
    def over(self) -> bool:
        """Whether the sweep has been stopped, or killed: no further run is to start, and those under way end."""
        if Path(f"{self.log}.stop").exists():
            return True
        return not self.outlives and self.host == socket.gethostname() and not _alive(self.parent)

    def end(self) -> None:
        """Stop the sweep: its jobs stop their runs."""
        Path(f"{self.log}.stop").touch()

    def leave_out(self, names: Sequence[str]) -> None:
        """Have these runs not started any more, and those under way ended by their jobs."""
        with Path(f"{self.log}.left_out").open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)

    def _is_left_out(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return name in Path(f"{self.log}.left_out").read_text(encoding="utf-8").splitlines()
        return False

    def run(self, name: str, folder: Path, overrides: Sequence[str], composed: Composed) -> SweepRun:
        """Run one job of the sweep called `name` in a process, and log it; a finished one is not run again.

        A finished run of another config than that of `composed` in `folder` is a `ConfigError`. Where this is
        interrupted, the process is stopped and its run logged first and, with a launcher that `kills`, returned.
        """
        if os.getpid() != self.parent:  # a launcher's own process, which would wait for further jobs
            signals.killed_with_parent()
        ended = _finished_before(folder, composed.config)
        if self.consoles is None:
            print(f"\n== {folder.name}{': finished before, not run again' * (ended is not None)}", flush=True)
        if ended is None:
            if self.over or self._is_left_out(folder.name):
                return SweepRun(folder.name, {"status": "interrupted"})
            count = 0 if not self.gpus else composed.gpus if self.gpus_per_run is None else self.gpus_per_run
            with own_gpus(self.gpus, count, Path(self.locks), lambda: self._ends(folder.name)) as gpus:
                if gpus is None:
                    return SweepRun(folder.name, {"status": "interrupted"})
                ended = self._in_process(name, folder, overrides, composed.limit_s, gpus)
        self.note(ended)
        return ended

    def _ends(self, name: str) -> bool:
        """Whether this run is to end."""
        return self.over or self._is_left_out(name)

    def _in_process(
        self, name: str, folder: Path, overrides: Sequence[str], limit_s: float | None, gpus: Sequence[str]
    ) -> SweepRun:
        console = Path(self.consoles, f"{folder.name}.log") if self.consoles else None
        place = Path(self.log).parent
        start = Start(name, self.sources, place, console, None, self.threads, self.environment, gpus=gpus)
        child = None
        try:
            with signals.held():  # else a run could start and stay unknown
                child = Child(start, folder, overrides, limit_s)
                about = {"pid": child.process.pid, "host": socket.gethostname(), "gpus": gpus}
                self._add({"begun": folder.name, **about})
            while (ended := child.look()) is None:
                if self._ends(folder.name):
                    return stop([child])[0]
                time.sleep(4 * POLL_S)
            return ended
        except BaseException as error:  # KeyboardInterrupt; or Slurm ends the job, of which submitit tells by its own
            if isinstance(error, KeyboardInterrupt):
                signals.arrived()
            ended = None if child is None else stop([child])[0]
            if ended is not None and self.kills and os.getpid() != self.parent:
                return ended
            if ended is not None:
                self.note(ended)
            raise


def _finished_before(folder: Path, config: str) -> SweepRun | None:
    """The run in the folder, where it came to its end with this config; with another it is refused."""
    run = RunFolder(folder) if folder.is_dir() else None
    if run is None or run.summary is None:
        return None
    if run.config != config:
        raise ConfigError(f"{folder} is a finished run of another config: move it away, or set hydra.sweep.dir")
    return SweepRun(folder.name, run.summary)


def _alive(process: int) -> bool:
    """Whether there is such a process, and it has not ended; one that nobody has waited for has."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError, IndexError):  # Linux; elsewhere there is no such file
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def end_processes(ids: Sequence[int]) -> None:
    """End runs that jobs have started: politely, and by force where that takes too long."""
    for one in ids:
        with suppress(OSError):
            os.kill(one, signal.SIGTERM)
    end = time.monotonic() + PATIENCE_S
    while any(map(_alive, ids)) and time.monotonic() < end:
        time.sleep(POLL_S)
    for one in ids:
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)
