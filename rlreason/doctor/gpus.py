"""GPUs as the driver and as torch see them, and where the two disagree: facts in, findings out."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.doctor.finding import FAIL, OK, WARN, Finding
from rlreason.memory.machine import Driver, size
from rlreason.runtime.gpus import why_unseen


def gpu_findings(
    facts: Mapping[str, Any], driver: Driver, visible: str | None, has_driver: bool, used: str = ""
) -> list[Finding]:
    """`facts`: of torch's probe; `driver`: what nvidia-smi says; `visible`: CUDA_VISIBLE_DEVICES.

    `has_driver`: nvidia-smi is installed. `used`: which of several GPUs the run uses and for what; "": the first.
    """
    found = driver_findings(driver, facts)
    if "cuda" not in facts:
        return found
    gpus: list[dict[str, Any]] = facts.get("gpus") or []
    if gpus:
        return [*found, *map(_seen, range(len(gpus)), gpus), *_together(gpus, facts.get("apart") or [], used)]
    return [*found, _unseen(facts, driver, visible, has_driver)]


def driver_findings(driver: Driver, facts: Mapping[str, Any]) -> list[Finding]:
    """The driver's version and the newest CUDA that it runs; nothing where there is none."""
    if driver.failure:
        cure = "run nvidia-smi by hand; after an update of the driver the machine must be started again"
        return [Finding("driver", WARN, driver.failure, cure)]
    newest = f", runs CUDA up to {facts['driver_cuda']}" if facts.get("driver_cuda") else ""
    return [Finding("driver", OK, f"{driver.version}{newest}")] if driver.version else []


def _unseen(facts: Mapping[str, Any], driver: Driver, visible: str | None, has_driver: bool) -> Finding:
    """Why torch sees no GPU."""
    if not driver.gpus:
        words = "nvidia-smi is here and lists none" if has_driver else "none: everything runs on the processor"
        cure = "nvidia-smi says why; after an update of the driver the machine must be started again"
        return Finding("GPU", WARN if has_driver else OK, words, cure * has_driver)
    named = [gpu.name + " (its memory is not told)" * (gpu.total is None) for gpu in driver.gpus]
    unseen = why_unseen(named, visible, str(facts.get("torch")), facts.get("built_for"))
    assert unseen is not None  # there are some
    return Finding("GPU", WARN if unseen.by_setting else FAIL, unseen.words, unseen.cure)


def _seen(n: int, gpu: Mapping[str, Any]) -> Finding:
    major, minor = gpu["capability"]
    words = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free, compute capability {major}.{minor}"
    if gpu["free"] < 0.8 * gpu["total"]:
        return Finding(f"GPU {n}", WARN, f"{words}: another program holds memory", "nvidia-smi lists the processes")
    if not gpu["bf16"]:
        return Finding(f"GPU {n}", WARN, f"{words}: no bfloat16, so products are float32, which is slow", "")
    return Finding(f"GPU {n}", OK, f"{words}, bfloat16")


def _together(gpus: Sequence[Mapping[str, Any]], apart: Sequence[Sequence[int]], used: str) -> list[Finding]:
    """How many of several GPUs this run uses, and whether they reach each other's memory."""
    if len(gpus) < 2:
        return []
    alone = "0 alone (gpus=N trains on more, rollout.gpus=N samples on more; CUDA_VISIBLE_DEVICES chooses another)"
    uses = Finding("GPUs used", OK, f"{used or alone}; {len(gpus)} are here")
    if not apart:
        return [uses, Finding("peer access", OK, f"all {len(gpus)} GPUs reach each other's memory")]
    pairs = ", ".join(f"{a}-{b}" for a, b in apart if a < b)
    words = f"not between GPUs {pairs}: weights go through the processor's memory, which is slower"
    return [uses, Finding("peer access", WARN, words, "NCCL_P2P_DISABLE=1 where a transfer hangs")]
