"""`curves.png` of one run, drawn from its `metrics.jsonl` alone."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlreason.runtime.atomic_files import whole
from rlreason.runtime.signals import held

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


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    with (folder / "metrics.jsonl").open() as file:
        return [json.loads(line) for line in file if line.strip()]


def series(rows: list[dict[str, Any]], name: str, over: str = "train_step") -> tuple[list[float], list[float]]:
    """The values of one metric over a counter: optimizer updates, or seconds (`time/active`)."""
    named = [row for row in rows if row.get(name) is not None]
    return [row.get(over, row.get("eval_step", 0)) for row in named], [row[name] for row in named]


def panels_of(rows: list[dict[str, Any]]) -> list[Panel]:
    """What was learned, how long responses grew, how sure the model is, how steady; more where more was measured.

    Where given or found responses are imitated, the loss says something, and in expert iteration the entropy of
    correct and other responses; where several updates use one rollout batch, how far the policy moved within it.
    """
    seen = {name for row in rows for name in row}
    imitates = bool(seen & {"sft/epoch", "ei/kept"})
    panels = [*PANELS, IMITATION if imitates else STEADINESS]
    if "ei/kept" in seen:
        panels += [BY_OUTCOME, STEADINESS]
    if "train/ratio" in seen and not imitates:
        panels += [panel for panel in OFF_POLICY if panel[1][0][0] in seen]
    return panels


def draw_curves(folder: Path, title: str) -> Path:
    """The panels of a run over its optimizer updates."""
    with held():  # an import that a signal cuts in two cannot be done again
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

    rows = read_metrics(folder)
    panels = panels_of(rows)
    columns = (len(panels) + 1) // 2
    fig, axes = plt.subplots(2, columns, figsize=(5 * columns, 6.4), constrained_layout=True)
    for ax, panel in zip(axes.T.flat if columns > 2 else axes.flat, panels, strict=False):
        draw_panel(ax, rows, panel)
    for ax in list(axes.T.flat if columns > 2 else axes.flat)[len(panels) :]:
        ax.remove()
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    path = folder / "curves.png"
    with whole(path) as partial:
        fig.savefig(partial, dpi=130, format=path.suffix[1:] or "png")
    plt.close(fig)
    return path


def draw_panel(ax: Any, rows: list[dict[str, Any]], panel: Panel) -> None:
    """One heading, its lines, and for the accuracy its interval and the whole split's at the end."""
    heading, lines = panel
    drawn = [(name, label) for name, label in lines if series(rows, name)[0]]
    for name, label in drawn:
        steps, values = series(rows, name)
        strong = name.startswith("eval/") or len(drawn) == 1
        style = {"marker": "o", "markersize": 4, "linewidth": 2} if name.startswith("eval/") else {"linewidth": 1.4}
        ax.plot(steps, values, label=label, alpha=1.0 if strong else 0.55, **style)
        if name == "eval/accuracy":
            low, high = series(rows, "eval/accuracy_low")[1], series(rows, "eval/accuracy_high")[1]
            ax.fill_between(steps, low, high, alpha=0.15, label="95% interval")
    whole = next((row for row in rows if row.get("final/problems", 0) > row.get("eval/problems", 0)), None)
    if heading.startswith("accuracy") and whole is not None:
        low, value, high = (whole[f"final/accuracy{end}"] for end in ("_low", "", "_high"))
        label = f"all {whole['final/problems']:.0f} problems"
        ax.errorbar(whole["train_step"], value, [[value - low], [high - value]], fmt="D", color="k", ms=4, label=label)
    ax.set_title(heading, fontsize=10, loc="left")
    ax.set_xlabel("optimizer update", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    if heading.startswith("accuracy"):
        ax.set_ylim(-0.02, 1.02)
    elif heading.startswith(("response", "entropy", "clip")):
        ax.set_ylim(bottom=0)
    if len(drawn) > 1:
        ax.legend(fontsize=8, frameon=False)


def title_of(folder: Path) -> str:
    """Model, data, objective and seed of a run, from its `config.yaml`."""
    config = OmegaConf.load(folder / "config.yaml")

    def named(key: str) -> str:
        return str(OmegaConf.select(config, key, default=""))  # another version's config may lack it

    objective = f"loss={loss}" if (loss := named("loss.loss_type")) else named("algorithm")
    return f"{named('model.name')}, {named('data.name')}: {objective}, seed {named('seed')}"
