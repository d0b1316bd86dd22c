"""What Hydra finds of sweeps: `hydra/sweeper=grid` and `hydra/launcher=processes`, which are the defaults here."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class GridConfig:
    """What a sweep's file says of its runs, and what the command line asks of the sweep."""

    _target_: str = "hydra_plugins.rlreason_sweeps.Grid"
    params: dict[str, Any] = field(default_factory=dict)  # axes: values separated by commas
    cells: Any = None  # lists of words that belong together, crossed with the axes
    embedded: Any = None  # axes, cells and reference instead of these at scale=embedded
    reference: Any = None  # words of the setting that the others are compared with, or "first"
    carries: Any = True  # whether a chain passes its winner on
    best_of: Any = None  # an earlier sweep of its chain whose best settings it takes
    chain: Any = None  # sweeps to run in order
    jobs: int | None = None  # the rest is typed, as jobs=2: see cli/names.py
    gpus_per_run: int | None = None
    dry: bool = False
    carry: list[str] = field(default_factory=list)
    sweep_name: str | None = None
    max_seeds: int | None = None  # of seed=auto


@dataclass
class ProcessesConfig:
    """How the runs of a sweep are started on this machine."""

    _target_: str = "hydra_plugins.rlreason_sweeps.Processes"
    jobs: int = 1  # at a time
    gpus: list[str] = field(default_factory=list)  # handed out in turn, as in CUDA_VISIBLE_DEVICES; none: all see all
    gpus_per_run: int = 1  # how many of them each job gets; 0: all see all
    preload: bool = True  # whether jobs are forked from a process that has loaded their libraries
    quiet: bool = False  # whether a job prints into a file also where it is the only one


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridConfig, provider="rlreason")
ConfigStore.instance().store(group="hydra/launcher", name="processes", node=ProcessesConfig, provider="rlreason")


class WithContext:
    """Keep what Hydra hands to a sweeper and to a launcher."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what the jobs need."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config


class Grid(WithContext, Sweeper):
    """Run every combination of axes and cells, and end the process with the exit code of the sweep."""

    hydra_context: HydraContext
    task_function: TaskFunction
    config: DictConfig

    def __init__(self, **_: Any) -> None:
        """Take nothing: the settings are read from the config, where lists are as they were written."""

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep: plan, checks, jobs, table. SystemExit passes Hydra."""
        from rlreason.cli.sweep import start_sweep  # Hydra imports its plug-ins at each start

        sys.exit(start_sweep(self, arguments))


class Processes(WithContext, Launcher):
    """Run the jobs in processes of this machine; one that dies fails its own job alone."""

    def __init__(self, jobs: int, gpus: Sequence[str], gpus_per_run: int, preload: bool, quiet: bool = False) -> None:
        self.jobs, self.gpus, self.gpus_per_run, self.preload = jobs, list(gpus), gpus_per_run, preload
        self.quiet = quiet or jobs > 1

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return what became of each, in their order."""
        from rlreason.sweeps.launcher import launch

        return launch(self, job_overrides, initial_job_idx)
