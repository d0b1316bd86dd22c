"""Keep `sweep.json` up to date while a sweep runs, and print a line at each start and end of a run."""

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlreason.records.status import write_status, written_at
from rlreason.runtime.text import duration
from rlreason.sweeps.closing import SweepRun
from rlreason.sweeps.state import DOMINATED, WAITING, RunState, SweepState, keep_stopped, refreshed, write_state


def now() -> str:
    """Return the time in ISO 8601 with the offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


class Board:
    """Keep the state of a sweep up to date, in `sweep.json` and on the terminal.

    `side_by_side`: the most runs at a time, for the estimate of the time left.
    """

    def __init__(
        self, state: SweepState, folder: Path, side_by_side: int, say: Callable[[str], object] = print
    ) -> None:
        self.state, self.folder, self.side_by_side, self._say = state, folder, side_by_side, say
        self._began: dict[str, float] = {}  # running ones, on the monotonic clock
        self._status_at: dict[str, int | None] = {}  # when their status had last been written at the start
        self._seconds: list[float] = []  # of those that ended in this process
        self.write()

    def write(self) -> None:
        """Write `sweep.json`."""
        write_state(self.folder, self.state)

    def running(self) -> list[str]:
        """Return the names of the runs in progress."""
        return list(self._began)

    def skipped(self, run: RunState) -> None:
        """Print that a run had finished before, or belongs to a stopped setting."""
        why = "its setting was stopped, not run" if run.status == DOMINATED else "finished before, not run again"
        self._say(f"\n== {run.name}: {why}")

    def begun(self, name: str, gpus: Sequence[str] = ()) -> None:
        """Record that a run has started. `gpus`: reserved for it."""
        run = self.state.run(name)
        run.status, run.reason, run.started, run.ended = "running", "", run.started or now(), None
        run.gpus = list(gpus)
        self._began[name], self._status_at[name] = time.monotonic(), written_at(self.folder / name)
        if len(self._began) > 1:
            for other in self._began:
                self.state.run(other).shared_machine = True
        self.write()
        others = len(self._began) - 1
        on = f" on GPU {', '.join(gpus)}" if gpus else ""
        if self.side_by_side == 1:
            self._say(f"\n== {name}{on}")
        else:
            self._say(f"== {name}: started{on}" + f", beside {others} more" * bool(others))

    def message(self, text: str) -> None:
        """Print a line about the whole sweep."""
        self._say(text)

    def ended(self, outcome: SweepRun) -> None:
        """Record that a run has ended; its figures are read from its folder."""
        run = self.state.run(outcome.name)
        seconds = time.monotonic() - self._began.pop(run.name, time.monotonic())
        before, run.seconds = run.seconds or 0.0, None
        refreshed(run, self.folder)
        run.seconds, run.ended = round(before + seconds, 1), now()
        if not outcome.failed and run.status == WAITING:  # its folder is on another machine
            run.status = outcome.status
        elif outcome.failed:
            recorded = run.reason if written_at(self.folder / run.name) != self._status_at.get(run.name) else ""
            bare = outcome.reason.startswith("exit code") and ":" not in outcome.reason
            reason = f"{outcome.reason}: {recorded}" if bare and recorded else outcome.reason or recorded
            run.status, run.reason = outcome.status, reason
        if run.of_its_own:
            self._seconds.append(seconds)
        self.write()
        self._say(f"== {run.name}: {outcome_text(run)}; {self.progress()}")

    def stop_settings(self, stops: list[dict[str, Any]]) -> list[str]:
        """Record settings to stop, as `SweepState.stopped_settings`; return the names of their live runs."""
        new = [one for one in stops if one["setting"] not in [old["setting"] for old in self.state.stopped_settings]]
        self.state.stopped_settings += new
        live = [
            r.name for r in self.state.runs if r.name in self._began and any(r.setting == n["setting"] for n in new)
        ]
        for one in new:
            setting = " ".join(f"{key}={value}" for key, value in one["setting"].items())
            self._say(f"! {setting} is stopped, with all its seeds: {one.get('reason', '')}")
        if new:
            keep_stopped(self.state)
            for name in live:  # until they have ended
                self.state.run(name).status = "running"
            self.write()
        return live

    def stopped(self, name: str) -> None:
        """Record that a run of a stopped setting has ended, also in its folder, unless it reached its own end first."""
        run = self.state.run(name)
        began = self._began.pop(name, time.monotonic())
        run.seconds, run.ended = round((run.seconds or 0.0) + time.monotonic() - began, 1), now()
        run.status = "interrupted"
        refreshed(run, self.folder)
        keep_stopped(self.state)
        place = self.folder / name
        if run.status == DOMINATED and place.is_dir():
            write_status(place, DOMINATED, run.reason)
        self.write()
        self._say(f"== {name}: {outcome_text(run)}; {self.progress()}")

    def progress(self) -> str:
        """Return the progress of the sweep, such as "3 of 10 done, about 4 min left"."""
        done = sum(run.of_its_own or run.status == "failed" for run in self.state.runs)
        left = len(self.state.runs) - done
        text = f"{done} of {len(self.state.runs)} done"
        if not left or not self._seconds:
            return text
        each = sum(self._seconds) / len(self._seconds)
        running = sum(min(each, time.monotonic() - began) for began in self._began.values())
        return f"{text}, about {duration(max(0.0, each * left - running) / min(left, self.side_by_side))} left"

    def finish(self, status: str) -> None:
        """Record the final status of the sweep."""
        self.state.status = status
        self.write()


def outcome_text(run: RunState) -> str:
    """Return the outcome of a run in a few words.

    >>> outcome_text(RunState("seed=0", [], {}, 0, "finished", accuracy=0.5, accuracy_before=0.25))
    'accuracy 0.250 -> 0.500, finished'
    """
    if run.score is not None:
        return f"score {run.score:g}, {run.status_text}"
    if run.accuracy is None:
        return run.status_text
    before = "" if run.accuracy_before is None else f"{run.accuracy_before:.3f} -> "
    return f"accuracy {before}{run.accuracy:.3f}, {run.status_text}"
