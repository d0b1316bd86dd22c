"""Whether two runs came out the same: their metrics, their responses and their weights, bit for bit."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.records import files
from rlreason.records.lines import PACKED, opened
from rlreason.records.reader import RunFolder

#: Metrics that a clock decides. Nothing else may differ between two runs of the same words on the same machine.
CLOCK = re.compile(r"time/|busy/|perf/|memory/|grading/ms_|eval/tokens_per_second")


class Compared(NamedTuple):
    """Of one kind of record: whether it is the same in both runs, None where one of them has none, and a sentence."""

    kind: str
    equal: bool | None
    said: str


def compared(one: RunFolder, other: RunFolder) -> list[Compared]:
    """Metrics, responses and weights of two runs; each is said in a sentence of its own."""
    return [_metrics(one.metrics, other.metrics), _responses(one.path, other.path), _weights(one.model, other.model)]


def without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics without what a clock decides.

    >>> without_clock({"train/loss": 0.5, "time/total": 3.0, "grading/ms_p99": 1.0})
    {'train/loss': 0.5}
    """
    return {name: value for name, value in row.items() if not CLOCK.match(name)}


def first_difference(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """(number of the row, name of the metric) where two lists of rows first differ, as far as both go; None: nowhere.

    >>> first_difference([{"a": 1.0}, {"a": 1.0, "b": 2.0}], [{"a": 1.0}, {"a": 1.0, "b": 3.0}, {}])
    (2, 'b')
    """
    for number, (a, b) in enumerate(zip(one, other, strict=False), 1):
        for name in dict.fromkeys((*a, *b)):
            if (name in a) != (name in b) or a[name] != b[name]:
                return number, name
    return None


def _metrics(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Compared:
    a, b = [without_clock(row) for row in one], [without_clock(row) for row in other]
    if not a or not b:
        return Compared("metrics", None, "metrics: one of the two has no rows")
    if (found := first_difference(a, b)) is not None:
        number, name = found
        values = f"{a[number - 1].get(name)} then, {b[number - 1].get(name)} now"
        return Compared("metrics", False, f"metrics differ from row {number} on: {name} was {values}")
    if len(a) != len(b):
        shared = min(len(a), len(b))
        return Compared("metrics", False, f"metrics: {len(a)} rows then, {len(b)} now; the first {shared} are equal")
    return Compared("metrics", True, f"metrics are equal ({len(a)} rows)")


def _responses(one: Path, other: Path) -> Compared:
    a, b = _response_files(one), _response_files(other)
    if not a or not b:
        return Compared("responses", None, "responses: one of the two has none")
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return Compared("responses", False, f"responses differ: only one has {name}")
        if (line := _first_line(a[name], b[name])) is not None:
            return Compared("responses", False, f"responses differ from line {line} of {name} on")
    return Compared("responses", True, f"responses are equal (files: {len(a)})")


def _response_files(folder: Path) -> dict[str, Path]:
    """The files of responses by their names in the run folder, compressed or not."""
    found = [file.path for kind in (files.ROLLOUTS, files.EVALS) for file in files.response_files(folder, kind)]
    if (whole := folder / files.RESPONSES).is_file():
        found.append(whole)
    return {str(path.relative_to(folder)).removesuffix(PACKED): path for path in found}


def _first_line(one: Path, other: Path) -> int | None:
    """The number of the first line in which two files differ; None where they are equal."""
    with opened(one) as a, opened(other) as b:
        for number, (line, twin) in enumerate(zip_longest(a, b), 1):
            if line != twin:
                return number
    return None


def _weights(one: Path | None, other: Path | None) -> Compared:
    if one is None or other is None:
        return Compared("weights", None, "weights: not compared, since one of the two has saved none (save_model=true)")
    a, b = weights_digest(one), weights_digest(other)
    if a == b:
        return Compared("weights", True, f"weights are equal ({a})")
    return Compared("weights", False, f"weights differ: {a} then, {b} now")


def weights_digest(model: Path) -> str:
    """8 hex digits of every byte of a model folder's safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        digest.update(f"{path.name}\0".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()[:8]
