"""Write files atomically, lock a run folder for one process, and end a run that hangs."""

import errno
import faulthandler
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from rlreason.errors import ConfigError, ResourceError, UnwritableError
from rlreason.runtime.signals import held

FULL = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space within your quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder, which is renamed to `path` when the block ends.

    Readers see the old file or the new one, never a part; a block that fails keeps the old one. `UnwritableError`
    where the system refuses.
    """
    new = path.with_name(path.name + ".partial")
    try:
        with explained(path):
            removed(new)  # left by a killed process
            yield new
            os.replace(new, path)
    finally:
        with suppress(OSError):
            removed(new)


def write_whole(path: Path, data: str | bytes) -> None:
    """Replace a file by this text (UTF-8) or these bytes, atomically; see `whole`."""
    with whole(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to the end of a file, or nothing of it. `UnwritableError` where the system refuses."""
    with explained(path), path.open("ab", buffering=0) as file:
        before, left = os.fstat(file.fileno()).st_size, memoryview(line)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an operating system's error in this block into an `UnwritableError` for `path`.

    safetensors raises an error of its own, whose text holds the system's error number.
    """
    try:
        yield
    except UnwritableError:
        raise
    except Exception as error:
        hidden = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(hidden[1]) if hidden else None
        if number is None:
            raise
        cure = FULL.get(number, "make the place writable") + ", or choose another folder (hydra.run.dir)"
        unwritable = UnwritableError(f"{path} cannot be written ({os.strerror(number)}): {cure}")
        if number in FULL:
            unwritable.exit_code = ResourceError.exit_code
        raise unwritable from error


def free_folder(folder: Path) -> Path:
    """Return the folder, with a number behind its name if something of that name is there."""
    numbered = (folder.with_name(f"{folder.name}_{number}") for number in count(2))
    return next(place for place in chain([folder], numbered) if not place.exists())


def removed(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


LARGEST = 1e100  # larger numbers are invalid


def number(value: Any) -> float | None:
    """Return the value as a float; None where it is no finite number."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None


LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems without locks
EVERY_S = 1.0  # between two signs of life, since `alive` is called after every token
GRACE_S = 5.0  # in which a wait with the same limit ends first, with a message

_end_after: tuple[float, BinaryIO] | None = None  # see `ended_when_it_hangs`
_last_sign = -EVERY_S  # on the monotonic clock


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None], key: str = "hydra.run.dir") -> Iterator[None]:
    """Lock the folder in this block against other processes and other runs of this one.

    The folder is created if needed, and removed again if nothing was written into it. `ConfigError` where it is
    locked; `UnwritableError` where it cannot be created. On a file system without locks there is a warning. `key`: the
    setting that names the folder.
    """
    path = folder.resolve() / LOCK
    missing = [place for place in path.parents if not place.exists()]
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    with held(), explained(path.parent):  # no signal between the lock and the block that releases it
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{key}={folder} is being written by {_owner(path)}: wait for it, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            say(f"! {folder} is on a file system without locks: nothing keeps a second run out of this folder")
        with suppress(OSError):  # on a full disk the lock still holds
            path.write_text(f"process {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}", encoding="utf-8")
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()
        with suppress(OSError):
            for empty in missing:
                empty.rmdir()


def holder(folder: Path) -> str | None:
    """Return which process has locked this folder, as text; None where none has. It takes the lock for an instant."""
    path = folder.resolve() / LOCK
    with suppress(OSError):  # a file system without locks
        try:
            if path.exists():
                with FileLock(path, blocking=False, fallback_to_soft=False):
                    pass
        except Timeout:
            return _owner(path)
    return None


def _owner(path: Path) -> str:
    """Return what the process that has locked a folder has written into its lock file."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return "another process"


def alive() -> None:
    """Give a sign of life, which puts off the end by `ended_when_it_hangs`; at most one a second counts.

    Must be called from the work itself and not from a timer.
    """
    global _last_sign
    now = time.monotonic()
    if now - _last_sign < EVERY_S:
        return
    _last_sign = now
    if _end_after is not None:
        faulthandler.dump_traceback_later(_end_after[0], exit=True, file=_end_after[1])


@contextmanager
def ended_when_it_hangs(stacks: Path, limit_s: float | None) -> Iterator[None]:
    """End the process in this block if `alive` is not called for `limit_s` seconds; None: never.

    The stacks of its threads are then in the file `stacks`. It ends with exit code 1 and without clean-up, as if it had
    been killed: its children must end by themselves. Time in which it is stopped (Ctrl-Z) counts, too.
    """
    global _end_after
    if limit_s is None:
        yield
        return
    with stacks.open("ab") as file:
        _end_after = (limit_s + GRACE_S, file)
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            _end_after = None
            with suppress(OSError):
                if not stacks.stat().st_size:
                    stacks.unlink()
