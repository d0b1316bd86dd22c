"""Check the parts of the machine that a run needs: GPUs, shared memory, disk."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlreason.cli.doctor.findings import FAIL, OK, WARN, DoctorFinding
from rlreason.model.shapes import Driver, processor, size
from rlreason.runtime.machine import usable_processors, why_unseen

SHARED = 1 << 30  # bytes of /dev/shm below which vLLM's workers and NCCL may fail: docker's default is 64 MB
SPARE = 2 << 30  # bytes of disk that should stay free


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a machine; None where unknown."""

    processors: int
    memory: tuple[int | None, int | None]  # bytes free and in total; of the container if it has a limit
    shared: tuple[int, int] | None  # bytes free and in total of /dev/shm


def read_machine() -> Machine:
    """Read the facts of this machine, in milliseconds."""
    there = processor()
    return Machine(usable_processors(), (there.free, there.total), _shared())


def _shared() -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.free, usage.total


def machine_findings(machine: Machine, uses_vllm: bool) -> list[DoctorFinding]:
    """Check processors, memory and shared memory. `uses_vllm`: its processes share memory."""
    free, total = machine.memory
    memory = f", {size(free)} of {size(total)} memory free" if free is not None and total is not None else ""
    found = [DoctorFinding("processors", OK, f"{machine.processors} for this process{memory}")]
    if machine.shared is not None:
        shared = f"{size(machine.shared[0])} of {size(machine.shared[1])} free in /dev/shm"
        if machine.shared[0] >= SHARED:
            found.append(DoctorFinding("shared memory", OK, shared))
        else:
            needed = "vLLM's workers and NCCL need 1 GiB" if uses_vllm else "rollout=vllm would need 1 GiB"
            cure = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8G /dev/shm"
            found.append(DoctorFinding("shared memory", WARN, f"{shared}: {needed}", cure))
    return found


def disk_findings(
    runs: Path,
    writes: tuple[int, int],
    cache: Path,
    downloads: int,
    free_of: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
    may_write: Callable[[Path], bool] = lambda place: os.access(place, os.W_OK),
) -> list[DoctorFinding]:
    """Check the space for what a run writes to `runs`, at least and at most, and downloads to `cache`, in bytes."""
    surely, most = writes
    of_runs = "free some space, choose another hydra.run.dir, or set checkpoint.keep=1 or save_rollouts_every=10"
    found = [
        _room("disk", runs, surely, most, f"a run writes {size(surely)} to {size(most)}", of_runs, free_of, may_write)
    ]
    if downloads:
        of_cache = "free some space, or set HF_HOME to a folder on another disk"
        does = f"the model is a download of {size(downloads)}"
        found.append(_room("model cache", cache, downloads, downloads, does, of_cache, free_of, may_write))
    return found


def _room(
    name: str,
    place: Path,
    surely: int,
    most: int,
    does: str,
    cure: str,
    free_of: Callable[[Path], int],
    may_write: Callable[[Path], bool],
) -> DoctorFinding:
    there = _existing(place)
    if not may_write(there):
        own = f"chmod u+w {there} if it is yours, or {cure.partition(', ')[2].removeprefix('or ')}"
        return DoctorFinding(name, FAIL, f"{there} cannot be written to", own)
    free = free_of(there)
    words = f"{size(free)} free in {there}; {does}"
    if free < surely:
        return DoctorFinding(name, FAIL, words, cure)
    return DoctorFinding(name, WARN, words, cure) if free < most + SPARE else DoctorFinding(name, OK, words)


def _existing(place: Path) -> Path:
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())


def gpu_findings(
    facts: Mapping[str, Any], driver: Driver, visible: str | None, has_driver: bool, used: str = ""
) -> list[DoctorFinding]:
    """Check GPUs. `facts`: from torch's probe; `driver`: from nvidia-smi; `visible`: CUDA_VISIBLE_DEVICES.

    `has_driver`: nvidia-smi is installed. `used`: which of several GPUs the run uses and for what; "": the first.
    """
    found = driver_findings(driver, facts)
    if "cuda" not in facts:
        return found
    gpus: list[dict[str, Any]] = facts.get("gpus") or []
    if gpus:
        return [*found, *map(_seen, range(len(gpus)), gpus), *_together(gpus, facts.get("apart") or [], used)]
    return [*found, _unseen(facts, driver, visible, has_driver)]


def driver_findings(driver: Driver, facts: Mapping[str, Any]) -> list[DoctorFinding]:
    """Return the driver's version and the newest CUDA that it supports; [] without a driver."""
    if driver.failure:
        cure = "run nvidia-smi by hand; after an update of the driver the machine must be started again"
        return [DoctorFinding("driver", WARN, driver.failure, cure)]
    newest = f", runs CUDA up to {facts['driver_cuda']}" if facts.get("driver_cuda") else ""
    return [DoctorFinding("driver", OK, f"{driver.version}{newest}")] if driver.version else []


def _unseen(facts: Mapping[str, Any], driver: Driver, visible: str | None, has_driver: bool) -> DoctorFinding:
    """Explain why torch sees no GPU."""
    if not driver.gpus:
        words = "nvidia-smi is here and lists none" if has_driver else "none: everything runs on the processor"
        cure = "nvidia-smi says why; after an update of the driver the machine must be started again"
        return DoctorFinding("GPU", WARN if has_driver else OK, words, cure * has_driver)
    named = [gpu.name + " (its memory is not told)" * (gpu.total is None) for gpu in driver.gpus]
    unseen = why_unseen(named, visible, str(facts.get("torch")), facts.get("built_for"))
    assert unseen is not None  # there are GPUs
    return DoctorFinding("GPU", WARN if unseen.by_setting else FAIL, unseen.words, unseen.cure)


def _seen(n: int, gpu: Mapping[str, Any]) -> DoctorFinding:
    major, minor = gpu["capability"]
    words = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free, compute capability {major}.{minor}"
    if gpu["free"] < 0.8 * gpu["total"]:
        return DoctorFinding(
            f"GPU {n}", WARN, f"{words}: another program holds memory", "nvidia-smi lists the processes"
        )
    if not gpu["bf16"]:
        return DoctorFinding(f"GPU {n}", WARN, f"{words}: no bfloat16, so products are float32, which is slow", "")
    return DoctorFinding(f"GPU {n}", OK, f"{words}, bfloat16")


def _together(gpus: Sequence[Mapping[str, Any]], apart: Sequence[Sequence[int]], used: str) -> list[DoctorFinding]:
    """Return how many of several GPUs this run uses, and whether they can access each other's memory."""
    if len(gpus) < 2:
        return []
    alone = "0 alone (gpus=N trains on more, rollout.gpus=N samples on more; CUDA_VISIBLE_DEVICES chooses another)"
    uses = DoctorFinding("GPUs used", OK, f"{used or alone}; {len(gpus)} are here")
    if not apart:
        return [uses, DoctorFinding("peer access", OK, f"all {len(gpus)} GPUs reach each other's memory")]
    pairs = ", ".join(f"{a}-{b}" for a, b in apart if a < b)
    words = f"not between GPUs {pairs}: weights go through the processor's memory, which is slower"
    return [uses, DoctorFinding("peer access", WARN, words, "NCCL_P2P_DISABLE=1 where a transfer hangs")]
