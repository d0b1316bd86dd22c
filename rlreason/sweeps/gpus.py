"""Find the GPUs of this machine for the runs of a sweep, and decide how many each run gets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.model.shapes import query_driver
from rlreason.runtime.machine import GPUS_VARIABLE, VISIBLE, torch_has_gpus
from rlreason.runtime.text import few

SETTINGS = "gpus, rollout.gpus, rollout.placement"
ALL_SHARED = "gpus_per_run=0 lets every run see all of them"


def machine_gpus(environ: Mapping[str, str], note: Callable[[str], object] = print) -> list[str]:
    """Return the GPUs that runs started here may use, as CUDA_VISIBLE_DEVICES would name them.

    Those of RLREASON_GPUS if it is set; else those of CUDA_VISIBLE_DEVICES, unchanged (numbers or UUIDs), or all that
    nvidia-smi lists. A Slurm job gets those that Slurm gave it. Does not load torch.

    >>> machine_gpus({"RLREASON_GPUS": "0, 2"})
    ['0', '2']
    """
    if GPUS_VARIABLE in environ:
        return _names(environ[GPUS_VARIABLE])
    visible = environ.get(VISIBLE)
    if not torch_has_gpus() or (visible is not None and not _names(visible)):
        return []
    driver = query_driver()
    if driver.failure:
        note(f"note: {driver.failure}: the runs of this sweep are given no GPUs of their own")
    if visible is None or not driver.gpus:
        return [str(number) for number in range(len(driver.gpus))]
    return _names(visible, len(driver.gpus))


def _names(text: str, there: int | None = None) -> list[str]:
    """Return the entries of such a list, each once; CUDA reads it up to the first that names no GPU.

    >>> _names("GPU-ab, GPU-cd"), _names("1,0,-1,2"), _names("0,7,1", 2), _names("")
    (['GPU-ab', 'GPU-cd'], ['1', '0'], ['0'], [])
    """
    found: list[str] = []
    for name in map(str.strip, text.split(",")):
        if not name or name.startswith("-") or (there is not None and name.isdecimal() and int(name) >= there):
            break
        found.append(name)
    return list(dict.fromkeys(found))


def gpus_needed(run: AnyRunConfig) -> int:
    """Return how many GPUs a run needs by its settings: for its ranks and for its engines.

    `gpus=auto` is one rank, outside torchrun.
    """
    if not works_on_a_model(run):
        return 0
    ranks = run.ranks_requested
    engines = run.rollout.gpus if run.rollout.engine == "vllm" else 1
    return ranks + engines if run.rollout.placement == "second_gpu" else max(ranks, engines)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """How a sweep hands out GPUs of this machine. `names`: empty if there are none, or if a launcher hands them out.

    `per_run`: as typed, for every run; None: as many as each needs. `least` and `most`: what the runs need.
    """

    names: tuple[str, ...] = ()
    per_run: int | None = None
    least: int = 1
    most: int = 1

    @property
    def apart(self) -> bool:
        """Return whether runs get GPUs of their own on this machine."""
        return bool(self.names) and self.per_run != 0 and self.most > 0

    @property
    def handed_out(self) -> tuple[str, ...]:
        """Return the GPUs that are given to runs in turn."""
        return self.names if self.apart else ()

    def of_run(self, asked: int) -> int:
        """Return the number of GPUs for a run that needs `asked`."""
        return asked if self.per_run is None else self.per_run

    def side_by_side(self, jobs: int | None, runs: int, without: int = 1) -> int:
        """Return how many runs fit at a time: `jobs` if typed, limited by the GPUs; without GPUs, `without`.

        >>> GpuPlan(("0", "1", "2", "3"), 2).side_by_side(None, 8), GpuPlan(("0",)).side_by_side(4, 8)
        (2, 1)
        >>> GpuPlan().side_by_side(None, 8), GpuPlan().side_by_side(4, 8), GpuPlan(("0", "1")).side_by_side(None, 1)
        (1, 4, 1)
        """
        if not self.apart:
            return max(1, min(jobs or without, runs))
        fit = len(self.names) // max(1, self.of_run(self.least))
        return max(1, min(jobs or fit, fit, runs))

    def line(self, jobs: int | None, runs: int) -> str:
        """Return the line about GPUs in a sweep's plan; "" if this machine has none to hand out.

        >>> GpuPlan(("0", "1", "2")).line(None, 8)
        '0, 1, 2: 1 a run, 3 runs side by side (jobs=N: N of them; gpus_per_run=0 lets every run see all of them)'
        >>> GpuPlan(("0", "1")).line(4, 8)
        '0, 1: 1 a run, 2 runs side by side: jobs=4 is more than they suffice for'
        """
        if not self.names or not self.most:
            return ""
        shown = few(self.names, 16)
        if not self.apart:
            return f"{shown}: every run sees all of them (gpus_per_run=0)"
        each = self.of_run(self.least)
        many = f"{each}" if self.per_run is not None or self.least == self.most else f"{each} to {self.most}"
        side = self.side_by_side(jobs, runs)
        text = f"{shown}: {many} a run, {f'{side} runs side by side' if side > 1 else 'one run at a time'}"
        if jobs is not None and side < min(jobs, runs):
            return f"{text}: jobs={jobs} is more than they suffice for"
        return text if jobs is not None else f"{text} (jobs=N: N of them; {ALL_SHARED})"


def gpu_plan(runs: Sequence[AnyRunConfig], names: Sequence[str], per_run: int | None, here: bool) -> GpuPlan:
    """Plan the GPUs of a sweep. `names`: the GPUs of this machine. `here`: whether its runs are here.

    `ConfigError` if a run could never start: more GPUs for each than there are, or fewer than one needs.
    """
    elsewhere = not here and not torch_has_gpus()  # other machines are assumed to be like this one
    asked = [0 if elsewhere else gpus_needed(run) for run in runs] or [1]
    plan = GpuPlan(tuple(names) if here else (), per_run, min(asked), max(asked))
    there = f"{len(names)} GPUs ({few(names, 16)})" if len(names) > 1 else "one GPU" if names else "no GPU"
    if per_run and per_run < plan.most:
        raise ConfigError(
            f"gpus_per_run={per_run}: a run of this sweep asks for {plan.most} GPUs by its settings ({SETTINGS}): "
            f"raise it to {plan.most}, or leave it out"
        )
    if here and per_run and per_run > len(names):
        cure = f"set it to {len(names)} or less" if names else "leave it out"
        raise ConfigError(
            f"gpus_per_run={per_run}: this machine has {there} for runs: {cure}, or have the runs on other machines "
            "(hydra/launcher=submitit_slurm)"
        )
    if plan.apart and plan.most > len(names):
        raise ConfigError(
            f"a run of this sweep asks for {plan.most} GPUs by its settings ({SETTINGS}), and this machine has "
            f"{there}: ask for fewer, or have the runs on other machines (hydra/launcher=submitit_slurm)"
        )
    return plan
