"""Run a sweep on this machine: its runs as processes, some at a time.

`run_sweep` locks the sweep's folder (`locked_sweep`) and loops; a `Child` is the process of one run, whose outcome is
read from its exit code and its folder (`run_outcome`).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from rlreason.errors import ReaderGone
from rlreason.records.files import STACKS
from rlreason.records.reader import RunFolder
from rlreason.records.status import ending, read_status, sweep_code, write_status
from rlreason.runtime import signals
from rlreason.runtime.files import run_lock
from rlreason.runtime.machine import SWEEP_VARIABLE, VISIBLE, children_on, shares, usable_processors
from rlreason.runtime.text import shorten
from rlreason.sweeps.board import Board
from rlreason.sweeps.closing import SweepRun
from rlreason.sweeps.design import Composed, Design, PlannedRun, refuse_changed, wait_for_earlier
from rlreason.sweeps.forks import THREADS, Forks, Process, can_fork
from rlreason.sweeps.gpus import GpuPlan
from rlreason.sweeps.state import DOMINATED, WAITING, SweepState, new_state

PATIENCE_S = signals.LIMIT_S + 10  # for a run that was sent SIGTERM to clean up
SECOND_SIGNAL_S = 3.0  # for one that was sent a second signal
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RunStart:
    """How a run of a sweep is started.

    `sources`: flags by which it finds the same options. `place`: a folder for what a process writes before it has one.
    """

    sweep: str  # its name
    sources: Sequence[str]
    place: Path
    console: Path | None = None  # the file that its output is added to; None: this process's own streams
    processors: Sequence[int] | None = None  # that it may use; None: those of this process
    threads: int | None = None  # for numerical work, at most; None: its own choice
    environment: Mapping[str, str | None] = field(default_factory=dict)  # changes to this process's; None: not set
    forks: Forks | None = None  # from which it is forked; None: its process loads its libraries itself
    gpus: Sequence[str] = ()  # reserved for it, and all that it sees; (): those that this process sees

    @property
    def omp_threads(self) -> str | None:
        """Return OMP_NUM_THREADS for its environment; None where it is not set."""
        given = os.environ.get(THREADS)
        return given if self.threads is None else str(_at_most(given, self.threads))


class Child:
    """The process of one run of a sweep, with the run's `overrides`, writing into `folder`.

    A run that hangs ends itself. Make it in the main thread: the kernel ends a process with the *thread* that started
    it.
    """

    def __init__(self, start: RunStart, folder: Path, overrides: Sequence[str], limit_s: float | None) -> None:
        words = [*start.sources, *overrides, f"hydra.run.dir='{folder}'"]
        env: dict[str, str | None] = {**os.environ, SWEEP_VARIABLE: start.sweep}
        env[THREADS] = start.omp_threads
        if threading.current_thread() is threading.main_thread():
            env[signals.FOLLOWS] = str(os.getpid())
        env |= {**start.environment, **({VISIBLE: ",".join(start.gpus)} if start.gpus else {})}
        given = {name: value for name, value in env.items() if value is not None}
        with ExitStack() as stack:
            out = None
            if start.console is not None:
                start.console.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(start.console.open("ab"))
            forked = start.forks.start(words, given, out, start.processors) if start.forks else None
            self.process: Process = forked or _started(words, given, out, start.processors)
        self.folder, self.limit_s, self.console, self.gpus = folder, limit_s, start.console, start.gpus

    def look(self) -> SweepRun | None:
        """Return the outcome of the run; None while it is in progress."""
        if self.process.poll() is not None:
            return run_outcome(self.folder, self.process.returncode, self.console)
        return None


def _started(
    words: Sequence[str], env: Mapping[str, str], out: IO[bytes] | None, processors: Sequence[int] | None
) -> Process:
    """Start a process that loads its libraries itself."""
    with children_on(processors):
        argv = [sys.executable, "-m", "rlreason", *words]
        return subprocess.Popen(argv, env=env, stdout=out, stderr=out)


def stop(children: Sequence[Child]) -> list[SweepRun]:
    """Stop runs with SIGTERM, and wait until they have recorded how they ended; at a second signal kill them.

    Ctrl-C on a terminal has reached them already: a further SIGTERM does not count as a second signal to a run of a
    sweep, a further SIGINT does.
    """
    alive = [child.process for child in children if child.process.poll() is None]

    def end_now() -> None:
        for process in alive:
            process.send_signal(signal.SIGINT)
        _wait(alive, SECOND_SIGNAL_S)

    with signals.before_leaving(end_now):
        try:
            for process in alive:
                process.terminate()
            _wait(alive, PATIENCE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # the latter in a launcher's own process
            for process in alive:
                process.kill()
            for process in alive:
                process.wait()
    return [run_outcome(child.folder, child.process.returncode) for child in children]


def _wait(processes: Sequence[Process], seconds: float) -> None:
    """Wait for all of them; `TimeoutExpired` after `seconds`."""
    end = time.monotonic() + seconds
    for process in processes:
        process.wait(max(0.01, end - time.monotonic()))


def _at_most(given: str | None, threads: int) -> int:
    """
    >>> _at_most(None, 2), _at_most("1", 2), _at_most("16", 2), _at_most("4,2", 2)
    (2, 1, 2, 2)
    """
    return min(int(given), threads) if given and given.isdigit() and int(given) else threads


def run_outcome(folder: Path, code: int, console: Path | None = None) -> SweepRun:
    """Return the outcome of the run whose process ended with `code` (below 0: by a signal). `console`: its output."""
    summary = RunFolder(folder).summary if folder.is_dir() else None
    if summary is not None and ending(read_status(folder) or "finished").exit_code == code:
        return SweepRun(folder.name, summary)
    if code in (130, ReaderGone.exit_code, -signal.SIGINT, -signal.SIGTERM):
        return SweepRun(folder.name, {"status": "interrupted"})
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if read_status(folder) == "running":  # it could not record that itself
        reason += f": it hung, see {STACKS}" * (folder / STACKS).exists()
        write_status(folder, "failed", reason)
    if console is not None and (last := _last_line(console)):
        reason += f": {last}"
    return SweepRun(folder.name, {"status": "failed"}, reason)


def _last_line(path: Path) -> str:
    """Return the last non-empty line of a file, without the program's name; "" if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
        return shorten(next((line for line in reversed(lines) if line), "").removeprefix("rlreason: "), 200)
    return ""


