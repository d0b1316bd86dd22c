"""Draw RUN/curves.png from RUN/metrics.jsonl, also of a run in progress; the frame of every picture by matplotlib."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CURVES, METRICS
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import whole
from rlreason.runtime.signals import held
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import visible


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
    """Return the values of one metric over the optimizer updates, or over the evaluations of a job without any."""
    named = [row for row in rows if row.get(name) is not None]
    at = [row["train_step"] if "train_step" in row else row.get("eval_step", 0) for row in named]
    return at, [row[name] for row in named]


def panels_of(rows: Rows, algorithm: str) -> list[Panel]:
    """Choose the panels: accuracy, length, entropy and gradient norm, and more where more was measured.

    Imitation adds the loss, and expert iteration the entropy of correct and other responses; several updates on one
    rollout batch add how far the policy moved within it.
    """
    seen = {name for row in rows for name in row}
    if algorithm == "sft":
        return [*PANELS, IMITATION]
    if algorithm == "ei":
        return [*PANELS, IMITATION, BY_OUTCOME, STEADINESS]
    return [*PANELS, STEADINESS, *(panel for panel in OFF_POLICY if "train/ratio" in seen and panel[1][0][0] in seen)]


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
        for ax, panel in zip(axes.flat, panels, strict=False):
            draw_panel(ax, rows, panel)
        for ax in axes.flat[len(panels) :]:
            ax.remove()
    return path


def draw_panel(ax: Any, rows: Rows, panel: Panel) -> None:
    """Draw one panel; that of the accuracy also has its 95% interval."""
    heading, lines = panel
    for name, label in lines:
        steps, values = series(rows, name)
        if values:
            ax.plot(steps, values, label=label, marker="o" if name.startswith("eval/") else None, markersize=4)
    (at, low), (_, high) = series(rows, "eval/accuracy_low"), series(rows, "eval/accuracy_high")
    if heading.startswith("accuracy") and len(low) == len(high):
        ax.fill_between(at, low, high, alpha=0.15, label="95% interval")
    ax.set_title(heading, fontsize=10, loc="left")
    ax.set_xlabel("optimizer update", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    if len(ax.lines) > 1:
        ax.legend(fontsize=8, frameon=False)


def title_of(run: RunFolder) -> str:
    """Return model, data, objective and seed of a run, and its reward; missing settings are left out."""
    keys = ("model.name", "data.name", "algorithm", "loss.loss_type", "prompt.reward", "seed")
    return ", ".join(f"{key}={value}" for key in keys if (value := run.setting(key)) is not None)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason curves`."""
    parser.add_run("a training run's folder, such as runs/grpo/DATE")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Draw the curves; `ConfigError` if there is nothing to draw."""
    run = RunFolder(arguments.run)
    with console.wait("drawing the curves"):
        picture = draw_curves(run)
    figures = {"run": run.path, "title": title_of(run), "picture": picture}
    figures |= {"rows": len(run.metrics), "last": run.metrics[-1]}
    return Answer(folded(f"curves: {picture}", console.width), figures)
