"""Which textbook effects show on which built-in task: arms that differ in one thing, paired over seeds.

    python benchmarks/task_effects.py [--seeds 4] [--jobs 1] [--runs DIR] [--out FILE] [--only EFFECT ...] [--tables]

Each run is a process of its own, on one thread, below DIR as ARM/seed=S. Finished runs are not run again, so the same
command goes on after an interruption; `--tables` only reads what is there. A difference is the mean over seeds of arm
minus reference on the same seed, with Student's t interval of S - 1 degrees of freedom; a figure of one arm has the
same interval of its values. Every seed starts from the same weights, and decides sampling and the order of questions.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlreason.runtime.files import write_whole  # noqa: E402
from rlreason.runtime.statistics import mean_interval  # noqa: E402

STEPS = 40
COMMON = ["eval_every=10", "save_model=false", "log_generations=0", "checkpoint.every=0"]
MANY = ["n_steps=20", "off_policy=e4_quarter"]  # 16 updates a rollout batch
ARMS = {
    "long": ["data=stories_long"],
    "long, no baseline": ["data=stories_long", "loss=no_baseline"],
    "long, rate 1e-2": ["data=stories_long", "learning_rate=1e-2"],
    "long, 16 updates, clipped": ["data=stories_long", "loss=grpo_clip", *MANY],
    "long, 16 updates, unclipped": ["data=stories_long", "loss=grpo_no_clip", *MANY],
    "mixed": ["data=stories_mixed"],
    "mixed, no std": ["data=stories_mixed", "std_norm=none"],
    "rambling": ["data=stories_rambling"],
    "rambling, constant": ["data=stories_rambling", "length_norm=constant"],
    "sparse": ["data=stories_sparse"],
    "shortcut": ["data=stories_shortcut"],
}


@dataclass(frozen=True)
class Run:
    """What one run left: its summary, and its rows of metrics."""

    summary: dict[str, Any]
    rows: list[dict[str, float]]

    def mean(self, name: str, first: int, last: int) -> float:
        """Of a metric over the rollout steps first..last, both included; nan where it was never logged."""
        values = [r[name] for r in self.rows if name in r and first <= r["rollout_step"] <= last]
        return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Effect:
    """A claim, the figure that would show it, and the arms; `reference` None: the figure of one arm by itself."""

    name: str
    claim: str
    figure: str
    measure: Callable[[Run], float]
    arm: str
    reference: str | None = None
    signed: bool = True  # whether the side of zero that the interval lies on says anything


def accuracy_on_the_way(run: Run) -> float:
    """Mean accuracy of the evaluations after the start; a run that ended early counts its last for those missing."""
    found = [row["eval/accuracy"] for row in run.rows if "eval/accuracy" in row]
    return sum([*found[1:], *[found[-1]] * max(0, 1 + STEPS // 10 - len(found))]) / max(len(found) - 1, STEPS // 10)


def final_accuracy(run: Run) -> float:
    """Of the final evaluation on all validation problems, or of the last there was."""
    known = [row[key] for row in run.rows for key in ("eval/accuracy", "final/accuracy") if key in row]
    return known[-1] if run.summary.get("accuracy") is None else float(run.summary["accuracy"])


def live(first: int, last: int) -> Callable[[Run], float]:
    """Share of groups whose rewards differ."""
    return lambda run: 1 - run.mean("reward/frac_reward_zero_std", first, last)


def late(name: str) -> Callable[[Run], float]:
    """Mean of a metric over the last ten rollout steps."""
    return lambda run: run.mean(name, run.rows[-1]["rollout_step"] - 9, STEPS)  # type: ignore[arg-type]


EFFECTS = (
    Effect("baseline", "without a baseline it learns slower", "mean accuracy on the way", accuracy_on_the_way,
           "long, no baseline", "long"),
    Effect("rate", "a rate of 1e-2 instead of 3e-4 breaks", "final accuracy", final_accuracy, "long, rate 1e-2",
           "long"),
    Effect("clip", "16 updates a batch break unclipped, and survive clipped", "final accuracy", final_accuracy,
           "long, 16 updates, unclipped", "long, 16 updates, clipped"),
    Effect("std", "without std_norm gradients are smaller", "gradient norm",
           lambda run: run.mean("train/grad_norm", 1, STEPS), "mixed, no std", "mixed"),
    Effect("std", "without std_norm it ends elsewhere", "final accuracy", final_accuracy, "mixed, no std", "mixed"),
    Effect("length", "a constant divisor shortens wrong answers", "tokens of a wrong answer, last 10 steps",
           late("rollout/length_wrong"), "rambling, constant", "rambling"),
    Effect("sparse", "few groups are live at first", "live groups, first 3 steps", live(1, 3), "sparse",
           signed=False),
    Effect("shortcut", "reward rises without the skill", "training reward, last 10 steps minus first 3",
           lambda run: late("reward/mean")(run) - run.mean("reward/mean", 1, 3), "shortcut"),
    Effect("shortcut", "reward rises without the skill", "validation accuracy, end minus start",
           lambda run: final_accuracy(run) - run.summary["accuracy_before"], "shortcut"),
)  # fmt: skip
#: Of the arms with default settings, which say what a task is like.
FIGURES: dict[str, Callable[[Run], float]] = {
    "start": lambda run: float(run.summary["accuracy_before"]),
    "end": final_accuracy,
    "reward, last 10": late("reward/mean"),
    "live groups, first 3": live(1, 3),
    "live groups, last 10": live(STEPS - 9, STEPS),
    "tokens at first": lambda run: float(run.summary["length_before"]),
    "tokens at the end": lambda run: float(run.summary["length"]),
    "seconds": lambda run: float(run.summary["seconds"]),
}
PLAIN = ("long", "mixed", "rambling", "sparse", "shortcut")


def read_run(folder: Path) -> Run | None:
    """What a run left; None where it has not ended by itself."""
    summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
    if not summary.is_file() or not metrics.is_file():
        return None
    told = json.loads(summary.read_text(encoding="utf-8"))
    if not told["status"].startswith(("finished", "diverged", "stopped")):
        return None
    return Run(told, [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()])


def folder_of(runs: Path, arm: str, seed: int) -> Path:
    """Where a run of an arm lies."""
    return runs / arm.replace(", ", "_").replace(" ", "-") / f"seed={seed}"


def run_one(runs: Path, arm: str, seed: int) -> None:
    """One run in a process of its own, unless it is there."""
    folder = folder_of(runs, arm, seed)
    if read_run(folder):
        return
    steps = [] if any(word.startswith("n_steps=") for word in ARMS[arm]) else [f"n_steps={STEPS}"]
    words = [*COMMON, *steps, *ARMS[arm], f"seed={seed}", f"hydra.run.dir='{folder}'"]
    argv = [sys.executable, "-m", "rlreason", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    found = read_run(folder)
    said = f"{found.summary['status']} {final_accuracy(found):.3f}" if found else done.stderr.strip()[-300:]
    print(f"{arm}, seed {seed}: {said}", flush=True)


def interval(values: list[float], digits: int = 3) -> str:
    """Mean and interval over seeds, or what there is of them.

    >>> interval([0.5, 0.6, 0.7], 2), interval([0.5], 2), interval([])
    ('0.60 (0.35 to 0.85), 3', '0.50, 1', '-')
    """
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "-"
    mean, low, high = mean_interval(values)
    spread = "" if math.isnan(low) else f" ({low:.{digits}f} to {high:.{digits}f})"
    return f"{mean:.{digits}f}{spread}, {len(values)}"


def runs_of(runs: Path, arm: str, seeds: int) -> dict[int, Run]:
    """The finished runs of an arm, by seed."""
    found = {seed: read_run(folder_of(runs, arm, seed)) for seed in range(seeds)}
    return {seed: run for seed, run in found.items() if run}


def verdict(values: list[float]) -> str:
    """What an interval of differences says of the claim's own figure: its sign, or that it cannot tell."""
    values = [value for value in values if not math.isnan(value)]
    mean, low, high = mean_interval(values) if values else (math.nan,) * 3
    if math.isnan(low):
        return "too few seeds"
    return "cannot tell" if low <= 0 <= high else "higher" if mean > 0 else "lower"