CONSOLES = "console"  # in a sweep's folder: a file for what each run printed, where several run at a time
Stops = Sequence[dict[str, Any]]  # settings to stop, as SweepState.stopped_settings
say = partial(print, flush=True)


@dataclass(frozen=True)
class SweepWork:
    """All that is needed to run a sweep.

    `composed`: returns the config and limits of a run. `after_run`: called after each run, returns the settings to
    stop. `carried`: see `SweepState`. `gpus`: what its runs get of this machine's.
    """

    design: Design
    composed: Callable[[PlannedRun], Composed]
    sources: Sequence[str] = ()  # flags by which a run finds the same options
    command: str = ""  # that starts the sweep again
    after_run: Callable[[SweepState], Stops] | None = None
    carried: Sequence[dict[str, Any]] = field(default_factory=tuple)
    gpus: GpuPlan = field(default_factory=GpuPlan)

    def todo(self, board: Board) -> list[PlannedRun]:
        """Return the runs that have not ended; print the others."""
        left = []
        for planned in self.design.runs:
            run = board.state.run(planned.name)
            if run.of_its_own:
                board.skipped(run)
            else:
                left.append(planned)
        return left

    def folder_of(self, run: PlannedRun) -> Path:
        """Return the folder that a run writes to."""
        return self.design.folder / run.name


@contextmanager
def locked_sweep(
    work: SweepWork, side_by_side: int, launcher: str, under_way: Callable[[], Collection[str]] = tuple
) -> Iterator[Board]:
    """Lock the sweep's folder for the block; yield the board, which records the sweep's end.

    `ConfigError` if another sweep has the folder, a run of an earlier start still writes, or a run there has other
    settings than now. `under_way`: names of runs known to be still running, not waited for.
    """
    folder = work.design.folder
    with run_lock(folder, say, "hydra.sweep.dir"):
        refuse_changed(work.design, work.composed)
        wait_for_earlier(work.design, say, under_way=under_way())
        board = Board(
            new_state(work.design, side_by_side, launcher, work.command, work.carried), folder, side_by_side, say
        )
        try:
            yield board
        except BaseException as error:
            board.finish("interrupted" if isinstance(error, KeyboardInterrupt) or signals.stop_signal() else "failed")
            raise
        board.finish({0: "finished", 130: "interrupted"}.get(code_of(board.state), "failed"))


