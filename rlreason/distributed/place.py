"""Which of several processes this one is, by the variables that torchrun sets; without torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlreason.errors import ConfigError

#: The variables that tell a process its place. Rank 0 starts others (engines, graders) that have no place among these.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ADDRESS = "127.0.0.1"  # of processes that rank 0 starts itself


@dataclass(frozen=True, slots=True)
class Place:
    """The number of this process, of how many, and its number on its machine."""

    rank: int
    world: int
    local: int


def place_of(env: Mapping[str, str] = os.environ) -> Place | None:
    """The place that the environment tells; None for a process that stands alone.

    >>> place_of({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"})
    Place(rank=5, world=8, local=1)
    >>> place_of({"RANK": "0"}) is None
    True
    """
    if not all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    return Place(rank, world, int(env.get("LOCAL_RANK", rank))) if world > 1 else None


def own_gpu(visible: str | None, number: int) -> str:
    """CUDA_VISIBLE_DEVICES of the process with this number on its machine: the one GPU that it is to see.

    So `cuda` means its own GPU in every process and thread. Beyond the end of the list: none.

    >>> own_gpu(None, 3), own_gpu("4,GPU-5e1c", 1), own_gpu("0", 1)
    ('3', 'GPU-5e1c', '')
    """
    if visible is None:
        return str(number)
    listed = [entry.strip() for entry in visible.split(",")]
    return listed[number] if number < len(listed) else ""


def world_of(gpus: str, place: Place | None, visible: int) -> int:
    """How many ranks train: those that torchrun has started, else as many as the setting says.

    `visible`: GPUs here; 0 where there are none, and the ranks share the processor. `ConfigError` where the two differ,
    or there are fewer GPUs.

    >>> world_of("auto", None, 8), world_of("2", None, 0), world_of("auto", Place(0, 4, 0), 4)
    (1, 2, 4)
    """
    if place is not None:
        if gpus not in ("auto", str(place.world)):
            raise ConfigError(f"gpus={gpus}, and torchrun has started {place.world} processes: leave gpus out")
        return place.world
    world = 1 if gpus == "auto" else int(gpus)
    if world > visible > 0:
        raise ConfigError(f"gpus={world}, and {visible} GPUs are visible here: set gpus={visible}")
    return world
