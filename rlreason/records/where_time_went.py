"""What a run's clock has counted, for the summary and for a person."""

from collections.abc import Mapping
from typing import Any

from rlreason.runtime.clock import GB, Clock

SHOWN = 4  # phases that a person is told


def where_time_went(clock: Clock) -> dict[str, Any]:
    """For `summary.json`: seconds, and those of each phase; tokens per second; peak of memory in GB."""
    return {
        "seconds": round(clock.total(), 1),
        "phases": {name: round(value, 3) for name, value in clock.phases().items()},
        **{name: round(value, 4) for name, value in clock.overall().items()},
        "peak_gb": round(clock.peak() / GB, 3),
    }


def time_line(summary: Mapping[str, Any]) -> str:
    """The same in a sentence; empty where the summary has none of it.

    >>> time_line({"phases": {"train": 6.0, "rollout": 3.0, "other": 1.0}, "peak_gb": 1.25,
    ...            "perf/train_tokens_per_second": 1200.0, "perf/train_mfu": 0.31})
    'time       train 60%, rollout 30%, other 10%; train 1200 tokens/s (31% of peak FLOPs); memory 1.2 GB'
    """
    phases: Mapping[str, float] = summary.get("phases", {})
    total = sum(phases.values())
    if not total:
        return ""
    longest = sorted(phases.items(), key=lambda item: -item[1])[:SHOWN]
    said = [", ".join(f"{name} {value / total:.0%}" for name, value in longest)]
    for name in ("rollout", "train"):
        if (speed := summary.get(f"perf/{name}_tokens_per_second")) is not None:
            used = summary.get(f"perf/{name}_mfu")
            said.append(f"{name} {speed:.0f} tokens/s" + (f" ({used:.0%} of peak FLOPs)" if used is not None else ""))
    return "; ".join([f"time       {said[0]}", *said[1:], f"memory {summary['peak_gb']:.1f} GB"])
