"""Hydra's launchers, made to run exactly the runs that a sweep has: a grid of overrides could not say which."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from rlreason.errors import ConfigError
from rlreason.runtime.processors import usable_processors

GROUP = "hydra/launcher"
BASIC = "basic"
#: What a launcher is given where the command line gives it nothing else: submitit ends a job after an hour.
DEFAULTS = {"submitit_local": {"hydra.launcher.timeout_min": 7 * 24 * 60}}
INSTALL = {"joblib": "hydra-joblib-launcher", "submitit": "hydra-submitit-launcher", "ray": "hydra-ray-launcher"}


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a launcher runs the runs of a sweep.

    `batch`: how many are handed to it at a time; None: all. `side_by_side`: how many of them it runs at a time on this
    machine. `shows_gpus`: False where it hides this machine's GPUs from its jobs.
    """

    batch: int | None
    side_by_side: int
    shows_gpus: bool
    words: list[str]  # of Hydra's, which set the launcher up


def chosen_launcher(words: Sequence[str]) -> str:
    """The launcher that the words of a command line choose.

    >>> chosen_launcher(["seed=0,1", "hydra/launcher=joblib"]), chosen_launcher(["seed=0"])
    ('joblib', 'basic')
    """
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == GROUP]
    return chosen[-1] if chosen else BASIC


def set_up(launcher: str, words: Sequence[str], jobs: int | None, runs: int) -> Jobs:
    """What a launcher needs for `runs` runs, `jobs` at a time; None: as many as there are processors.

    Hydra's words of the command line (`hydra.launcher.n_jobs=2`, `hydra.sweeper.max_batch_size=2`) win.

    >>> jobs = set_up("joblib", [], 2, 6)
    >>> (jobs.batch, jobs.side_by_side, jobs.words)
    (None, 2, ['hydra.launcher.n_jobs=2'])
    """
    given = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in words)}
    width = max(1, min(runs, jobs or usable_processors()))
    batch = int(given["hydra.sweeper.max_batch_size"]) if "hydra.sweeper.max_batch_size" in given else None
    own = {key: str(value) for key, value in DEFAULTS.get(launcher, {}).items()}
    if launcher == "joblib":
        n_jobs = int(given.get("hydra.launcher.n_jobs", width))
        width = n_jobs if n_jobs > 0 else usable_processors()
        own["hydra.launcher.n_jobs"] = str(width)
    elif launcher == "submitit_local":  # it starts all that it is given at once
        batch = width = batch or width
    elif launcher != BASIC:  # on other machines, for all that is known here
        width = jobs or 1
        batch = batch or jobs
    shows = launcher != "submitit_local" or "hydra.launcher.gpus_per_node" in given
    return Jobs(batch, width, shows, [f"{key}={value}" for key, value in own.items() if key not in given])


def launcher_of(
    hydra: Hydra, config_name: str, words: Sequence[str], folder: Path, task: Callable[[DictConfig], Any]
) -> Callable[[Sequence[tuple[str, Sequence[str]]]], list[Exception | None]]:
    """A function that has the chosen launcher run jobs, (name, overrides) each, in their folders below `folder`.

    `words`: those that choose it and set it up. It returns what went wrong in each job, and waits for all.
    """
    here = [*words, "hydra.mode=MULTIRUN", f"hydra.sweep.dir='{folder}'"]
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
