"""How the launcher of a sweep is chosen and set up."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlreason.runtime.machine import usable_processors
from rlreason.sweeps.processes import GpuPlan

GROUP = "hydra/launcher"
PROCESSES, JOBLIB, LOCAL, SLURM = "processes", "joblib", "submitit_local", "submitit_slurm"
HERE = (PROCESSES, JOBLIB, LOCAL)  # that start their runs on this machine
WEEK, DAY = 7 * 24 * 60, 24 * 60  # minutes; submitit's default is an hour
TIMEOUTS = 10  # times that a job of Slurm is queued again when its time is over: its run resumes
#: Processors and gigabytes of memory for each GPU of a run, and for a run without one. Slurm's default: one.
WITH_GPU, WITHOUT = (8, 64), (4, 16)


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a launcher runs the runs of a sweep.

    `batch`: how many it is given at a time; None: all. `side_by_side`: how many of them it runs at a time.
    """

    batch: int | None
    side_by_side: int
    words: list[str]  # Hydra's overrides that set up the launcher

    def line(self, launcher: str) -> str:
        """Return what was set for a launcher, for the plan of a sweep.

        >>> Jobs(None, 2, ["hydra.launcher.n_jobs=2"]).line("joblib")
        'joblib: n_jobs=2 (hydra.launcher.KEY=VALUE sets another)'
        """
        if launcher == PROCESSES:
            return ""
        settings = [word.removeprefix("hydra.launcher.") for word in self.words]
        settings += [f"{self.batch} runs at a time"] if self.batch else []
        keys = " (hydra.launcher.KEY=VALUE sets another)" if self.words else ""
        return f"{launcher}: {', '.join(settings) or 'as it is by itself'}{keys}"


def chosen_launcher(words: Sequence[str]) -> str:
    """Return the launcher that the overrides choose.

    >>> chosen_launcher(["seed=0,1", "hydra/launcher=joblib"]), chosen_launcher(["seed=0"])
    ('joblib', 'processes')
    """
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == GROUP]
    return chosen[-1] if chosen else PROCESSES


def set_up(launcher: str, words: Sequence[str], jobs: int | None, runs: int, gpus: GpuPlan | None = None) -> Jobs:
    """Set up a launcher for `runs` runs, `jobs` at a time; None: as many as `gpus` suffice for.

    Where it hands out none, None means one; without any GPU, another launcher than ours takes as many as there are
    processors. Overrides on the command line (`hydra.launcher.n_jobs=2`) take precedence.

    >>> set_up("joblib", [], 2, 6)
    Jobs(batch=None, side_by_side=2, words=['hydra.launcher.n_jobs=2'])
    """
    plan = gpus or GpuPlan()
    given = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    width = plan.side_by_side(jobs, runs, 1 if launcher == PROCESSES or plan.names else usable_processors())
    batch, own = None, dict[str, object]()
    if launcher == PROCESSES:
        own = {"jobs": width, "gpus": list(plan.handed_out)}
    elif launcher == JOBLIB:
        n_jobs = int(given.get("hydra.launcher.n_jobs", width))
        width = n_jobs if n_jobs > 0 else usable_processors()
        own["n_jobs"] = width
    elif launcher == LOCAL:  # it starts all its jobs together, and hides the GPUs from them unless told how many
        batch = width
        own["timeout_min"] = WEEK
        if plan.names:
            own["gpus_per_node"] = len(plan.names)
    elif launcher == SLURM:
        width = max(1, min(jobs or runs, runs))
        own = _of_slurm(plan.of_run(plan.most), jobs, given)
    else:
        width = jobs or 1
    named = {f"hydra.launcher.{key}": value for key, value in own.items()}
    return Jobs(batch, width, [f"{key}={value}" for key, value in named.items() if key not in given])


def _of_slurm(gpus: int, jobs: int | None, given: Collection[str]) -> dict[str, object]:
    """Return what a job of Slurm requests. GPUs requested in another way (gres, gpus_per_task) are not named twice."""
    processors, memory = WITH_GPU if gpus else WITHOUT
    own: dict[str, object] = {"timeout_min": DAY, "max_num_timeout": TIMEOUTS}
    own |= {"cpus_per_task": processors * max(1, gpus), "mem_gb": memory * max(1, gpus)}
    otherwise = {"gres", "gpus_per_task"} & {key.removeprefix("hydra.launcher.") for key in given}
    own |= {"gpus_per_node": gpus} if gpus and not otherwise else {}
    return own | ({"array_parallelism": jobs} if jobs else {})
