"""What each rank of a run will have of the model: asked before it is loaded, and again when it is there."""

from contextlib import suppress
from typing import cast

import torch
from transformers import AutoConfig

from rlreason.config.model import ModelConfig
from rlreason.config.run import RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.distributed.place import place_of, world_of
from rlreason.errors import ConfigError
from rlreason.memory.machine import Device, processor
from rlreason.memory.ranks import Parallel, parallel_mode
from rlreason.memory.shapes import ModelShape, shape_from, shape_of
from rlreason.model.devices import pick_device


def is_spread(run: RunConfig) -> bool:
    """Whether a model from a folder will be spread over ranks: then it is never whole on a GPU.

    One made on the spot is small, and is trained as a whole before.
    """
    if not run.trains or run.model.made_on_the_spot:
        return False
    training = cast(TrainingConfig, run)
    world = world_of(training.gpus, place_of(), torch.cuda.device_count())
    return world > 1 and mode_of(training, _shape(run.model), pick_device(), world).mode == "shard"


def _shape(model: ModelConfig) -> ModelShape | None:
    """Also of a model that is still to be downloaded: its config.json is, now."""
    if (shape := shape_of(model).shape) is not None:
        return shape
    with suppress(OSError, ValueError):  # which the one who loads it says better
        return shape_from(AutoConfig.from_pretrained(str(model.folder), trust_remote_code=False).to_dict())
    return None


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
