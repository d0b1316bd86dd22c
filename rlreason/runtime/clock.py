"""Where the seconds of a run go: one phase at a time in the loop, so that they add up; and what others did meanwhile.

time/PHASE    seconds that the loop spent in it or waited for it; all phases together are the wall time
busy/PHASE    seconds of work in other threads, such as grading while sampling goes on
perf/...      tokens per second and FLOP utilisation of a phase
memory/...    peak of a phase on a GPU; of the process so far on a processor
"""

import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rlreason.runtime.throughput import ModelSize, Work, rates

SETUP, OTHER = "setup", "other"
#: Phases that are neither sampling nor learning.
RESTING = (SETUP, OTHER, "eval", "checkpoint", "profile")
GB = 1e9


class Clock:
    """Belongs to the thread that makes it, the loop's: there a phase is what is waited for, elsewhere it is work.

    `row` has what came since the row before, so a run's rows add up to its whole.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)  # time/... and busy/... so far
        self.work: dict[str, Work] = defaultdict(Work)  # phase -> all of it so far
        self.model: ModelSize | None = None  # by which FLOPs are counted; None: not at all
        self.gauge: Callable[[], float] | None = None  # peak bytes of a GPU since it was asked last
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext  # names phases in a trace
        self.peaks: dict[str, float] = {}  # phase -> bytes of a GPU, in this process
        self._told: dict[str, float] = {}  # of `seconds` in rows so far
        self._told_work: dict[str, Work] = {}
        self._told_peaks: dict[str, float] = {}  # of phases since the newest row
        self._owner = threading.get_ident()
        self._now = {self._owner: (SETUP, time.monotonic())}  # thread -> (phase, since when)
        self._guard = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens in this block counts as `name`, and no longer as the phase around it."""
        before = self._switch(name)
        try:
            with self.annotate(name):
                yield
        finally:
            self._switch(before)

    def begin(self, name: str = OTHER) -> None:
        """From here on, what stands in no block of a phase counts as `name`."""
        self._switch(name)

    def _switch(self, name: str | None) -> str | None:
        """End the phase of this thread, begin another; returns the one that ended. None: nothing is counted."""
        thread, now = threading.get_ident(), time.monotonic()
        before, since = self._now.get(thread, (None, now))
        if before is not None:
            with self._guard:
                self.seconds[self._key(thread, before)] += now - since
            if self.gauge is not None and thread == self._owner:
                peak = self.gauge()
                self.peaks[before] = max(peak, self.peaks.get(before, 0.0))
                self._told_peaks[before] = max(peak, self._told_peaks.get(before, 0.0))
        if name is None:
            self._now.pop(thread, None)
        else:
            self._now[thread] = name, now
        return before

    def _key(self, thread: int, phase: str) -> str:
        return f"time/{phase}" if thread == self._owner else f"busy/{phase}"

    def busy(self, name: str, seconds: float) -> None:
        """Another thread has worked for so long."""
        with self._guard:
            self.seconds[f"busy/{name}"] += seconds

    def parts_of(self, phase: str, told: Mapping[str, float]) -> dict[str, float]:
        """Take `time/PART` of what was told of a phase that has ended as a phase of its own; returns the rest."""
        for name, seconds in told.items():
            if name.startswith("time/") and name != f"time/{phase}":
                with self._guard:
                    self.seconds[f"time/{phase}"] -= seconds
                    self.seconds[name] += seconds
        return {name: value for name, value in told.items() if not name.startswith("time/")}

    def worked(self, name: str, work: Work) -> None:
        """Count what a phase has done."""
        with self._guard:
            self.work[name] = self.work[name].plus(work)

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the loop so far, the present one included."""
        found = {name[5:]: value for name, value in self._up_to_now().items() if name.startswith("time/")}
        return {name: value for name, value in found.items() if value > 0}

    def spent(self, phase: str) -> float:
        """Seconds of one phase of the loop so far."""
        return self._up_to_now().get(f"time/{phase}", 0.0)

    def total(self) -> float:
        """Seconds of everything."""
        return sum(self.phases().values())

    def active(self) -> float:
        """Seconds of sampling and learning, and of writing it down."""
        return sum(value for name, value in self.phases().items() if name not in RESTING)

    def _up_to_now(self) -> dict[str, float]:
        phase, since = self._now[self._owner]
        with self._guard:
            found = dict(self.seconds)
        found[f"time/{phase}"] = found.get(f"time/{phase}", 0.0) + time.monotonic() - since
        return found

    def row(self) -> dict[str, float]:
        """What came since the row before: seconds, tokens per second, peaks of memory."""
        seconds = self._up_to_now()
        with self._guard:
            work = dict(self.work)
        out = {name: value - self._told.get(name, 0.0) for name, value in seconds.items()}
        since = {name: done.plus(self._told_work.get(name, Work()).negative()) for name, done in work.items()}
        peaks = {f"memory/{phase}_peak_gb": peak / GB for phase, peak in self._told_peaks.items()}
        self._told, self._told_work, self._told_peaks = seconds, work, {}
        return {
            **{name: value for name, value in out.items() if value > 0},
            **rates(since, self.model),
            **(peaks if self.gauge is not None else {"memory/process_peak_gb": process_peak() / GB}),
        }

    def overall(self) -> dict[str, float]:
        """Tokens per second and utilisation of the whole run, as `perf/...`."""
        with self._guard:
            return rates(dict(self.work), self.model)

    def peak(self) -> float:
        """Bytes at most: of the GPU where it is measured, else of the process."""
        return max(self.peaks.values(), default=0.0) if self.gauge is not None else process_peak()

    def state(self) -> dict[str, dict[str, list[float]]]:
        """Everything counted so far and what of it stood in rows, in plain values."""
        names, work = self._up_to_now(), dict(self.work)
        return {
            "seconds": {name: [value, self._told.get(name, 0.0)] for name, value in names.items()},
            "work": {name: [*done, *self._told_work.get(name, Work())] for name, done in work.items()},
        }

    def put(self, state: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Go on from this state; what this process has spent so far comes on top and stands in no row yet."""
        for name, (value, told) in state["seconds"].items():
            self.seconds[name] += value
            self._told[name] = self._told.get(name, 0.0) + told
        for name, values in state["work"].items():
            half = len(values) // 2
            self.work[name] = self.work[name].plus(Work(values[0], *map(int, values[1:half])))
            self._told_work[name] = Work(values[half], *map(int, values[half + 1 :]))


def process_peak() -> float:
    """Bytes that this process has had in memory at most since it began (its peak resident set)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1.0 if sys.platform == "darwin" else 1024.0)
