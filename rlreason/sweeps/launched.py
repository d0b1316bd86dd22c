"""Run a sweep by one of Hydra's launchers, which decides where its jobs run.

Each job runs one run in a process (`Sweep.run`) and adds a line to a log at its start and end; a `Follower` in the
process of the sweep reads the log.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.reader import RunFolder
from rlreason.runtime import signals
from rlreason.runtime.files import removed
from rlreason.runtime.machine import VISIBLE, usable_processors
from rlreason.runtime.text import first_line
from rlreason.sweeps.board import Board
from rlreason.sweeps.closing import SweepRun
from rlreason.sweeps.design import Composed, PlannedRun
from rlreason.sweeps.gpus import own_gpus
from rlreason.sweeps.runner import (
    CONSOLES,
    PATIENCE_S,
    POLL_S,
    Child,
    RunStart,
    SweepWork,
    locked_sweep,
    run_outcome,
    stop,
)
from rlreason.sweeps.state import DOMINATED, WAITING, SweepState

SWEEP = "RLREASON_SWEEP"  # environment: a `Sweep` as JSON, for the processes that a launcher starts


@dataclass(frozen=True, slots=True)
class Sweep:
    """The data that every job of a sweep needs, in whichever process a launcher runs it."""

    sources: list[str]  # flags by which a run finds the same options
    log: str  # a file to which each job adds lines; jobs on another machine use a file next to it
    consoles: str | None = None  # the folder for the output of each run; None: it goes where the job's goes
    threads: int | None = None  # of each run, at most
    environment: dict[str, str | None] = field(default_factory=dict)  # in which each run differs from its job
    gpus: Sequence[str] = ()  # of this machine, which its runs get in turn
    gpus_per_run: int | None = None  # None: as many as each needs
    locks: str = ""  # the folder of this machine in which jobs lock the GPUs of their runs
    outlives: bool = False  # its jobs continue when the process of the sweep is killed
    kills: bool = False  # the launcher kills all jobs and their runs as soon as one of them raises
    parent: int = field(default_factory=os.getpid)  # the process of the sweep, with which its jobs end
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def of_environment(cls) -> "Sweep":
        """Return the sweep that this process belongs to; `KeyError` if there is none."""
        return cls(**json.loads(os.environ[SWEEP]))

    def announce(self) -> None:
        """Put the sweep into the environment of the processes that it will start."""
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
        """Return the lines added since the last call. `read`: file -> number of lines read so far, updated here.

        {"begun", "pid", "host", "gpus"} at a start, a `SweepRun` at an end.
        """
        found = []
        for path in sorted(Path(self.log).parent.glob(f"*{Path(self.log).name}")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            found += [json.loads(line) for line in lines[read.get(path.name, 0) :]]
            read[path.name] = len(lines)
        return found

    def runs(self) -> list[SweepRun]:
        """Return the runs that have ended, in the order of their ends."""
        return [SweepRun(**line) for line in self.new_lines({}) if "name" in line]

    @property
    def over(self) -> bool:
        """Return whether the sweep was stopped or killed: no run may start any more, and those in progress end."""
        if Path(f"{self.log}.stop").exists():
            return True
        return not self.outlives and self.host == socket.gethostname() and not _alive(self.parent)

    def end(self) -> None:
        """Stop the sweep: its jobs stop their runs."""
        Path(f"{self.log}.stop").touch()

    def leave_out(self, names: Sequence[str]) -> None:
        """Have these runs not started any more, and those in progress ended by their jobs."""
        with Path(f"{self.log}.left_out").open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)

    def _is_left_out(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return name in Path(f"{self.log}.left_out").read_text(encoding="utf-8").splitlines()
        return False

    def run(self, name: str, folder: Path, overrides: Sequence[str], composed: Composed) -> SweepRun:
        """Run one job of the sweep called `name` in a process, and log it; skip a finished run.

        Raise `ConfigError` if `folder` holds a finished run with another config. On an interruption the process is
        stopped and its run logged first and, with a launcher that `kills`, returned.
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
            with own_gpus(self.gpus, count, Path(self.locks), lambda: self._must_end(folder.name)) as gpus:
                if gpus is None:
                    return SweepRun(folder.name, {"status": "interrupted"})
                ended = self._in_process(name, folder, overrides, composed.limit_s, gpus)
        self.note(ended)
        return ended

    def _must_end(self, name: str) -> bool:
        return self.over or self._is_left_out(name)

    def _in_process(
        self, name: str, folder: Path, overrides: Sequence[str], limit_s: float | None, gpus: Sequence[str]
    ) -> SweepRun:
        console = Path(self.consoles, f"{folder.name}.log") if self.consoles else None
        place = Path(self.log).parent
        start = RunStart(name, self.sources, place, console, None, self.threads, self.environment, gpus=gpus)
        child = None
        try:
            with signals.held():  # else a run could start unrecorded
                child = Child(start, folder, overrides, limit_s)
                about = {"pid": child.process.pid, "host": socket.gethostname(), "gpus": gpus}
                self._add({"begun": folder.name, **about})
            while (ended := child.look()) is None:
                if self._must_end(folder.name):
                    return stop([child])[0]
                time.sleep(4 * POLL_S)
            return ended
        except BaseException as error:  # KeyboardInterrupt, or submitit's own when Slurm ends the job
            if isinstance(error, KeyboardInterrupt):
                signals.arrived()
            ended = None if child is None else stop([child])[0]
            if ended is not None and self.kills and os.getpid() != self.parent:
                return ended
            if ended is not None:
                self.note(ended)
            raise


