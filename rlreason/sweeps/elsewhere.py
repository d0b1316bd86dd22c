"""Run a sweep on other machines: as jobs of Slurm, or as tasks of Ray.

`run_elsewhere` starts a `Job` for each run through a `Cluster` and follows what the jobs write in the sweep's folder.
"""

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlreason.errors import ConfigError
from rlreason.runtime import signals
from rlreason.runtime.files import removed, write_whole
from rlreason.runtime.text import few, first_line, shorten
from rlreason.sweeps.board import Board
from rlreason.sweeps.design import Composed, PlannedRun
from rlreason.sweeps.launched import LOG, Follower, Sweep
from rlreason.sweeps.runner import CONSOLES, PATIENCE_S, SweepWork, locked_sweep
from rlreason.sweeps.state import SweepState

LOOK_S = 1.0  # between two checks for jobs that have ended


class Cluster(Protocol):
    """A service that starts jobs on other machines."""

    name: str  # of the launcher
    outlives: bool  # whether its jobs continue when the process of the sweep is killed

    def under_way(self) -> Mapping[str, str]:
        """Return the runs whose jobs of an earlier start still wait or run: name -> `Job.digest`."""

    def start(self, jobs: Sequence["Job"]) -> str:
        """Start jobs; return a short message on how."""

    def over(self) -> list[tuple[str, Exception | None]]:
        """Return the runs whose jobs have ended since the last call, each with the error of the job itself."""

    @property
    def left(self) -> int:
        """Return how many jobs have not ended."""

    def stop(self) -> None:
        """End all jobs; those that run have been notified, and get time to end in order."""


@dataclass(frozen=True)
class Job:
    """All that a process on any machine that sees the sweep's folder needs to run one run."""

    sweep: Sweep
    name: str  # of the sweep
    run: PlannedRun
    folder: Path
    composed: Composed
    directory: str = field(default_factory=os.getcwd)  # that paths in its overrides are relative to

    @property
    def digest(self) -> str:
        """Return a hash of its run's settings."""
        return hashlib.sha256(self.composed.config.encode()).hexdigest()[:16]


def run_job(job: Job) -> str:
    """Run a job to its end and return its status; it reports to the sweep by itself."""
    os.chdir(job.directory)
    return job.sweep.run(job.name, job.folder, job.run.overrides, job.composed).status


def run_elsewhere(work: SweepWork, cluster: Cluster, place: Path, side_by_side: int) -> SweepState:
    """Run what is left of a sweep on a cluster. `place`: a folder for what the jobs write, in the sweep's.

    Jobs of an earlier start that still run are followed, not started again. On KeyboardInterrupt all are ended in order
    first.
    """
    folder = work.design.folder
    with locked_sweep(work, side_by_side, cluster.name, cluster.under_way) as board:
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
    work: SweepWork, board: Board, cluster: Cluster, sweep: Sweep, jobs: Sequence[Job], going: Mapping[str, str]
) -> None:
    new = [job for job in jobs if job.run.name not in going]
    with _followed(work, board, sweep, [job.run for job in jobs if job.run.name in going]) as follower:
        try:
            if new:
                with signals.held():  # else jobs could start and stay unknown
                    said = cluster.start(new)
                board.message(f"== {said}")
            _until_all_have_ended(cluster, follower, [job.run for job in jobs])
        except BaseException:
            signals.arrived()
            sweep.end()
            cluster.stop()
            raise


def _refuse_others(work: SweepWork, jobs: Sequence[Job], going: Mapping[str, str]) -> None:
    """Raise `ConfigError` if jobs of an earlier start still run with other settings, or left the sweep."""
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
def _followed(work: SweepWork, board: Board, sweep: Sweep, going: Sequence[PlannedRun]) -> Iterator[Follower]:
    """Follow what jobs write. For runs still in progress, read the earlier lines to learn whether they have begun."""
    follower = Follower(work, board, sweep)
    before: dict[str, dict[str, Any]] = {}
    for line in sweep.new_lines(follower.read):
        before[line.get("begun", line.get("name", ""))] = line
    for run in going:
        board.message(f"== {run.name}: its job of an earlier start goes on, and is followed")
        if "begun" in (line := before.get(run.name, {})):
            board.begun(run.name, line["gpus"])
    follower.start()
    try:
        yield follower
    finally:
        follower.finish()


SLURM_LAUNCHER = "submitit_slurm"
COMMANDS = ("sbatch", "srun", "squeue", "scancel")
ASK_S = 10.0  # between two calls of squeue, which many users share
RESULT_S = 30.0  # for the result file of a job that has left Slurm's queue to appear on this machine
QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")
#: Parameters that submitit names in the same way for every cluster; the others are Slurm's.
PLAIN = (
    "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout",
)  # fmt: skip


