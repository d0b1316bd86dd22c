"""JSON lines of a file that a killed process, a full disk or another program may have left broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.runtime.text import few

NAMED = 3  # broken lines of a file that are reported one by one
Checks = Callable[[dict[str, Any]], str]  # what is wrong with a row, empty where nothing is


def read_lines(path: Path, wrong: Checks, say: Callable[[str], None]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, row) of every line that can be used; the others are named to `say` in one line, and left out.

    Raises `ConfigError` where the file cannot be opened.
    """
    rows, broken = list[tuple[int, dict[str, Any]]](), list[str]()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parsed(line)
                    if said := wrong(row):
                        raise ValueError(said)
                except (ValueError, RecursionError) as error:
                    broken.append(f"{number} ({error})")
                else:
                    rows.append((number, row))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make it readable, or choose another") from error
    if broken:
        say(f"{path}: left out line {few(broken, NAMED)}")
    return rows


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