def _finished_before(folder: Path, config: str) -> SweepRun | None:
    """Return the finished run in the folder, if its config is the same; `ConfigError` if it is another."""
    run = RunFolder(folder) if folder.is_dir() else None
    if run is None or run.summary is None:
        return None
    if run.config != config:
        raise ConfigError(f"{folder} is a finished run of another config: move it away, or set hydra.sweep.dir")
    return SweepRun(folder.name, run.summary)


def _alive(process: int) -> bool:
    """Return whether the process exists and is no zombie."""
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
    """End runs that jobs have started: by SIGTERM, then by SIGKILL."""
    for one in ids:
        with suppress(OSError):
            os.kill(one, signal.SIGTERM)
    end = time.monotonic() + PATIENCE_S
    while any(map(_alive, ids)) and time.monotonic() < end:
        time.sleep(POLL_S)
    for one in ids:
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)


JOBS = ".jobs-"
LOG = "runs.jsonl"
KILLS = ("joblib",)  # launchers that kill all processes below them when they are interrupted
LOOK_S = 0.3  # between two reads of what the jobs have written
#: Starts these runs as jobs and waits for them; returns for each job the error outside its run, or None.
Launch = Callable[[Sequence[PlannedRun]], Sequence[Exception | None]]


def launch_sweep(
    work: SweepWork, launcher: str, launch: Launch, side_by_side: int, batch: int | None = None, shows_gpus: bool = True
) -> SweepState:
    """Run what is left of a sweep by the launcher of this name, `batch` runs at a time if given.

    `side_by_side`: how many the launcher runs at a time, which share this machine's processors. `shows_gpus`: False if
    the launcher hides this process's GPUs from its jobs; runs with GPUs of their own see those in all cases. On
    KeyboardInterrupt all runs are stopped in order first.
    """
    folder = work.design.folder
    with (
        locked_sweep(work, side_by_side, launcher) as board,
        _place(folder) as place,
        signals.temporary_folder("rlreason-gpus-") as locks,
    ):
        visible = {} if shows_gpus else {VISIBLE: os.environ.get(VISIBLE)}
        threads = max(1, usable_processors() // side_by_side) if side_by_side > 1 else None
        consoles = str(folder.absolute() / CONSOLES)
        sweep = Sweep(
            list(work.sources), str(Path(place).absolute() / LOG), consoles, threads, visible, work.gpus.handed_out,
            work.gpus.per_run, locks, kills=launcher in KILLS,
        )  # fmt: skip
        sweep.announce()
        follower = Follower(work, board, sweep)
        follower.start()
        try:
            todo = work.todo(board)
            for at in range(0, len(todo), batch or max(1, len(todo))):
                runs = [run for run in todo[at:][:batch] if board.state.run(run.name).status != DOMINATED]
                follower.failed(runs, _launched(launch, runs, sweep.kills))
        except BaseException:
            signals.arrived()
            sweep.end()
            follower.end_runs()
            _kill_launcher()
            raise
        finally:
            follower.finish()
    return board.state


@contextmanager
def _place(folder: Path) -> Iterator[str]:
    """Make a folder for what the jobs write inside the sweep's, which other machines may see; remove old ones."""
    for old in folder.glob(f"{JOBS}*"):
        removed(old)
    with signals.temporary_folder(JOBS, folder) as place:
        yield place


def _launched(launch: Launch, runs: Sequence[PlannedRun], kills: bool) -> Sequence[Exception | None]:
    if not runs:
        return []
    try:
        with signals.held() if kills else nullcontext():  # else it would interrupt final checkpoints
            return launch(runs)
    except Exception as error:
        if signals.stop_signal():
            raise KeyboardInterrupt from None
        return [error] * len(runs)  # runs that have ended are in the log


def _kill_launcher() -> None:
    """Kill the launcher's processes below this one; its runs have ended."""
    for one in signals.below(os.getpid()):
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)


