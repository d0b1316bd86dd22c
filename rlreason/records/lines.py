"""JSON lines, plain or compressed, of a file that a killed process or another program may have left broken."""

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.runtime.atomic_files import explained, whole
from rlreason.runtime.signals import held, removed_if_left
from rlreason.runtime.text import few

NAMED = 3  # broken lines of a file that are reported one by one
Checks = Callable[[dict[str, Any]], str]  # what is wrong with a row, empty where nothing is
PACKED = ".gz"  # ends the name of a file that is compressed
LEVEL = 1  # of zlib: token ids and log-probabilities hardly get smaller with more
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)  # what a compressed file that is cut or altered raises


def opened(path: Path) -> BufferedIOBase:
    """A file of lines to read, unpacked where it is compressed."""
    return gzip.open(path, "rb") if path.suffix == PACKED else path.open("rb")


@contextmanager
def written(path: Path) -> Iterator[BufferedIOBase]:
    """A file of lines to write, compressed where its name says so; it replaces the old one when the block ends.

    The same lines give the same bytes. `UnwritableError` where the system refuses.
    """
    with whole(path) as partial, partial.open("wb") as file:
        if path.suffix != PACKED:
            yield file
            return
        with gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as packed:
            yield packed


@contextmanager
def growing(path: Path) -> Iterator[Callable[[Iterable[Mapping[str, Any]]], None]]:
    """Yields a function that adds rows to what becomes the file when the block ends; where it fails, nothing is left.

    Unlike in `written`, a signal ends the block between two additions. `UnwritableError` where the system refuses.
    """
    partial = path.with_name(path.name + ".partial")

    def add(rows: Iterable[Mapping[str, Any]]) -> None:
        with held(), explained(path), partial.open("ab") as file:
            file.writelines(map(line_of, rows))

    with removed_if_left(partial):
        try:
            partial.unlink(missing_ok=True)  # of a process that was killed
            yield add
            with held(), explained(path):
                os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def finite(value: Any) -> Any:
    """The value with null for every number that is not finite: JSON has no word for them.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON, with null for every number that is not finite.

    >>> line_of({"a": [1.5, float("inf")]})
    b'{"a": [1.5, null]}\\n'
    """
    try:
        text = json.dumps(row, allow_nan=False)
    except ValueError:  # rare, and looking at every number of every row first would cost more than writing it
        text = json.dumps(finite(row), allow_nan=False)
    return text.encode() + b"\n"


def read_lines(path: Path, wrong: Checks, say: Callable[[str], None]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, row) of every line that can be used; the others are named to `say` in one line, and left out.

    Raises `ConfigError` where the file cannot be opened.
    """
    return list(each_line(path, wrong, say))


def each_line(
    path: Path, wrong: Checks, say: Callable[[str], None], shortened: Callable[[bytes], bytes] = bytes
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same one by one, for a file that is larger than what is kept of it.

    `shortened`: takes from a line what is not needed, before it is parsed.
    """
    broken, number = list[str](), 0
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parsed(shortened(line))
                    if said := wrong(row):
                        raise ValueError(said)
                except (ValueError, RecursionError) as error:
                    broken.append(f"{number} ({error})")
                else:
                    yield number, row
    except DAMAGED as error:
        broken.append(f"{number + 1} and what follows ({type(error).__name__})")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make it readable, or choose another") from error
    if broken:
        say(f"{path}: left out line {few(broken, NAMED)}")


def parsed(line: bytes) -> dict[str, Any]:
    r"""The JSON object in a line.

    >>> parsed(b'{"a": 1}\n')
    {'a': 1}
    >>> parsed(b'{"a": 1, "b')
    Traceback (most recent call last):
    ValueError: half a line
    """
    if b"\0" in line:
        raise ValueError("NUL bytes")
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except ValueError:
        raise ValueError("not JSON" if line.endswith(b"\n") else "half a line") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row
