"""Whether ranks that train have the whole model each, or a share of it: decided by the memory plan."""

from dataclasses import replace
from typing import NamedTuple

from rlreason.config.run import RunConfig
from rlreason.memory.fitting import divided
from rlreason.memory.machine import Device, size
from rlreason.memory.plan import plan_of
from rlreason.memory.shapes import ModelShape
from rlreason.memory.work import Work, work_of


class Parallel(NamedTuple):
    """What each rank has of the model, and why."""

    mode: str  # replicate: all of it; shard: a part
    why: str


def parallel_mode(
    run: RunConfig, shape: ModelShape | None, device: Device, world: int, prompt: int | None = None
) -> Parallel:
    """The mode of `world` ranks on devices like this one. `run.parallel` decides where it is not auto.

    `shape`: None where nobody can tell it: then the whole model. `prompt`: tokens of the longest prompt, where they are
    known.
    """
    asked = str(getattr(run, "parallel", "auto"))
    if asked != "auto":
        return Parallel(asked, "as asked")
    if world == 1:
        return Parallel("replicate", "one process trains")
    if shape is None:
        return Parallel("replicate", "the plan does not know the model's shape")
    work, here = replace(work_of(run, shape, device, prompt), ranks=world), divided(device, world)
    whole = plan_of(replace(work, parallel="replicate"), here)
    if here.free is None:
        return Parallel("replicate", "nobody can tell how much memory is free")
    need = f"a whole model takes about {size(whole.peak)} in {whole.when}, and {size(here.free)} are free"
    if plan_of(work, here).mode == "replicate":
        return Parallel("replicate", need if work.may_be_spread else f"{need}; {_why_whole(work)}")
    return Parallel("shard", need)


def _why_whole(work: Work) -> str:
    """Why a model cannot be spread."""
    if work.engine == "hf" and work.head.on_gpu:
        return "rollout=hf samples from a whole one"
    setting = "optimizer=adamw_8bit" if work.optimizer != "adamw" else "model.weights=bfloat16"
    return f"{setting} cannot be spread"
