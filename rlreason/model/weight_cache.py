"""A cache of start weights in a folder of bounded size: entries are found by key, made once, written atomically."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from rlreason.runtime.text import first_line

Weights = dict[str, Tensor]

MAX_BYTES = 200 * 2**20  # of all entries together, about a hundred models of the default size
LOCK_TIMEOUT_S = 1800.0  # while another run makes the same model
SUFFIX = ".safetensors"


class BrokenWeightsError(Exception):
    """A file of weights whose content is not what was written."""


def checksum(weights: Weights) -> str:
    """16 hex digits of names, types, shapes and every bit of the values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def copied(named: Iterable[tuple[str, Tensor]]) -> Weights:
    """A copy of the weights in main memory, without gradient."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named}


def write_weights(path: Path, weights: Weights, key: str) -> None:
    """Write the weights with their key and checksum; `OSError` or `SafetensorError` where that fails.

    They are written under another name and renamed, so that no reader meets half a file.
    """
    partial = path.with_name(path.name + ".partial")
    save_file(weights, partial, metadata={"key": key, "checksum": checksum(weights)})
    partial.chmod(0o644)  # safetensors lets nobody else read them, as a package or a shared folder must
    os.replace(partial, path)


def read_weights(path: Path, key: str) -> Weights:
    """The weights that were written under this key; `BrokenWeightsError` where the file holds anything else."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except SafetensorError as error:
        raise BrokenWeightsError(str(error)) from error
    if metadata.get("key") != key or metadata.get("checksum") != checksum(weights):
        raise BrokenWeightsError("its checksum or its key is another")
    return weights


@dataclass(frozen=True)
class WeightCache:
    """Entries in `folder`, of `max_bytes` together. A folder that cannot be written is reported in a line, not raised.

    A process that makes an entry holds a lock on a file next to it; the system releases it when the process ends.
    """

    folder: Path
    say: Callable[[str], None]  # prints a line
    max_bytes: int = MAX_BYTES

    def get(self, key: str, make: Callable[[], Weights]) -> tuple[Weights, bool]:
        """(weights, whether they were found). Of two runs that need the same entry at the same time, one makes it."""
        path = self.folder / f"{key}{SUFFIX}"
        if (found := self._read(path, key, quiet=True)) is not None:
            return found, True
        with self._locked(path) as usable:
            if (found := self._read(path, key)) is not None:  # made by the run that was waited for
                return found, True
            weights = make()
            if usable:
                self._write(path, weights, key)
        return weights, False

    def _read(self, path: Path, key: str, quiet: bool = False) -> Weights | None:
        try:
            weights = read_weights(path, key)
            with suppress(OSError):  # a read-only folder
                os.utime(path)  # those unused for longest are removed first
        except OSError:  # not there, or not to be read
            return None
        except BrokenWeightsError as error:
            if not quiet:  # else it is read again under the lock, and reported then
                self.say(f"! {path} is broken ({error}): it is made anew")
            return None
        return weights

    def _write(self, path: Path, weights: Weights, key: str) -> None:
        try:
            write_weights(path, weights, key)
            self._tidy(path)
        except (OSError, SafetensorError) as error:
            self._cannot(error)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[bool]:
        """Hold the lock of an entry, or go on without it; yields whether the folder can be written."""
        lock, usable = FileLock(path.with_suffix(".lock")), True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self.say("another run is making the same model: waiting for it ...")
                with suppress(Timeout):
                    lock.acquire(timeout=LOCK_TIMEOUT_S, poll_interval=0.2)
        except OSError as error:
            self._cannot(error)
            usable = False
        try:
            yield usable
        finally:
            lock.release()

    def _cannot(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or first_line(error)
        self.say(f"! model.cache: {self.folder} cannot be written ({reason}): this model is not kept")

    def _tidy(self, newest: Path) -> None:
        """Remove the entries unused for longest until `max_bytes` suffice, and what a killed run left."""
        ages = sorted((path.stat().st_mtime, path) for path in self.folder.glob(f"*{SUFFIX}") if path != newest)
        left = self.max_bytes - newest.stat().st_size
        for _, path in reversed(ages):
            left -= path.stat().st_size
            if left < 0:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f"*{SUFFIX}.partial"):
            if path.stat().st_mtime < newest.stat().st_mtime - LOCK_TIMEOUT_S:  # nobody is writing it any more
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.lock"):
            unused = path.stat().st_mtime < newest.stat().st_mtime - LOCK_TIMEOUT_S
            if unused and not path.with_suffix(SUFFIX).exists():
                path.unlink(missing_ok=True)
