"""What a finished sweep shows in the terminal: one line per run. It knows summaries, not torch or Hydra."""

import math
from dataclasses import dataclass
from typing import Any

JOB_OF_SWEEP = "RLREASON_JOB_OF_SWEEP"  # an environment variable, set for the processes that a sweep starts


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of a sweep: its folder's name and its `summary.json`."""

    name: str
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return float(self.summary.get("accuracy", math.nan))

    @property
    def failed(self) -> bool:
        return str(self.summary.get("status", "")).startswith("failed")


def arms_table(arms: list[Arm]) -> str:
    """One line per run, in the order they ran.

    >>> print(arms_table([Arm("lr=1", {"status": "failed (exit code 1)"})]))
    run     accuracy         length         status
    lr=1           -              -         failed (exit code 1)
    """
    width = max(6, *(len(arm.name) for arm in arms))
    rows = [f"{'run':{width}}  accuracy         length         status"]
    for arm in arms:
        s = arm.summary
        if "accuracy" in s:
            accuracy = f"{s['accuracy_before']:.3f} -> {s['accuracy']:.3f}"
            length = f"{s['length_before']:5.1f} -> {s['length']:5.1f}"
            rows.append(f"{arm.name:{width}}  {accuracy}   {length} {s['status']}")
        else:
            rows.append(f"{arm.name:{width}}         -              -         {s['status']}")
    return "\n".join(rows)
