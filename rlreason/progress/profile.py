"""`profile=true`: a torch trace of one step of a run, and torch's table of what cost most in it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import profile, record_function

from rlreason.records.console import Console
from rlreason.records.files import PROFILE_TABLE, PROFILE_TRACE
from rlreason.records.writer import RunWriter

LARGEST = 10


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
        clock.annotate = record_function  # the trace has the clock's phases next to the operations
        with profile() as trace:
            yield
        clock.annotate = nullcontext
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with self.console.wait("writing the profile"), clock.phase("profile"):
            trace.export_chrome_trace(str(self.records.folder / PROFILE_TRACE))
            costs = trace.key_averages().table(f"self_{device}_time_total", LARGEST, max_name_column_width=60)
            self.records.document(PROFILE_TABLE, f"Step {step}:\n\n```text\n{costs}```\n")
