"""The checkpoints of a run folder as files: written whole or not at all, verified before use. Needs no torch.

    checkpoints/step_00012_update_00034_eval_00003/
      model/               the policy, a folder that transformers loads
      state.safetensors    random states, adapters
      moments.safetensors  moments of the optimizer; removed when the run has finished
      state.json           progress of the run: counters, problems, records, the current step
      manifest.json        size and digest of every file above, written last

A name has the number of steps begun, and of updates and evaluations done.
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
FORMAT = 1  # version of the contents of a checkpoint


def name_of(steps: int, updates: int, evaluations: int) -> str:
    """Return the name of a checkpoint after this many begun steps, updates and evaluations.

    >>> name_of(12, 34, 3)
    'step_00012_update_00034_eval_00003'
    """
    return f"step_{steps:05d}_update_{updates:05d}_eval_{evaluations:05d}"


def write_checkpoint(folder: Path, name: str, state: dict[str, Any], write: Callable[[Path], object]) -> Path:
    """Write the checkpoint `name` of the run in `folder`; `write` writes the large files into the given folder.

    It gets its name when it is complete. On `UnwritableError` nothing of it stays, and earlier ones are unchanged.
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
    """Hash a file's bytes to 32 hex digits."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            found.update(part)
    return found.hexdigest()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [path for path in (folder / CHECKPOINTS).glob("step_*") if path.is_dir() and path.suffix == ""]
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def set_aside_behind(path: Path) -> None:
    """Rename every newer checkpoint, none of which could be used, to `.broken`, so that it can be written again."""
    with explained(path):
        for newer in reversed(checkpoints_in(path.parents[1])):
            if newer == path:
                break
            aside = newer.with_name(f"{newer.name}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)


def newest_good(folder: Path, say: Callable[[str], object]) -> Path | None:
    """Return the newest checkpoint whose files are intact, and report every newer one.

    `ConfigError` where there are some and none can be used.
    """
    found = checkpoints_in(folder)
    for path in reversed(found):
        if not (wrong := checkpoint_fault(path)):
            return path
        before = "the one before it is tried" if path != found[0] else "it is the oldest"
        say(f"! {path} cannot be used ({wrong}): {before}")
    for path in reversed(found):
        if not checkpoint_fault(path, records=False):
            say(f"! {path.name} is taken all the same: the rows that are missing stay lost")
            return path
    if found:
        raise ConfigError(
            f"hydra.run.dir={folder} holds no checkpoint that can be used: choose another folder, or move "
            f"{CHECKPOINTS}/ away to begin anew"
        )
    return None


def checkpoint_fault(path: Path, records: bool = True) -> str:
    """Return why a checkpoint cannot be used, or nothing. `records`: check also that the run's records are as long."""
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
    """Read the state of the run from an intact checkpoint."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def pruned(names: list[str], accuracies: dict[str, float], keep: int) -> list[str]:
    """Return the checkpoints to remove, of these, oldest first: all but the newest `keep` and the newest best one.

    `accuracies`: of the evaluated ones.

    >>> pruned(["a", "b", "c", "d"], {"a": 0.5, "b": 0.7, "c": 0.6}, keep=1)
    ['a', 'c']
    """
    best = max(reversed(names), key=lambda name: accuracies.get(name, -1.0), default=None)
    stay = {*names[-keep:], *([best] if best in accuracies else [])}
    return [name for name in names if name not in stay]


def remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a partly removed one is never taken for a whole one."""
    with explained(path):
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def moments_in(path: Path) -> dict[str, int]:
    """Return the files with the optimizer's moments and their sizes; none in a checkpoint of a finished run."""
    listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return {name: size for name, (size, _) in listed.items() if name.partition("/")[0] in (MOMENTS, SPREAD)}


def remove_moments(path: Path) -> None:
    """Remove the moments from a checkpoint, from the manifest first, so that the checkpoint stays valid."""
    gone = moments_in(path)
    with explained(path):
        listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        rest = {name: entry for name, entry in listed.items() if name not in gone}
        write_whole(path / MANIFEST, json.dumps(rest, indent=1) + "\n")
        for name in gone:
            (path / name).unlink(missing_ok=True)
        if (path / SPREAD).is_dir():
            (path / SPREAD).rmdir()


def linked(source: Path, target: Path) -> None:
    """Copy the folder `source` to `target` with hard links where the file system allows it."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    if target.exists():
        shutil.rmtree(target)
    with whole(target) as partial:
        shutil.copytree(source, partial, copy_function=link)
