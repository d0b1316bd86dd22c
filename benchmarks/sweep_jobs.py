"""What running side by side saves: the wall time of one sweep with jobs=2 over that with jobs=1.

    python benchmarks/sweep_jobs.py [--repeats 1] [--processors 2] [WORDS ...]

Four runs of the built-in task, whose model takes one thread wherever it runs. `WORDS` change the runs. Both ways take
turns; what is printed is the ratio of each pair, and whether the final figures are the same. On a machine with other
work the ratio says little: its load is printed with it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ["learning_rate=0.001,0.01", "seed=0,1", "n_steps=20", "save_model=false"]


def sweep(folder: Path, jobs: int, words: Sequence[str], processors: int) -> float:
    """Seconds of a sweep in a process of its own, on so many processors."""
    argv = [sys.executable, "-m", "rlreason", "-m", *RUNS, *words, f"jobs={jobs}", f"hydra.sweep.dir={folder}"]
    allowed = sorted(os.sched_getaffinity(0))[:processors]
    began, before = time.monotonic(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    os.sched_setaffinity(0, before)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}\n{done.stdout}\n{done.stderr}")
    return time.monotonic() - began


def accuracies(folder: Path) -> dict[str, float]:
    """Run -> its final accuracy."""
    runs = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["runs"]
    return {run["name"]: run["accuracy"] for run in runs}


def main() -> None:
    """Measure, and print a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--processors", type=int, default=2)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    for number in range(asked.repeats):
        with tempfile.TemporaryDirectory() as place:
            one, two = Path(place) / "one", Path(place) / "two"
            alone = sweep(one, 1, asked.words, asked.processors)
            beside = sweep(two, 2, asked.words, asked.processors)
            same = "the same" if accuracies(one) == accuracies(two) else "not the same (other numbers of threads)"
            print(
                f"{number + 1}: jobs=1 {alone:.0f} s, jobs=2 {beside:.0f} s, ratio {beside / alone:.2f}; "
                f"final accuracies {same}; load {os.getloadavg()[0]:.1f} on {asked.processors} processors",
                flush=True,
            )


if __name__ == "__main__":
    main()