class SlurmCluster:
    """See `elsewhere.Cluster`. `settings`: those of `hydra.launcher`, as its plug-in names them."""

    name, outlives = SLURM_LAUNCHER, True

    def __init__(self, place: Path, settings: Mapping[str, Any]) -> None:
        if missing := [command for command in COMMANDS if shutil.which(command) is None]:
            raise ConfigError(
                f"hydra/launcher={SLURM_LAUNCHER}: {', '.join(missing)} cannot be found here: start the sweep on a "
                "machine of "
                "the cluster (its login node), or leave hydra/launcher out"
            )
        self.place, self.settings = place, dict(settings)
        self._submitted = str(self.settings.pop("submitit_folder"))
        self._jobs: dict[str, str] = {}  # run -> job, of those that have not ended
        self._asked_at, self._states = -ASK_S, dict[str, str]()
        self._gone_at: dict[str, float] = {}  # when a job had left Slurm's queue
        self._digests: dict[str, str] = {}  # run -> `Job.digest`
        self._looked = False

    def under_way(self) -> Mapping[str, str]:
        """See `Cluster`."""
        if not self._looked:
            self._looked = True
            with suppress(OSError, ValueError):
                told = json.loads(self._file.read_text())
                self._jobs = {run: job for run, (job, _) in told.items()}
                self._digests = {run: digest for run, (_, digest) in told.items()}
            try:
                states = self._queue() if self._jobs else {}
            except (OSError, subprocess.SubprocessError) as error:
                raise ConfigError(
                    f"{self._file} names jobs of an earlier start, and Slurm does not say whether they go on "
                    f"({error}): type the sweep again when squeue works"
                ) from None
            self._jobs = {run: job for run, job in self._jobs.items() if job in states}
        return {run: self._digests[run] for run in self._jobs}

    def start(self, jobs: Sequence[Job]) -> str:
        """See `Cluster`. `ConfigError` where Slurm refuses them."""
        try:
            submitted = self._executor().map_array(run_job, jobs)
        except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"hydra/launcher={SLURM_LAUNCHER}: Slurm does not take the jobs ({shorten(str(error), 300)}): set what "
                "it wants "
                "by hydra.launcher.KEY=VALUE, such as hydra.launcher.partition=NAME"
            ) from None
        self._jobs |= {one.run.name: job.job_id for one, job in zip(jobs, submitted, strict=True)}
        self._digests |= {job.run.name: job.digest for job in jobs}
        write_whole(self._file, json.dumps({run: [job, self._digests[run]] for run, job in self._jobs.items()}) + "\n")
        ids = [job.job_id for job in submitted]
        shown = ids[0] if len(ids) == 1 else f"{ids[0]} to {ids[-1]}"
        return f"{len(ids)} job{'s' * (len(ids) > 1)} in Slurm's queue: {shown}"

    def over(self) -> list[tuple[str, Exception | None]]:
        """See `Cluster`."""
        if time.monotonic() - self._asked_at >= ASK_S:
            with suppress(OSError, subprocess.SubprocessError):  # it is busy: keep the last states
                self._states = self._queue()
        found = [(run, *result) for run, job in self._jobs.items() if (result := self._result(job))]
        for run, _ in found:
            del self._jobs[run]
        return found

    @property
    def left(self) -> int:
        """See `Cluster`."""
        return len(self._jobs)

    def stop(self) -> None:
        """See `Cluster`."""
        end, queued = time.monotonic() + PATIENCE_S, True
        while self._jobs and time.monotonic() < end:
            with suppress(OSError, subprocess.SubprocessError):
                self._states = self._queue()
                self._jobs = {run: job for run, job in self._jobs.items() if job in self._states}
                if queued:
                    self._cancel([job for job in self._jobs.values() if self._states[job] in QUEUED])
                    queued = False
            time.sleep(1.0)
        self._cancel(list(self._jobs.values()))
        self._jobs = {}

    @property
    def _file(self) -> Path:
        return self.place / "jobs.json"

    def _executor(self) -> Any:
        import submitit

        given = {key: value for key, value in self.settings.items() if value not in (None, [], {})}
        timeouts = given.pop("max_num_timeout", 0)
        given.pop("_target_", None)
        executor = submitit.AutoExecutor(self._submitted, cluster="slurm", slurm_max_num_timeout=timeouts)
        executor.update_parameters(**{k if k in PLAIN else f"slurm_{k}": value for k, value in given.items()})
        return executor

    def _queue(self) -> dict[str, str]:
        """Return job -> state of this user's waiting and running jobs."""
        self._asked_at = time.monotonic()
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %T"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return dict(pair for line in told.splitlines() if len(pair := line.split()) == 2)

    def _paths(self, job: str) -> Any:
        from submitit.core.utils import JobPaths

        return JobPaths(self._submitted, job, 0)

    def _result(self, job: str) -> tuple[Exception | None] | None:
        """Return a 1-tuple with the error of a job that has ended; None while it runs, or may yet leave a result."""
        from submitit.core.utils import pickle_load

        with suppress(OSError, EOFError):
            outcome, told = pickle_load(self._paths(job).result_pickle)
            return (None if outcome == "success" else RuntimeError(str(told).strip().splitlines()[-1]),)
        if job in self._states:
            self._gone_at.pop(job, None)
        elif time.monotonic() - self._gone_at.setdefault(job, time.monotonic()) > RESULT_S:
            return (RuntimeError(f"Slurm's job {job} ended without a result{self._last_word(job)}"),)
        return None

    def _last_word(self, job: str) -> str:
        with suppress(OSError):
            lines = self._paths(job).stderr.read_text(errors="replace").strip().splitlines()
            return f": {shorten(first_line(RuntimeError(lines[-1])), 200)}" if lines else ""
        return ""

    def _cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["scancel", *jobs], capture_output=True, check=False, timeout=60)


