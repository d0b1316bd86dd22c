"""Compare two runs bit for bit: metrics, responses, weights, summary, checkpoints; only times may differ."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

CLOCKS = ("time/", "busy/", "perf/", "memory/", "grading/ms_")  # prefixes of times and rates
OF_THE_MACHINE = ("seconds", "phases", "peak_gb", "threads", "checkpoints")  # in a summary


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics without times and rates."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKS)} for line in lines]


def responses_of(run: Path) -> dict[str, bytes]:
    """Return file -> content of every file of responses."""
    return {str(p.relative_to(run)): p.read_bytes() for kind in ("rollouts", "evals") for p in (run / kind).glob("*")}


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file of responses."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def append(path: Path, more: bytes) -> None:
    """Add to the end of a file of lines, compressed or not."""
    with gzip.open(path, "ab") if path.suffix == ".gz" else path.open("ab") as file:
        file.write(more)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the lines of a file of responses."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def weights_of(run: Path) -> dict[str, bytes]:
    """Return weight -> bytes of the saved model."""
    return {name: w.numpy().tobytes() for name, w in load_file(run / "model" / "model.safetensors").items()}


def summary_of(run: Path) -> dict[str, Any]:
    """Return the summary without times and the machine."""
    summary = json.loads((run / "summary.json").read_text())
    (summary.get("start") or {}).pop("seconds", None)  # that making the start model took
    return {k: v for k, v in summary.items() if not k.startswith(CLOCKS) and k not in OF_THE_MACHINE}


def states_of(run: Path) -> dict[str, dict[str, bytes]]:
    """Return file -> tensor -> bytes of every checkpoint, such as the optimizer's moments."""
    states = {}
    for path in run.glob("checkpoints/step_*/*.safetensors"):
        tensors = load_file(path)
        states[f"{path.parent.name}/{path.name}"] = {key: t.numpy().tobytes() for key, t in tensors.items()}
    return states


def differences(one: Path, other: Path) -> list[str]:
    """Describe how two finished runs differ; empty if they are equal bit for bit."""
    lines = []
    a, b = rows_of(one), rows_of(other)
    if len(a) != len(b):
        lines.append(f"{len(a)} rows of metrics and {len(b)}")
    for number, (row, twin) in enumerate(zip(a, b, strict=False), 1):
        keys = [key for key in row.keys() | twin.keys() if row.get(key) != twin.get(key)]
        lines += [f"row {number}: {key} is {row.get(key)} and {twin.get(key)}" for key in sorted(keys)]
    texts, others = responses_of(one), responses_of(other)
    lines += [name for name in sorted(texts.keys() | others.keys()) if texts.get(name) != others.get(name)]
    if weights_of(one) != weights_of(other):
        lines.append("the weights differ")
    a, b = summary_of(one), summary_of(other)
    lines += [f"summary: {k} is {a.get(k)} and {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    states, others = states_of(one), states_of(other)
    lines += [f"the tensors of {name} differ" for name in states.keys() & others.keys() if states[name] != others[name]]
    return lines
