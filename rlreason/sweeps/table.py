"""The table of a finished sweep in the terminal: one line per run."""

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
        """The accuracy of the last evaluation; not a number where the summary has none."""
        accuracy = self.summary.get("accuracy")
        return math.nan if accuracy is None else float(accuracy)  # null: weights that are no numbers have none

    @property
    def status(self) -> str:
        """How the run ended: a status of `records.status.STATUSES`."""
        return known(str(self.summary.get("status", "")))

    @property
    def failed(self) -> bool:
        """Whether the run did not come to an end of its own."""
        return not ending(self.status).of_its_own

    @property
    def shown(self) -> str:
        """The status as the table shows it, with the reason."""
        return str(self.summary["status"]) + f" ({self.reason})" * bool(self.reason)


def runs_table(runs: list[SweepRun]) -> str:
    """One line per run, in the order they ran, named by the overrides in which the runs differ.

    >>> print(runs_table([SweepRun("lr=1", {"status": "failed"}, "exit code 1")]))
    run     accuracy         length         status
    lr=1           -              -         failed (exit code 1)
    """
    parts = [run.name.split(",") for run in runs]
    shared = set(parts[0]).intersection(*parts) if len(runs) > 1 else set()
    names = [",".join(p for p in own if p not in shared) or run.name for own, run in zip(parts, runs, strict=True)]
    width = max(6, *map(len, names))
    rows = [f"{'run':{width}}  accuracy         length         status"]
    for name, run in zip(names, runs, strict=True):
        s = run.summary
        if "accuracy_before" in s:
            accuracy = f"{s['accuracy_before']:.3f} -> {run.accuracy:.3f}"
            length = f"{s['length_before']:5.1f} -> {s['length']:5.1f}"
            rows.append(f"{name:{width}}  {accuracy}   {length} {run.shown}")
        elif "accuracy" in s:  # a job that does not train
            rows.append(f"{name:{width}}           {s['accuracy']:.3f}            {s['length']:5.1f} {run.shown}")
        else:
            rows.append(f"{name:{width}}         -              -         {run.shown}")
    protocols = {
        name: run.summary["protocol"] for name, run in zip(names, runs, strict=True) if "protocol" in run.summary
    }
    if protocols:
        mixed = refuse_mixture(protocols, allow=True)
        hashes = ", ".join(dict.fromkeys(p["hash"] for p in protocols.values()))
        rows += [f"protocol {hashes}", *(f"! {line}" for line in mixed)]
    return "\n".join(rows)
