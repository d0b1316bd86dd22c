"""The status of a run, its exit code, and a summary of its time."""

import errno
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError, ResourceError, UnwritableError
from rlreason.records.files import STATUS, SUMMARY
from rlreason.runtime.clock import GB, Clock
from rlreason.runtime.files import write_whole
from rlreason.runtime.text import redacted


class Ending(NamedTuple):
    """The meaning of a status. `of_its_own`: the run ended as its settings provide and left a `summary.json`."""

    meaning: str
    exit_code: int | None
    of_its_own: bool


STATUSES: dict[str, Ending] = {
    "running": Ending("under way, or killed without a chance to say so", None, False),
    "finished": Ending("all steps done", 0, True),
    "stopped": Ending("ended by a rule that was asked for, as stopped:RULE", 0, True),
    "budget": Ending("ended because its hours, tokens or steps were spent", 0, True),
    "diverged": Ending("the loss, the weights or the accuracy went astray, as diverged:RULE", 5, True),
    "interrupted": Ending("stopped by a signal", 130, False),
    "failed": Ending("anything else went wrong", 1, False),
}


RESOURCES = ResourceError.exit_code
SHORTAGES = ("can't allocate memory", "CUDA error: out of memory", "No space left on device")  # in libraries' errors


def ending(status: str) -> Ending:
    """Return the row of a status, whatever its rule.

    >>> ending("diverged:loss").exit_code, ending("finished").of_its_own
    (5, True)
    """
    return STATUSES[status.partition(":")[0]]


def known(status: str) -> str:
    """Return the status if it is in the table, else `failed`.

    >>> known("diverged:loss"), known("")
    ('diverged:loss', 'failed')
    """
    return status if status.partition(":")[0] in STATUSES else "failed"


def read_status(folder: Path) -> str | None:
    """Return the status in a run's `status.json`, else in its `summary.json`; None where neither can be read."""
    for name in (STATUS, SUMMARY):
        with suppress(OSError, ValueError, AttributeError):  # a file that is not there, or broken
            return known(str(json.loads((folder / name).read_text(encoding="utf-8")).get("status", "")))
    return None


def read_ending(folder: Path) -> dict[str, str]:
    """Return when and how the run ended: {"ended", "status", "reason"}; {} while it runs, or if it was killed."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        row = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        if row["status"] != "running":
            return {"ended": str(row["time"]), "status": str(row["status"]), "reason": str(row["reason"])}
    return {}


def written_at(folder: Path) -> int | None:
    """Return when the folder's status was last written, in nanoseconds; None where it has none."""
    path = folder / STATUS
    return path.stat().st_mtime_ns if path.exists() else None


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that ended with this error.

    >>> exit_code(KeyboardInterrupt()), exit_code(ConfigError("a wrong word")), exit_code(MemoryError())
    (130, 2, 4)
    """
    if isinstance(error, ConfigError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return getattr(error, "exit_code", 130)
    return RESOURCES if _is_shortage(error) else 1


def _is_shortage(error: BaseException) -> bool:
    """Whether memory or disk ran out. Errors of torch and safetensors are recognised by name or text."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
    return any(words in str(error) for words in SHORTAGES)


def write_status(folder: Path, status: str, reason: str = "") -> None:
    """Replace `status.json`: {"status", "reason", "time"}."""
    assert ending(status)
    row = {"status": status, "reason": redacted(reason), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    path, text = folder / STATUS, json.dumps(row, indent=2) + "\n"
    try:
        write_whole(path, text)
    except UnwritableError:
        if not path.exists():
            raise
        with path.open("r+", encoding="utf-8") as file:  # a full disk still has the space of the old one
            file.write(text)
            file.truncate()


def sweep_code(statuses: Sequence[str]) -> int:
    """Return a sweep's exit code: 0 when every run ended by itself, 130 when interrupted, else 1.

    >>> sweep_code(["finished", "diverged:loss"]), sweep_code(["finished", "failed"])
    (0, 1)
    """
    if any(status == "interrupted" for status in statuses):
        return 130
    return 0 if all(ending(status).of_its_own for status in statuses) else 1


PHASES_IN_LINE = 4


def time_summary(clock: Clock) -> dict[str, Any]:
    """Return seconds, also of each phase, tokens per second and the peak of memory in GB, for `summary.json`."""
    return {
        "seconds": round(clock.total(), 1),
        "phases": {name: round(value, 3) for name, value in clock.phases().items()},
        **{name: round(value, 4) for name, value in clock.overall().items()},
        "peak_gb": round(clock.peak() / GB, 3),
    }


def time_line(summary: Mapping[str, Any]) -> str:
    """Return the same as a line; empty where the summary has none of it.

    >>> time_line({"phases": {"train": 6.0, "rollout": 3.0, "other": 1.0}, "peak_gb": 1.25,
    ...            "perf/train_tokens_per_second": 1200.0, "perf/train_mfu": 0.31})
    'time       train 60%, rollout 30%, other 10%; train 1200 tokens/s (31% of peak FLOPs); memory 1.2 GB'
    """
    phases: Mapping[str, float] = summary.get("phases", {})
    total = sum(phases.values())
    if not total:
        return ""
    longest = sorted(phases.items(), key=lambda item: -item[1])[:PHASES_IN_LINE]
    parts = [", ".join(f"{name} {value / total:.0%}" for name, value in longest)]
    for name in ("rollout", "train"):
        if (speed := summary.get(f"perf/{name}_tokens_per_second")) is not None:
            used = summary.get(f"perf/{name}_mfu")
            parts.append(f"{name} {speed:.0f} tokens/s" + (f" ({used:.0%} of peak FLOPs)" if used is not None else ""))
    return "; ".join([f"time       {parts[0]}", *parts[1:], f"memory {summary['peak_gb']:.1f} GB"])
