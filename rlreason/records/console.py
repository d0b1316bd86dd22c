"""The terminal: a run's rows, its live line and closing table; a line for each run of a sweep; how a command ends."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rlreason.errors import ConfigError, ReaderGone
from rlreason.records.files import METRICS, UNFINISHED
from rlreason.records.reader import RESOURCES, RunFolder, exit_code, read_status, written_at
from rlreason.runtime import signals
from rlreason.runtime.files import alive
from rlreason.runtime.plugins import find_modules_here
from rlreason.runtime.streams import LINE_ANEW, folded, print_stderr, settle_streams
from rlreason.runtime.text import duration, first_line, visible

LOG_WIDTH = 120  # columns of a file or a pipe
#: The columns of the table of steps, and their widths.
COLUMNS = {
    "step": 9, "accuracy": 9, "reward": 7, "format": 7, "length": 7, "entropy": 8, "grad": 7, "time": 6, "left": 6,
}  # fmt: skip
#: Of the columns from `reward` to `grad`: the metrics of which the first that a step has is shown, and its format.
FIGURES = (
    (("reward/mean",), ".3f"),
    (("reward/format", "eval/format"), ".3f"),
    (("rollout/length", "eval/length"), ".1f"),
    (("train/entropy",), ".3f"),
    (("train/grad_norm",), ".3g"),
)


@dataclass
class Wait:
    """A long activity on the console: its name, its line, its end, and whether it was ever shown."""

    what: str
    text: str
    more: Callable[[], str]  # returns the part of the line that changes all the time
    thread: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)
    shown: bool = False


class Console:
    """Prints the rows of a run. A terminal shows the latest step and long waits in place; a log file gets rows only."""

    shown_after_s = 2.0  # seconds before a wait is shown
    row_after_s = 60.0  # seconds since its last row after which a log file gets that of any step

    def __init__(self, out: TextIO | None = None) -> None:
        self.n_steps = self.done = 0  # steps of the table, and those before its first row
        self.out = out or sys.stdout
        self.began = time.monotonic()
        self.live = self.out.isatty()
        self._writing = threading.RLock()
        self._waits: list[Wait] = []

    @property
    def width(self) -> int:
        """Columns of the terminal (COLUMNS, where it is set), or of a log file."""
        return shutil.get_terminal_size().columns if self.live else LOG_WIDTH

    def say(self, text: str = "") -> None:
        """Print sentences, wrapped to the width."""
        self.table(folded(visible(text), self.width, below=2))

    def table(self, text: str) -> None:
        """Print lines unchanged, except that control characters are made visible."""
        with self._writing:
            if self.live:
                self.out.write(LINE_ANEW)
            print(visible(text), file=self.out, flush=True)

    def start(self, n_steps: int, done: int = 0) -> None:
        """Print the heading of the table of `n_steps` steps, and start the clock of its `time` and `left`.

        `done`: steps that a resumed run had already finished.
        """
        self.began = self.last_row = time.monotonic()
        self.n_steps, self.done = n_steps, done
        self.table("\n" + in_columns(list(COLUMNS)))

    def step(self, step: int, accuracy: float, metrics: Mapping[str, float], keep: bool) -> None:
        """Show a step and the latest accuracy: with `keep` as a row that stays, else in place, on a terminal.

        A log file gets the row also where its last one is a minute old.
        """
        alive()
        now = time.monotonic()
        spent, late = now - self.began, now - self.last_row > self.row_after_s
        left = duration(spent / (step - self.done) * (self.n_steps - step)) if step > self.done else ""
        numbers = [next((f"{metrics[key]:{form}}" for key in keys if key in metrics), "") for keys, form in FIGURES]
        row = in_columns([f"{step}/{self.n_steps}", f"{accuracy:.3f}", *numbers, duration(spent), left])
        if keep or (late and not self.live):
            self.last_row = now
            self.table(row)
        else:
            self._in_place(row)

    @contextmanager
    def wait(self, what: str, more: Callable[[], str] = str) -> Iterator[Wait]:
        """Show the activity of this block in place on a terminal after 2 s, with the time so far.

        `more` returns the rest of the line each time it is shown.
        """
        alive()
        wait = Wait(what, what, more)
        watcher = threading.Thread(target=self._watch, args=(wait,), name="progress", daemon=True)
        self._waits.append(wait)
        watcher.start()
        try:
            yield wait
        except Exception as error:
            error.add_note(f"in: {wait.text}")  # the first note is of the innermost wait
            raise
        finally:
            alive()
            wait.over.set()
            self._waits.remove(wait)
            watcher.join(1.0)

    def part(self, text: str) -> None:
        """Set the progress of the innermost wait, such as `3/16 responses`; calls from other threads are ignored."""
        alive()
        if self._waits and (wait := self._waits[-1]).thread == threading.get_ident():
            wait.text = f"{wait.what}: {text}"

    def _watch(self, wait: Wait) -> None:
        with suppress(OSError):  # the terminal was closed
            while self.live and not wait.over.wait(0.5):
                spent = time.monotonic() - wait.began
                if self._waits[-1:] == [wait] and spent > self.shown_after_s:
                    wait.shown, time_spent = True, f", {duration(spent)}"
                    self._in_place(f"{wait.text}{wait.more()}"[: self.width - 1 - len(time_spent)] + time_spent)
            if wait.shown:
                self._in_place("")

    def _in_place(self, text: str) -> None:
        if self.live:
            with self._writing:
                self.out.write(LINE_ANEW + visible(text.replace("\n", " "))[: self.width - 1])
                self.out.flush()


def in_columns(cells: Sequence[str]) -> str:
    """Format the cells of a row of the table of steps."""
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))


def closing_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Format the evaluation metrics before and after training, in 60 columns; accuracy with its 95% interval."""

    def interval(m: Mapping[str, Any]) -> str:
        return f"{m['eval/accuracy']:.3f} ({m['eval/accuracy_low']:.2f}-{m['eval/accuracy_high']:.2f})"

    asked = f"{before['eval/problems']:.0f} problems x {before['eval/samples'] / before['eval/problems']:.0f}"
    rows = [(asked, "start", "end"), ("accuracy (95% int.)", interval(before), interval(after))]
    for name in ("reward", "format", "length", "truncated"):
        if f"eval/{name}" in after:
            rows.append((name, f"{before[f'eval/{name}']:.3f}", f"{after[f'eval/{name}']:.3f}"))
    return "\n".join(f"{label:22} {start:>18} {end:>18}" for label, start, end in rows)