def code_of(state: SweepState) -> int:
    """Return the exit code of a sweep that has ended: see `records.status.sweep_code`."""
    return sweep_code(["failed" if run.status in (WAITING, "running") else run.status for run in state.runs])


def run_sweep(work: SweepWork, jobs: int = 1) -> SweepState:
    """Run what is left of a sweep, `jobs` runs at a time, each on its share of the processors; return its state.

    A failed run does not affect the others. On KeyboardInterrupt all runs are stopped in order first. Call it in the
    main thread: the kernel ends a process with the thread that started it.
    """
    with locked_sweep(work, jobs, "basic") as board, signals.temporary_folder("rlreason-sweep-") as place:
        _Loop(work, board, jobs, Path(place)).run()
    return board.state


class _Loop:
    """Start runs while there are free places, and watch those in progress."""

    def __init__(self, work: SweepWork, board: Board, jobs: int, place: Path) -> None:
        self.work, self.board, self.jobs, self.place = work, board, jobs, place
        self.waiting = work.todo(board)
        self.running: dict[int, tuple[PlannedRun, Child]] = {}  # by slot
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self.processors = shares(allowed, jobs) if allowed and jobs > 1 else [None] * jobs
        self.threads = None if jobs == 1 else max(1, usable_processors() // jobs)
        self.forks: Forks | None = None
        self._next: tuple[str, Composed] | None = None  # the next run, composed once while it waits

    def run(self) -> None:
        try:
            if len(self.waiting) > 1 and can_fork():
                self.forks = Forks(RunStart("", (), self.place, threads=self.threads).omp_threads)
                self.forks.ready()
            while self.waiting or self.running:
                self._fill()
                time.sleep(POLL_S)
                for number in list(self.running):
                    if number not in self.running:  # it was stopped with its setting
                        continue
                    if (ended := self.running[number][1].look()) is not None:
                        del self.running[number]
                        self.board.ended(ended)
                        self._after_run()
        except BaseException:
            signals.arrived()
            for ended in stop([child for _, child in self.running.values()]):
                self.board.ended(ended)
            raise
        finally:
            if self.forks is not None:
                self.forks.close()

    def _fill(self) -> None:
        for number in range(self.jobs):
            if self.waiting and number not in self.running:
                planned = self.waiting[0]
                if self._next is None or self._next[0] != planned.name:
                    self._next = planned.name, self.work.composed(planned)
                composed = self._next[1]
                gpus = self._gpus(composed)
                if gpus is None:
                    return
                with signals.held():  # else a run could start unrecorded
                    self.waiting.pop(0)
                    self.running[number] = planned, self._start(planned, number, composed, gpus)

    def _gpus(self, composed: Composed) -> list[str] | None:
        """Return GPUs for a run, the first free ones; None if too few are free."""
        taken = [gpu for _, child in self.running.values() for gpu in child.gpus]
        free = [gpu for gpu in self.work.gpus.handed_out if gpu not in taken]
        count = self.work.gpus.of_run(composed.gpus) if self.work.gpus.apart else 0
        return free[:count] if len(free) >= count else None

    def _start(self, planned: PlannedRun, number: int, composed: Composed, gpus: Sequence[str]) -> Child:
        console = None if self.jobs == 1 else self.work.design.folder / CONSOLES / f"{planned.name}.log"
        start = RunStart(
            self.work.design.name, self.work.sources, self.place, console, self.processors[number], self.threads,
            forks=self.forks if composed.may_fork else None, gpus=gpus,
        )  # fmt: skip
        self.board.begun(planned.name, gpus)
        return Child(start, self.work.folder_of(planned), planned.overrides, composed.limit_s)

    def _after_run(self) -> None:
        """Stop the settings that can no longer win."""
        if self.work.after_run is None or not (stops := self.work.after_run(self.board.state)):
            return
        live = self.board.stop_settings(list(stops))
        self.waiting = [run for run in self.waiting if self.board.state.run(run.name).status != DOMINATED]
        ended = [number for number, (run, _) in self.running.items() if run.name in live]
        stop([self.running[number][1] for number in ended])
        for number in ended:
            self.board.stopped(self.running.pop(number)[0].name)
