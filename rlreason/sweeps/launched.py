"""Run a sweep by one of Hydra's launchers, which decides where its jobs run."""

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
from rlreason.sweeps.runner import CONSOLES, PATIENCE_S, POLL_S, Child, Start, Work, came_to, held, stop
from rlreason.sweeps.state import DOMINATED, WAITING, SweepState

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


JOBS = ".jobs-"
LOG = "runs.jsonl"
KILLS = ("joblib",)  # launchers that kill all processes below them when they are interrupted
LOOK_S = 0.3  # between two looks at what the jobs have written
#: Starts these runs as jobs and waits for them; returns what went wrong in each job before its run, or None.
Launch = Callable[[Sequence[PlannedRun]], Sequence[Exception | None]]


def launch_sweep(
    work: Work, launcher: str, launch: Launch, side_by_side: int, batch: int | None = None, shows_gpus: bool = True
) -> SweepState:
    """Run what is left of a sweep by a launcher of this name, `batch` runs at a time where it is given.

    `side_by_side`: how many of them the launcher runs at a time, who share this machine's processors. `shows_gpus`:
    False where the launcher hides from its jobs the GPUs that this process sees. Runs with GPUs of their own see those
    in all cases. On KeyboardInterrupt all runs are stopped in order first.
    """
    folder = work.design.folder
    with (
        held(work, side_by_side, launcher) as board,
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
    """A folder for what the jobs write, in that of the sweep, which other machines may see; those left behind go."""
    for old in folder.glob(f"{JOBS}*"):
        removed(old)
    with signals.temporary_folder(JOBS, folder) as place:
        yield place


def _launched(launch: Launch, runs: Sequence[PlannedRun], kills: bool) -> Sequence[Exception | None]:
    if not runs:
        return []
    try:
        with signals.held() if kills else nullcontext():  # else it is interrupted in the middle of last checkpoints
            return launch(runs)
    except Exception as error:
        if signals.stop_signal():
            raise KeyboardInterrupt from None
        return [error] * len(runs)  # those that have ended have said so


def _kill_launcher() -> None:
    """End what is left of a launcher below this process: its runs have ended."""
    for one in signals.below(os.getpid()):
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)


class Follower:
    """The thread that reads what the jobs say, until `finish`."""

    def __init__(self, work: Work, board: Board, sweep: Sweep) -> None:
        self.work, self.board, self.sweep = work, board, sweep
        self.ids: dict[str, int] = {}  # run -> its process, while it is under way
        self.read: dict[str, int] = {}  # file -> its lines that were taken in
        self._over, self._guard = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def _follow(self) -> None:
        while not self._over.wait(LOOK_S):
            if self.sweep.kills and signals.stop_signal():  # the jobs stop their runs, and the launcher ends
                self.sweep.end()
            with suppress(OSError):  # nobody reads what is printed any more
                self.look()

    def look(self) -> None:
        """Take in what has been written since the last look."""
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
        """Jobs are over: a run that has not said how it ended has failed."""
        self.look()
        for planned, error in zip(runs, errors, strict=False):
            with self._guard:
                if self.board.state.run(planned.name).status not in (WAITING, "running"):
                    continue
                came_to(self.work.folder_of(planned), -signal.SIGKILL)  # its folder says so, too
                reason = "its job ended without a word" if error is None else first_line(error)
                self.board.ended(SweepRun(planned.name, {"status": "failed"}, reason))

    def end_runs(self) -> None:
        """Stop what is under way."""
        self.look()
        end_processes([one for name, one in self.ids.items() if name in self.board.running()])

    def finish(self) -> None:
        """The sweep is over: what nobody has told of is read from the run folders."""
        self._over.set()
        self._thread.join(10)
        self.look()
        for name in self.board.running():
            self.board.ended(came_to(self.work.design.folder / name, -signal.SIGTERM))
