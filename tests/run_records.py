"""Compare two runs bit for bit: metrics, responses, weights, summary, checkpoints; only times may differ."""

import gzip
import json
from pathlib import Path
from typing import Any

CLOCKS = ("time/", "busy/", "perf/", "memory/", "grading/ms_")  # prefixes of times and rates
OF_THE_MACHINE = ("seconds", "phases", "peak_gb", "threads", "checkpoints")  # in a summary


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics without times and rates."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKS)} for line in lines]


def responses_of(run: Path) -> dict[str, bytes]:
    """Return file -> content of every file of responses."""
    files = [path for kind in ("rollouts", "evals") for path in (run / kind).rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file of responses."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def append(path: Path, more: bytes) -> None:
    """Add to the end of a file of lines, compressed or not."""
    with gzip.open(path, "ab") if path.suffix == ".gz" else path.open("ab") as file:
        file.write(more)


def summary_of(run: Path) -> dict[str, Any]:
    """Return the summary without times and the machine."""
    summary = json.loads((run / "summary.json").read_text())
    (summary.get("start") or {}).pop("seconds", None)  # that making the start model took
    return {k: v for k, v in summary.items() if not k.startswith(CLOCKS) and k not in OF_THE_MACHINE}


def tensors_of(run: Path) -> dict[str, dict[str, bytes]]:
    """Return file -> tensor -> bytes of the saved model and of every checkpoint, such as the optimizer's moments."""
    from safetensors.torch import load_file  # which imports torch

    files = [run / "model/model.safetensors", *run.glob("checkpoints/step_*/*.safetensors")]
    return {str(p.relative_to(run)): {key: t.numpy().tobytes() for key, t in load_file(p).items()} for p in files}


def differences(one: Path, other: Path) -> list[str]:
    """Describe how two finished runs differ; empty if they are equal bit for bit."""
    a, b = rows_of(one), rows_of(other)
    lines = [f"{len(a)} rows of metrics and {len(b)}"] * (len(a) != len(b))
    pairs = [(f"row {number}", *rows) for number, rows in enumerate(zip(a, b, strict=False), 1)]
    pairs.append(("responses", responses_of(one), responses_of(other)))
    pairs.append(("summary", summary_of(one), summary_of(other)))
    for what, then, now in pairs:
        lines += [f"{what}: {key} differs" for key in sorted(then | now) if then.get(key) != now.get(key)]
    states, others = tensors_of(one), tensors_of(other)
    return lines + [
        f"the tensors of {name} differ" for name in states.keys() & others.keys() if states[name] != others[name]
    ]
