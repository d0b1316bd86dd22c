"""What a finished sweep shows in the terminal: one line per run."""

import math
from dataclasses import dataclass
from typing import Any

from rlreason.evaluation.protocol import refuse_mixture
from rlreason.records.status import ending, known


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep: its folder's name, its `summary.json`, or a status alone with the reason for it."""

    name: str
    summary: dict[str, Any]
    reason: str = ""

    @property
    def accuracy(self) -> float:
        """The final validation accuracy; nan where there is none."""
        accuracy = self.summary.get("accuracy")
        return math.nan if accuracy is None else float(accuracy)  # null: weights that are no numbers have none

    @property
    def status(self) -> str:
        """A status of `records.status.STATUSES`."""
        return known(str(self.summary.get("status", "")))

    @property
    def failed(self) -> bool:
        """Whether the run did not come to an end of its own."""
        return not ending(self.status).of_its_own

    @property
    def shown(self) -> str:
        """Its status in the table."""
        return str(self.summary["status"]) + f" ({self.reason})" * bool(self.reason)


def runs_table(arms: list[SweepRun]) -> str:
    """One line per run, in the order they ran, named by the overrides in which the runs differ.

    >>> print(runs_table([SweepRun("lr=1", {"status": "failed"}, "exit code 1")]))
    run     accuracy         length         status
    lr=1           -              -         failed (exit code 1)
    """
    parts = [arm.name.split(",") for arm in arms]
    shared = set(parts[0]).intersection(*parts) if len(arms) > 1 else set()
    names = [",".join(p for p in own if p not in shared) or arm.name for own, arm in zip(parts, arms, strict=True)]
    width = max(6, *map(len, names))
    rows = [f"{'run':{width}}  accuracy         length         status"]
    for name, arm in zip(names, arms, strict=True):
        s = arm.summary
        if "accuracy_before" in s:
            accuracy = f"{s['accuracy_before']:.3f} -> {arm.accuracy:.3f}"
            length = f"{s['length_before']:5.1f} -> {s['length']:5.1f}"
            rows.append(f"{name:{width}}  {accuracy}   {length} {arm.shown}")
        elif "accuracy" in s:  # a job that does not train
            rows.append(f"{name:{width}}           {s['accuracy']:.3f}            {s['length']:5.1f} {arm.shown}")
        else:
            rows.append(f"{name:{width}}         -              -         {arm.shown}")
    protocols = {
        name: arm.summary["protocol"] for name, arm in zip(names, arms, strict=True) if "protocol" in arm.summary
    }
    if protocols:
        mixed = refuse_mixture(protocols, allow=True)
        hashes = ", ".join(dict.fromkeys(p["hash"] for p in protocols.values()))
        rows += [f"protocol {hashes}", *(f"! {line}" for line in mixed)]
    return "\n".join(rows)
