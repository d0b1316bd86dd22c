"""What each rank of a run will have of the model: asked before it is loaded, and again when it is there."""

import torch

from rlreason.config.run import RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.distributed.place import place_of, world_of
from rlreason.errors import ConfigError
from rlreason.memory.machine import Device, processor
from rlreason.memory.ranks import Parallel, parallel_mode
from rlreason.memory.shapes import ModelShape, shape_of
from rlreason.model.devices import pick_device


def is_spread(run: RunConfig) -> bool:
    """Whether a model from a folder will be spread over ranks: then it is never whole on a GPU.

    One made on the spot is small, and is trained as a whole before.
    """
    if not isinstance(run, TrainingConfig) or run.model.made_on_the_spot:
        return False
    world = world_of(run.gpus, place_of(), torch.cuda.device_count())
    return world > 1 and mode_of(run, shape_of(run.model).shape, pick_device(), world).mode == "shard"


def mode_of(run: TrainingConfig, shape: ModelShape | None, device: torch.device, world: int) -> Parallel:
    """replicate or shard, and why, by the memory plan.

    `ConfigError` where the engine cannot sample from a model in parts.
    """
    here = processor()
    if device.type == "cuda":
        total = torch.cuda.mem_get_info()[1]  # of what is free now, vLLM has its part already, which the plan counts
        here = Device("cuda", torch.cuda.get_device_name(), total, total)
    found = parallel_mode(run, shape, here, world)
    if found.mode == "shard" and run.rollout.engine == "hf" and device.type == "cuda":
        raise ConfigError(
            f"rollout=hf with parallel={run.parallel}, which divides the model ({found.why}): the in-process engine "
            "samples from a whole one: choose rollout=vllm, or parallel=replicate"
        )
    if found.mode == "shard" and run.rollout.compile:
        raise ConfigError(
            f"rollout.compile=true with parallel={run.parallel}, which divides the model ({found.why}): its steps are "
            "compiled from a whole one: set it to false, or choose parallel=replicate"
        )
    return found
