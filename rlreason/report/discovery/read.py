"""Read `conversation_log.json` of a discover run: every field of its type, or one line that names what is wrong."""

import json
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.report.discovery.log import START, Best, Call, Log, Reply, Result, Spent, Start, Turn
from rlreason.runtime.json_fields import fits
from rlreason.runtime.text import shorten, visible

MOST_BYTES = 1 << 29  # a larger file is no log
MOST_LEVELS = 60  # lists and objects within one another
LARGEST = 10**15  # of whatever is counted
UNBOUNDED = {"min_squared_distance", "max_squared_norm", "seed"}  # whole numbers of any size
Kind = TypeVar("Kind")
Reader = Callable[[Any, str], Any]


class _WrongError(Exception):
    """What is wrong with a file, without its path."""


def is_discover_run(folder: Path) -> bool:
    """Whether a folder holds the log of a discover run, readable or not."""
    with suppress(OSError, ValueError):
        return (folder / files.CONVERSATION).is_file()
    return False


def read_log(folder: Path) -> Log:
    """The log of a run that has ended, was killed or is under way.

    `ConfigError`, one line with the file's path, where there is none or where anything in it is not what it must be.
    """
    path = folder / files.CONVERSATION
    try:
        return replace(_log(_document(path), ""), folder=folder)
    except _WrongError as error:
        raise ConfigError(
            f"{visible(str(path))} is no log of a discover run: {error}: give the folder of another run"
        ) from None


def _document(path: Path) -> Any:
    if not path.is_file():
        raise _WrongError("there is no such file")
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise _WrongError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
        document = json.loads(path.read_bytes().decode(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else shorten(visible(str(error)), 80)
        raise _WrongError(f"it cannot be read ({why or type(error).__name__})") from None
    if _levels(document) > MOST_LEVELS:
        raise _WrongError(f"its lists and objects lie more than {MOST_LEVELS} deep")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _levels(document: Any) -> int:
    """How deep lists and objects lie within one another, at most one more than MOST_LEVELS."""
    level, within = 0, [document]
    while within and level <= MOST_LEVELS:
        inner: list[Any] = []
        for one in within:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level, within = level + 1, inner
    return level


def _log(told: Any, at: str) -> Log:
    told = {**told, "folder": Path()} if isinstance(told, dict) else told
    parts = {"start": _start, "turns": _each(_turn), "spent": _plain(Spent), "best": _plain(Best)}
    log = _made(Log, told, at, parts)
    seen: set[str] = set()
    for k, turn in enumerate(log.turns):
        if turn.id in seen:
            raise _WrongError(f"turns[{k}] is turn {turn.id} a second time")
        seen.add(turn.id)
    if log.best.turn != START and log.best.turn not in seen:
        raise _WrongError(f"best.turn={_shown(log.best.turn)} names none of its turns")
    return log


def _start(told: Any, at: str) -> Start:
    return _made(Start, told, at, {"result": _or_none(_plain(Result))})


def _turn(told: Any, at: str) -> Turn:
    parts = {"calls": _each(_plain(Call)), "reply": _or_none(_plain(Reply)), "result": _or_none(_plain(Result))}
    return _made(Turn, told, at, parts)


def _plain(kind: type[Any]) -> Reader:
    return lambda told, at: _made(kind, told, at, {})


def _or_none(read: Reader) -> Reader:
    return lambda told, at: None if told is None else read(told, at)


def _each(read: Reader) -> Reader:
    def read_each(told: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(told, list):
            raise _WrongError(f"{at} is no list")
        return tuple(read(one, f"{at}[{k}]") for k, one in enumerate(told))

    return read_each


def _made(kind: type[Kind], told: Any, at: str, parts: dict[str, Reader]) -> Kind:
    """The dataclass from an object of the file; `parts` reads the fields that are objects themselves."""
    if not isinstance(told, dict):
        raise _WrongError(f"{at or 'it'} is no object")
    found: dict[str, Any] = {}
    for name, (expected, is_needed) in _fields(cast(Hashable, kind)).items():
        where = f"{at}.{name}" if at else name
        if name not in told:
            if is_needed:
                raise _WrongError(f"{where} is missing")
            continue
        value = told[name]
        if name in parts:
            value = parts[name](value, where)
        elif not fits(value, expected):
            raise _WrongError(f"{where}={_shown(value)} is no {_word(expected)}")
        elif isinstance(value, int | float) and name not in UNBOUNDED and not 0 <= value <= LARGEST:
            raise _WrongError(f"{where}={_shown(value)} lies outside 0 to {LARGEST:,}")
        found[name] = value
    return kind(**found)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Name -> (type, whether it must be there)."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _word(expected: Any) -> str:
    """A type as a person says it.

    >>> _word(int | None), _word(list[str])
    ('whole number or null', 'list of texts')
    """
    words = {int: "whole number", float: "number", str: "text", NoneType: "null", list[str]: "list of texts"}
    if expected in words:
        return words[expected]
    parts = get_args(expected)
    return " or ".join(map(_word, parts)) if NoneType in parts else "object"


def _shown(value: Any) -> str:
    try:
        return shorten(visible(json.dumps(value)), 40)
    except ValueError:  # a number with more digits than Python writes
        return type(value).__name__
