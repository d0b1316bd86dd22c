"""Runs a sweep: its runs as processes, some at a time; those that ended before stay as they are."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlreason.records.status import sweep_code
from rlreason.runtime import signals
from rlreason.runtime.lock import run_lock
from rlreason.runtime.processors import shares, usable_processors
from rlreason.sweeps.before import Composed, refuse_changed, wait_for_earlier
from rlreason.sweeps.board import Board
from rlreason.sweeps.design import Design, PlannedRun
from rlreason.sweeps.forks import Forks, can_fork
from rlreason.sweeps.gpus import GpuPlan
from rlreason.sweeps.processes import POLL_S, Child, Start, stop
from rlreason.sweeps.state import DOMINATED, WAITING, SweepState, new_state

CONSOLES = "console"  # in a sweep's folder: a file for what each run printed, where several run at a time
Stops = Sequence[dict[str, Any]]  # settings to stop, as SweepState.stopped_settings
say = partial(print, flush=True)


@dataclass(frozen=True)
class Work:
    """What is needed to run a sweep.

    `composed`: the config and the limits of one of its runs. `after_run`: asked when a run has ended which settings
    are to be stopped. `carried`: see `SweepState`. `gpus`: what its runs get of this machine's.
    """

    design: Design
    composed: Callable[[PlannedRun], Composed]
    sources: Sequence[str] = ()  # flags by which a run finds the same options
    command: str = ""  # that starts the sweep again
    after_run: Callable[[SweepState], Stops] | None = None
    carried: Sequence[dict[str, Any]] = field(default_factory=tuple)
    gpus: GpuPlan = field(default_factory=GpuPlan)

    def todo(self, board: Board) -> list[PlannedRun]:
        """The runs that did not end before; the others are said."""
        left = []
        for planned in self.design.runs:
            run = board.state.run(planned.name)
            if run.of_its_own:
                board.skipped(run)
            else:
                left.append(planned)
        return left

    def folder_of(self, run: PlannedRun) -> Path:
        """Where it writes."""
        return self.design.folder / run.name


@contextmanager
def held(
    work: Work, side_by_side: int, launcher: str, under_way: Callable[[], Collection[str]] = tuple
) -> Iterator[Board]:
    """The sweep's folder, which no other process has in this block; and the state of the sweep, up to date at its end.

    `ConfigError` where another sweep has the folder, a run of an earlier start still writes, or a run there has other
    settings than now. `under_way`: names of runs that are known to go on, and are not waited for.
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
            board.finish("interrupted" if isinstance(error, KeyboardInterrupt) or signals.asked() else "failed")
            raise
        board.finish({0: "finished", 130: "interrupted"}.get(code_of(board.state), "failed"))


def code_of(state: SweepState) -> int:
    """The exit code of a sweep that has ended: see `records.status.sweep_code`."""
    return sweep_code(["failed" if run.status in (WAITING, "running") else run.status for run in state.runs])


def run_sweep(work: Work, jobs: int = 1) -> SweepState:
    """Run what is left of a sweep, `jobs` runs at a time, each on its share of the processors; returns its state.

    What fails leaves the others alone. On KeyboardInterrupt all runs are stopped in order first. Runs in the main
    thread: the kernel ends a process with the thread that started it.
    """
    with held(work, jobs, "basic") as board, signals.temporary_folder("rlreason-sweep-") as place:
        _Loop(work, board, jobs, Path(place)).run()
    return board.state


class _Loop:
    """Starts runs while there are free places, and looks after those under way."""

    def __init__(self, work: Work, board: Board, jobs: int, place: Path) -> None:
        self.work, self.board, self.jobs, self.place = work, board, jobs, place
        self.waiting = work.todo(board)
        self.running: dict[int, tuple[PlannedRun, Child]] = {}  # by place
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self.processors = shares(allowed, jobs) if allowed and jobs > 1 else [None] * jobs
        self.threads = None if jobs == 1 else max(1, usable_processors() // jobs)
        self.forks: Forks | None = None
        self._next: tuple[str, Composed] | None = None  # the run whose turn it is, composed once while it waits

    def run(self) -> None:
        """Until every run has ended."""
        try:
            if len(self.waiting) > 1 and can_fork():
                self.forks = Forks(Start("", (), self.place, threads=self.threads).omp_threads)
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
                with signals.held():  # else a run could start and stay unknown
                    self.waiting.pop(0)
                    self.running[number] = planned, self._start(planned, number, composed, gpus)

    def _gpus(self, composed: Composed) -> list[str] | None:
        """GPUs for a run, the first that no other has; None where too few are free."""
        taken = [gpu for _, child in self.running.values() for gpu in child.gpus]
        free = [gpu for gpu in self.work.gpus.handed_out if gpu not in taken]
        count = self.work.gpus.of_run(composed.gpus) if self.work.gpus.apart else 0
        return free[:count] if len(free) >= count else None

    def _start(self, planned: PlannedRun, number: int, composed: Composed, gpus: Sequence[str]) -> Child:
        console = None if self.jobs == 1 else self.work.design.folder / CONSOLES / f"{planned.name}.log"
        start = Start(
            self.work.design.name, self.work.sources, self.place, console, self.processors[number], self.threads,
            forks=self.forks if composed.may_fork else None, gpus=gpus,
        )  # fmt: skip
        self.board.begun(planned.name, gpus)
        return Child(start, self.work.folder_of(planned), planned.words, composed.limit_s)

    def _after_run(self) -> None:
        """Stop the settings that cannot win any more."""
        if self.work.after_run is None or not (stops := self.work.after_run(self.board.state)):
            return
        live = self.board.stop_settings(list(stops))
        self.waiting = [run for run in self.waiting if self.board.state.run(run.name).status != DOMINATED]
        ended = [number for number, (run, _) in self.running.items() if run.name in live]
        stop([self.running[number][1] for number in ended])
        for number in ended:
            self.board.stopped(self.running.pop(number)[0].name)
