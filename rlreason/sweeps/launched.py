"""Runs a sweep by one of Hydra's launchers, which decides where its jobs run; each job starts its run as a process.

What the jobs write into a common file is followed here, so that the sweep says and writes down the same as one that
starts its runs itself.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from rlreason.runtime import signals
from rlreason.runtime.atomic_files import removed
from rlreason.runtime.gpus import VISIBLE
from rlreason.runtime.processors import usable_processors
from rlreason.runtime.text import first_line
from rlreason.sweeps.board import Board
from rlreason.sweeps.design import PlannedRun
from rlreason.sweeps.jobs import Sweep, end_processes
from rlreason.sweeps.processes import came_to
from rlreason.sweeps.runner import CONSOLES, Work, held
from rlreason.sweeps.state import DOMINATED, WAITING, SweepState
from rlreason.sweeps.table import SweepRun

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
        if signals.asked():
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
            if self.sweep.kills and signals.asked():  # the jobs stop their runs, and the launcher comes to its end
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
