"""The terminal during a run: a header, one row per evaluation, a live line, a closing table."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

from rlreason.runtime.files import alive
from rlreason.runtime.streams import LINE_ANEW, folded, width_of
from rlreason.runtime.text import visible

T = TypeVar("T")


#: The columns of the table of steps: heading, width, the metrics of which the first that a step has is shown, format.
COLUMNS: tuple[tuple[str, int, tuple[str, ...], str], ...] = (
    ("step", 9, (), ""),
    ("accuracy", 9, (), ""),
    ("reward", 7, ("reward/mean",), ".3f"),
    ("format", 7, ("reward/format", "eval/format"), ".3f"),
    ("length", 7, ("rollout/length", "eval/length"), ".1f"),
    ("entropy", 8, ("train/entropy",), ".3f"),
    ("grad", 7, ("train/grad_norm",), ".3g"),
    ("time", 6, (), ""),
    ("left", 6, (), ""),
)


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds, or hours and minutes.

    >>> clock(75), clock(3700)
    ('1:15', '1h01')
    """
    s = round(seconds)
    return f"{s // 3600}h{s % 3600 // 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


class Wait:
    """A long activity on the console: its name, its progress and its time so far."""

    def __init__(self, what: str, logged: bool, more: Callable[[], str]) -> None:
        self.text = self.what = what
        self.more = more  # returns the part of the line that changes all the time
        self.logged = logged  # whether a log file needs no line, or has it
        self.began, self.thread = time.monotonic(), threading.get_ident()
        self.over = threading.Event()
        self.shown = False

    def part(self, text: str) -> None:
        """Set its progress, such as `3/16 responses`; calls from other threads than the waiting one are ignored."""
        if threading.get_ident() == self.thread:
            self.text = f"{self.what}: {text}"

    def line(self, width: int) -> str:
        """Return its line, cut to `width` columns."""
        spent = f", {clock(time.monotonic() - self.began)}"
        return f"{self.text}{self.more()}"[: width - len(spent)] + spent


