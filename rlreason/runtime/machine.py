"""Find the processors, memory and GPUs that this process may use, without torch; keep and restore its random states."""

import importlib.metadata
import math
import os
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import util
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rlreason.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

VISIBLE = "CUDA_VISIBLE_DEVICES"
SWEEP_VARIABLE = "RLREASON_JOB_OF_SWEEP"  # the sweep's name, for the processes that a sweep starts
GPUS_VARIABLE = "RLREASON_GPUS"  # GPUs that sweeps hand out, instead of those that are found (sweeps/gpus.py)
GPU_TORCH = "pip install --force-reinstall 'torch>=2.11,<2.14'"
#: The variables of torch's GPU memory allocator: the second name is the general one; vLLM reads only the first.
ALLOCATION = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
BF16_SINCE = (8, 0)  # compute capability
LONGEST_FOLDER = 70  # bytes of a temporary folder in which a socket's whole path fits into 104


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run computes; bytes of its memory, None if unknown."""

    kind: str  # cuda | cpu
    name: str = ""
    free: int | None = None
    total: int | None = None
    bf16: bool = True  # computes bfloat16 natively
    second_free: int | None = None  # on the second GPU, used only by rollout.placement=second_gpu


@dataclass(frozen=True, slots=True)
class Driver:
    """The GPUs that NVIDIA's driver lists, its version, and why it lists none if it fails."""

    gpus: tuple[Device, ...] = ()
    version: str = ""
    failure: str = ""


def query_driver() -> Driver:
    """Ask NVIDIA's driver for the GPUs of this machine, container or job, whatever CUDA_VISIBLE_DEVICES is.

    Nothing where there is no driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        gpus = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle, free, total = pynvml.nvmlDeviceGetHandleByIndex(number), None, None
            with suppress(pynvml.NVMLError_NotSupported):  # memory that is shared with the processor
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                free, total = memory.free, memory.total
            bf16 = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) >= BF16_SINCE
            gpus.append(Device("cuda", pynvml.nvmlDeviceGetName(handle), free, total, bf16))
        return Driver(tuple(gpus), pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        there = not isinstance(error, pynvml.NVMLError_LibraryNotFound)
        return Driver(failure=f"NVIDIA's driver does not answer ({error})" if there else "")


@cache
def driver_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that NVIDIA's driver lists, as they were when this was first called."""
    return tuple(gpu.name for gpu in query_driver().gpus)


def torch_has_gpus() -> bool:
    """Whether the installed torch was built for GPUs; without importing it."""
    return not importlib.metadata.version("torch").endswith("+cpu")


def believed_device() -> Device:
    """Guess torch's device without torch: the first visible GPU, else the processor."""
    visible = os.environ.get(VISIBLE)
    gpus = query_driver().gpus if torch_has_gpus() and visible not in ("", "-1") else ()
    numbers = [int(n) for n in (visible or "").split(",") if n.strip().isdecimal() and int(n) < len(gpus)]
    return with_second([gpus[n] for n in numbers] or gpus) if gpus else processor()


def with_second(gpus: Sequence[Device]) -> Device:
    """Return the first of some GPUs, with the second one's free memory."""
    return replace(gpus[0], second_free=gpus[1].free) if len(gpus) > 1 else gpus[0]


def why_unseen(gpus: Sequence[str], visible: str | None, torch: str, built_for: str | None) -> tuple[str, str] | None:
    """Return why torch reaches none of these GPUs, and the cure; None where the machine has none.

    `visible`: CUDA_VISIBLE_DEVICES; `torch`: its version; `built_for`: the version of CUDA that it was built for.

    >>> why_unseen(["A100"], "", "2.13.0", "13.0")[1]
    'unset CUDA_VISIBLE_DEVICES'
    """
    if not gpus:
        return None
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1") or (first.isdecimal() and int(first) >= len(gpus)):
        words, cure = f"{VISIBLE}={visible} hides {', '.join(gpus)}", f"unset {VISIBLE}"
    elif not built_for:
        words, cure = f"{', '.join(gpus)} is here, and torch {torch} is built for processors alone", GPU_TORCH
    else:
        words = f"torch {torch} for CUDA {built_for} does not reach {', '.join(gpus)}"
        cure = f"update the driver, or take a torch for an older CUDA ({GPU_TORCH}); in a cluster's job, ask for a GPU"
    return f"{words}: everything runs on the processor", cure


