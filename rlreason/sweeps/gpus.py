"""How many GPUs each run of a sweep gets, how many runs there are side by side then, and the words about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlreason.config.any_run import AnyRunConfig
from rlreason.config.run import works_on_a_model
from rlreason.errors import ConfigError
from rlreason.runtime.gpus import torch_has_gpus
from rlreason.runtime.text import few

SETTINGS = "gpus, rollout.gpus, rollout.placement"
ALL_SHARED = "gpus_per_run=0 lets every run see all of them"


def gpus_asked(run: AnyRunConfig) -> int:
    """GPUs that a run needs by its settings: those of its ranks, and those that sample behind or beside them.

    `gpus=auto` is one rank, outside torchrun.
    """
    if not works_on_a_model(run):
        return 0
    ranks = run.ranks_asked
    engines = run.rollout.gpus if run.rollout.engine == "vllm" else 1
    return ranks + engines if run.rollout.placement == "second_gpu" else max(ranks, engines)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What a sweep hands out: these GPUs of this machine, by name; none where there are none, or others do it.

    `per_run`: as typed, for every run; None: as many as each asks for. `least` and `most`: what the runs ask for.
    """

    names: tuple[str, ...] = ()
    per_run: int | None = None
    least: int = 1
    most: int = 1

    @property
    def leases(self) -> bool:
        """Whether runs get GPUs of their own on this machine."""
        return bool(self.names) and self.per_run != 0 and self.most > 0

    @property
    def handed_out(self) -> tuple[str, ...]:
        """Those that runs lease."""
        return self.names if self.leases else ()

    def of_run(self, asked: int) -> int:
        """GPUs for a run that asks for so many."""
        return asked if self.per_run is None else self.per_run

    def side_by_side(self, jobs: int | None, runs: int, without: int = 1) -> int:
        """Runs at a time: `jobs` where it is typed, but no more than the GPUs suffice for; `without` GPUs: so many.

        >>> GpuPlan(("0", "1", "2", "3"), 2).side_by_side(None, 8), GpuPlan(("0",)).side_by_side(4, 8)
        (2, 1)
        >>> GpuPlan().side_by_side(None, 8), GpuPlan().side_by_side(4, 8), GpuPlan(("0", "1")).side_by_side(None, 1)
        (1, 4, 1)
        """
        if not self.leases:
            return max(1, min(jobs or without, runs))
        fit = len(self.names) // max(1, self.of_run(self.least))
        return max(1, min(jobs or fit, fit, runs))

    def line(self, jobs: int | None, runs: int) -> str:
        """The line of a sweep's plan about them; "" where this machine has none to hand out.

        >>> GpuPlan(("0", "1", "2")).line(None, 8)
        '0, 1, 2: 1 a run, 3 runs side by side (jobs=N: N of them; gpus_per_run=0 lets every run see all of them)'
        >>> GpuPlan(("0", "1")).line(4, 8)
        '0, 1: 1 a run, 2 runs side by side: jobs=4 is more than they suffice for'
        """
        if not self.names or not self.most:
            return ""
        shown = few(self.names, 16)
        if not self.leases:
            return f"{shown}: every run sees all of them (gpus_per_run=0)"
        each = self.of_run(self.least)
        many = f"{each}" if self.per_run is not None or self.least == self.most else f"{each} to {self.most}"
        side = self.side_by_side(jobs, runs)
        text = f"{shown}: {many} a run, {f'{side} runs side by side' if side > 1 else 'one run at a time'}"
        if jobs is not None and side < min(jobs, runs):
            return f"{text}: jobs={jobs} is more than they suffice for"
        return text if jobs is not None else f"{text} (jobs=N: N of them; {ALL_SHARED})"


def gpu_plan(runs: Sequence[AnyRunConfig], names: Sequence[str], per_run: int | None, here: bool) -> GpuPlan:
    """What a sweep of these runs hands out. `names`: the GPUs of this machine. `here`: whether its runs are here.

    `ConfigError` where a run could never start: more GPUs for each than there are, or fewer than one asks for.
    """
    elsewhere = not here and not torch_has_gpus()  # where nobody can look, what is installed tells what is meant
    asked = [0 if elsewhere else gpus_asked(run) for run in runs] or [1]
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
    if plan.leases and plan.most > len(names):
        raise ConfigError(
            f"a run of this sweep asks for {plan.most} GPUs by its settings ({SETTINGS}), and this machine has "
            f"{there}: ask for fewer, or have the runs on other machines (hydra/launcher=submitit_slurm)"
        )
    return plan
