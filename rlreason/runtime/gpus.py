"""The GPUs of this machine as its driver lists them, read without torch, and how torch is to divide their memory.

A run that computes on the processor of a machine with GPUs is said to, with what keeps torch from them.
"""

import importlib.metadata
import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

DRIVER = Path("/proc/driver/nvidia")
DEVICES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_TORCH = "pip install --force-reinstall 'torch>=2.11,<2.14'"
#: Where torch reads how it divides a GPU's memory: the later name is the general one, the first is read by vLLM, too.
ALLOCATION = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Unseen(NamedTuple):
    """Why torch reaches none of the GPUs that are here, and what helps."""

    words: str
    cure: str
    by_setting: bool  # a variable of the environment hides them, which may be meant


def driver_gpus(driver: Path = DRIVER, devices: Path = DEVICES) -> list[str]:
    """The names of NVIDIA's GPUs that this machine, container or job has; one that has no name is "a GPU"."""
    names = [name for place in _entries(driver / "gpus") if (name := told_in(place / "information", "Model"))]
    return names or ["a GPU" for place in _entries(devices) if place.name.removeprefix("nvidia").isdecimal()]


def torch_has_gpus() -> bool:
    """Whether the torch that is installed was built to compute on GPUs; without loading it."""
    try:
        return importlib.metadata.version("torch").partition("+")[2] != "cpu"
    except importlib.metadata.PackageNotFoundError:
        return False


def told_in(path: Path, begins: str) -> str:
    """What stands behind the colon of a file's first line that begins like this; "" where there is none."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(begins):
                return " ".join(line.partition(":")[2].split())
    return ""


def why_unseen(gpus: Sequence[str], visible: str | None, torch: str, built_for: str | None) -> Unseen | None:
    """Why torch reaches none of these GPUs; None where the machine has none.

    `visible`: CUDA_VISIBLE_DEVICES; `torch`: its version; `built_for`: the version of CUDA that it was built for.

    >>> why_unseen(["A100"], "", "2.13.0", "13.0")[:2]
    ('CUDA_VISIBLE_DEVICES= hides A100: everything runs on the processor', 'unset CUDA_VISIBLE_DEVICES')
    >>> why_unseen(["A100"], "1", "2.13.0", "13.0").words
    'CUDA_VISIBLE_DEVICES=1 names no GPU of this machine and hides A100: everything runs on the processor'
    """
    if not gpus:
        return None
    named, on = ", ".join(gpus), "everything runs on the processor"
    if visible is not None and visible.strip() in ("", "-1"):
        return Unseen(f"{VISIBLE}={visible} hides {named}: {on}", f"unset {VISIBLE}", True)
    first = (visible or "").split(",")[0].strip()
    if first.removeprefix("-").isdecimal() and not 0 <= int(first) < len(gpus):
        number = "0" if len(gpus) == 1 else f"0 to {len(gpus) - 1}"
        words = f"{VISIBLE}={visible} names no GPU of this machine and hides {named}: {on}"
        return Unseen(words, f"set it to {number}", True)
    if not built_for:
        words = f"{named} is here, and torch {torch} is built for processors alone: {on}"
        return Unseen(words, f"{GPU_TORCH}, which brings CUDA's libraries", False)
    return Unseen(
        f"torch {torch} for CUDA {built_for} does not reach {named}: the driver is too old for it, or this job was "
        f"given no GPU: {on}",
        "update the driver (nvidia-smi shows the newest CUDA it knows), or take a torch for an older CUDA; "
        f"{GPU_TORCH}; in a job of a cluster, ask for a GPU",
        False,
    )


def divide_memory_finely(environ: MutableMapping[str, str] = os.environ, gpus: Sequence[str] | None = None) -> None:
    """Have torch grow its parts of a GPU's memory, where nothing else is set: to be called before it is imported.

    Rows and caches grow by and by here, and a part that is a little too small for the next one would be kept beside
    it. vLLM turns this off around the memory that sleeps (its pull request 40812, older than all versions used here).
    """
    if not any(name in environ for name in ALLOCATION) and (driver_gpus() if gpus is None else gpus):
        environ[ALLOCATION[0]] = "expandable_segments:True"


def _entries(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(folder.iterdir())
