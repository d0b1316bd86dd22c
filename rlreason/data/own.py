"""Problems that a function of the user's own makes, as rows like those of a file."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from rlreason.config.ranges import MADE
from rlreason.config.tasks import FunctionDataConfig
from rlreason.data.files import Row
from rlreason.errors import ConfigError, DataError
from rlreason.plugins.load import described, load
from rlreason.types import Problem

SPLITS = {"train"}, {"train", "validation"}


def rows_of(data: FunctionDataConfig) -> dict[str, list[Row]]:
    """The rows of "train" and, where the function makes them apart, of "validation".

    `DataError` where it fails or returns something else, `ConfigError` where data.n_validation asks to hold out rows
    of what is split already.
    """
    said = f"data.function={data.function}"
    try:
        made = load(data.function)(**data.options)
        splits = dict(made) if isinstance(made, Mapping) else {"train": made}
        if set(splits) not in SPLITS:
            raise DataError(
                f"{said} returned {', '.join(map(repr, splits)) or 'nothing'}: return rows, or a dictionary "
                "of rows with the keys train and validation"
            )
        rows = {label: list(islice(_iterable(splits[label]), MADE + 1)) for label in sorted(splits)}
    except DataError:
        raise
    except Exception as error:  # whatever a stranger's function does
        raise DataError(f"{said} fails: {described(error)}: fix it") from error
    if any(len(found) > MADE for found in rows.values()):
        raise DataError(f"{said} returned more than {MADE} rows, or never ends: return fewer")
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
    """A `Problem` as the row that it would be read from; numbers of numpy as Python's, and one that is none as absent.

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
    return None if isinstance(value, float) and math.isnan(value) else value  # a table's empty cell
