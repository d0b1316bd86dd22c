"""The terminal during a run: a header, one row per evaluation, a live line, a closing table."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from rlreason.errors import ConfigError
from rlreason.records.files import CURVES, METRICS
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import alive, whole
from rlreason.runtime.signals import held
from rlreason.runtime.streams import LINE_ANEW, folded, width_of
from rlreason.runtime.text import visible

T = TypeVar("T")


class Column(NamedTuple):
    """A column of the table of steps: its heading and width, and both for a narrow terminal."""

    title: str
    width: int
    short: str
    narrow: int


COLUMNS = (
    Column("step", 9, "step", 7), Column("accuracy", 9, "acc.", 5), Column("reward", 7, "rew.", 6),
    Column("format", 7, "form.", 5), Column("length", 7, "len.", 6), Column("entropy", 8, "entr.", 5),
    Column("grad", 7, "grad", 6), Column("time", 6, "time", 5), Column("left", 6, "left", 5),
)  # fmt: skip
#: The metrics of each column, of which the first that exists is shown: of a step, or of the first evaluation.
CELLS = (
    (("reward/mean",), ".3f"),
    (("reward/format", "eval/format"), ".3f"),
    (("rollout/length", "eval/length"), ".1f"),
    (("train/entropy",), ".3f"),
    (("train/grad_norm",), ".3g"),
)
WIDE = sum(column.width + 1 for column in COLUMNS) - 1


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
        self.own_line = False  # whether `Console.progress` has replaced its line

    def part(self, text: str) -> None:
        """Set its progress, such as `3/16 responses`; calls from other threads than the waiting one are ignored."""
        if threading.get_ident() == self.thread and not self.own_line:
            self.text = f"{self.what}: {text}"

    def line(self, width: int) -> str:
        """Return its line, cut to `width` columns."""
        more = "" if self.own_line else self.more()
        spent = f", {clock(time.monotonic() - self.began)}"
        return f"{self.text}{more}"[: width - len(spent)] + spent


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
        self.table(self._in_columns([c.title if self._is_wide() else c.short for c in COLUMNS]))

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
        if not self._waits:
            return self._in_place(text)
        wait = self._waits[-1]
        wait.text, wait.own_line, wait.shown = text, True, True
        self._in_place(wait.line(self.width - 1))

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

    def each(self, what: str, items: Iterator[T], count: int, done: int = 0) -> Iterator[T]:
        """Yield items `done` to `count`, showing the wait for each as `what 3/16`."""
        for place in range(done, count):
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

    def _is_wide(self) -> bool:
        return self.width > WIDE

    def _in_columns(self, cells: list[str]) -> str:
        widths = [c.width if self._is_wide() else c.narrow for c in COLUMNS]
        return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    def _row(self, step: int, accuracy: float, m: Mapping[str, float]) -> str:
        spent = time.monotonic() - self.began if self.began is not None else 0.0
        left = clock(spent / (step - self.done) * (self.n_steps - step)) if step > self.done else ""
        numbers = [next((f"{m[key]:{form}}" for key in keys if key in m), "") for keys, form in CELLS]
        return self._in_columns([f"{step}/{self.n_steps}", f"{accuracy:.3f}", *numbers, clock(spent), left])

    def _wipe(self) -> None:
        if self.live:
            self.out.write(LINE_ANEW)


def closing_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Format the evaluation metrics before and after training, in 60 columns; accuracy with its 95% interval."""
    each = f" x {n}" if (n := round(before["eval/samples"] / before["eval/problems"])) > 1 else ", sampled"
    asked = f"{before['eval/problems']:.0f} problems"
    if "eval/questions" in before:
        asked = f"{before['eval/problems']:.0f} rows, {before['eval/questions']:.0f} questions"
    sampled = f"{asked}{each}"
    rows = [f"{sampled:22} {'start':>18} {'end':>18}"]

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


#: The formats that matplotlib can write, by the suffix of the file.
FORMATS = ("png", "pdf", "svg", "svgz", "eps", "ps", "pgf", "jpg", "jpeg", "tif", "tiff", "webp", "raw", "rgba")


def make_text_plain(fig: Any) -> None:
    """Show the texts of a figure without control characters and formulas, since they contain users' names."""
    from matplotlib.text import Text

    numbers = {label for ax in fig.axes for label in (*ax.get_xticklabels(), *ax.get_yticklabels())}
    for text in fig.findobj(Text):
        if text not in numbers:
            text.set_text(visible(text.get_text()))
            text.set_parse_math(False)


