"""The runs of a sweep as jobs of Slurm, through submitit: one array, each job with processors and GPUs of its own.

Slurm decides when and where a job runs. The jobs go on where the sweep's own process ends without a word (a terminal
that was closed, a login node that went down): typed again on a machine of the cluster, the sweep finds them.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.runtime.atomic_files import write_whole
from rlreason.runtime.text import first_line, shorten
from rlreason.sweeps.elsewhere import Job, run_job
from rlreason.sweeps.processes import PATIENCE_S

NAME = "submitit_slurm"
COMMANDS = ("sbatch", "srun", "squeue", "scancel")
ASK_S = 10.0  # between two questions to Slurm, which serves many
RESULT_S = 30.0  # for the result of a job that Slurm does not know any more to be seen on this machine
QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")
#: Parameters that submitit names alike for every cluster; the others are Slurm's.
PLAIN = (
    "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout",
)  # fmt: skip


class SlurmCluster:
    """See `elsewhere.Cluster`. `settings`: those of `hydra.launcher`, as its plug-in names them."""

    name, outlives = NAME, True

    def __init__(self, place: Path, settings: Mapping[str, Any]) -> None:
        if missing := [command for command in COMMANDS if shutil.which(command) is None]:
            raise ConfigError(
                f"hydra/launcher={NAME}: {', '.join(missing)} cannot be found here: start the sweep on a machine of "
                "the cluster (its login node), or leave hydra/launcher out"
            )
        self.place, self.settings = place, dict(settings)
        self._submitted = str(self.settings.pop("submitit_folder"))
        self._jobs: dict[str, str] = {}  # run -> job, of those that have not ended
        self._asked_at, self._states = -ASK_S, dict[str, str]()
        self._gone_at: dict[str, float] = {}  # when Slurm knew nothing of a job any more
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
                states = self._asked() if self._jobs else {}
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
                f"hydra/launcher={NAME}: Slurm does not take the jobs ({shorten(str(error), 300)}): set what it wants "
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
            with suppress(OSError, subprocess.SubprocessError):  # it is busy: what is known stands
                self._states = self._asked()
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
                self._states = self._asked()
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

    def _asked(self) -> dict[str, str]:
        """Job -> state, of this user's jobs that wait or are under way."""
        self._asked_at = time.monotonic()
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %T"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return dict(pair for line in told.splitlines() if len(pair := line.split()) == 2)

    def _paths(self, job: str) -> Any:
        from submitit.core.utils import JobPaths

        return JobPaths(self._submitted, job, 0)

    def _result(self, job: str) -> tuple[Exception | None] | None:
        """What went wrong in a job that has ended; None while it has not, or may yet leave a result."""
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
