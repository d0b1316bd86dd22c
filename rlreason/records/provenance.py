"""What `provenance.json` tells of a run: enough to repeat it on another machine."""

import platform
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlreason import __version__
from rlreason.records.files import VERSION
from rlreason.runtime.processors import usable_processors

PACKAGES = ("torch", "transformers", "math-verify", "hydra-core", "vllm", "flash-attn")


def provenance(schemas: Mapping[str, str], words: Sequence[str] = ()) -> dict[str, Any]:
    """The version of the folder, and where, when and by what the run was started: a command line of these words.

    `schemas`: which classes its settings are of, by their names in `config.store.SCHEMAS`.
    """
    return {
        "schema_version": VERSION,
        "schemas": dict(schemas),
        "rlreason": __version__,
        "commit": _commit(),
        "command": shlex.join(["python", "-m", "rlreason", *words]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": usable_processors(),  # that this process may use
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with `+changes` when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed.strip() else "")