@contextmanager
def picture(path: Path, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Yield the axes to draw on, `size` in inches; write `path`, in the format of its suffix, when the block ends."""
    with held():  # an import that a signal interrupts cannot be repeated
        from matplotlib.figure import Figure  # not pyplot, whose choice of a screen is the caller's

    fig = Figure(figsize=size, layout="constrained")
    yield fig.subplots(rows, columns)
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    make_text_plain(fig)
    with whole(path) as partial:
        fig.savefig(partial, dpi=130, format=path.suffix[1:] or "png")


Panel = tuple[str, tuple[tuple[str, str], ...]]  # heading, ((metric, label), ...)
PANELS: tuple[Panel, ...] = (
    ("accuracy and reward", (("eval/accuracy", "validation accuracy"), ("reward/mean", "training reward"))),
    ("response length (tokens)", (("eval/length", "validation"), ("rollout/length", "training"))),
    ("entropy (nats per token)", (("eval/entropy", "validation"), ("train/entropy", "training"))),
)
STEADINESS: Panel = ("gradient norm before clipping", (("train/grad_norm", "training"),))
IMITATION: Panel = ("loss (nats per token)", (("train/loss", "training"),))
BY_OUTCOME: Panel = (
    "entropy of sampled responses (nats per token)",
    (("rollout/entropy_correct", "correct"), ("rollout/entropy_wrong", "others")),
)
OFF_POLICY: tuple[Panel, ...] = (
    ("clip fraction", (("train/clip_fraction", "training"),)),
    ("mean ratio to the policy that sampled", (("train/ratio", "training"),)),
)


Rows = list[dict[str, Any]]  # of `metrics.jsonl`: numbers, or None


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return the values of one metric over the optimizer updates, or the evaluations of a job without updates."""
    named = [row for row in rows if row.get(name) is not None]
    at = [row["train_step"] if "train_step" in row else row.get("eval_step", 0) for row in named]
    return at, [row[name] for row in named]


def panels_of(rows: Rows, algorithm: str) -> list[Panel]:
    """Choose the panels: accuracy, length, entropy and gradient norm, and more where more was measured.

    Imitation adds the loss, and expert iteration the entropy of correct and other responses; several updates on one
    rollout batch add how far the policy moved within it.
    """
    seen = {name for row in rows for name in row}
    imitates = algorithm in ("sft", "ei")
    panels = [*PANELS, IMITATION if imitates else STEADINESS]
    if algorithm == "ei":
        panels += [BY_OUTCOME, STEADINESS]
    if "train/ratio" in seen and not imitates:
        panels += [panel for panel in OFF_POLICY if panel[1][0][0] in seen]
    return panels


def draw_curves(run: RunFolder) -> Path:
    """Draw the panels of a run over its optimizer updates into `curves.png` in its folder; return the path.

    Raises `ConfigError` where it has no metrics yet.
    """
    rows = run.metrics
    if not rows:
        raise ConfigError(f"RUN={run.path} holds no {METRICS} with a row in it: give the folder of a training run")
    panels = panels_of(rows, str(run.setting("algorithm") or ""))
    columns = (len(panels) + 1) // 2
    path = run.path / CURVES
    with picture(path, title_of(run), (5 * columns, 6.4), 2, columns) as axes:
        places = list(axes.T.flat if columns > 2 else axes.flat)
        for ax, panel in zip(places, panels, strict=False):
            draw_panel(ax, rows, panel)
        for ax in places[len(panels) :]:
            ax.remove()
    return path


def draw_panel(ax: Any, rows: Rows, panel: Panel) -> None:
    """Draw one panel; that of the accuracy also has its interval, and the final accuracy on the whole split."""
    heading, lines = panel
    drawn = [(name, label) for name, label in lines if series(rows, name)[0]]
    for name, label in drawn:
        steps, values = series(rows, name)
        strong = name.startswith("eval/") or len(drawn) == 1
        style = {"marker": "o", "markersize": 4, "linewidth": 2} if name.startswith("eval/") else {"linewidth": 1.4}
        ax.plot(steps, values, label=label, alpha=1.0 if strong else 0.55, **style)
        if name == "eval/accuracy":
            draw_interval(ax, rows)
    if heading.startswith("accuracy"):
        draw_whole_split(ax, rows)
    ax.set_title(heading, fontsize=10, loc="left")
    ax.set_xlabel("optimizer update", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    if heading.startswith("accuracy"):
        _, rewards = series(rows, "reward/mean")  # a user's reward may have any range
        low, high = min([0, *rewards]), max([1, *rewards])
        ax.set_ylim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    elif heading.startswith(("response", "entropy", "clip")):
        ax.set_ylim(bottom=0)
    if len(drawn) > 1:
        ax.legend(fontsize=8, frameon=False)


def draw_interval(ax: Any, rows: Rows) -> None:
    """Draw the 95% interval of each accuracy."""
    bounds = ("eval/accuracy_low", "eval/accuracy_high")
    measured = [row for row in rows if all(row.get(name) is not None for name in ("eval/accuracy", *bounds))]
    (at, low), (_, high) = (series(measured, name) for name in bounds)
    ax.fill_between(at, low, high, alpha=0.15, label="95% interval")


def draw_whole_split(ax: Any, rows: Rows) -> None:
    """Draw the final accuracy on the whole split with its interval, where there is one."""
    names = [f"final/accuracy{end}" for end in ("_low", "", "_high")]
    whole = next((row for row in rows if (row.get("final/problems") or 0) > (row.get("eval/problems") or 0)), {})
    if all(whole.get(name) is not None for name in names):
        low, value, high = (whole[name] for name in names)
        label = f"all {whole['final/problems']:.0f} problems"
        ax.errorbar(
            whole.get("train_step", 0), value, [[value - low], [high - value]], fmt="D", color="k", ms=4, label=label
        )


def title_of(run: RunFolder) -> str:
    """Return model, data, objective and seed of a run, and a user's reward; missing settings are empty."""
    model, data, loss, algorithm, seed = (
        "" if (value := run.setting(key)) is None else value
        for key in ("model.name", "data.name", "loss.loss_type", "algorithm", "seed")
    )
    reward = str(run.setting("prompt.reward") or "")
    own = f", reward={reward}" if ":" in reward else ""
    return f"{model}, {data}: {f'loss={loss}' if loss else algorithm}{own}, seed {seed}"
