"""Runs a sweep whose runs start on other machines: as jobs of Slurm (`slurm.py`), or as tasks of Ray (`on_ray.py`).

Each job starts its run as a process, and tells this process by lines in files of the sweep's folder, which all machines
must see. That folder, and not this process, is what a sweep is: typed again, it goes on.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlreason.errors import ConfigError
from rlreason.runtime import signals
from rlreason.runtime.atomic_files import removed
from rlreason.runtime.text import few
from rlreason.sweeps.before import Composed
from rlreason.sweeps.board import Board
from rlreason.sweeps.design import PlannedRun
from rlreason.sweeps.jobs import Sweep
from rlreason.sweeps.launched import LOG, Follower
from rlreason.sweeps.runner import CONSOLES, Work, held
from rlreason.sweeps.state import SweepState

LOOK_S = 1.0  # between two looks at which jobs have ended


class Cluster(Protocol):
    """What starts jobs on other machines."""

    name: str  # of the launcher
    outlives: bool  # whether its jobs go on where the process of the sweep is killed

    def under_way(self) -> Mapping[str, str]:
        """Of the runs that have jobs from an earlier start of the sweep, waiting or under way: name -> `Job.digest`."""

    def start(self, jobs: Sequence["Job"]) -> str:
        """Start jobs, and say how in a few words."""

    def over(self) -> list[tuple[str, Exception | None]]:
        """The runs whose jobs have ended since this was last asked, each with what went wrong in the job itself."""

    @property
    def left(self) -> int:
        """How many jobs have not ended."""

    def stop(self) -> None:
        """End all jobs: those under way were told, and get time to do so in order."""


@dataclass(frozen=True)
class Job:
    """What any process of any machine that sees the sweep's folder needs to run one run."""

    sweep: Sweep
    name: str  # of the sweep
    run: PlannedRun
    folder: Path
    composed: Composed
    directory: str = field(default_factory=os.getcwd)  # that paths in its words start from

    @property
    def digest(self) -> str:
        """Of its run's settings."""
        return hashlib.sha256(self.composed.config.encode()).hexdigest()[:16]


def run_job(job: Job) -> str:
    """Run it to its end; how it ended. It tells the sweep by itself."""
    os.chdir(job.directory)
    return job.sweep.run(job.name, job.folder, job.run.words, job.composed).status


def run_elsewhere(work: Work, cluster: Cluster, place: Path, side_by_side: int) -> SweepState:
    """Run what is left of a sweep on a cluster. `place`: a folder for what the jobs write, in the sweep's.

    Jobs of an earlier start that go on are followed, not started again. On KeyboardInterrupt all of them are ended in
    order first.
    """
    folder = work.design.folder
    with held(work, side_by_side, cluster.name, cluster.under_way) as board:
        going = cluster.under_way()
        log, consoles = str(place.absolute() / LOG), str(folder.absolute() / CONSOLES)
        sweep = Sweep(list(work.sources), log, consoles, outlives=cluster.outlives)
        if going and sweep.over:
            raise ConfigError(f"hydra.sweep.dir={folder}: the jobs of an earlier start are being ended: wait a minute")
        if not going:
            removed(place)
        place.mkdir(exist_ok=True)
        todo = work.todo(board)
        jobs = [Job(sweep, work.design.name, run, work.folder_of(run).absolute(), work.composed(run)) for run in todo]
        _refuse_others(work, jobs, going)
        try:
            _run_jobs(work, board, cluster, sweep, jobs, going)
        finally:
            if not cluster.left:
                removed(place)
    return board.state


def _run_jobs(
    work: Work, board: Board, cluster: Cluster, sweep: Sweep, jobs: Sequence[Job], going: Mapping[str, str]
) -> None:
    new = [job for job in jobs if job.run.name not in going]
    with _followed(work, board, sweep, [job.run for job in jobs if job.run.name in going]) as follower:
        try:
            if new:
                with signals.held():  # else jobs could start and stay unknown
                    said = cluster.start(new)
                board.says(f"== {said}")
            _until_all_have_ended(cluster, follower, [job.run for job in jobs])
        except BaseException:
            signals.arrived()
            sweep.end()
            cluster.stop()
            raise


def _refuse_others(work: Work, jobs: Sequence[Job], going: Mapping[str, str]) -> None:
    """`ConfigError` where jobs of an earlier start go on whose runs are others now, or are not asked for any more."""
    changed = [job.run.name for job in jobs if going.get(job.run.name, job.digest) != job.digest]
    gone = [name for name in going if name not in {run.name for run in work.design.runs}]
    for names, how in ((changed, "with other settings"), (gone, "that this sweep does not have")):
        if names:
            raise ConfigError(
                f"hydra.sweep.dir={work.design.folder}: jobs of an earlier start go on {how} ({few(names)}): end them, "
                "or give this sweep a folder of its own (sweep_name=NAME)"
            )


def _until_all_have_ended(cluster: Cluster, follower: Follower, runs: Sequence[PlannedRun]) -> None:
    named = {run.name: run for run in runs}
    while cluster.left:
        for name, error in cluster.over():
            if name in named:
                follower.failed([named[name]], [error])
        time.sleep(LOOK_S)


@contextmanager
def _followed(work: Work, board: Board, sweep: Sweep, going: Sequence[PlannedRun]) -> Iterator[Follower]:
    """A follower of what jobs write. Of runs that go on, what was written before counts: whether they have begun."""
    follower = Follower(work, board, sweep)
    before: dict[str, dict[str, Any]] = {}
    for line in sweep.new_lines(follower.read):
        before[line.get("begun", line.get("name", ""))] = line
    for run in going:
        board.says(f"== {run.name}: its job of an earlier start goes on, and is followed")
        if "begun" in (line := before.get(run.name, {})):
            board.begun(run.name, line["gpus"])
    follower.start()
    try:
        yield follower
    finally:
        follower.finish()
