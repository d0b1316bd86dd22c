"""`curves.png` of one run, drawn from its `metrics.jsonl` alone. It knows files; it must not know torch.

`python -m rlreason.curves RUN` draws it again, or for a run that is still under way.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlreason.entry import Parser, answered
from rlreason.errors import ConfigError

Panel = tuple[str, tuple[tuple[str, str], ...]]  # heading, ((metric, label), ...)
PANELS: tuple[Panel, ...] = (
    ("accuracy and reward", (("eval/accuracy", "validation accuracy"), ("reward/mean", "training reward"))),
    ("response length (tokens)", (("eval/length", "validation"), ("rollout/length", "training"))),
    ("entropy (nats per token)", (("eval/entropy", "validation"), ("train/entropy", "training"))),
    ("gradient norm before clipping", (("train/grad_norm", "training"),)),
)
IMITATION: Panel = ("loss (nats per token)", (("train/loss", "training"),))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    with (folder / "metrics.jsonl").open() as file:
        return [json.loads(line) for line in file if line.strip()]


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; evaluations count in finished steps."""
    named = [row for row in rows if row.get(name) is not None]
    points = [(row["train_step"] if "train_step" in row else row["eval_step"], row[name]) for row in named]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(folder: Path, title: str) -> Path:
    """Four panels over training steps: what was learned, how long responses grew, how sure the model is, how steady.

    Where given or found responses are imitated, the last one is the loss, which says something there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(folder)
    fig, axes = plt.subplots(2, 2, figsize=(10, 6.4), constrained_layout=True)
    imitates = any("sft/epoch" in row or "ei/kept" in row for row in rows)
    panels = (*PANELS[:3], IMITATION) if imitates else PANELS
    for ax, (heading, lines) in zip(axes.flat, panels, strict=True):
        drawn = [(name, label) for name, label in lines if series(rows, name)[0]]
        for name, label in drawn:
            steps, values = series(rows, name)
            strong = name.startswith("eval/") or len(drawn) == 1
            style = {"marker": "o", "markersize": 4, "linewidth": 2} if name.startswith("eval/") else {"linewidth": 1.4}
            ax.plot(steps, values, label=label, alpha=1.0 if strong else 0.55, **style)
            if name == "eval/accuracy":
                low, high = series(rows, "eval/accuracy_low")[1], series(rows, "eval/accuracy_high")[1]
                ax.fill_between(steps, low, high, alpha=0.15, label="95% interval")
        ax.set_title(heading, fontsize=10, loc="left")
        ax.set_xlabel("step", fontsize=9)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.25)
        if heading.startswith("accuracy"):
            ax.set_ylim(-0.02, 1.02)
        elif heading.startswith(("response", "entropy")):
            ax.set_ylim(bottom=0)
        if len(drawn) > 1:
            ax.legend(fontsize=8, frameon=False)
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    path = folder / "curves.png"
    fig.savefig(path, dpi=130)
    plt.close(fig)
    return path


def main(words: Sequence[str]) -> None:
    parser = Parser(prog="python -m rlreason.curves", description="Draw RUN/curves.png from RUN/metrics.jsonl.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a training run's folder, such as runs/grpo/DATE")
    folder = parser.parse_args(words).run
    if not (folder / "metrics.jsonl").is_file() or not read_metrics(folder):
        raise ConfigError(f"RUN={folder} holds no metrics.jsonl with a row in it: give the folder of a training run")
    print(f"curves: {draw_curves(folder, title_of(folder))}")


def title_of(folder: Path) -> str:
    """Model, data, objective and seed of a run, from its `config.yaml`."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    objective = f"loss={config['loss']['loss_type']}" if "loss" in config else config["algorithm"]
    return f"{config['model']['name']}, {config['data']['name']}: {objective}, seed {config['seed']}"


if __name__ == "__main__":
    sys.exit(answered(lambda: main(sys.argv[1:])))
