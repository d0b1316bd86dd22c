"""Measure the seconds of a run by phase, and the work that each phase has done."""

import operator
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import yaml


def peak_tflops(gpu: str) -> float | None:
    """Return the peak dense bfloat16 TFLOP/s of a GPU of this name; None where unknown.

    >>> peak_tflops("NVIDIA A100-SXM4-40GB"), peak_tflops("NVIDIA L40S"), peak_tflops("NVIDIA L40")
    (312.0, 362.0, None)
    >>> peak_tflops("NVIDIA GeForce RTX 4090 Laptop GPU"), peak_tflops("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    (None, None)
    """
    words = f" {gpu.replace('-', ' ')} "
    if any(f" {other} " in words for other in ("Laptop", "MIG", "D")):  # another chip, or part of one
        return None
    table = yaml.safe_load(Path(__file__).with_name("peak_tflops.yaml").read_text(encoding="utf-8"))
    return next((peak for part, peak in table.items() if f" {part} " in words), None)


class ModelSize(NamedTuple):
    """The sizes from which FLOPs are computed, and the peak for their utilisation."""

    parameters: int  # of matrix products: without an input embedding that is not also the output layer
    layers: int
    width: int  # of all heads together
    peak_tflops: float | None = None  # of the device; None: not known
    ranks: int = 1  # devices that train, each with that peak


class Work(NamedTuple):
    """The work of a phase. A backward pass costs twice its forward pass: training counts positions three times."""

    seconds: float = 0.0
    tokens: int = 0  # response tokens sampled, or tokens trained on
    positions: int = 0  # through the model, prompts included
    contexts: int = 0  # the sum over positions of the positions attended to

    def plus(self, other: "Work") -> "Work":
        """Return the sum of this work and the other."""
        return Work(*map(operator.add, self, other))


def group_work(prompt: int, responses: Iterable[int], passes: int = 1) -> Work:
    """Return the work of one prompt with its responses, from their lengths in tokens; the prompt counts once.

        positions   P + sum_i R_i
        contexts    P (P + 1) / 2 + sum_i (R_i P + R_i (R_i + 1) / 2)

    passes: 1 forward, 3 with the backward pass.

    >>> group_work(2, [1, 3])
    Work(seconds=0.0, tokens=4, positions=6, contexts=18)
    >>> group_work(2, [1, 3], passes=3).positions
    18
    """
    lengths = list(responses)
    contexts = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in lengths)
    tokens = sum(lengths)
    return Work(0.0, tokens, passes * (prompt + tokens), passes * contexts)


def flops(work: Work, model: ModelSize) -> float:
    """Return the FLOPs of the work: 2 N for each position, 4 L d for each pair of a position and one it attends to.

    With the backward pass that is 6 N a token and 12 L d a pair. What a program computes twice (a prompt repeated,
    activations of a checkpointed layer) does not count.

    >>> flops(Work(positions=10, contexts=55), ModelSize(1000, layers=2, width=8))
    23520.0
    """
    return 2.0 * model.parameters * work.positions + 4.0 * model.layers * model.width * work.contexts


def rates(work: Mapping[str, Work], model: ModelSize | None) -> dict[str, float]:
    """Return `perf/PHASE_tokens_per_second` and, where the device's peak is known, `perf/PHASE_mfu`, a share of 1.

    >>> rates({"train": Work(2.0, 100, 300, 0)}, ModelSize(10**9, 1, 1, peak_tflops=1.0))
    {'perf/train_tokens_per_second': 50.0, 'perf/train_mfu': 0.3}
    """
    out = {}
    for phase, done in work.items():
        if done.seconds <= 0 or not done.tokens:
            continue
        out[f"perf/{phase}_tokens_per_second"] = done.tokens / done.seconds
        if model is not None and model.peak_tflops is not None:
            peak = 1e12 * model.peak_tflops * (model.ranks if phase == "train" else 1)
            out[f"perf/{phase}_mfu"] = flops(done, model) / done.seconds / peak
    return out


SETUP, OTHER = "setup", "other"
#: Phases that are neither sampling nor learning.
RESTING = (SETUP, OTHER, "eval", "checkpoint", "profile")
GB = 1e9


