"""`profile=true`: a torch trace of one step of a run, and a table of what cost most in it."""

import gzip
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlreason.records.console import Console
from rlreason.records.files import PROFILE_TABLE, PROFILE_TRACE
from rlreason.records.writer import RunWriter
from rlreason.runtime.atomic_files import whole
from rlreason.runtime.clock import Clock
from rlreason.runtime.signals import temporary_folder

LARGEST = 10
NAME = 60  # letters of an operation's name: the backward pass of attention differs from the forward one in the last


class Cost(NamedTuple):
    """What an operation has cost in a step, without what it called. Seconds of the processor and of a GPU."""

    name: str
    calls: int
    seconds: float
    gpu_seconds: float = 0.0


class Profile:
    """Traces the second step that this process does, or the only one: the first pays for what is loaded late."""

    def __init__(self, wanted: bool, records: RunWriter, console: Console, n_steps: int) -> None:
        self.wanted, self.records, self.console, self.n_steps = wanted, records, console, n_steps
        self.first: int | None = None  # step of this process

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Step 1, 2, ... happens in this block."""
        self.first = step if self.first is None else self.first
        if not self.wanted or step != min(self.first + 1, self.n_steps):
            yield
            return
        clock = self.records.clock
        with annotated(clock), profile(activities=activities()) as trace:
            yield
        with self.console.wait("writing the profile"), clock.phase("profile"):
            write_trace(trace, self.records.folder / PROFILE_TRACE)
            self.records.document(PROFILE_TABLE, costs_table(costs_of(trace), step))


@contextmanager
def annotated(clock: Clock) -> Iterator[None]:
    """In this block the trace has the clock's phases beside the operations."""
    before, clock.annotate = clock.annotate, record_function
    try:
        yield
    finally:
        clock.annotate = before


def activities() -> list[ProfilerActivity]:
    """The processor, and the GPU where torch has one."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()


def write_trace(trace: profile, path: Path) -> None:
    """The trace in Chrome's format, compressed; `UnwritableError` where the system refuses."""
    with temporary_folder("rlreason-trace-") as place, whole(path) as partial:
        plain = Path(place) / "trace.json"
        trace.export_chrome_trace(str(plain))
        with plain.open("rb") as text, gzip.open(partial, "wb", compresslevel=4) as packed:
            shutil.copyfileobj(text, packed)


def costs_of(trace: profile) -> list[Cost]:
    """Every operation of the trace, without the phases that stand beside them."""
    return [
        Cost(event.key, event.count, event.self_cpu_time_total / 1e6, event.self_device_time_total / 1e6)
        for event in trace.key_averages()
        if not event.is_user_annotation
    ]


def costs_table(costs: Sequence[Cost], step: int, n: int = LARGEST) -> str:
    """The largest costs as a table in Markdown: by seconds of the GPU where it worked, else of the processor.

    >>> print(costs_table([Cost("aten::mm", 4, 3.0), Cost("aten::add", 8, 1.0)], step=2, n=1))
    Step 2: the 1 largest costs of 2 operations, which took 4.00 s of the processor's time.
    <BLANKLINE>
    | operation                                                    | calls | seconds | share |
    | :----------------------------------------------------------- | ----: | ------: | ----: |
    | aten::mm                                                     |     4 |   3.000 |   75% |
    <BLANKLINE>
    """
    on_gpu = any(cost.gpu_seconds for cost in costs)
    seconds = {cost: cost.gpu_seconds if on_gpu else cost.seconds for cost in costs}
    total, device = sum(seconds.values()), "GPU" if on_gpu else "processor"
    largest = sorted(costs, key=lambda cost: -seconds[cost])[:n]
    lines = [
        f"Step {step}: the {len(largest)} largest costs of {len(costs)} operations, which took {total:.2f} s of the "
        f"{device}'s time.",
        "",
        f"| {'operation':{NAME}} | calls | seconds | share |",
        f"| :{'-' * (NAME - 1)} | ----: | ------: | ----: |",
    ]
    for cost in largest:
        share = seconds[cost] / total if total else 0.0
        lines.append(f"| {cost.name[:NAME]:{NAME}} | {cost.calls:>5} | {seconds[cost]:>7.3f} | {share:>5.0%} |")
    return "\n".join(lines) + "\n"
