"""Write files atomically, and describe in one line why one cannot be written."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlreason.errors import ResourceError, UnwritableError
from rlreason.runtime.signals import held, removed_if_left

FULL = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space within your quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}
ELSEWHERE = ", or choose another folder (hydra.run.dir)"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path for a file or a folder, which is renamed to `path` when the block ends.

    Readers see the old file or the new one, never half of one; a block that fails leaves the old one alone.
    `UnwritableError` where the system refuses.
    """
    partial = path.with_name(path.name + ".partial")
    _remove(partial)  # of a process that was killed
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
    """The error for a file that could not be written, by the system's error number.

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
    """Remove a file, a link or a whole folder; one that is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    with suppress(OSError):
        removed(path)
