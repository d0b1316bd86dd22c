"""Read rows from files, the hub or a user's function, and problems from the `reasoning-gym` package."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from rlreason.config.data import FunctionDataConfig
from rlreason.config.fields import MADE
from rlreason.config.leaves import required
from rlreason.errors import ConfigError, DataError
from rlreason.runtime.plugins import described, load
from rlreason.runtime.text import few, first_line
from rlreason.types import Problem

#: (its place, such as "line 3", and the row, or a `BadRowError` where it could not be read)
RawRow = tuple[str, Any]


class BadRowError(Exception):
    """Why a row cannot be used, as the end of a sentence that begins with the row's place."""


def file_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a .jsonl file, line by line, or of the list in a .json file; `DataError` if it has no list.

    A line that is no JSON is yielded as a `BadRowError`, not raised.
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
    """Return split name -> rows of a data set on the hub; `ConfigError` where it cannot be read."""
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
class ProblemTable:
    """The problems of one file or split, and the data's own ids of them."""

    problems: list[Problem]
    own_ids: list[str | None]
    notes: list[str]


def read_table(
    rows: Iterable[RawRow],
    source: str,
    prefix: str,
    parse: Callable[[Any, str], Problem],
    own_id: Callable[[Any], str | None],
    skip: bool,
) -> ProblemTable:
    """Parse rows into problems with the ids `prefix-number`, counted from 0.

    `parse` makes a problem from a row and an id, `own_id` reads the id in the row. A row that cannot be used is a
    `DataError`, or with `skip` left out and counted in the notes. A source without usable rows is a `DataError`.
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
    return ProblemTable(problems, own_ids, notes)


def _reasons(bad: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"; {len(rows)} because the row {reason} ({few(rows, 3)})" for reason, rows in bad.items())


def question_hash(question: str) -> str:
    """Hash a question to 16 hex digits, independent of white space, to recognise it across files and runs.

    >>> question_hash("1 + 1?") == question_hash(" 1 +\\n1? ")
    True
    """
    return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:16]


def fingerprint(problems: Iterable[Problem], asked_only: bool = False) -> str:
    """Hash everything that a run uses of its problems to 12 hex digits; `asked_only`: only prompts and answers."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(f"{p.id}\x1f{p.question}\x1f{p.answer}".encode())
        given = (("solution", p.solution), ("prompt", p.prompt), ("response", p.response))
        for name, text in given[1:2] if asked_only else given:
            digest.update(f"\x1f{name}\x1f{text}".encode() if text is not None else b"")
        digest.update(b"\x1e")
    return digest.hexdigest()[:12]


SPLITS = {"train"}, {"train", "validation"}


def rows_of(data: FunctionDataConfig) -> dict[str, list[RawRow]]:
    """Return the rows of "train" and, where the function returns them separately, of "validation".

    `DataError` where it fails or returns something else, `ConfigError` where data.n_validation is set although the
    function splits the rows itself.
    """
    setting = f"data.function={data.function}"
    try:
        made = load(data.function)(**data.options)
        splits = dict(made) if isinstance(made, Mapping) else {"train": made}
        if set(splits) not in SPLITS:
            raise DataError(
                f"{setting} returned {', '.join(map(repr, splits)) or 'nothing'}: return rows, or a dictionary "
                "of rows with the keys train and validation"
            )
        rows = {label: list(islice(_iterable(splits[label]), MADE + 1)) for label in sorted(splits)}
    except DataError:
        raise
    except Exception as error:  # anything that a user's function raises
        raise DataError(f"{setting} fails: {described(error)}: fix it") from error
    if any(len(found) > MADE for found in rows.values()):
        raise DataError(f"{setting} returned more than {MADE} rows, or never ends: return fewer")
    if len(rows) == 2 and data.n_validation is not None:
        raise ConfigError(
            f"data.n_validation={data.n_validation}: {data.function} returns validation rows of its own: leave it out"
        )
    return {label: [(f"row {n}", _row(row)) for n, row in enumerate(found, 1)] for label, found in rows.items()}


def _iterable(made: Any) -> Iterable[Any]:
    if hasattr(made, "iterrows"):  # a table of pandas, which would yield the names of its columns
        return made.to_dict("records")  # type: ignore[no-any-return]
    if isinstance(made, str | bytes) or not isinstance(made, Iterable):
        raise TypeError(f"it returned {type(made).__name__}, and must return or yield rows")
    return made


def _row(made: Any) -> Any:
    """Convert a `Problem` to the row that it would be read from, numpy's numbers to Python's, and nan to None.

    >>> import numpy
    >>> _row({"question": "1+1?", "answer": numpy.int64(2), "level": float("nan")})
    {'question': '1+1?', 'answer': 2, 'level': None}
    """
    if isinstance(made, dict):
        return {key: _value(value) for key, value in made.items()}
    if not isinstance(made, Problem):
        return made
    fields = asdict(made)
    return fields.pop("facts") | fields


def _value(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value  # an empty cell of a table


OVERSAMPLING = 2  # problems generated per problem requested, to find enough different ones


def make_gym(tasks: Sequence[str], n: int, seed: int) -> list[Problem]:
    """Make n different problems, of each task in turn; `ConfigError` where a task is unknown or has too few."""
    per_task = -(-n // len(tasks))
    columns = [_problems(task, per_task, seed) for task in tasks]
    return [problem for row in zip(*columns, strict=True) for problem in row][:n]


def _problems(task: str, n: int, seed: int) -> list[Problem]:
    """Make n problems of a task whose own answers its verifier accepts; others are skipped."""
    entry_at, score = _source(task, OVERSAMPLING * n, seed)
    problems: dict[str, Problem] = {}
    for index in range(OVERSAMPLING * n):
        entry = {"task": task, **entry_at(index)}
        question = entry["question"].strip()
        if question not in problems and _is_sound(entry, score):
            id, answer = f"{task}-{len(problems)}", json.dumps(entry)
            problems[question] = Problem(id, question, answer, facts={"source": task})
        if len(problems) == n:
            return list(problems.values())
    raise ConfigError(
        f"data.task={task}: of {OVERSAMPLING * n} problems only {len(problems)} are different and accepted by the "
        f"task's own verifier, and {n} were asked for: " + ("lower data.n_train" if problems else "choose another task")
    )


def _source(
    task: str, size: int, seed: int
) -> tuple[Callable[[int], dict[str, Any]], Callable[[str, dict[str, Any]], float]]:
    """Return (index -> entry, the task's verifier) from the package."""
    with required(f"data.task={task}", "reasoning_gym"):
        from reasoning_gym.factory import DATASETS, create_dataset, get_score_answer_fn
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS) or sorted(DATASETS)[:5]
        raise ConfigError(f"data.task={task} is no task of reasoning-gym: give one of its names, as {', '.join(near)}")
    try:
        return create_dataset(task, seed=seed, size=size).__getitem__, get_score_answer_fn(task)
    except Exception as error:  # every task has rules of its own for what it can make
        raise ConfigError(
            f"data.task={task} cannot make {size} problems ({error}): lower data.n_train, or choose another task"
        ) from error


def _is_sound(entry: dict[str, Any], score: Callable[[str, dict[str, Any]], float]) -> bool:
    """Whether the entry's own answer gets the full score after a round trip through JSON, as in grading."""
    try:
        sent = json.loads(json.dumps(entry))
        return float(score(sent["answer"].strip(), sent)) >= 1.0
    except Exception:  # not JSON, no answer, or a verifier that raises after the round trip
        return False
