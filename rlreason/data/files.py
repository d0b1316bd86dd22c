"""Problems from JSON-lines files or a hub data set: `question` and `answer`, the gold answer after `####`.

A row that cannot be used is named by file and line. It must not know tokenizers, prompts or graders.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.types import Problem


def load_folder_or_hub(path: str, name: str) -> tuple[list[Problem], list[Problem]]:
    """(train, test) from a folder with train.jsonl and test.jsonl, or from a hub data set of the same rows."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return tuple(
            list(read_problems(_lines(folder / f"{half}.jsonl"), f"{name}-{half}")) for half in ("train", "test")
        )  # type: ignore[return-value]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"data.path={path} is no folder here, and reading it from the hub needs the datasets package: "
            "pip install 'rlreason[hub]', or give a folder with train.jsonl and test.jsonl"
        ) from error
    try:
        halves = load_dataset(path, "main")
    except Exception as error:  # the hub client raises many kinds; all mean that it cannot be reached or read
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"data.path={path} cannot be read from the hub ({reason}): give a folder instead") from error
    train, test = (
        list(read_problems(((f"{path}/{half} row {i}", row) for i, row in enumerate(halves[half])), f"{name}-{half}"))
        for half in ("train", "test")
    )
    return train, test


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where} is not UTF-8: save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where} is not JSON ({error.msg}): mend or remove the line") from error


def read_problems(rows: Iterable[tuple[str, Any]], prefix: str) -> Iterator[Problem]:
    """Rows with `question` and `answer` -> problems; ids are `prefix-number`, counted from 0."""
    for number, (where, row) in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is no JSON object: each line must hold question and answer")
        for key in ("question", "answer"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise ConfigError(f"{where} has no text under {key!r}: each line must hold question and answer")
        solution, mark, gold = row["answer"].rpartition("####")
        gold = without_thousands_commas(gold.strip() if mark else row["answer"].strip())
        if not gold:
            raise ConfigError(f"{where} has nothing after '####': mend or remove the line")
        yield Problem(f"{prefix}-{number}", row["question"].strip(), gold, solution.strip() if mark else None)


def without_thousands_commas(gold: str) -> str:
    """A plain number without its thousands commas; anything else as it is.

    >>> without_thousands_commas("-1,234,567.5"), without_thousands_commas("(1,2)"), without_thousands_commas("1,2,3")
    ('-1234567.5', '(1,2)', '1,2,3')
    """
    return gold.replace(",", "") if re.fullmatch(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?", gold) else gold


def subset(problems: list[Problem], limit: int | None, seed: int) -> list[Problem]:
    """`limit` problems drawn by seed, nested: the first 128 are among the first 256. None takes all, in order."""
    if limit is None or limit >= len(problems):
        return problems
    order = list(range(len(problems)))
    random.Random(f"subset/{seed}").shuffle(order)
    return [problems[i] for i in order[:limit]]


def fingerprint(problems: Iterable[Problem]) -> str:
    """A short hash of questions and answers: two runs with the same one saw the same problems."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(f"{p.id}\x1f{p.question}\x1f{p.answer}\x1e".encode())
    return digest.hexdigest()[:12]
