"""`rlreason inspect RUN --gradients`: the laboratory's table, picture and figures."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlreason.config.store import register
from rlreason.records.console import Console
from rlreason.records.files import finite
from rlreason.records.reader import RunFolder
from rlreason.records.training_curves import picture
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import folded
from rlreason.runtime.subcommand import Answer
from rlreason.training.laboratory import OWN, Laboratory, ObjectiveScore, laboratory, read_run, read_step

COLUMNS = (
    "objective",
    "loss",
    "|gradient|",
    "cosine",
    "clipped",
    "zero adv.",
    "short:long",
    "loss, length norm, advantage",
)
ROW = "{:<25} {:>9} {:>10} {:>7} {:>8} {:>9} {:>10}  {}"
LOOK_FOR = (
    "What to look for: cosine says whether an objective pushes the policy in the direction of this run's own (1: the "
    "same direction, where a larger |gradient| is no more than a larger step), and short:long says how many times more "
    "one token of the shortest quarter of responses weighs than one of the longest quarter: 1 where the length norm "
    "treats every token alike (constant, token) and nothing is clipped, above 1 where it divides by each response's "
    "own length (masked_mean)."
)
NO_GRADIENT = (
    "! this run's own gradient is 0 at this step, because no sample has an advantage: cosines are not defined here; "
    "choose another step (--step)"
)


def table(result: Laboratory) -> str:
    """Format one line per objective for a terminal, and what to look for."""
    head = (
        f"step {result.step}: {result.samples} responses, {result.tokens} tokens, scored by the {result.policy} policy"
    )
    head += " (so ratios are not 1, and clips act)"
    lines = ["\n" + head, "", ROW.format(*COLUMNS)]
    lines += [_line(m) for m in result.objectives]
    lines += ["", textwrap.fill(LOOK_FOR, 118)]
    if result.objectives[0].cosine is None:
        lines += [textwrap.fill(NO_GRADIENT, 118)]
    return "\n".join(lines)


def _line(m: ObjectiveScore) -> str:
    label = f"{OWN}, {m.name}" if m.name.startswith("length_norm=") else m.name
    label = label.replace("length_norm=", "but ")
    cosine = _number(m.cosine, ".3f")
    ratio = _number(m.short_to_long, ".2f")
    shares = f"{m.clipped:.1%}", f"{m.zero_advantage:.0%}"
    return ROW.format(label, f"{m.loss:.3g}", f"{m.grad_norm:.3g}", cosine, *shares, ratio, m.axes).rstrip()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def lab_file(folder: Path, step: int, suffix: str) -> Path:
    """Return RUN/lab/step_NNNNN.SUFFIX, creating its folder."""
    path = folder / "lab" / f"step_{step:05d}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    return path


def figures(result: Laboratory) -> dict[str, Any]:
    """Return all numbers of the table and the picture, and more; non-finite ones become null."""
    content = asdict(result)
    for score, row in zip(result.objectives, content["objectives"], strict=True):
        row["short_to_long"] = score.short_to_long
    numbers: dict[str, Any] = finite(content)
    return numbers


def draw(folder: Path, result: Laboratory) -> Path:
    """Plot, left, a token's weight by position for each length norm; right, the direction of each gradient."""
    path = lab_file(folder, result.step, "png")
    title = f"{folder.name}, step {result.step}; this run: {result.objectives[0].axes}"
    with picture(path, title, (12, 5), columns=2) as (left, right):
        _draw_positions(left, result)
        _draw_cosines(right, result)
    return path


def _draw_positions(ax: Any, result: Laboratory) -> None:
    """Plot a token's weight at each position, relative to the objective's average position."""
    norms = [m for m in result.objectives if m.name == OWN or m.name.startswith("length_norm=")]
    for m, style in zip(norms, ("-", "--", ":"), strict=False):
        points = [(t, w) for t, w in enumerate(m.position_weight) if w is not None]
        mean = sum(w for _, w in points) / len(points) if points else 0.0
        if mean:
            kind = m.axes.split(", ")[1]
            label = f"{kind} ({OWN})" if m.name == OWN else kind
            ax.plot([t for t, _ in points], [w / mean for _, w in points], style, linewidth=2, label=label)
    positions = range(len(result.still_going))
    ax.fill_between(positions, result.still_going, color="grey", alpha=0.15, label="share of responses this long")
    dips = "; it falls where tokens are clipped" if result.objectives[0].clipped else ""
    ax.set_title(f"weight of one token, by its position (1: the average{dips})", fontsize=10, loc="left")
    ax.set_xlabel("token position in the response", fontsize=9)
    ax.set_ylim(0, ax.get_ylim()[1] * 1.25)  # room for the legend above the curves
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")


def _draw_cosines(ax: Any, result: Laboratory) -> None:
    named = [m for m in result.objectives[1:] if not m.name.startswith("length_norm=")]
    values = [m.cosine or 0.0 for m in named]
    ax.barh([m.name for m in named], values, color="tab:blue", alpha=0.75)
    for row, m in enumerate(named):
        text = f" {_number(m.cosine, '.2f')}" + (f", {m.clipped:.0%} clipped" if m.clipped >= 0.005 else "")
        ax.text(max(m.cosine or 0.0, 0.0), row, text, va="center", fontsize=8)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlim(min(0.0, *values) * 1.1 - 0.02, 1.3)
    ax.set_xticks([tick for tick in (-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1) if tick >= min(0.0, *values)])
    ax.set_title("cosine of each objective's gradient with this run's own", fontsize=10, loc="left")
    ax.grid(alpha=0.25, axis="x")


def compare_gradients(folder: RunFolder, step: int | None, console: Console) -> Answer:
    """Compare the objectives on one step's rollouts, by default those of the last saved step."""
    register()
    run = read_run(folder)
    step, samples = read_step(folder, run, step)
    with console.wait("comparing the objectives"):
        result = laboratory(folder, run, step, samples, console)
    numbers = figures(result)
    file = lab_file(folder.path, result.step, "json")
    write_whole(file, json.dumps(numbers, indent=1) + "\n")
    with console.wait("drawing"):
        picture = draw(folder.path, result)
    files = folded(f"picture: {picture}, numbers: {file}", console.width)
    return Answer(f"{table(result)}\n\n{files}", {"run": folder.path, **numbers, "picture": picture, "numbers": file})
