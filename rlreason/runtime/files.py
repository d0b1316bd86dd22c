"""Write files atomically, read JSON into dataclasses, and lock a run folder for one process."""

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlreason.errors import ConfigError, ResourceError, UnwritableError
from rlreason.runtime.signals import held, removed_if_left

FULL = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space within your quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}
ELSEWHERE = ", or choose another folder (hydra.run.dir)"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder, which is renamed to `path` when the block ends.

    Readers see the old file or the new one, never a part; a block that fails keeps the old one. `UnwritableError`
    where the system refuses.
    """
    partial = path.with_name(path.name + ".partial")
    _remove(partial)  # left by a killed process
    try:
        with held(), removed_if_left(partial), explained(path):  # a signal waits until it has been written
            yield partial
            os.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise


def write_whole(path: Path, text: str) -> None:
    """Replace a file by this text (UTF-8), atomically. `UnwritableError` where the system refuses."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Add a line to the end of a file, or nothing of it. `UnwritableError` where the system refuses."""
    with explained(path), path.open("ab", buffering=0) as file:
        before, left = os.fstat(file.fileno()).st_size, memoryview(f"{line}\n".encode())
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
        raise unwritable(path, number) from error


def unwritable(path: Path | str, number: int) -> UnwritableError:
    """Return the error for a file that could not be written, by the system's error number.

    >>> print(unwritable("a.json", errno.ENOSPC))
    a.json cannot be written (No space left on device): free some space, or choose another folder (hydra.run.dir)
    """
    cure = FULL.get(number, "make the place writable")
    cause = os.strerror(number)
    error = UnwritableError(f"{path} cannot be written ({cause}): {cure}{ELSEWHERE}")
    if number in FULL:
        error.exit_code = ResourceError.exit_code
    return error


def removed(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    with suppress(OSError):
        removed(path)


LARGEST = 1e100  # larger numbers are invalid


def fields_of(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of the dataclass. `TypeError` for a value of another type than its field's."""
    kinds = get_type_hints(kind)
    found = {field.name: values[field.name] for field in fields(kind) if field.name in values}
    for name, value in found.items():
        if not fits(value, kinds[name]):
            raise TypeError(f"{name} has a value of another type")
    return found


def number(value: Any) -> float | None:
    """Return the value as a float; None where it is no finite number."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has an annotated type: any, a plain one, or a list, dict, tuple or union of such.

    >>> fits({"lr": "1e-3"}, dict[str, str]), fits([1, None], list[int]), fits(1, float | None), fits(True, int)
    (True, False, True, False)
    """
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is UnionType:
        return any(fits(value, one) for one in of)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, of[0]) and fits(v, of[1]) for k, v in value.items())
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(fits(one, of[0]) for one in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return number(value) is not None
    return isinstance(value, kind)


NAME = ".lock"
EVERY_S = 1.0  # between two signs of life, since `alive` is called after every token
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # errors of file systems without locks
CURE = "wait for it, or choose another folder"

_held: set[Path] = set()  # locks of this process
_last_sign = -EVERY_S  # on the monotonic clock


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None], key: str = "hydra.run.dir") -> Iterator[None]:
    """Lock the folder in this block against other processes and other runs of this one.

    The folder is created if needed, and removed again if nothing was written into it. `ConfigError` where it is
    locked; `UnwritableError` where it cannot be created. On a file system without locks there is a warning. `key`: the
    setting that names the folder.
    """
    path = Path(os.path.realpath(folder)) / NAME
    made = _made(path.parent)
    try:
        with _own(path, folder, key):
            with held():  # else a signal could come between the lock and the block that releases it
                file = _acquired(path, folder, say, key)
            try:
                yield
            finally:
                _released(path, file)
    finally:
        with suppress(OSError):
            for empty in made:
                empty.rmdir()


def alive() -> None:
    """Give a sign of life: touch the lock files of this process, at most once a second.

    Must be called from the work itself and not from a timer: a sweep ends a run without a sign of life for
    `waits.run_s` seconds. It does not tell apart several runs in one process.
    """
    global _last_sign
    now = time.monotonic()
    if now - _last_sign < EVERY_S:
        return
    _last_sign = now
    for path in list(_held):
        with suppress(OSError):  # by its path: opening and closing the file would release the lock
            os.utime(path)


def last_sign() -> float:
    """Return the time of this process's last sign of life, in seconds of the monotonic clock."""
    return _last_sign


def sign_of_life(folder: Path) -> int | None:
    """Return the time of the last sign of life of the run in this folder, in nanoseconds; None before its first."""
    try:
        return (folder / NAME).stat().st_mtime_ns
    except OSError:
        return None


def holder(folder: Path) -> str | None:
    """Return who has locked this folder, as text; None where no one has. It takes the lock for an instant."""
    path = Path(os.path.realpath(folder)) / NAME
    if path in _held:  # opening and closing the file would release the lock
        return "this process"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        taken = error.errno in (errno.EACCES, errno.EAGAIN)
        return _named(os.read(file, 4096).decode("utf-8", "replace")) if taken else None
    finally:
        os.close(file)
    return None


def _made(folder: Path) -> list[Path]:
    """Create the folder; return it and its parents that were missing, itself first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return missing


@contextmanager
def _own(path: Path, folder: Path, key: str) -> Iterator[None]:
    """Lock the folder against other runs in this process."""
    if path in _held:
        raise ConfigError(f"{key}={folder} is being written by another run of this process: {CURE}")
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)


def _acquired(path: Path, folder: Path, say: Callable[[str], None], key: str) -> int:
    """Return the open, locked file, in which our process id is written."""
    while True:
        with explained(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.read(file, 4096).decode("utf-8", "replace")
                os.close(file)
                raise ConfigError(f"{key}={folder} is being written by {_named(holder)}: {CURE}") from None
            if error.errno not in WITHOUT_LOCKS:
                os.close(file)
                with explained(path):
                    raise
            say(
                f"! {folder} lies on a file system without locks ({os.strerror(error.errno)}): nothing holds a "
                "second run off this folder"
            )
        if _is_still(path, file):
            break
        os.close(file)  # its owner has removed it meanwhile
    with suppress(OSError):  # on a full disk the lock still holds
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()}\n{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    return file


def _released(path: Path, file: int) -> None:
    if os.getpid() == _pid_in(file):  # not a fork, which never had the lock
        with suppress(OSError):
            path.unlink()
    os.close(file)


def _pid_in(file: int) -> int:
    """Return the process id in the file; this process's where it is empty, as on a full disk."""
    first = os.pread(file, 32, 0).split(b"\n")[0]
    return int(first) if first.isdigit() else os.getpid()


def _is_still(path: Path, file: int) -> bool:
    """Whether the path is still this very file."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _named(holder: str) -> str:
    """Describe the owner of a lock from the text in its file.

    >>> _named("12\\n2026-01-02 03:04:05\\n"), _named("")
    ('process 12 since 2026-01-02 03:04:05', 'another process')
    """
    lines = holder.splitlines()
    return f"process {lines[0]} since {lines[1]}" if len(lines) > 1 else "another process"
