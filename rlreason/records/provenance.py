"""Collect what is needed to repeat a run on another machine: versions, hardware, data, and the commit of the code."""

import hashlib
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from rlreason.config.leaves import flat
from rlreason.records.files import VERSION
from rlreason.runtime import __version__
from rlreason.runtime.machine import ALLOCATION, SWEEP_VARIABLE, query_driver, read_text, usable_processors
from rlreason.runtime.text import redacted, shorten

ROOT = Path(__file__).resolve().parents[2]  # of this package's checkout, where there is one
GIT_S = 30.0  # time limit of git, which may hang with its file system
DIGITS = 16  # of a digest
PACKAGES = (
    "torch", "transformers", "numpy", "tokenizers", "safetensors", "math-verify", "hydra-core", "omegaconf", "vllm",
    "flash-attn", "bitsandbytes", "peft",
)  # fmt: skip
#: Environment variables that affect numbers or speed. No others are recorded.
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ATTENTION_BACKEND",
    "TRITON_F32_DEFAULT", *ALLOCATION,
)  # fmt: skip
MACHINE = ("python", "platform", "cpu_count")


def commit_of(root: Path = ROOT) -> str | None:
    """Return the checkout's commit, with `+changes` when its files differ from it; None outside a checkout.

    Git starts no program that the repository names.
    """
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "--no-optional-locks", "describe", "--always"]
    command += ["--exclude=*", "--abbrev=40", "--dirty=+changes"]
    with suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            return subprocess.run(command, capture_output=True, timeout=GIT_S, check=True, text=True).stdout.strip()
    return None


def package_digest() -> str:
    """Hash this package's source files, which identifies the code also without git."""
    digest, package = hashlib.sha256(), ROOT / __name__.partition(".")[0]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def source_digests(sources: Mapping[str, str]) -> dict[str, str]:
    """Return setting -> hash of the source of the user's own function that it names."""
    return {key: hashlib.sha256(text.encode()).hexdigest()[:DIGITS] for key, text in sources.items()}


def provenance(words: Sequence[str] = (), sources: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return the version of the folder, and where, when and by the words of which command line the run was started.

    `sources`: setting -> source of the user's own function that it names.
    """
    sweep = os.environ.get(SWEEP_VARIABLE)
    return {
        "schema_version": VERSION,
        "command": shlex.join(["python", "-m", "rlreason", *redacted(list(words))]),
        "directory": str(Path.cwd()),  # for relative paths in it
        **({"sweep": sweep} if sweep else {}),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **environment(),
        **({"own_functions": source_digests(sources)} if sources else {}),
    }


def environment() -> dict[str, Any]:
    """Return the code, the libraries and the machine of this process, as the system names it."""
    packages = dict[str, str]()
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    driver = query_driver()
    model = re.search(r"^model name\s*: (.*)", read_text("/proc/cpuinfo") or "", re.MULTILINE)
    hardware = {
        "cpu": model[1] if model else platform.machine(),
        "processors": os.cpu_count(),  # of the machine
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        **({"gpus": [gpu.name for gpu in driver.gpus]} if driver.gpus else {}),
        **({"driver": driver.version} if driver.version else {}),
    }
    return {
        "rlreason": __version__,
        "commit": commit_of(),
        "code": package_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": usable_processors(),  # of this process
        "packages": packages,
        "hardware": hardware,
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return one line for each of these facts, also inside groups, that has changed.

    A fact that is missing on one side is skipped; inside a group it counts as none.

    >>> differences({"python": "3.11", "packages": {"torch": "2.11"}}, {"python": "3.12", "packages": {}},
    ...             ["python", "packages"])
    ['python: 3.11 then, 3.12 now', 'packages.torch: 2.11 then, none now']
    """
    common = [key for key in keys if key in then and key in now]
    before, after = (flat({key: facts[key] for key in common}) for facts in (then, now))
    lines = []
    for key in before | after:
        old, new = (facts.get(key, "none") for facts in (before, after))
        if old != new:
            lines.append(f"{key}: {shorten(str(old), 100)} then, {shorten(str(new), 100)} now")
    return lines