def tables(runs: Path, seeds: int) -> Iterator[str]:
    """Markdown: what the tasks are like, how every arm ended, and the effects."""
    yield f"| task | {' | '.join(FIGURES)} |\n|{' --- |' * (len(FIGURES) + 1)}"
    for arm in PLAIN:
        found = runs_of(runs, arm, seeds).values()
        yield f"| {arm} | " + " | ".join(interval([figure(run) for run in found]) for figure in FIGURES.values()) + " |"
    yield "\n| arm | settings | final accuracy | ended |\n| --- | --- | --- | --- |"
    for arm, words in ARMS.items():
        found = runs_of(runs, arm, seeds).values()
        ended = ", ".join(sorted(f"{run.summary['status']} {run.summary['reason']}".strip() for run in found))
        settings = " ".join(f"`{word}`" for word in words)
        yield f"| {arm} | {settings} | {interval([final_accuracy(run) for run in found])} | {ended} |"
    yield "\n| claim | figure | arm | reference | difference, 95% interval, seeds | verdict |\n|" + " --- |" * 6
    for effect in EFFECTS:
        ours = runs_of(runs, effect.arm, seeds)
        theirs = runs_of(runs, effect.reference, seeds) if effect.reference else {}
        pairs = [(run, theirs.get(seed)) for seed, run in ours.items() if not effect.reference or seed in theirs]
        values = [effect.measure(run) - (effect.measure(other) if other else 0.0) for run, other in pairs]
        said = verdict(values) if effect.signed else "-"
        cells = (effect.claim, effect.figure, effect.arm, effect.reference or "-", interval(values), said)
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description="Which textbook effects show on which built-in task.")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; seconds mean nothing then")
    parser.add_argument("--runs", type=Path, default=Path("runs/task_effects"), help="the folder of the runs")
    parser.add_argument("--out", type=Path, help="write the tables there as well")
    parser.add_argument("--only", nargs="*", default=None, help="names of effects", choices=[e.name for e in EFFECTS])
    parser.add_argument("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    runs = args.runs.resolve()
    needed = {a for e in EFFECTS if args.only is None or e.name in args.only for a in (e.arm, e.reference) if a}
    todo = [(arm, seed) for seed in range(args.seeds) for arm in ARMS if arm in needed]
    if not args.tables:
        with ThreadPoolExecutor(max(1, args.jobs)) as pool:
            list(pool.map(lambda pair: run_one(runs, *pair), todo))
    text = "\n".join(tables(runs, args.seeds)) + "\n"
    print(text)
    if args.out:
        write_whole(args.out, text)


if __name__ == "__main__":
    main()