def divide_memory_finely() -> None:
    """Let torch expand its segments of GPU memory, unless set otherwise; must be called before torch is imported.

    Rows and caches grow step by step, and a segment that is a little too small would be kept next to the next one.
    """
    if not any(name in os.environ for name in ALLOCATION) and driver_gpus():
        os.environ[ALLOCATION[0]] = "expandable_segments:True"


def read_text(path: str) -> str | None:
    """Return the text of a small file; None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def usable_processors() -> int:
    """Return the processors that this process may use, at least 1: its affinity, or fewer where a cgroup limits it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, cgroup_quota())))  # 1.5 keep two threads busy most of the time


def shares(processors: Sequence[int], parts: int) -> list[list[int]]:
    """Divide processors, by their numbers, among `parts` that run side by side; the rest goes to the last ones.

    Where there are fewer processors than parts, each part gets all of them.

    >>> shares([0, 1, 2, 5, 7], 2), shares([0], 2)
    ([[0, 1], [2, 5, 7]], [[0], [0]])
    """
    n = len(processors)
    if n < parts:
        return [list(processors)] * parts
    return [list(processors[k * n // parts : (k + 1) * n // parts]) for k in range(parts)]


def control_groups() -> Iterator[str]:
    """Yield the folders of this process's control group (version 2) and of those above it, which bind too.

    In a container the path may be the host's: then only the top one has files.
    """
    for line in (read_text("/proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            group = PurePosixPath(line[3:])
            yield from (f"/sys/fs/cgroup{path}".rstrip("/") for path in (group, *group.parents))


def cgroup_quota() -> float:
    """Return the processors' worth of time that the control groups allow, infinity without a limit."""
    quotas = [math.inf]
    for folder in control_groups():
        if limit := re.match(r"(\d+) (\d+)", read_text(f"{folder}/cpu.max") or ""):  # quota and period, in microseconds
            quotas.append(int(limit[1]) / int(limit[2]))
    return min(quotas)


def processor() -> Device:
    """Return the processor's memory: the machine's, or less if a control group limits it.

    Memory that a group uses as a cache of files counts as free.
    """
    import psutil

    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for folder in control_groups():
        limit = read_text(f"{folder}/memory.max") or "max"
        if limit.strip() != "max":
            used = int(read_text(f"{folder}/memory.current") or 0)
            cached = re.search(r"^inactive_file (\d+)", read_text(f"{folder}/memory.stat") or "", re.MULTILINE)
            used -= int(cached[1]) if cached else 0
            total, free = min(total, int(limit)), min(free, max(0, int(limit) - used))
    return Device("cpu", "the processor", free, total)


PREFIX = "generator."  # of the name of a tensor that is a generator's state


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
    tensors = {f"{PREFIX}cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {f"{PREFIX}cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        tensors[f"{PREFIX}mps"] = torch.mps.get_rng_state()
    return plain, tensors


def set_random_states(plain: dict[str, Any], tensors: "dict[str, Tensor]") -> None:
    """Restore every generator; those of the GPUs that exist here."""
    import numpy as np
    import torch

    version, keys, gauss = plain["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(plain["numpy"]))
    torch.set_rng_state(tensors[f"{PREFIX}cpu"])
    for i in range(torch.cuda.device_count()):
        if (state := tensors.get(f"{PREFIX}cuda.{i}")) is not None:
            torch.cuda.set_rng_state(state, i)
    if torch.backends.mps.is_available() and f"{PREFIX}mps" in tensors:
        torch.mps.set_rng_state(tensors[f"{PREFIX}mps"])


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Start the block with gradients and float32, as in a new process, and restore the process's state after it."""
    import torch

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    generators, variables = random_states(), dict(os.environ)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        set_random_states(*generators)
        os.environ.clear()
        os.environ.update(variables)


def place_sockets() -> None:
    """Let multiprocessing keep its sockets in /tmp where the path of the temporary folder is too long for a socket."""
    before = tempfile.gettempdir()
    if len(os.fsencode(before)) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()  # made once for a process
        tempfile.tempdir = before


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ADDRESS = "127.0.0.1"  # of processes that rank 0 starts itself


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of this process, the number of ranks, and its rank on its machine."""

    rank: int
    world: int
    local: int


def place_of(env: Mapping[str, str] = os.environ) -> Place | None:
    """Read the process's place from the environment, as torchrun sets it; None for a single process."""
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
