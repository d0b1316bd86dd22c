"""Choose and set up the launcher of a sweep, hand out the GPUs of this machine, and have Hydra run the jobs."""

import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.types import RunMode

from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.runtime import signals
from rlreason.runtime.machine import GPUS_VARIABLE, VISIBLE, query_driver, torch_has_gpus, usable_processors
from rlreason.runtime.text import few, first_line
from rlreason.sweeps.processes import PARENT, failure
from rlreason.sweeps.state import RunState

if TYPE_CHECKING:
    from hydra_plugins.rlreason_sweeps import Grid

Note = Callable[[str], object]
GROUP = "hydra/launcher"
PROCESSES, JOBLIB, LOCAL, SLURM = "processes", "joblib", "submitit_local", "submitit_slurm"
HERE = (PROCESSES, JOBLIB, LOCAL)  # that start their runs on this machine
WEEK, DAY = 7 * 24 * 60, 24 * 60  # minutes; submitit's default is an hour
TIMEOUTS = 10  # times that a job of Slurm is queued again when its time is over: its run resumes
#: Processors and gigabytes of memory for each GPU of a run, and for a run without one. Slurm's default: one.
WITH_GPU, WITHOUT = (8, 64), (4, 16)
THREADS = "OMP_NUM_THREADS"  # libraries read it as they are loaded
SETTINGS = "gpus, rollout.gpus, rollout.placement"
DESIGNED = ("hydra.sweep.", "hydra.run.", "hydra.mode", "hydra.sweeper.")  # Hydra's settings that a design sets


def machine_gpus(environ: Mapping[str, str], note: Note = print) -> list[str]:
    """Return the GPUs that runs started here may use, as CUDA_VISIBLE_DEVICES would name them.

    Those of RLREASON_GPUS if it is set; else those of CUDA_VISIBLE_DEVICES, or all that NVIDIA's driver lists.

    >>> machine_gpus({"RLREASON_GPUS": "0, 2"}), machine_gpus({"CUDA_VISIBLE_DEVICES": "-1"})
    (['0', '2'], [])
    """
    named = environ.get(GPUS_VARIABLE, environ.get(VISIBLE) if torch_has_gpus() else "")
    if named is None:
        driver = query_driver()
        if driver.failure:
            note(f"note: {driver.failure}: the runs of this sweep are given no GPUs of their own")
        return [str(number) for number in range(len(driver.gpus))]
    names = map(str.strip, named.split(","))
    return list(dict.fromkeys(itertools.takewhile(lambda name: name and not name.startswith("-"), names)))


