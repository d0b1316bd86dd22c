"""Compare what two runs of the same settings have left: metrics, responses and weights, bit for bit."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlreason.records.files import EVALS, PACKED, RESPONSES, ROLLOUTS, opened, response_files
from rlreason.records.reader import RunFolder

#: Metrics that depend on time. Nothing else may differ between two runs of the same settings on the same machine.
CLOCK = re.compile(r"time/|busy/|perf/|memory/|grading/ms_|eval/tokens_per_second")


def compared(one: RunFolder, other: RunFolder) -> tuple[dict[str, bool | None], list[str]]:
    """Return of metrics, responses and weights whether both runs agree (None if one has none), and a sentence each."""
    equal, said = dict[str, bool | None](), list[str]()
    for kind, contents in (("metrics", metrics), ("responses", responses), ("weights", weights)):
        then, now = contents(one), contents(other)
        different = [key for key in then | now if key not in then or key not in now or then[key] != now[key]]
        equal[kind] = not different if then and now else None
        if not then or not now:
            said.append(f"{kind}: one of the two has none")
        elif different:
            key = different[0]
            said.append(f"{kind} differ: {key} was {then.get(key)} then, {now.get(key)} now")
        else:
            said.append(f"{kind} are equal ({len(then)} {'numbers' if kind == 'metrics' else 'files'})")
    return equal, said


def without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics without those that depend on time.

    >>> without_clock({"train/loss": 0.5, "time/total": 3.0, "grading/ms_p99": 1.0})
    {'train/loss': 0.5}
    """
    return {name: value for name, value in row.items() if not CLOCK.match(name)}


def metrics(run: RunFolder) -> dict[str, Any]:
    """Return the run's metrics by row and name, in order."""
    rows = enumerate(map(without_clock, run.metrics), 1)
    return {f"row {number}'s {name}": value for number, row in rows for name, value in row.items()}


def responses(run: RunFolder) -> dict[str, str]:
    """Return a digest of each file of responses, by its name in the run folder, packed or not."""
    found = [file.path for kind in (ROLLOUTS, EVALS) for file in response_files(run.path, kind)]
    found += [run.path / RESPONSES] if (run.path / RESPONSES).is_file() else []
    return {str(path.relative_to(run.path)).removesuffix(PACKED): _digest(path) for path in found}


def weights(run: RunFolder) -> dict[str, str]:
    """Return a digest of each file of the saved model's weights, by its name."""
    return {path.name: _digest(path) for path in sorted(run.model.glob("*.safetensors"))} if run.model else {}


def _digest(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]  # type: ignore[arg-type]  # of a packed file too
