"""What a person sees while a run goes on: a header, one row per evaluation, a live line, a closing table.

It knows numbers and text; it must not know tensors or algorithms.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

COLUMNS = ("step", "accuracy", "reward", "format", "length", "entropy", "grad", "time", "left")
ROW = "{:>9} {:>9} {:>7} {:>7} {:>7} {:>8} {:>7} {:>6} {:>6}"


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes.

    >>> clock(75), clock(3700)
    ('1:15', '1h01')
    """
    s = round(seconds)
    return f"{s // 3600}h{s % 3600 // 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


class Stopwatch:
    """Seconds per part of a step, as `time/NAME`."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """What was done since the last lap belongs to none."""
        self._last = time.monotonic()


class Console:
    """Rows for a person. On a terminal the newest step is shown in place; a log file gets rows only."""

    def __init__(self, n_steps: int = 0, out: TextIO | None = None) -> None:
        self.n_steps, self.out = n_steps, out or sys.stdout
        self.began: float | None = None
        self.live = self.out.isatty()
        self.accuracy = float("nan")

    def say(self, text: str = "") -> None:
        self._wipe()
        print(text, file=self.out, flush=True)

    def start(self) -> None:
        self.began = time.monotonic()
        self.say("\n" + ROW.format(*COLUMNS))

    def step(self, step: int, metrics: Mapping[str, float], keep: bool) -> None:
        """Show a step; `keep` makes it a lasting row, otherwise it is shown in place on a terminal only."""
        row = self._row(step, metrics)
        if keep:
            self.say(row)
        elif self.live:
            self.out.write("\r" + row)
            self.out.flush()

    def progress(self, text: str) -> None:
        """A line shown in place on a terminal, such as the warm start's loss."""
        if self.live:
            self.out.write("\r\033[K" + text)
            self.out.flush()

    def _row(self, step: int, m: Mapping[str, float]) -> str:
        spent = time.monotonic() - self.began if self.began is not None else 0.0
        left = clock(spent / step * (self.n_steps - step)) if step else ""
        numbers = [
            f"{m[key]:{form}}" if key in m else ""
            for key, form in (
                ("reward/mean", ".3f"),
                ("reward/format", ".3f"),
                ("rollout/length", ".1f"),
                ("train/entropy", ".3f"),
                ("train/grad_norm", ".3g"),
            )
        ]
        return ROW.format(f"{step}/{self.n_steps}", f"{self.accuracy:.3f}", *numbers, clock(spent), left)

    def _wipe(self) -> None:
        if self.live:
            self.out.write("\r\033[K")


def closing_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Start and end side by side; accuracy with its 95% interval over the validation problems."""
    each = f" x {n}" if (n := round(before["eval/samples"] / before["eval/problems"])) > 1 else ", sampled"
    asked = f"{before['eval/problems']:.0f} problems{each}"
    rows = [f"{asked:22} {'start':>20} {'end':>20}"]

    def interval(m: Mapping[str, Any]) -> str:
        return f"{m['eval/accuracy']:.3f} ({m['eval/accuracy_low']:.2f}-{m['eval/accuracy_high']:.2f})"

    rows.append(f"{'accuracy (95% int.)':22} {interval(before):>20} {interval(after):>20}")
    for label, key in (("format", "eval/format"), ("length, tokens", "eval/length"), ("truncated", "eval/truncated")):
        form = ".1f" if key.endswith("length") else ".3f"
        rows.append(f"{label:22} {before[key]:>20{form}} {after[key]:>20{form}}")
    return "\n".join(rows)
