"""The checkpoints of a run folder as files: whole or absent, found newest first, checked before they are trusted.

    checkpoints/step_00012_update_00034_eval_00003/
      model/               the policy, a folder that transformers loads
      state.safetensors    random states, adapters
      moments.safetensors  moments of the optimizer; of a finished run they go
      state.json           how far the run was: counters, problems, records, the step in hand
      manifest.json        size and digest of every file above, written last

A name tells how many steps had begun, how many updates and evaluations were done. Nothing here needs torch.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import CHECKPOINTS, MANIFEST, MOMENTS, SPREAD, STATE
from rlreason.runtime.files import explained, whole, write_whole

READ_BYTES = 1 << 20
FORMAT = 1  # of what stands in a checkpoint


def name_of(steps: int, updates: int, evaluations: int) -> str:
    """The name of the checkpoint of a run that has begun so many steps.

    >>> name_of(12, 34, 3)
    'step_00012_update_00034_eval_00003'
    """
    return f"step_{steps:05d}_update_{updates:05d}_eval_{evaluations:05d}"


def write_checkpoint(folder: Path, name: str, state: dict[str, Any], write: Callable[[Path], object]) -> Path:
    """Make the checkpoint `name` of the run in `folder`: `write` puts the large files where it is told to.

    It appears under its name when it is complete. `UnwritableError` where the system refuses: then nothing of it
    stays, and those before are as they were.
    """
    path = folder / CHECKPOINTS / name
    with explained(path):
        path.parent.mkdir(exist_ok=True)
    with whole(path) as partial:
        partial.mkdir()
        write(partial)
        write_whole(partial / STATE, json.dumps({"format": FORMAT, **state}))
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        listed = {str(file.relative_to(partial)): [file.stat().st_size, digest(file)] for file in files}
        write_whole(partial / MANIFEST, json.dumps(listed, indent=1) + "\n")
    return path


def digest(path: Path) -> str:
    """32 hex digits of a file's bytes."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            found.update(part)
    return found.hexdigest()


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in (folder / CHECKPOINTS).glob("step_*") if path.is_dir() and path.suffix == ""]
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def set_aside_behind(path: Path) -> None:
    """Give every newer checkpoint, of which none could be used, the ending `.broken`: its place is written again."""
    with explained(path):
        for newer in reversed(checkpoints_in(path.parents[1])):
            if newer == path:
                break
            aside = newer.with_name(f"{newer.name}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)


def newest_good(folder: Path, say: Callable[[str], object]) -> Path | None:
    """The newest checkpoint whose files are as they were written; every one before which it had to go back is said.

    `ConfigError` where there are some and none can be used.
    """
    found = checkpoints_in(folder)
    for path in reversed(found):
        if not (wrong := what_is_wrong(path)):
            return path
        before = "the one before it is tried" if path != found[0] else "it is the oldest"
        say(f"! {path} cannot be used ({wrong}): {before}")
    for path in reversed(found):
        if not what_is_wrong(path, records=False):
            say(f"! {path.name} is taken all the same: the rows that are missing stay lost")
            return path
    if found:
        raise ConfigError(
            f"hydra.run.dir={folder} holds no checkpoint that can be used: choose another folder, or move "
            f"{CHECKPOINTS}/ away to begin anew"
        )
    return None


def what_is_wrong(path: Path, records: bool = True) -> str:
    """Why a checkpoint cannot be used; empty where it can be. `records`: those of the run must reach so far, too."""
    try:
        listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, written) in listed.items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes of {size}"
            if digest(path / name) != written:
                return f"{name} is not as it was written"
        state = read_state(path)
        if (version := state.get("format")) != FORMAT:
            return f"it is of format {version}, and this program reads {FORMAT}"
        for name, size in state["offsets"].items() if records else ():
            file = path.parents[1] / name
            if (found := file.stat().st_size if file.exists() else 0) < size:
                return f"{name} of the run had {size} bytes then and has {found} now"
        return ""
    except OSError as error:
        name = os.path.relpath(error.filename, path) if error.filename else MANIFEST
        return f"{name}: {error.strerror}"
    except (ValueError, TypeError, AttributeError):
        return f"{MANIFEST} is broken"


def read_state(path: Path) -> dict[str, Any]:
    """How far the run was, from a checkpoint that is good."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def pruned(names: list[str], accuracies: dict[str, float], keep: int) -> list[str]:
    """Which of the checkpoints, oldest first, may go: all but the newest `keep` and the newest of the best accuracy.

    `accuracies`: of those that were evaluated.

    >>> pruned(["a", "b", "c", "d"], {"a": 0.5, "b": 0.7, "c": 0.6}, keep=1)
    ['a', 'c']
    """
    best = max(reversed(names), key=lambda name: accuracies.get(name, -1.0), default=None)
    stay = {*names[-keep:], *([best] if best in accuracies else [])}
    return [name for name in names if name not in stay]


def remove(path: Path) -> None:
    """Remove a checkpoint: first its manifest, so that half of one is never taken for a whole one."""
    with explained(path):
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def moments_in(path: Path) -> dict[str, int]:
    """The files of a checkpoint that hold moments of the optimizer, with their sizes; none in one of a finished run."""
    listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return {name: size for name, (size, _) in listed.items() if name.partition("/")[0] in (MOMENTS, SPREAD)}


def without_moments(path: Path) -> None:
    """Take the moments out of a checkpoint. The manifest forgets them first, so that what is there stays whole."""
    gone = moments_in(path)
    with explained(path):
        listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        rest = {name: told for name, told in listed.items() if name not in gone}
        write_whole(path / MANIFEST, json.dumps(rest, indent=1) + "\n")
        for name in gone:
            (path / name).unlink(missing_ok=True)
        if (path / SPREAD).is_dir():
            (path / SPREAD).rmdir()


def linked(source: Path, target: Path) -> None:
    """`target` becomes a copy of the folder `source` that shares its bytes on the disk, where the disk can do that."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    if target.exists():
        shutil.rmtree(target)
    with whole(target) as partial:
        shutil.copytree(source, partial, copy_function=link)