class Clock:
    """Measures phases. In the thread that makes it, the loop's, they are `time/...`, in other threads `busy/...`.

    `row` has the times since the row before, so that a run's rows sum to its total.
    """

    def __init__(self) -> None:
        self.model: ModelSize | None = None  # for FLOPs; None: they are not computed
        self.gauge: Callable[[], float] | None = None  # returns the peak bytes of a GPU since its last call
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext  # names phases in a trace
        # By phase: in the whole run, and since the newest row.
        self._seconds = defaultdict[str, float](float), defaultdict[str, float](float)
        self._work = defaultdict[str, Work](Work), defaultdict[str, Work](Work)
        self._peaks: dict[str, float] = {}  # phase -> bytes of a GPU since the row before
        self._peak = 0.0  # of all phases
        self._owner = threading.get_ident()
        self._now = {self._owner: (SETUP, time.monotonic())}  # thread -> (phase, since when)
        self._guard = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count this block as `name`, and not as the phase around it."""
        before = self.begin(name)
        try:
            with self.annotate(name):
                yield
        finally:
            self.begin(before)

    def begin(self, name: str | None = OTHER) -> str | None:
        """End the phase of this thread, begin another, and return the one that ended. None: no phase."""
        thread, now = threading.get_ident(), time.monotonic()
        before, since = self._now.get(thread, (None, now))
        if before is not None:
            self.add(f"{'time' if thread == self._owner else 'busy'}/{before}", now - since)
            if self.gauge is not None and thread == self._owner:
                peak = self.gauge()
                self._peak = max(peak, self._peak)
                self._peaks[before] = max(peak, self._peaks.get(before, 0.0))
        if name is None:
            self._now.pop(thread, None)
        else:
            self._now[thread] = name, now
        return before

    def _settle(self) -> None:
        """Count the time of the loop's current phase so far."""
        if threading.get_ident() == self._owner:
            self.begin(self._now[self._owner][0])

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to `time/...` or, of another thread, to `busy/...`."""
        with self._guard:
            for sums in self._seconds:
                sums[name] += seconds

    def parts_of(self, phase: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the `time/PART` metrics of an ended phase to phases of their own; return the other metrics."""
        for name, seconds in metrics.items():
            if name.startswith("time/") and name != f"time/{phase}":
                self.add(f"time/{phase}", -seconds)
                self.add(name, seconds)
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}

    def worked(self, name: str, work: Work) -> None:
        """Add the work of a phase."""
        with self._guard:
            for sums in self._work:
                sums[name] = sums[name].plus(work)

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase of the loop so far, the current one included."""
        self._settle()
        with self._guard:
            seconds = self._seconds[0].items()
            return {name[5:]: value for name, value in seconds if name.startswith("time/") and value > 0}

    def spent(self, phase: str) -> float:
        """Return the seconds of one phase of the loop so far."""
        return self.phases().get(phase, 0.0)

    def total(self) -> float:
        """Return the seconds of all phases."""
        return sum(self.phases().values())

    def active(self) -> float:
        """Return the seconds of sampling and learning, and of writing their records."""
        return sum(value for name, value in self.phases().items() if name not in RESTING)

    def row(self) -> dict[str, float]:
        """Return seconds, tokens per second and peaks of memory since the row before."""
        self._settle()
        memory = {"memory/process_peak_gb": process_peak() / GB}
        if self.gauge is not None:
            memory = {f"memory/{phase}_peak_gb": peak / GB for phase, peak in self._peaks.items()}
        with self._guard:
            (all_seconds, seconds), (all_work, work) = self._seconds, self._work
            times = {name: seconds[name] for name in all_seconds if seconds[name] > 0}
            speeds = rates({name: work[name] for name in all_work}, self.model)
            seconds.clear()
            work.clear()
        self._peaks.clear()
        return {**times, **speeds, **memory}

    def overall(self) -> dict[str, float]:
        """Return tokens per second and utilisation of the whole run, as `perf/...`."""
        with self._guard:
            return rates(self._work[0], self.model)

    def peak(self) -> float:
        """Return the peak bytes: of the GPU where it is measured, else of the process."""
        return self._peak if self.gauge is not None else process_peak()

    def state_dict(self) -> dict[str, Any]:
        """Return all sums as plain values."""
        self._settle()
        return {"seconds": [dict(sums) for sums in self._seconds], "work": [dict(sums) for sums in self._work]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state; the time of this process so far is added and will be in the next row."""
        for seconds, earlier in zip(self._seconds, state["seconds"], strict=True):
            for name, value in earlier.items():
                seconds[name] += value
        for work, done in zip(self._work, state["work"], strict=True):
            for name, values in done.items():
                work[name] = work[name].plus(Work(*values))


def process_peak() -> float:
    """Return the peak resident set of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1.0 if sys.platform == "darwin" else 1024.0)