RAY_LAUNCHER = "ray"
PROCESSORS = 4  # for each run, where a machine has so many
INSTALL = "hydra/launcher=ray: Ray is not installed: pip install 'rlreason[ray]'"


def fitting(machine: tuple[float, float], processors: float, gpus: int) -> int:
    """Return how many runs fit on a machine with these (processors, GPUs).

    >>> fitting((16, 8), 4, 1), fitting((16, 2), 4, 1), fitting((16, 0), 4, 0), fitting((2, 0), 4, 0)
    (4, 2, 4, 0)
    """
    by_processors = int(machine[0] // processors)
    return min(by_processors, int(machine[1] // gpus)) if gpus else by_processors


class RayCluster:
    """See `elsewhere.Cluster`. `settings`: those of `conf/hydra/launcher/ray.yaml`. `gpus`: of each run."""

    name, outlives = RAY_LAUNCHER, False  # Ray ends the tasks of a process that has ended

    def __init__(self, settings: Mapping[str, Any], gpus: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError(INSTALL)
        self.settings, self.gpus = dict(settings), gpus
        self._tasks: dict[Any, str] = {}  # Ray's reference -> run, of those that have not ended

    def under_way(self) -> Mapping[str, str]:
        """See `Cluster`."""
        return {}

    def start(self, jobs: Sequence[Job]) -> str:
        """See `Cluster`. `ConfigError` if there is no such cluster, or no machine of it could ever run such a task."""
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
        address = self.settings.get("address")
        try:
            handler = signal.getsignal(signal.SIGTERM)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            signal.signal(signal.SIGTERM, handler)  # Ray has put its own in place
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"hydra.launcher.address={address}: no Ray cluster answers ({shorten(str(error), 200)}): start one "
                "(ray start --head), or leave the address out"
            ) from None
        machines = [(n["Resources"].get("CPU", 0), n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]]
        processors = self.settings.get("num_cpus") or min(PROCESSORS, max(most for most, _ in machines))
        room = sum(fitting(machine, processors, self.gpus) for machine in machines)
        if not room:
            raise ConfigError(
                f"hydra/launcher=ray: a run asks for {self.gpus} GPUs and {processors:g} processors, and no machine of "
                f"the cluster has both ({', '.join(f'{gpus:g} and {cpus:g}' for cpus, gpus in machines)}): lower "
                "gpus_per_run or hydra.launcher.num_cpus"
            )
        task = ray.remote(num_gpus=self.gpus, num_cpus=processors, max_retries=0)(run_job)
        self._tasks = {task.remote(job): job.run.name for job in jobs}
        return f"{len(jobs)} task{'s' * (len(jobs) > 1)} given to Ray, which has room for {room} at a time"

    def over(self) -> list[tuple[str, Exception | None]]:
        """See `Cluster`."""
        import ray

        ended, _ = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        found: list[tuple[str, Exception | None]] = []
        for one in ended:
            error: Exception | None = None
            try:
                ray.get(one)
            except Exception as raised:  # of the task, or of Ray, whose worker has died
                error = raised
            found.append((self._tasks.pop(one), error))
        return found

    @property
    def left(self) -> int:
        """See `Cluster`."""
        return len(self._tasks)

    def stop(self) -> None:
        """See `Cluster`. Waiting tasks find that the sweep is over."""
        import ray

        if self._tasks:
            ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=PATIENCE_S)
        self._tasks = {}
        ray.shutdown()