def gpus_needed(run: AnyRunConfig) -> int:
    """Return how many GPUs a run needs by its settings: for its ranks and for its engines.

    `gpus=auto` is one rank, outside torchrun.
    """
    if not works_on_a_model(run):
        return 0
    engines = run.rollout.gpus if run.rollout.engine == "vllm" else 1
    second = run.rollout.placement == "second_gpu"
    return run.ranks_requested + engines if second else max(run.ranks_requested, engines)


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a launcher runs the runs of a sweep."""

    launcher: str = PROCESSES
    side_by_side: int = 1  # runs at a time
    words: Sequence[str] = ()  # Hydra's overrides that set up the launcher
    gpus: Sequence[str] = ()  # of this machine
    gpus_per_run: int = 0  # that our launcher hands out; 0: every run sees all

    @property
    def sharing(self) -> int:
        """Return how many runs share the memory of one device."""
        return 1 if (self.gpus_per_run and self.gpus) or self.launcher not in HERE else self.side_by_side

    def lines(self) -> dict[str, str]:
        """Return the lines on launcher and GPUs in a sweep's plan, by label.

        >>> Jobs(side_by_side=3, gpus=["0", "1", "2"], gpus_per_run=1).lines()["GPUs"]
        '0, 1, 2: 1 a run, 3 runs at a time (jobs=N: N of them; gpus_per_run=0: every run sees all GPUs)'
        """
        settings = [word.removeprefix("hydra.launcher.") for word in self.words]
        settings += [f"{self.side_by_side} runs at a time"] if self.launcher == LOCAL else []
        launcher = f"{self.launcher}: {', '.join(settings)}" if self.launcher != PROCESSES else ""
        each, n = self.gpus_per_run, self.side_by_side
        how = f"{each} a run, {n} runs at a time (jobs=N: N of them; gpus_per_run=0: every run sees all GPUs)"
        how = how if each else "every run sees all of them"
        return {"launcher": launcher, "GPUs": f"{few(self.gpus, 16)}: {how}" if self.gpus else ""}


def jobs_of(
    words: Sequence[str],
    runs: Sequence[AnyRunConfig],
    jobs: int | None,
    per_run: int | None,
    note: Note,
    absent: list[str] | None = None,
) -> Jobs:
    """Set up the launcher that the overrides choose for these runs, `jobs` at a time, with `per_run` GPUs each.

    None: as many as the GPUs suffice for, and as many GPUs as the neediest run asks for. Without GPUs, ours runs one at
    a time, another as many as there are processors. Typed settings of the launcher (`hydra.launcher.n_jobs=2`) take
    precedence. `ConfigError`, or a line in `absent`, for more GPUs than there are.
    """
    given = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    launcher, needed = given.get(GROUP, PROCESSES), max(map(gpus_needed, runs), default=1)
    gpus, each = machine_gpus(os.environ, note) if launcher in HERE else [], needed if per_run is None else per_run
    wrong = ""
    if per_run and launcher in (JOBLIB, LOCAL):
        wrong = f"gpus_per_run={per_run}: {GROUP}={launcher} hands out no GPUs: leave it out, or leave {GROUP} out"
    elif per_run and per_run < needed:
        wrong = f"gpus_per_run={per_run}: a run of this sweep asks for {needed} GPUs ({SETTINGS}): raise it to that"
    elif launcher == PROCESSES and (per_run or gpus) and each > len(gpus):
        wrong = (
            f"a run of this sweep asks for {each} GPUs ({SETTINGS}, gpus_per_run), and this machine has {len(gpus)} "
            f"for runs ({few(gpus, 16) or 'none'}): ask for fewer, or use other machines ({GROUP}={SLURM})"
        )
    if wrong:
        if absent is None or launcher in (JOBLIB, LOCAL):
            raise ConfigError(wrong)
        absent.append(wrong)
        gpus = []
    if launcher == PROCESSES:
        most = len(gpus) // each if gpus and each else jobs or 1
        width = min(jobs or most, most, len(runs)) or 1
        own: dict[str, object] = {"jobs": width, "gpus": gpus if each else [], "gpus_per_run": each}
        if any(works_on_a_model(run) and run.rollout.engine == "vllm" for run in runs):
            own["preload"] = "false"  # vLLM decides by the GPUs that there are as it is loaded
        return Jobs(launcher, width, _unless(given, own), gpus, each)
    at_once = min(jobs or (1 if gpus else usable_processors()), len(runs)) or 1
    if launcher == JOBLIB:
        n_jobs = int(given.get("hydra.launcher.n_jobs", at_once))
        return Jobs(launcher, n_jobs if n_jobs > 0 else usable_processors(), _unless(given, {"n_jobs": n_jobs}), gpus)
    if launcher == LOCAL:  # it hides the GPUs from its jobs unless told how many
        own = {"timeout_min": WEEK, "gpus_per_node": len(gpus)} if gpus else {"timeout_min": WEEK}
        return Jobs(launcher, at_once, _unless(given, own), gpus)
    if launcher == SLURM:  # whose machines are assumed to be like this one
        n = each if per_run or torch_has_gpus() else 0
        processors, memory = WITH_GPU if n else WITHOUT
        own = {"timeout_min": DAY, "max_num_timeout": TIMEOUTS}
        own |= {"cpus_per_task": processors * max(1, n), "mem_gb": memory * max(1, n)}
        if n and not given.keys() & {"hydra.launcher.gres", "hydra.launcher.gpus_per_task"}:  # not requested already
            own["gpus_per_node"] = n
        own |= {"array_parallelism": jobs} if jobs else {}
        return Jobs(launcher, min(jobs or len(runs), len(runs)) or 1, _unless(given, own))
    return Jobs(launcher, jobs or 1)


def _unless(given: Collection[str], own: Mapping[str, object]) -> list[str]:
    """Return our settings of a launcher as overrides, without those that were given."""
    return [f"hydra.launcher.{key}={value}" for key, value in own.items() if f"hydra.launcher.{key}" not in given]


def launched(
    grid: "Grid", words: Sequence[str], jobs: Jobs, folder: Path, left: Sequence[RunState]
) -> dict[str, Exception | None]:
    """Have the launcher run what is left of a sweep; return the error of each job, by the name of its run.

    `words`: the overrides of the sweep, which writes to `folder`.
    """
    of_hydra = [word for word in words if word.startswith(("hydra.", "hydra/")) and not word.startswith(DESIGNED)]
    of_hydra += [*left[0].overrides, *jobs.words, f"hydra.sweep.dir='{folder}'", "hydra.mode=MULTIRUN"]
    if jobs.launcher in HERE:
        os.environ[PARENT] = str(os.getpid())
        if jobs.side_by_side > 1:
            threads, own = max(1, usable_processors() // jobs.side_by_side), os.environ.get(THREADS, "")
            os.environ[THREADS] = str(min(int(own), threads) if own.isdigit() and int(own) else threads)
    every = [[*run.overrides, f"hydra.sweep.subdir='{run.name}'"] for run in left]
    size, results = jobs.side_by_side if jobs.launcher == LOCAL else len(every), list[Any]()  # that starts all at once
    try:
        config = grid.hydra_context.config_loader.load_configuration(
            grid.config.hydra.job.config_name, of_hydra, run_mode=RunMode.MULTIRUN
        )
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=grid.hydra_context, task_function=grid.task_function, config=config
        )
        for first in range(0, len(every), size):
            results += launcher.launch(every[first : first + size], initial_job_idx=first)
    except ImportError as error:
        raise ConfigError(f"{GROUP}={jobs.launcher} cannot be loaded ({error}): install its package") from None
    except Exception as error:  # joblib and submitit give up when the process of one run is killed
        if signals.stop_signal():
            raise KeyboardInterrupt from None
        print(f"! {jobs.launcher} gave up: {type(error).__name__}: {first_line(error)}", flush=True)
        return {run.name: error for run in left}
    return {run.name: failure(result) for run, result in zip(left, results, strict=True)}
