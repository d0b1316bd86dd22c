"""What checkpoints cost: their size, seconds to write and to read one, their share of a run's time.

    python benchmarks/checkpoint_cost.py [--model DIR --data DIR]

The built-in model learns for 20 steps; with `--model DIR --data DIR` that model learns GSM8K's solutions instead. Runs
with the default settings and runs without checkpoints take turns, so that other programs slow both alike. What counts
is the ratio within a pair, on a busy machine that of processor seconds. Reading means what going on needs: every digest
checked, every tensor loaded.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlreason.records.files import STATE, checkpoints_in, newest_good, read_json  # noqa: E402

BUILT_IN = ["n_steps=20"]
OF_A_MODEL = [
    "algorithm=sft", "model=local", "data=gsm8k", "prompt=r1_zero", "data.limit=512", "train_batch_size=4",
    "eval_problems=2", "eval_every=1000", "sampling.max_tokens=8", "epochs=null", "n_steps=20",
]  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """One run: its seconds as it counts them, and of these, those of its checkpoints."""

    seconds: float
    count: int
    writing: float
    size: int  # bytes of a checkpoint; 0 without any
    processor: float  # seconds, of user and system, imports included
    reading: float = 0.0  # seconds, of the newest


def run(words: Sequence[str], folder: Path) -> Cost:
    """Train in a process of its own, and read what it left."""
    argv = [sys.executable, "-m", "rlreason", *words, f"hydra.run.dir='{folder}'"]
    before = processor_seconds()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}\n{done.stdout}\n{done.stderr}")
    used = processor_seconds() - before
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    told = summary["checkpoints"]
    reading = read_seconds(folder) if checkpoints_in(folder) else 0.0
    return Cost(summary["time/total"], told["count"], told["seconds"], told["bytes"], used, reading)


def processor_seconds() -> float:
    """What all ended child processes have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_seconds(folder: Path) -> float:
    """Seconds to find the newest good checkpoint of a run, and to load it. Its files are in the system's cache."""
    from safetensors.torch import load_file

    begin = time.perf_counter()
    path = newest_good(folder, print)
    assert path is not None
    read_json(path / STATE)
    for file in path.rglob("*.safetensors"):
        load_file(file)
    return time.perf_counter() - begin


def pairs(words: Sequence[str], count: int) -> list[tuple[Cost, Cost]]:
    """(with default checkpoints, without any), so many times; which comes first changes."""
    found = []
    for number in range(count):
        costs: dict[str, Cost] = {}
        for every in ("null", "0") if number % 2 == 0 else ("0", "null"):
            with tempfile.TemporaryDirectory(prefix="checkpoint-cost-") as place:
                costs[every] = run([*words, f"checkpoint.every={every}"], Path(place) / "run")
            cost = costs[every]
            told = f"{cost.seconds:.1f} s, {cost.processor:.1f} s of a processor"
            print(f"pair {number + 1}, checkpoint.every={every}: {told}", flush=True)
        found.append((costs["null"], costs["0"]))
    return found


def table(found: Sequence[tuple[Cost, Cost]]) -> str:
    """The costs as lines."""
    kept = [one for one, _ in found]
    ratios = {
        "time with / time without": [one.seconds / other.seconds for one, other in found],
        "processor time, likewise": [one.processor / other.processor for one, other in found],
    }
    each = statistics.median(one.writing / max(one.count, 1) for one in kept)
    share = statistics.median(one.writing / one.seconds for one in kept)
    rows = [
        ("size of a checkpoint", f"{kept[-1].size / 1e6:.1f} MB"),
        ("seconds to write one", f"{each:.2f}"),
        ("seconds to check and read one", f"{statistics.median(one.reading for one in kept):.2f}"),
        ("checkpoints of a run", ", ".join(str(one.count) for one in kept)),
        ("share of the run's time", f"{share:.1%}"),
        *((name, f"{statistics.median(r):.3f} ({min(r):.3f} to {max(r):.3f})") for name, r in ratios.items()),
    ]
    return "\n".join(f"{name:<32}{value}" for name, value in rows)


def arguments() -> Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="a model folder; default: the built-in model")
    parser.add_argument("--data", metavar="DIR", help="with --model: GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("words", metavar="WORD", nargs="*", help="more settings, such as n_steps=40 threads=2")
    given = parser.parse_args()
    if bool(given.model) != bool(given.data):
        parser.error("--model and --data belong together")
    return given


def main() -> None:
    """Run the pairs and print the table."""
    given = arguments()
    words = BUILT_IN
    if given.model:
        places = {"model.path": given.model, "data.path": given.data}
        words = [*OF_A_MODEL, *(f"{key}='{Path(path).resolve()}'" for key, path in places.items())]
    chosen = {word.partition("=")[0] for word in given.words}
    words = [word for word in words if word.partition("=")[0] not in chosen] + given.words
    print(f"python -m rlreason {' '.join(words)}", flush=True)
    print(table(pairs(words, given.pairs)))


if __name__ == "__main__":
    main()
