"""Where rows come from: JSON-lines files, JSON lists and hub data sets. And what is done with a row that is no use.

A row that cannot be used is named by file and line: it stops the run, or is left out, counted and said. What a row
means is read in `rows.py`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlreason.config.packages import required
from rlreason.errors import ConfigError, DataError
from rlreason.runtime.text import few, first_line
from rlreason.types import Problem

#: (where it stands, the row); a `BadRowError` in its place says why it could not even be read.
Row = tuple[str, Any]


class BadRowError(Exception):
    """Why a row cannot be used, as the end of a sentence that begins with where the row stands."""


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl file, line by line, or of the list in a .json file; `DataError` where it holds no list.

    A line that is no JSON comes as a `BadRowError`, not raised.
    """
    if path.suffix == ".json":
        rows = _json(path.read_bytes())
        if not isinstance(rows, list):
            why = f"{rows}" if isinstance(rows, BadRowError) else "holds no list"
            raise DataError(f"{path} {why}: a .json file holds one list of rows; name it .jsonl if each line is one")
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _json(line)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        return BadRowError("is not UTF-8")
    except (ValueError, RecursionError):  # also of a number with thousands of digits
        return BadRowError("is not JSON")


def hub_splits(path: str, hub_config: str | None) -> Mapping[str, Iterable[Any]]:
    """Split name -> rows of a data set on the hub; `ConfigError` where it cannot be read."""
    with required(f"data.path={path} is no folder here, and reading it from the hub", "datasets"):
        from datasets import load_dataset
    try:
        return load_dataset(path, hub_config)  # type: ignore[no-any-return]
    except Exception as error:  # the hub client raises many kinds; all mean that it cannot be reached or read
        raise ConfigError(
            f"data.path={path} with data.hub_config={hub_config} cannot be read from the hub "
            f"({first_line(error)}): "
            "fix these, or give a folder instead"
        ) from error


@dataclass(frozen=True, slots=True)
class Table:
    """The problems of one file or split, and the ids that the data itself gives them."""

    problems: list[Problem]
    own_ids: list[str | None]
    notes: list[str]


def read_table(
    rows: Iterable[Row],
    source: str,
    prefix: str,
    parse: Callable[[Any, str], Problem],
    own_id: Callable[[Any], str | None],
    skip: bool,
) -> Table:
    """Rows -> problems with the ids `prefix-number`, counted from 0.

    `parse` makes a problem of a row and an id, `own_id` finds the id in the row. A row that cannot be used is a
    `DataError`, or with `skip` left out and counted in the notes; so is a source without a single usable row.
    """
    problems: list[Problem] = []
    own_ids: list[str | None] = []
    bad: dict[str, list[str]] = {}
    for number, (where, row) in enumerate(rows):
        try:
            if isinstance(row, BadRowError):
                raise row
            problems.append(parse(row, f"{prefix}-{number}"))
            own_ids.append(own_id(row))
        except BadRowError as reason:
            if not skip:
                cure = "fix or remove it, or set data.bad_rows=skip to leave such rows out"
                raise DataError(f"{source}, {where} {reason}: {cure}") from None
            bad.setdefault(str(reason), []).append(where)
    if not problems:
        raise DataError(f"{source} holds no row that can be used" + _reasons(bad) + ": give one with problems")
    dropped = sum(map(len, bad.values()))
    notes = [f"! {source}: {dropped} of {len(problems) + dropped} rows left out{_reasons(bad)}"] if bad else []
    return Table(problems, own_ids, notes)


def _reasons(bad: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"; {len(rows)} because the row {reason} ({few(rows, 3)})" for reason, rows in bad.items())


def question_hash(question: str) -> str:
    """By which a question is recognised across files and runs: 16 hex digits that do not depend on white space.

    >>> question_hash("1 + 1?") == question_hash(" 1 +\\n1? ")
    True
    """
    return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:16]


def fingerprint(problems: Iterable[Problem], asked_only: bool = False) -> str:
    """12 hex digits from everything that a run uses of its problems; `asked_only`: from prompts and answers alone."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(f"{p.id}\x1f{p.question}\x1f{p.answer}".encode())
        given = (("solution", p.solution), ("prompt", p.prompt), ("response", p.response))
        for name, text in given[1:2] if asked_only else given:
            digest.update(f"\x1f{name}\x1f{text}".encode() if text is not None else b"")
        digest.update(b"\x1e")
    return digest.hexdigest()[:12]
