"""The state of the whole process: random generators, threads, garbage collection, and its place among ranks."""

import gc
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlreason.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


NAME = "generator."  # prefix of a tensor that is a generator's state


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> "tuple[dict[str, Any], dict[str, Tensor]]":
    """Return the states of all generators: Python's and numpy's as plain values, torch's as tensors by name."""
    import numpy as np
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    plain = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    tensors = {f"{NAME}cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {f"{NAME}cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return plain, tensors


def set_random_states(plain: dict[str, Any], tensors: "dict[str, Tensor]") -> None:
    """Restore every generator; those of the GPUs that exist here."""
    import numpy as np
    import torch

    version, keys, gauss = plain["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = plain["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))
    torch.set_rng_state(tensors[f"{NAME}cpu"])
    for i in range(torch.cuda.device_count()):
        if (state := tensors.get(f"{NAME}cuda.{i}")) is not None:
            torch.cuda.set_rng_state(state, i)


#: Prefixes of the variables that a run and its libraries set.
VARIABLES = ("GLOO_", "PYTORCH_", "TOKENIZERS_", "TORCHINDUCTOR_", "TRITON_", "VLLM_")


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Start the block with gradients and float32, as in a new process, and restore the process's state after it."""
    import torch

    threads, dtype, variables, generators = (
        torch.get_num_threads(), torch.get_default_dtype(), _variables(), random_states(),
    )  # fmt: skip
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        set_random_states(*generators)
        for name in _variables().keys() - variables.keys():
            del os.environ[name]
        os.environ |= variables


@contextmanager
def loading(for_good: bool = False) -> Iterator[None]:
    """Import modules in this block without garbage collection.

    `for_good`: objects alive at its end are never collected. Must be False in a notebook, whose user may have garbage
    of their own by then.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if was_on:
            gc.enable()


#: The variables of a process's rank. Other processes that rank 0 starts (engines, graders) must not have them.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ADDRESS = "127.0.0.1"  # of processes that rank 0 starts itself


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of this process, the number of ranks, and its rank on its machine."""

    rank: int
    world: int
    local: int


def place_of(env: Mapping[str, str] = os.environ) -> Place | None:
    """Read the process's place from the environment; None for a single process.

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
    """Return CUDA_VISIBLE_DEVICES of the process with this number on its machine: its one GPU.

    So `cuda` means its own GPU in every process and thread. Beyond the end of the list: none.

    >>> own_gpu(None, 3), own_gpu("4,GPU-5e1c", 1), own_gpu("0", 1)
    ('3', 'GPU-5e1c', '')
    """
    if visible is None:
        return str(number)
    listed = [entry.strip() for entry in visible.split(",")]
    return listed[number] if number < len(listed) else ""


def world_of(gpus: str, place: Place | None, visible: int) -> int:
    """Return the number of ranks: those that torchrun has started, else by the setting.

    `visible`: GPUs here; without any, the ranks share the processor. `ConfigError` where torchrun and the setting
    differ, or there are too few GPUs.

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
