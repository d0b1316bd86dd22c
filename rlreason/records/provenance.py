"""Collect what is needed to repeat a run on another machine: versions, hardware, data, and the commit of the code."""

import hashlib
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from rlreason.records.files import VERSION
from rlreason.runtime.machine import ALLOCATION, SWEEP_VARIABLE, query_driver, usable_processors, value_in
from rlreason.runtime.text import redacted, shorten
from rlreason.runtime.version import __version__

ROOT = Path(__file__).resolve().parents[2]  # of this package's checkout, where there is one
GIT_S = 30.0  # time limit of git, which may hang with its file system
DIGITS = 16  # of a digest


def commit_of(root: Path = ROOT) -> str | None:
    """Return the checkout's commit, with `+changes` when files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    commit, changed = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    if commit is None or changed is None:
        return None
    return commit.strip() + ("+changes" if changed.strip() else "")


def own_code(root: Path = ROOT) -> dict[str, str] | None:
    """Return {"commit"} of the checkout that the current folder is in; None outside one, or in that of `root`."""
    with suppress(OSError):
        here = Path.cwd()
        top = _git(here, "rev-parse", "--show-toplevel")
        if top and (place := Path(top.rstrip("\n"))).resolve() != root and (commit := commit_of(place)):
            return {"commit": commit}
    return None


def package_digest() -> str:
    """Hash this package's source files, which identifies the code also without git."""
    digest, package = hashlib.sha256(), ROOT / __name__.partition(".")[0]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def _git(root: Path, *arguments: str) -> str | None:
    """Run git and return its output; None where it fails or is not installed."""
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
    env = os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, env=env, timeout=GIT_S, check=True)
        return done.stdout.decode(errors="replace")
    return None


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


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run is started from.

    `overrides`: of the command line. `sources`: setting -> source of each function of the user's own.
    """

    overrides: Sequence[str] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


def provenance(origin: Origin) -> dict[str, Any]:
    """Return the version of the folder, and where, when and by which command line the run was started."""
    directory = None
    with suppress(OSError):  # it may be gone
        directory = str(Path.cwd())
    return {
        "schema_version": VERSION,
        "command": shlex.join(["python", "-m", "rlreason", *redacted(list(origin.overrides))]),
        "directory": directory,  # for relative paths in it
        **({"sweep": sweep} if (sweep := os.environ.get(SWEEP_VARIABLE)) else {}),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **environment(),
        **({"own_functions": list(origin.sources)} if origin.sources else {}),
    }


def environment() -> dict[str, Any]:
    """Return the code, the libraries and the machine of this process."""
    return {
        "rlreason": __version__,
        "commit": commit_of(),
        "code": package_digest(),
        **({"own_code": own} if (own := own_code()) else {}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": usable_processors(),  # of this process
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "hardware": hardware(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def hardware() -> dict[str, Any]:
    """Return processor, memory and graphics cards as the system names them, without loading a library."""
    driver = query_driver()
    return {
        "cpu": value_in(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "processors": os.cpu_count(),  # of the machine
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        **({"gpus": [gpu.name for gpu in driver.gpus]} if driver.gpus else {}),
        **({"driver": driver.version} if driver.version else {}),
    }


def part_line(earlier: Mapping[str, Any]) -> str:
    """Describe an earlier part of a resumed run by its provenance: when, by which code, how it ended.

    >>> part_line({"started": "2026-01-31T12:00:00+0000", "commit": "0123456789abcdef+changes",
    ...            "command": "python -m rlreason seed=1", "status": "interrupted", "reason": "by SIGINT after step 3"})
    '2026-01-31T12:00:00+0000, commit 0123456789+changes, python -m rlreason seed=1: interrupted by SIGINT after step 3'
    """
    ended = "ended without a word (killed, or the machine went down)"
    if earlier.get("status", "running") != "running":
        ended = f"{earlier['status']} {earlier.get('reason', '')}".strip()
    commit = f"commit {short(earlier['commit'])}" if earlier.get("commit") else ""
    about = (str(earlier.get("started") or "at an unknown time"), commit, str(earlier.get("command") or ""))
    return f"{', '.join(filter(None, about))}: {ended}"


def code_differs(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a sentence where the code of a run has changed since its earlier part; "" where it is the same.

    >>> code_differs({"commit": "0" * 40, "code": "ab"}, {"commit": "1" * 40, "code": "cd"})
    'the code has changed: commit 0000000000 (code ab) then, commit 1111111111 (code cd) now'
    >>> code_differs({"commit": "0" * 40, "code": "ab"}, {"commit": "1" * 40, "code": "ab"})  # of documents
    ''
    """
    if all(earlier[key] == now.get(key) for key in ("code", "own_code") if key in earlier):
        return ""
    return f"the code has changed: {_code_name(earlier)} then, {_code_name(now)} now"


def differences(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return one line for each of these facts, also inside groups, that has changed.

    A fact that is missing on one side is skipped; inside a group it counts as none.

    >>> differences({"python": "3.11", "packages": {"torch": "2.11"}}, {"python": "3.12", "packages": {}},
    ...             ["python", "packages"])
    ['python: 3.11 then, 3.12 now', 'packages.torch: 2.11 then, none now']
    """
    lines = []
    for key in keys:
        before, after = then.get(key), now.get(key)
        if key not in then or key not in now or before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            names = dict.fromkeys((*before, *after), "none")
            lines += [f"{key}.{line}" for line in differences(names | {**before}, names | {**after}, [*names])]
        else:
            lines.append(f"{key}: {shorten(str(before), 100)} then, {shorten(str(after), 100)} now")
    return lines


def short(commit: str) -> str:
    """Shorten a commit for display."""
    digits, plus, changes = str(commit).partition("+")
    return digits[:10] + plus + changes


def _code_name(origin: Mapping[str, Any]) -> str:
    commit, own = origin.get("commit"), origin.get("own_code")
    named = f"commit {short(commit)}" if commit else f"rlreason {origin.get('rlreason')}"
    return f"{named} (code {origin.get('code')})" + (f" with own code {short(own['commit'])}" if own else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
