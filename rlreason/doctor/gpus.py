"""GPUs as the driver and as torch see them, and where the two disagree: facts in, findings out."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.doctor.finding import FAIL, OK, WARN, Finding
from rlreason.memory.machine import Device, size

GPU_TORCH = "pip install --force-reinstall 'torch>=2.11,<2.14'"


def gpu_findings(
    facts: Mapping[str, Any], driver: Sequence[Device], visible: str | None, has_driver: bool
) -> list[Finding]:
    """`facts`: of torch's probe; `driver`: the GPUs that nvidia-smi lists; `visible`: CUDA_VISIBLE_DEVICES.

    `has_driver`: nvidia-smi is installed.
    """
    if "cuda" not in facts:
        return []
    gpus: list[dict[str, Any]] = facts.get("gpus") or []
    if gpus:
        return [*map(_seen, range(len(gpus)), gpus), *_together(gpus, facts.get("apart") or [])]
    if not driver:
        words = "nvidia-smi is here and lists none" if has_driver else "none: everything runs on the processor"
        cure = "nvidia-smi says why; after an update of the driver the machine must be started again"
        return [Finding("GPU", WARN if has_driver else OK, words, cure * has_driver)]
    named = ", ".join(gpu.name for gpu in driver)
    if visible in ("", "-1"):
        words = f"CUDA_VISIBLE_DEVICES={visible} hides {named}: everything runs on the processor"
        return [Finding("GPU", WARN, words, "unset CUDA_VISIBLE_DEVICES")]
    if not facts.get("built_for"):
        words = f"{named} is here, and torch {facts.get('torch')} is built for processors alone"
        return [Finding("GPU", FAIL, words, f"{GPU_TORCH}, which brings CUDA's libraries")]
    words = (
        f"torch {facts.get('torch')} for CUDA {facts['built_for']} does not reach {named}: the driver is too old for it"
    )
    cure = (
        f"update the driver (nvidia-smi shows the newest CUDA it knows), or take a torch for an older CUDA; {GPU_TORCH}"
    )
    return [Finding("GPU", FAIL, words, cure)]


def _seen(n: int, gpu: Mapping[str, Any]) -> Finding:
    major, minor = gpu["capability"]
    words = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free, compute capability {major}.{minor}"
    if gpu["free"] < 0.8 * gpu["total"]:
        return Finding(f"GPU {n}", WARN, f"{words}: another program holds memory", "nvidia-smi lists the processes")
    if not gpu["bf16"]:
        return Finding(f"GPU {n}", WARN, f"{words}: no bfloat16, so products are float32, which is slow", "")
    return Finding(f"GPU {n}", OK, f"{words}, bfloat16")


def _together(gpus: Sequence[Mapping[str, Any]], apart: Sequence[Sequence[int]]) -> list[Finding]:
    """Whether several GPUs reach each other's memory."""
    if len(gpus) < 2:
        return []
    if not apart:
        return [Finding("peer access", OK, f"all {len(gpus)} GPUs reach each other's memory")]
    pairs = ", ".join(f"{a}-{b}" for a, b in apart if a < b)
    words = f"not between GPUs {pairs}: weights go through the processor's memory, which is slower"
    return [Finding("peer access", WARN, words, "NCCL_P2P_DISABLE=1 where a transfer hangs")]
