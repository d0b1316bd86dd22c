"""The runs of a sweep as tasks of a Ray cluster, each with processors and GPUs of its own.

Ray decides where a task runs, and sets CUDA_VISIBLE_DEVICES for it. This talks to Ray itself: Hydra's plug-in for Ray
(hydra-ray-launcher 1.2) wants cloudpickle 2, and what else runs here wants 3.
"""

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rlreason.errors import ConfigError
from rlreason.runtime.text import shorten
from rlreason.sweeps.elsewhere import Job, run_job
from rlreason.sweeps.processes import PATIENCE_S

NAME = "ray"
PROCESSORS = 4  # for each run, where a machine has so many
INSTALL = "hydra/launcher=ray: Ray is not installed: pip install 'rlreason[ray]'"


def fitting(machine: tuple[float, float], processors: float, gpus: int) -> int:
    """How many runs a machine of so many (processors, GPUs) has room for.

    >>> fitting((16, 8), 4, 1), fitting((16, 2), 4, 1), fitting((16, 0), 4, 0), fitting((2, 0), 4, 0)
    (4, 2, 4, 0)
    """
    by_processors = int(machine[0] // processors)
    return min(by_processors, int(machine[1] // gpus)) if gpus else by_processors


class RayCluster:
    """See `elsewhere.Cluster`. `settings`: those of `conf/hydra/launcher/ray.yaml`. `gpus`: of each run."""

    name, outlives = NAME, False  # the tasks of a process that has ended are ended by Ray

    def __init__(self, settings: Mapping[str, Any], gpus: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError(INSTALL)
        self.settings, self.gpus = dict(settings), gpus
        self._tasks: dict[Any, str] = {}  # Ray's reference -> run, of those that have not ended

    def under_way(self) -> Mapping[str, str]:
        """See `Cluster`."""
        return {}

    def start(self, jobs: Sequence[Job]) -> str:
        """See `Cluster`. `ConfigError` where there is no such cluster, or none that could ever run such a task."""
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here tells nobody of it
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
            except Exception as raised:  # of the task, or of Ray, whose worker has gone
                error = raised
            found.append((self._tasks.pop(one), error))
        return found

    @property
    def left(self) -> int:
        """See `Cluster`."""
        return len(self._tasks)

    def stop(self) -> None:
        """See `Cluster`. Tasks that wait find that the sweep is over."""
        import ray

        if self._tasks:
            ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=PATIENCE_S)
        self._tasks = {}
        ray.shutdown()
