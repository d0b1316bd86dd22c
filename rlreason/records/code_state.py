"""The commit of the checkout that a run's code is of, and a digest of the code itself.

Git is asked for nothing that would run a program named in a repository's settings, and for no longer than `GIT_S`.
"""

import hashlib
import os
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the checkout that this package stands in, where there is one
GIT_S = 30.0  # a git that takes longer, on a file system that hangs, is given up
DIGITS = 16  # of a digest


def commit_of(root: Path = ROOT) -> str | None:
    """The checkout's commit, with `+changes` when files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    commit, changed = _asked(root, "rev-parse", "HEAD"), _asked(root, "status", "--porcelain")
    if commit is None or changed is None:
        return None
    return commit.strip() + ("+changes" if changed.strip() else "")


def own_code(root: Path = ROOT) -> dict[str, str] | None:
    """The commit of another checkout that the current folder lies in, such as one with rewards of the user's own.

    {"commit"}; None outside any other checkout.
    """
    with suppress(OSError):
        here = Path.cwd()
        top = _asked(here, "rev-parse", "--show-toplevel")
        if top and (place := Path(top.rstrip("\n"))).resolve() != root and (commit := commit_of(place)):
            return {"commit": commit}
    return None


def package_digest() -> str:
    """A digest of this package's source files: it names the code where there is no git, too."""
    digest, package = hashlib.sha256(), ROOT / __name__.partition(".")[0]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def _asked(root: Path, *words: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "--no-optional-locks", *words]
    env = os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, env=env, timeout=GIT_S, check=True)
        return done.stdout.decode(errors="replace")
    return None
