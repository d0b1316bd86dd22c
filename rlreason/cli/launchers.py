"""Hydra's launchers, made to run exactly the runs that a sweep has: a grid of overrides could not say which."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from rlreason.errors import ConfigError
from rlreason.runtime.processors import usable_processors
from rlreason.sweeps.gpus import GpuPlan

GROUP = "hydra/launcher"
BASIC, LOCAL, SLURM, RAY = "basic", "submitit_local", "submitit_slurm", "ray"
HERE = (BASIC, "joblib", LOCAL)  # that start their runs on this machine
PACKAGES = {
    "joblib": "launchers",
    LOCAL: "launchers",
    SLURM: "launchers",
    RAY: "ray",
}  # launcher -> extra that brings it
WEEK, DAY = 7 * 24 * 60, 24 * 60  # minutes; submitit ends a job after an hour where nothing is said
#: For each GPU of a run, and for a run without one: processors, and gigabytes of memory. By itself Slurm gives one.
WITH_GPU, WITHOUT = (8, 64), (4, 16)


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a launcher runs the runs of a sweep.

    `batch`: how many are handed to it at a time; None: all. `side_by_side`: how many of them it runs at a time.
    `shows_gpus`: False where it hides this machine's GPUs from its jobs. `gpus`: of each run, where the launcher hands
    them out.
    """

    batch: int | None
    side_by_side: int
    shows_gpus: bool
    words: list[str]  # of Hydra's, which set the launcher up
    gpus: int = 0

    def line(self, launcher: str) -> str:
        """What was set for a launcher, for the plan of a sweep.

        >>> Jobs(None, 2, True, ["hydra.launcher.n_jobs=2"]).line("joblib")
        'joblib: n_jobs=2 (hydra.launcher.KEY=VALUE sets another)'
        """
        if launcher == BASIC:
            return ""
        said = [word.removeprefix("hydra.launcher.") for word in self.words]
        said += [f"{self.batch} runs at a time"] if self.batch else []
        said += [f"{self.gpus or 'no'} GPU{'s' * (self.gpus > 1)} a run"] if launcher == RAY else []
        keys = " (hydra.launcher.KEY=VALUE sets another)" if self.words else ""
        return f"{launcher}: {', '.join(said) or 'as it is by itself'}{keys}"


def chosen_launcher(words: Sequence[str]) -> str:
    """The launcher that the words of a command line choose.

    >>> chosen_launcher(["seed=0,1", "hydra/launcher=joblib"]), chosen_launcher(["seed=0"])
    ('joblib', 'basic')
    """
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == GROUP]
    return chosen[-1] if chosen else BASIC


def set_up(launcher: str, words: Sequence[str], jobs: int | None, runs: int, gpus: GpuPlan | None = None) -> Jobs:
    """What a launcher needs for `runs` runs, `jobs` at a time; None: as many as `gpus` suffice for.

    Without GPUs that are None: as many as there are processors, of this program's own loop one. Hydra's words of the
    command line (`hydra.launcher.n_jobs=2`, `hydra.sweeper.max_batch_size=2`) win.

    >>> jobs = set_up("joblib", [], 2, 6)
    >>> (jobs.batch, jobs.side_by_side, jobs.words)
    (None, 2, ['hydra.launcher.n_jobs=2'])
    """
    plan = gpus or GpuPlan()
    given = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    width = plan.side_by_side(jobs, runs, 1 if launcher == BASIC else usable_processors())
    batch = int(given["hydra.sweeper.max_batch_size"]) if "hydra.sweeper.max_batch_size" in given else None
    own: dict[str, int] = {}
    each = 0
    if launcher == "joblib":
        n_jobs = int(given.get("hydra.launcher.n_jobs", width))
        width = n_jobs if n_jobs > 0 else usable_processors()
        own["n_jobs"] = width
    elif launcher == LOCAL:  # it starts all that it is given at once
        batch = width = batch or width
        own["timeout_min"] = WEEK
    elif launcher in (SLURM, RAY):
        each = plan.of_run(plan.most)
        own |= _of_slurm(each, jobs, given) if launcher == SLURM else {}
        width, batch = max(1, min(jobs or runs, runs)), None
    elif launcher != BASIC:  # on other machines, for all that is known here
        width, batch = jobs or 1, batch or jobs
    shows = launcher != LOCAL or "hydra.launcher.gpus_per_node" in given
    named = {f"hydra.launcher.{key}": value for key, value in own.items()}
    return Jobs(batch, width, shows, [f"{key}={value}" for key, value in named.items() if key not in given], each)


def _of_slurm(gpus: int, jobs: int | None, given: Collection[str]) -> dict[str, int]:
    """What a job of Slurm asks for. GPUs that were asked for otherwise (gres, gpus_per_task) are not named twice."""
    processors, memory = WITH_GPU if gpus else WITHOUT
    own = {"timeout_min": DAY, "cpus_per_task": processors * max(1, gpus), "mem_gb": memory * max(1, gpus)}
    otherwise = {"gres", "gpus_per_task"} & {key.removeprefix("hydra.launcher.") for key in given}
    own |= {"gpus_per_node": gpus} if gpus and not otherwise else {}
    return own | ({"array_parallelism": jobs} if jobs else {})


def settings_of(hydra: Hydra, config_name: str, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The settings of the launcher that these words choose and set up, for a sweep in a folder."""
    config = hydra.compose_config(
        config_name, _multirun_words(words, folder), run_mode=RunMode.MULTIRUN, with_log_configuration=False
    )
    found = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _multirun_words(words: Sequence[str], folder: Path) -> list[str]:
    return [*words, "hydra.mode=MULTIRUN", f"hydra.sweep.dir='{folder}'"]


def launcher_of(
    hydra: Hydra, config_name: str, words: Sequence[str], folder: Path, task: Callable[[DictConfig], Any]
) -> Callable[[Sequence[tuple[str, Sequence[str]]]], list[Exception | None]]:
    """A function that has the chosen launcher run jobs, (name, overrides) each, in their folders below `folder`.

    `words`: those that choose it and set it up. It returns what went wrong in each job, and waits for all.
    """
    here = _multirun_words(words, folder)
    config = hydra.compose_config(config_name, here, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
    try:
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    except ImportError as error:
        raise ConfigError(f"{GROUP}={chosen_launcher(words)} cannot be loaded ({error}): install its package") from None
    return _Launch(launcher)


class _Launch:
    """Runs batches, numbered on."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.done = launcher, 0

    def __call__(self, jobs: Sequence[tuple[str, Sequence[str]]]) -> list[Exception | None]:
        overrides = [[*words, f"hydra.sweep.subdir='{name}'"] for name, words in jobs]
        first, self.done = self.done, self.done + len(overrides)
        return [_error(one) for one in self.launcher.launch(overrides, initial_job_idx=first)]


def _error(job: Any) -> Exception | None:
    try:
        _ = job.return_value
    except Exception as error:
        return error
    return None
