"""What docs/real_model.md shows of a chain of stages: its picture, its tables, ten responses before and after.

    python benchmarks/real_model.py runs/sweeps/smollm2_stories zero_shot sft ei grpo [--out FILE.png]

The stages are the chain's sweeps, each without the chain's name: first what nothing was taught, then the reference of
the others. Accuracies, differences and their intervals are those of `rlreason report`. The last lines name each run's
summary.json by the first 12 digits of its SHA-256.
"""

import argparse
import csv
import hashlib
import html
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlreason.records.reader import RunFolder  # noqa: E402
from rlreason.records.rows import Row  # noqa: E402

INK, BLUE, PALE = "#343a44", "#1f8fd6", "#9fcdee"
SHOWN, WIDTH, STEPS = 10, 16, 5


def table(path: Path) -> list[dict[str, str]]:
    """Read a CSV with a heading."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def last_responses(run: Path) -> dict[str, Row]:
    """Return each problem's last response of a run or an evaluation, by its id."""
    folder = RunFolder(run)
    rows = folder.rows(folder.responses(), ("problem_id", "question", "response", "outcome"))
    return {row["problem_id"]: row for row in rows.values()}


def in_cell(text: str, width: int) -> str:
    """Return the beginning of a response, without its tags, as it can stand in a table of Markdown."""
    text = " ".join(re.sub("</?(think|answer)>", " ", text).split())
    return html.escape(text if len(text) <= width else f"{text[:width].rstrip()} …", quote=False).replace("|", "&#124;")


def told(stage: str) -> str:
    """Return a stage's name as people write it."""
    return stage.upper() if len(stage) < 5 else stage.replace("_", "-")


def draw(
    stages: list[str], settings: dict[str, dict[str, str]], seeds: list[list[float]], curve: Path, name: str
) -> Figure:
    """Draw each stage's accuracy with its interval and its seeds, and the reward of the last one's steps."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[4, 5])
    for place, (stage, values) in enumerate(zip(stages, seeds, strict=True)):
        mean, half = float(settings[stage]["accuracy"]), float(settings[stage]["accuracy ±"])
        left.errorbar(place, mean, [[min(half, mean)], [half]], fmt="o", color=INK, capsize=4, zorder=2)
        left.scatter([place] * len(values), [100 * value for value in values], color=BLUE, s=14, zorder=3)
    left.set_xticks(range(len(stages)), [told(stage) for stage in stages])
    highest = max(100 * value for values in seeds for value in values)
    left.set(title="Accuracy of the last evaluation, %", ylim=(-2, 100 if highest > 20 else None))
    found = [row for row in table(curve) if row["setting"] == name]
    for seed in sorted({row["seed"] for row in found if row["data"] == "run"}):
        own = [
            (float(row["step"]), float(row["value"])) for row in found if (row["data"], row["seed"]) == ("run", seed)
        ]
        right.plot(*zip(*own, strict=True), color=PALE, linewidth=1)
    means = [float(row["value"]) for row in found if row["data"] == "mean"]
    smooth = [statistics.fmean(means[at : at + STEPS]) for at in range(len(means) - STEPS + 1)]
    right.plot([at + (STEPS + 1) / 2 for at in range(len(smooth))], smooth, color=INK, linewidth=2)
    right.set(title=f"{told(stages[-1])}'s rewards: each seed, and the mean of {STEPS} steps", xlabel="step")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb")
        axes.set_axisbelow(True)
    return figure


def main() -> None:
    """Draw the picture, and print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chain", type=Path)
    parser.add_argument("stages", nargs="+", help="first what nothing was taught; then the reference of the others")
    parser.add_argument("--out", type=Path, default=Path("real_model.png"))
    asked = parser.parse_args()
    chain, stages = asked.chain, list(asked.stages)
    folders = [chain / f"{chain.name}_{stage}" for stage in stages]
    runs = [sorted(folder.glob("seed=*/summary.json")) for folder in folders]
    with tempfile.TemporaryDirectory() as place:
        order = map(str, [folders[1], folders[0], *folders[2:]])
        words = ["report", *order, "--out", place, "--figures", place, "--metric", "reward/mean"]
        subprocess.run([sys.executable, "-m", "rlreason", *words], check=True)
        found = {row["setting"].removeprefix(f"{chain.name}_"): row for row in table(Path(place) / "settings.csv")}
        summaries = [[json.loads(path.read_text("utf-8")) for path in of_stage] for of_stage in runs]
        seeds = [[float(one["accuracy"]) for one in of_stage] for of_stage in summaries]
        draw(stages, found, seeds, Path(place) / "reward_mean.csv", folders[-1].name).savefig(asked.out, dpi=150)
    print("| stage | accuracy | seeds | against " + stages[1] + " | tokens | minutes a run | GB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for stage, of_stage, values in zip(stages, summaries, seeds, strict=True):
        one = found[stage]
        cells = [stage, f"{one['accuracy']} ± {one['accuracy ±']}", " ".join(f"{100 * value:.1f}" for value in values)]
        cells += [f"{one['difference']} ± {one['difference ±']}: {one['verdict']}" if one["difference"] else ""]
        cells += [f"{statistics.fmean(run['length'] for run in of_stage):.0f}"]
        cells += [f"{statistics.fmean(sum(run['phases'].values()) for run in of_stage) / 60:.0f}"]
        cells += [f"{max(run['peak_gb'] for run in of_stage):.1f}"]
        print(f"| {' | '.join(cells)} |")
    before, after = (last_responses(runs[number][0].parent) for number in (0, -1))
    print("\n| question | before | after |\n| --- | --- | --- |")
    for problem in [problem for problem in before if problem in after][:SHOWN]:
        row, begun = after[problem], in_cell(before[problem]["response"], WIDTH)
        print(f"| {row['question']} | {begun} | {in_cell(row['response'], 3 * WIDTH)} ({row['outcome']}) |")
    print()
    for stage, of_stage in zip(stages, runs, strict=True):
        print(f"{stage}: " + " ".join(hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in of_stage))


if __name__ == "__main__":
    main()
