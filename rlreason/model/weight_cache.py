"""Weights of models made on the spot, kept in a folder: found by key, written whole, made once, bounded in size.

It knows tensors and files; it must not know what a key is made of, tokenizers or configuration.
"""

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

Weights = dict[str, Tensor]

MOST_BYTES = 200 * 2**20  # of all kept models together, about a hundred of the default size
PATIENCE_S = 1800.0  # for another run that makes the same model
SUFFIX = ".safetensors"


class BrokenWeightsError(Exception):
    """A file of weights that is not what was written."""


def checksum(weights: Weights) -> str:
    """16 hex digits of names, types, shapes and every bit of the values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def copied(named: Iterable[tuple[str, Tensor]]) -> Weights:
    """The weights as they are now, in memory of their own, on the processor."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named}


def write_weights(path: Path, weights: Weights, key: str) -> None:
    """Written beside its place and renamed when whole. `OSError` or `SafetensorError` where that cannot be done."""
    partial = path.with_name(path.name + ".partial")
    save_file(weights, partial, metadata={"key": key, "checksum": checksum(weights)})
    partial.chmod(0o644)  # safetensors lets nobody else read them, as a package or a shared folder must
    os.replace(partial, path)


def read_weights(path: Path, key: str) -> Weights:
    """Bit for bit what was written under this key; `BrokenWeightsError` where the file holds anything else."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    except SafetensorError as error:
        raise BrokenWeightsError(str(error)) from error
    if facts.get("key") != key or facts.get("checksum") != checksum(weights):
        raise BrokenWeightsError("its checksum or its key is another")
    return weights


@dataclass(frozen=True)
class Keeper:
    """Keeps weights in `folder`. Where it cannot be read or written, it says so in a line, and nothing is kept.

    Whoever makes an entry holds a lock on a file beside it, which the system drops when its holder dies.
    """

    folder: Path
    say: Callable[[str], None]
    most_bytes: int = MOST_BYTES

    def get(self, key: str, make: Callable[[], Weights]) -> tuple[Weights, bool]:
        """(weights, whether they were found). Two runs that ask at the same time make them once."""
        path = self.folder / f"{key}{SUFFIX}"
        if (found := self._read(path, key, quiet=True)) is not None:
            return found, True
        with self._alone(path) as usable:
            if (found := self._read(path, key)) is not None:  # the run that was waited for has made it
                return found, True
            weights = make()
            if usable:
                self._write(path, weights, key)
        return weights, False

    def _read(self, path: Path, key: str, quiet: bool = False) -> Weights | None:
        try:
            weights = read_weights(path, key)
            with suppress(OSError):  # a folder that can only be read
                os.utime(path)  # the longest unused go first
        except OSError:  # not there, or not to be read
            return None
        except BrokenWeightsError as error:
            if not quiet:  # it is read again when nobody else can mend it
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
    def _alone(self, path: Path) -> Iterator[bool]:
        """Hold the lock of an entry, or go on without one; whether the folder can be written."""
        lock, usable = FileLock(path.with_suffix(".lock")), True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self.say("another run is making the same model: waiting for it ...")
                with suppress(Timeout):
                    lock.acquire(timeout=PATIENCE_S, poll_interval=0.2)
        except OSError as error:
            self._cannot(error)
            usable = False
        try:
            yield usable
        finally:
            lock.release()

    def _cannot(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
        self.say(f"! model.cache: {self.folder} cannot be written ({reason}): this model is not kept")

    def _tidy(self, newest: Path) -> None:
        """Remove what was unused for longest until the others are small enough; and what a killed run left."""
        ages = sorted((path.stat().st_mtime, path) for path in self.folder.glob(f"*{SUFFIX}") if path != newest)
        room = self.most_bytes - newest.stat().st_size
        for _, path in reversed(ages):
            room -= path.stat().st_size
            if room < 0:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f"*{SUFFIX}.partial"):
            if path.stat().st_mtime < newest.stat().st_mtime - PATIENCE_S:  # nobody is writing it any more
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.lock"):
            unused = path.stat().st_mtime < newest.stat().st_mtime - PATIENCE_S
            if unused and not path.with_suffix(SUFFIX).exists():
                path.unlink(missing_ok=True)
