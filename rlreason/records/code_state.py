"""The code that a run is of: the commit of a checkout, and the difference from it, with nothing secret in it.

Git is asked for nothing that would run a program named in a repository's settings, and for no longer than `GIT_S`.
"""

import hashlib
import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlreason.records.files import CHANGES
from rlreason.runtime.atomic_files import write_whole
from rlreason.runtime.secrets import HIDDEN, redacted

ROOT = Path(__file__).resolve().parents[2]  # of the checkout that this package stands in, where there is one
MOST_BYTES = 2**20  # of a difference that is kept
MARGIN = 2**16  # read beyond them, so that a secret at the cut is seen whole
MOST_NAMES = 100  # of untracked files
GIT_S = 30.0  # a git that takes longer, on a file system that hangs, is given up
DIGITS = 16  # of a digest

_GIT = ("-c", "core.fsmonitor=false", "-c", "core.quotePath=false", "--no-optional-locks")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from a checkout's commit. `digest` is of the whole difference, before anything was hidden or cut."""

    digest: str
    files: list[str]  # that differ, from the checkout's root
    untracked: list[str]  # names alone; no more than `MOST_NAMES`
    patch: str  # redacted, and cut where it is long

    def facts(self) -> dict[str, Any]:
        """What `provenance.json` says of it."""
        return {
            "digest": self.digest,
            "files": self.files,
            "untracked": self.untracked,
            **({"secrets_hidden": hidden} if (hidden := self.patch.count(HIDDEN)) else {}),
        }


def commit_of(root: Path = ROOT) -> str | None:
    """The checkout's commit, with `+changes` when files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    commit, changed = _asked(root, "rev-parse", "HEAD"), _asked(root, "status", "--porcelain")
    if commit is None or changed is None:
        return None
    return commit.strip() + ("+changes" if changed.strip() else "")


def changes_of(root: Path = ROOT) -> Changes | None:
    """What differs from the checkout's commit; None where nothing does, and outside a checkout."""
    if not (commit_of(root) or "").endswith("+changes"):
        return None
    names = _asked(root, *_DIFF, "--name-only", "-z") or ""
    untracked = _names(_asked(root, "ls-files", "--others", "--exclude-standard", "-z") or "")
    if len(untracked) > MOST_NAMES:
        untracked = [*untracked[:MOST_NAMES], f"and {len(untracked) - MOST_NAMES} more"]
    with tempfile.TemporaryFile() as file:
        size = _into(file, root)
        file.seek(0)
        start = file.read(MOST_BYTES + MARGIN)
        digest = hashlib.sha256(start)
        while block := file.read(MOST_BYTES):
            digest.update(block)
    return Changes(digest.hexdigest()[:DIGITS], _names(names), untracked, _shown(start, size))


def own_code(root: Path = ROOT) -> dict[str, Any] | None:
    """The commit of another checkout that the current folder lies in, such as one with rewards of the user's own.

    {"commit", "digest"}, the digest of its difference where there is one; None outside any other checkout.
    """
    with suppress(OSError):
        here = Path.cwd()
        top = _asked(here, "rev-parse", "--show-toplevel")
        if top and (place := Path(top.rstrip("\n"))).resolve() != root and (commit := commit_of(place)):
            changes = changes_of(place)
            return {"commit": commit} | ({"digest": changes.digest} if changes else {})
    return None


def package_digest() -> str:
    """A digest of this package's source files: it names the code where there is no git, too."""
    digest, package = hashlib.sha256(), ROOT / __name__.partition(".")[0]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def keep_changes(folder: Path, root: Path = ROOT) -> dict[str, Any]:
    """Write the difference into a run folder; returns what `provenance.json` says of it, {} where nothing differs.

    A run that goes on with other changes adds its own behind those of its earlier parts.
    """
    changes = changes_of(root)
    if changes is None:
        return {}
    path = folder / CHANGES
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    head = f"# changes {changes.digest} to commit {(commit_of(root) or '').removesuffix('+changes')}\n"
    if head not in before:
        write_whole(path, before + head + changes.patch)
    return {"changes": changes.facts()}


def _asked(root: Path, *words: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(_command(root, *words), capture_output=True, env=_env(), timeout=GIT_S, check=True)
        return done.stdout.decode(errors="replace")
    return None


def _into(file: IO[bytes], root: Path) -> int:
    """Write the difference into a file; returns its size in bytes, 0 where git fails."""
    with suppress(OSError, subprocess.SubprocessError):
        command = _command(root, *_DIFF)
        subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, env=_env(), timeout=GIT_S, check=True)
        return file.seek(0, os.SEEK_END)
    file.truncate(0)
    return 0


def _command(root: Path, *words: str) -> list[str]:
    return ["git", "-C", str(root), *_GIT, *words]


def _env() -> dict[str, str]:
    return os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def _names(listed: str) -> list[str]:
    return sorted(redacted(name) for name in listed.split("\0") if name)


def _shown(start: bytes, size: int) -> str:
    """The beginning of a difference as text, without secrets; it says where it was cut."""
    text = redacted(start.decode(errors="replace"))
    if len(text.encode()) <= MOST_BYTES and size == len(start):
        return text
    kept = text.encode()[:MOST_BYTES].decode(errors="ignore").rpartition("\n")[0]
    return f"{kept}\n# cut here: {len(kept.encode())} of {size} bytes are shown\n"