class Console:
    """Prints the rows of a run. A terminal shows the latest step in place; a log file gets rows only."""

    shown_after_s = 2.0  # seconds before a wait is shown on a terminal
    logged_after_s = 10.0  # and before it is printed to a log file

    def __init__(self, out: TextIO | None = None) -> None:
        self.n_steps = self.done = 0  # steps of the table, and those before its first row
        self.out = out or sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        self.began: float | None = None
        self.live = self.out.isatty()
        self._writing = threading.RLock()
        self._waits: list[Wait] = []

    @property
    def width(self) -> int:
        """Columns of the terminal, or of a log file."""
        return width_of(self.out)

    def say(self, text: str = "") -> None:
        """Print sentences, wrapped to the width."""
        self.table(folded(visible(text), self.width))

    def table(self, text: str) -> None:
        """Print lines unchanged, except that control characters are made visible."""
        with self._writing:
            self._wipe()
            print(visible(text), file=self.out, flush=True)

    def start(self, n_steps: int, done: int = 0) -> None:
        """Print the heading of the table of `n_steps` steps, and start the clock of its `time` and `left`.

        `done`: steps that a resumed run had already finished.
        """
        self.began, self.n_steps, self.done = time.monotonic(), n_steps, done
        self.say()
        self.table(in_columns([title for title, *_ in COLUMNS]))

    def step(self, step: int, accuracy: float, metrics: Mapping[str, float], keep: bool) -> None:
        """Show a step and the latest accuracy: with `keep` as a row that stays, else in place, on a terminal only."""
        alive()
        row = self._row(step, accuracy, metrics)
        if keep:
            self.table(row)
        else:
            self._in_place(row)

    def progress(self, text: str) -> None:
        """Show a line in place on a terminal, such as the warm start's loss."""
        alive()
        if self._waits:
            wait = self._waits[-1]
            wait.text, wait.more, wait.shown = text, str, True
            text = wait.line(self.width - 1)
        self._in_place(text)

    @contextmanager
    def wait(self, what: str, logged: bool = False, more: Callable[[], str] = str) -> Iterator[Wait]:
        """Show the activity of this block: in place on a terminal after 2 s, with the time so far.

        A log file gets one line after 10 s; `logged`: none, because it was printed or repeats often. `more` returns
        the rest of the line each time it is shown.
        """
        alive()
        wait = Wait(what, logged, more)
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

    def each(self, what: str, items: Iterator[T], count: int) -> Iterator[T]:
        """Yield `count` items, showing the wait for each as `what 3/16`."""
        for place in range(count):
            with self.wait(f"{what} {place + 1}/{count}", logged=True):
                item = next(items)
            yield item

    def part(self, text: str) -> None:
        """Set the progress of the innermost wait, such as `3/16 responses`."""
        alive()
        if self._waits:
            self._waits[-1].part(text)

    def _watch(self, wait: Wait) -> None:
        with suppress(OSError):  # the terminal was closed
            while not wait.over.wait(0.5):
                spent = time.monotonic() - wait.began
                if self._waits[-1:] != [wait]:
                    continue
                if self.live and spent > self.shown_after_s:
                    self._in_place(wait.line(self.width - 1))
                    wait.shown = True
                elif not self.live and spent > self.logged_after_s and not wait.logged:
                    wait.logged = True
                    self.say(f"{wait.what} ...")
            if wait.shown and self.live:
                with self._writing:
                    self._wipe()
                    self.out.flush()

    def _in_place(self, text: str) -> None:
        if self.live:
            with self._writing:
                self.out.write(LINE_ANEW + visible(text.replace("\n", " "))[: self.width - 1])
                self.out.flush()

    def _row(self, step: int, accuracy: float, m: Mapping[str, float]) -> str:
        spent = time.monotonic() - self.began if self.began is not None else 0.0
        left = clock(spent / (step - self.done) * (self.n_steps - step)) if step > self.done else ""
        numbers = [next((f"{m[key]:{form}}" for key in keys if key in m), "") for _, _, keys, form in COLUMNS if keys]
        return in_columns([f"{step}/{self.n_steps}", f"{accuracy:.3f}", *numbers, clock(spent), left])

    def _wipe(self) -> None:
        if self.live:
            self.out.write(LINE_ANEW)


def in_columns(cells: Sequence[str]) -> str:
    """Format the cells of a row of the table of steps."""
    return " ".join(f"{cell:>{width}}" for cell, (_, width, _, _) in zip(cells, COLUMNS, strict=True))


def closing_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Format the evaluation metrics before and after training, in 60 columns; accuracy with its 95% interval."""
    each = f" x {n}" if (n := round(before["eval/samples"] / before["eval/problems"])) > 1 else ", sampled"
    problems = f"{before['eval/problems']:.0f} problems"
    if "eval/questions" in before:
        problems = f"{before['eval/problems']:.0f} rows, {before['eval/questions']:.0f} questions"
    rows = [f"{problems + each:22} {'start':>18} {'end':>18}"]

    def interval(m: Mapping[str, Any]) -> str:
        return f"{m['eval/accuracy']:.3f} ({m['eval/accuracy_low']:.2f}-{m['eval/accuracy_high']:.2f})"

    rows.append(f"{'accuracy (95% int.)':22} {interval(before):>18} {interval(after):>18}")
    keys = [("format", "eval/format"), ("length, tokens", "eval/length"), ("truncated", "eval/truncated")]
    if any(m.get("eval/reward", m["eval/accuracy"]) != m["eval/accuracy"] for m in (before, after)):
        keys.insert(0, ("reward", "eval/reward"))  # a user's reward with more values than right and wrong
    for label, key in keys:
        form = ".1f" if key.endswith("length") else ".3f"
        rows.append(f"{label:22} {before[key]:>18{form}} {after[key]:>18{form}}")
    return "\n".join(rows)
