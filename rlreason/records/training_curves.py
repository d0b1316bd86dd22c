"""Draw RUN/curves.png from RUN/metrics.jsonl, also of a run in progress; the frame of every picture by matplotlib."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CURVES, METRICS
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import whole
from rlreason.runtime.signals import held
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import visible


@contextmanager
def picture(path: Path, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Yield the axes to draw on, `size` in inches; write `path`, in the format of its suffix, when the block ends.

    Texts are shown without formulas and control characters, since they contain users' names.
    """
    with held():  # an import that a signal interrupts cannot be repeated
        import matplotlib as mpl
        from matplotlib.figure import Figure  # not pyplot, whose choice of a screen is the caller's
        from matplotlib.text import Text

    with mpl.rc_context({"text.parse_math": False}):
        fig = Figure(figsize=size, layout="constrained")
        yield fig.subplots(rows, columns)
        fig.suptitle(title, fontsize=10, x=0.01, ha="left", wrap=True)
        for text in fig.findobj(Text):
            text.set_text(visible(text.get_text()))
        with whole(path) as partial:
            fig.savefig(partial, dpi=130, format=path.suffix[1:] or "png")


#: The panels of a picture, of which it has those in which something was measured.
PANELS = yaml.safe_load(Path(__file__).with_name("panels.yaml").read_text(encoding="utf-8"))


def draw_curves(run: RunFolder) -> Path:
    """Draw a run over its optimizer updates, or a job over its evaluations, into `curves.png`; return the path.

    A panel shows metrics, the accuracy with its 95% interval. Raises `ConfigError` where it has no metrics yet.
    """
    rows, algorithm = run.metrics, run.setting("algorithm")
    measured = {name for row in rows for name in row}
    panels = [
        panel
        for panel in PANELS
        if measured & panel["metrics"].keys() and algorithm in panel.get("algorithms", [algorithm])
    ]
    if not panels:
        raise ConfigError(f"RUN={run.path} holds no {METRICS} with a row in it: give the folder of a training run")
    columns = (len(panels) + 1) // 2
    path = run.path / CURVES
    with picture(path, title_of(run), (5 * columns, 6.4), 2, columns) as axes:
        for ax, panel in zip(axes.flat, panels, strict=False):
            for name, label in panel["metrics"].items():
                named = [row for row in rows if row.get(name) is not None]
                at = [row.get("train_step", row.get("eval_step", 0)) for row in named]
                if named:
                    marker = "o" if name.startswith("eval/") else None
                    ax.plot(at, [row[name] for row in named], label=label, marker=marker, markersize=4)
                if named and name == "eval/accuracy" and all("eval/accuracy_high" in row for row in named):
                    low, high = ([row[f"{name}_{end}"] for row in named] for end in ("low", "high"))
                    ax.fill_between(at, low, high, alpha=0.15, label="95% interval")
            ax.set_title(panel["heading"], fontsize=10, loc="left")
            ax.set_xlabel("optimizer update", fontsize=9)
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(alpha=0.25)
            if len(ax.lines) > 1:
                ax.legend(fontsize=8, frameon=False)
        for ax in axes.flat[len(panels) :]:
            ax.remove()
    return path


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
    figures = {"run": run.path, "title": title_of(run), "picture": picture, "rows": len(run.metrics)}
    return Answer(folded(f"curves: {picture}", console.width), figures | {"last": run.metrics[-1]})