@contextmanager
def run_lines(labels: Mapping[Path, str]) -> Iterator[None]:
    """Keep a line for each run that is under way below what the block prints; on a terminal only.

    `labels`: the folder of a run that the block may start -> its name in its line. The lines are read from the runs'
    own files every 2 s.
    """
    if not labels or not sys.stdout.isatty():
        yield
        return
    from rich.console import Console as Screen  # slow to import
    from rich.live import Live
    from rich.table import Table

    before = {folder: written_at(folder) for folder in labels}  # of a run that was killed earlier, it says "running"

    def lines() -> Table:
        table = Table.grid(padding=(0, 3))
        for folder, label in labels.items():
            with suppress(Exception):  # a line that cannot be drawn must not end hours of work
                if read_status(folder) == "running" and written_at(folder) != before[folder]:
                    table.add_row(visible(label), *progress_cells(folder))
        return table

    screen = Screen(file=sys.__stdout__, markup=False)  # sys.stdout escapes its control codes
    live = Live(get_renderable=lines, console=screen, refresh_per_second=0.5, transient=True)
    with signals.before_leaving(lambda: screen.show_cursor(True)), live:
        yield


def progress_cells(folder: Path) -> Sequence[str]:
    """Return the progress of a run under way: its step of all steps, last accuracy and time left."""
    if (answers := folder / UNFINISHED).exists():
        lines = answers.read_bytes().count(b"\n")
        return [f"{lines - 1} responses"]  # the first line says whose they are
    return _progress_of_training(folder, (folder / METRICS).stat().st_mtime_ns)


@lru_cache  # a long run has megabytes of metrics
def _progress_of_training(folder: Path, written: int) -> Sequence[str]:
    """Return the same from metrics that were last `written` at this time, in nanoseconds."""
    run = RunFolder(folder, lambda _: None)
    if not (rows := run.metrics):
        return ["starting"]
    planned, left = run.setting("n_steps"), ""  # None in discovery
    accuracies = ["", *(f"{row['eval/accuracy']:.3f}" for row in rows if row.get("eval/accuracy") is not None)]
    before, done = rows[0]["rollout_step"], rows[-1]["rollout_step"]
    if planned and before < done < planned:
        a_step = (rows[-1]["time/total"] - rows[0]["time/total"]) / (done - before)
        left = f"{duration(a_step * (planned - done))} left"
    return [f"{done}/{planned or '?'}", accuracies[-1], left]


def print_error(error: BaseException) -> bool:
    """Print in one line what ended a command; return False for an error of the program, which needs its traceback."""
    if isinstance(error, ConfigError):
        print_stderr(str(error))
    elif isinstance(error, KeyboardInterrupt):
        with suppress(OSError):  # the terminal may be gone
            print_stderr(f"stopped {signals.why_stopped(error)}")
    elif exit_code(error) == RESOURCES:
        print_stderr(shortage(error))
    else:
        return False
    return True


def shortage(error: BaseException) -> str:
    """Return what ran out, and what helps.

    >>> shortage(OSError("No space left on device"))
    'No space left on device: free some space, or choose another hydra.run.dir'
    """
    cause = first_line(error)
    if isinstance(error, OSError) or "No space" in cause:
        return f"{cause}: free some space, or choose another hydra.run.dir"
    cure = "lower micro_batch_tokens or rollout.max_rows, or take a smaller model (rlreason plan adds it up)"
    return f"out of memory ({cause}): {cure}"


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; a mistake is printed in one line, an error of the program is raised."""
    settle_streams()
    try:
        try:
            return command() or 0
        finally:
            sys.stdout.flush()  # here: a reader who has left, or a full disk, must not fail at the process's end
    except ReaderGone:
        return exit_code(KeyboardInterrupt()) if signals.stop_signal() else ReaderGone.exit_code
    except (Exception, KeyboardInterrupt) as error:
        signals.arrived()
        if signals.stop_signal() and not isinstance(error, KeyboardInterrupt):
            error = KeyboardInterrupt()  # it failed because the process was ending
        with suppress(ReaderGone):
            if not print_error(error):
                raise
        return exit_code(error)


def run_cli(command: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit code.

    After a signal the command cleans up; a second signal ends it immediately.
    """
    with signals.stoppable():
        find_modules_here()
        code = exit_code_of(command)
        if signals.stop_signal():
            signals.leave(code)
    sys.exit(code)
