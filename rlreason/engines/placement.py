"""Decide which GPUs vLLM's engines run on, from plain numbers; imports no torch."""

import os
from collections.abc import Sequence

from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.runtime.machine import place_of


def ranks_here(run: RunConfig) -> int:
    """Return how many ranks of the trainer run on this machine, on its first GPUs."""
    if (place := place_of()) is not None:
        return int(os.environ.get("LOCAL_WORLD_SIZE") or place.world)
    return run.ranks_requested


def engine_gpus(placement: str, engines: int, ranks: int, visible: int) -> list[int]:
    """Return the GPU number of each engine, of `visible` GPUs; the trainer's ranks have the first ones.

    Engines share GPUs with ranks, starting with rank 0's, unless `placement` is second_gpu: then they get the GPUs
    after the trainer's. Without GPUs they share the processor. `ConfigError` where there are too few.

    >>> engine_gpus("auto", 1, 1, 8), engine_gpus("colocate", 4, 2, 8), engine_gpus("second_gpu", 6, 2, 8)
    ([0], [0, 1, 2, 3], [2, 3, 4, 5, 6, 7])
    """
    apart = placement == "second_gpu"
    first = ranks if apart else 0
    if (apart or (engines > 1 and visible)) and first + engines > visible:
        setting = "rollout.placement=second_gpu" if apart else f"rollout.gpus={engines}"
        parts = f", {ranks} for the policy and {engines} for vLLM" if apart else ""
        raise ConfigError(
            f"{setting}: GPUs visible here: {visible}, and it takes {first + engines}{parts}: "
            f"{_placement_cure(apart, engines, visible - first)}"
        )
    return list(range(first, first + engines))


def _placement_cure(apart: bool, engines: int, room: int) -> str:
    if room >= 1:
        return f"set rollout.gpus={room}"
    cures = ["leave rollout.gpus out"] * (engines > 1) + ["choose auto"] * apart
    return " and ".join(cures)


def describe_placement(placement: str, gpus: Sequence[int], ranks: int) -> str:
    """Describe where the engines run, for the console.

    >>> describe_placement("auto", [0], 1)
    "rollout.placement=colocate: vLLM runs on the policy's GPU"
    >>> describe_placement("colocate", [0, 1, 2], 2)
    'rollout.placement=colocate: vLLM runs on GPUs 0, 1, 2; the policy shares 0, 1'
    >>> describe_placement("auto", [0], 4)
    "rollout.placement=colocate: vLLM runs on the policy's first GPU; rollout.gpus=4 samples on all of them"
    >>> describe_placement("second_gpu", [1], 1)
    'rollout.placement=second_gpu: vLLM runs in a process and on a GPU of its own'
    >>> describe_placement("second_gpu", [2, 3], 2)
    'rollout.placement=second_gpu: vLLM runs on GPUs 2, 3, which the policy does not use'
    """
    if placement == "second_gpu":
        if list(gpus) == [1]:
            return "rollout.placement=second_gpu: vLLM runs in a process and on a GPU of its own"
        return f"rollout.placement=second_gpu: vLLM runs on {_listed(gpus)}, which the policy does not use"
    if len(gpus) == 1 and ranks > 1:
        more = f"rollout.gpus={ranks} samples on all of them"
        return f"rollout.placement=colocate: vLLM runs on the policy's first GPU; {more}"
    if len(gpus) == 1:
        return "rollout.placement=colocate: vLLM runs on the policy's GPU"
    shared = ", ".join(str(gpu) for gpu in gpus if gpu < ranks)
    return f"rollout.placement=colocate: vLLM runs on {_listed(gpus)}; the policy shares {shared}"


def _listed(gpus: Sequence[int]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"