class Follower:
    """A thread that reads what the jobs write, until `finish`."""

    def __init__(self, work: SweepWork, board: Board, sweep: Sweep) -> None:
        self.work, self.board, self.sweep = work, board, sweep
        self.ids: dict[str, int] = {}  # run -> its process, while it runs
        self.read: dict[str, int] = {}  # file -> number of lines read
        self._over, self._guard = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        """Start to follow."""
        self._thread.start()

    def _follow(self) -> None:
        while not self._over.wait(LOOK_S):
            if self.sweep.kills and signals.stop_signal():  # the jobs stop their runs, and the launcher ends
                self.sweep.end()
            with suppress(OSError):  # no one reads the output any more
                self.look()

    def look(self) -> None:
        """Read what was written since the last look."""
        with self._guard:
            for line in self.sweep.new_lines(self.read):
                if "begun" in line:
                    if line["host"] == self.sweep.host:
                        self.ids[line["begun"]] = line["pid"]
                    self.board.begun(line["begun"], line["gpus"])
                    continue
                run = SweepRun(**line)
                self.ids.pop(run.name, None)
                if run.name in self.board.running():
                    self._ended(run)

    def _ended(self, run: SweepRun) -> None:
        if self.board.state.run(run.name).setting in [one["setting"] for one in self.board.state.stopped_settings]:
            self.board.stopped(run.name)
            return
        self.board.ended(run)
        if self.work.after_run is None or not (stops := self.work.after_run(self.board.state)):
            return
        live = self.board.stop_settings(list(stops))
        self.sweep.leave_out([run.name for run in self.board.state.runs if run.status == DOMINATED])
        end_processes([self.ids[name] for name in live if name in self.ids])

    def failed(self, runs: Sequence[PlannedRun], errors: Sequence[Exception | None]) -> None:
        """Record as failed each run whose job is over and that reported no end."""
        self.look()
        for planned, error in zip(runs, errors, strict=False):
            with self._guard:
                if self.board.state.run(planned.name).status not in (WAITING, "running"):
                    continue
                run_outcome(self.work.folder_of(planned), -signal.SIGKILL)  # records it in the folder, too
                reason = "its job ended without a word" if error is None else first_line(error)
                self.board.ended(SweepRun(planned.name, {"status": "failed"}, reason))

    def end_runs(self) -> None:
        """End the runs in progress."""
        self.look()
        end_processes([one for name, one in self.ids.items() if name in self.board.running()])

    def finish(self) -> None:
        """Stop following; for runs without a reported end, read it from their folders."""
        self._over.set()
        self._thread.join(10)
        self.look()
        for name in self.board.running():
            self.board.ended(run_outcome(self.work.design.folder / name, -signal.SIGTERM))
