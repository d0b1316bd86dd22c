"""How cost grows: `python benchmarks/growth.py` measures, `--write` puts table and picture into docs/performance.md.

Each point is measured in a process of its own, forked when torch is imported, on one thread: processor seconds of the
work, its child processes included, and the most memory that it held above what was there before, or that the largest of
its child processes held. What takes less than a second is done three times after a warm-up, and the cheapest counts.
Points are kept in `--json` as they are measured, and a point that is there is not measured again.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from against_trl import ROOT, resident
from growth_report import Axis, Point, report

Work = Callable[[], object]
SMALL = ["n_steps=1", "rollout_batch_size=16", "group_size=4", "sampling.max_tokens=16", "eval_every=0"]
SMALL += ["threads=1", "log_generations=0", "checkpoint.every=0", "model.warm_start.steps=0"]


class Measured(NamedTuple):
    """An axis with how the work of one size is set up."""

    axis: Axis
    prepare: Callable[[int], Work]


def policy_of(vocabulary: int = 512, width: int = 128) -> Any:
    """A tiny Llama of 2 layers with random weights."""
    import torch

    from rlreason.model.parameters import build_model, build_tokenizer
    from rlreason.model.policy import Policy

    tokenizer = build_tokenizer(["How many are 2 and 3?"], vocab_size=300)
    model = build_model(vocabulary, width=width)
    model.config.max_position_embeddings = 4096
    return Policy(model, tokenizer, device=torch.device("cpu"))


def update(
    prompts: int = 2, group: int = 4, length: int = 128, times: int = 1, vocabulary: int = 512, width: int = 128
) -> Work:
    """`times` optimizer steps on groups of given responses to prompts of 100 tokens."""
    from random import Random

    from rlreason.config.training import OptimizationConfig
    from rlreason.objectives.objective import LossConfig, Objective
    from rlreason.training.learner import Learner
    from rlreason.types import Grade, Response, Sample

    random, samples = Random(0), []
    for number in range(prompts):
        prompt = [random.randrange(2, 300) for _ in range(100)]
        for member in range(group):
            ids = [random.randrange(2, 300) for _ in range(length)]
            response = Response(f"p{number}", prompt, ids, [], "", "length")
            grade, old = Grade(1.0, 0.0, 0.0, "wrong"), [-6.0] * length if times > 1 else None
            samples.append(Sample(response, grade, advantage=1.0 if member % 2 else -1.0, old_log_probs=old))
    objective = Objective(loss=LossConfig("grpo_clip", cliprange=0.2))
    policy = policy_of(vocabulary, width)
    learner = Learner(policy, objective, OptimizationConfig(1e-6), micro_batch_tokens=4096)
    return lambda: [learner.update(samples) for _ in range(times)]


def generate(length: int) -> Work:
    """16 prompts of 100 tokens, each continued by `length` tokens."""
    from rlreason.engines.base import Prompt, Sampling
    from rlreason.engines.hf import HFEngine

    engine = HFEngine(policy_of())
    prompts = [Prompt(f"p{i}", [(7 * i + j) % 290 + 2 for j in range(100)], i) for i in range(16)]
    return lambda: engine.generate(prompts, Sampling(1.0, length, length), 1)


def whole_run(verb: str, *words: str) -> Work:
    """A run from Python in a folder of its own, with the model that comes with the package."""
    import rlreason

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            getattr(rlreason, verb)(*words, f"hydra.run.dir={folder}/run", quiet=True)

    return work


def training_rows(rows: int) -> Work:
    """One small step behind the reading of so many training rows."""
    return whole_run("train", *SMALL, f"data.n_train={rows}", "data.n_validation=16", "eval_problems=8")


def evaluation(problems: int) -> Work:
    """An evaluation of so many problems."""
    return whole_run("evaluate", "threads=1", f"data.n_validation={problems}", f"eval_problems={problems}")


def sweep(runs: int) -> Work:
    """A sweep of so many of the smallest runs, one after the other, as the command line starts it."""
    seeds = ",".join(map(str, range(runs)))
    words = [*SMALL, f"seed={seeds}", "data.n_train=64", "data.n_validation=16", "eval_problems=8", "jobs=1"]

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            argv = [sys.executable, "-m", "rlreason", "-m", *words, f"hydra.sweep.dir={folder}/sweep"]
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(argv)}\n{done.stdout}\n{done.stderr}")

    return work


def parameters(width: int) -> int:
    """Of the tiny Llama of this width, in thousands."""
    return round(sum(p.numel() for p in policy_of(width=width).model.parameters()) / 1000)


#: Model size is measured at these widths; the axis shows thousands of parameters.
WIDTHS = (64, 128, 256, 512)


def everything() -> list[Measured]:
    """What is measured, in the order of the table."""
    size_of = {parameters(width): width for width in WIDTHS}
    attention = "attention looks back at every token before"
    prefix = "a prompt is computed once for its group"
    return [
        Measured(
            Axis("group size", "responses per prompt", "an update on 2 prompts", (2, 4, 8, 16, 32), prefix),
            lambda n: update(group=n),
        ),
        Measured(Axis("questions", "prompts", "an update on groups of 4", (1, 2, 4, 8, 16)), lambda n: update(n)),
        Measured(
            Axis("response length", "tokens", "an update on 8 responses", (64, 128, 256, 512, 1024), attention),
            lambda n: update(length=n),
        ),
        Measured(
            Axis("length sampled", "tokens", "sampling 16 responses", (32, 64, 128, 256, 512), attention), generate
        ),
        Measured(
            Axis(
                "vocabulary", "tokens", "an update on 8 responses", (1024, 4096, 16384, 65536), "layers cost as before"
            ),
            lambda n: update(vocabulary=n),
        ),
        Measured(
            Axis(
                "model size", "thousand parameters", "an update on 8 responses", tuple(size_of), "small products waste"
            ),
            lambda n: update(width=size_of[n]),
        ),
        Measured(Axis("epochs", "passes", "a step's updates on 8 responses", (1, 2, 4, 8)), lambda n: update(times=n)),
        Measured(Axis("problems", "problems", "an evaluation", (64, 256, 1024, 2048), "fuller batches"), evaluation),
        Measured(Axis("rows", "training rows", "a run of one step", (4000, 16000, 64000, 128000)), training_rows),
        Measured(
            Axis("runs", "runs", "a sweep of runs of one step", (1, 2, 4), "they share the start of a process"), sweep
        ),
    ]


def measured(prepare: Callable[[int], Work], size: int) -> Point:
    """The point of one size, measured in a process forked for it. `ChildProcessError` where that fails."""
    near, far = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(far, json.dumps(_point(prepare(size))).encode())
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
    os.close(far)
    with os.fdopen(near) as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise ChildProcessError(f"size {size} failed: its error stands above")
    return Point(size, *json.loads(said))


def _point(work: Work) -> tuple[float, float]:
    """(processor seconds, MB above the start) of the work."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before, costs = resident("VmRSS"), []
    while True:
        begin = _processor_seconds()
        work()
        costs.append(_processor_seconds() - begin)
        if costs[0] > 1 or len(costs) == 4:
            child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # Linux counts in kB
            return min(costs[1:] or costs), max(resident("VmHWM") - before, child)


def _processor_seconds() -> float:
    """Of this process and of those children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def main() -> None:
    """Measure what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="axes by name, such as runs; left out: all")
    parser.add_argument("--json", type=Path, default=ROOT / "runs/growth.json", help="where points are kept")
    parser.add_argument("--write", action="store_true", help="put table and picture into docs/performance.md")
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(1)
    axes = everything()
    if unknown := set(asked.only) - {m.axis.name for m in axes}:
        sys.exit(f"--only={unknown.pop()} is no axis: choose among {', '.join(m.axis.name for m in axes)}")
    kept: dict[str, list[list[float]]] = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    for axis, prepare in axes:
        points = kept.setdefault(axis.name, [])
        missing = set(axis.sizes) - {point[0] for point in points}
        for size in sorted(missing if axis.name in asked.only or not asked.only else ()):
            point = measured(prepare, size)
            points.append(list(point))
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            asked.json.write_text(json.dumps(kept, indent=1) + "\n")
            print(f"{axis.name} {size}: {point.seconds:.2f} s, {point.memory:.0f} MB", flush=True)
    report([m.axis for m in axes], _points(kept), ROOT if asked.write else None)


def _points(kept: dict[str, Sequence[Sequence[float]]]) -> dict[str, list[Point]]:
    """Axis -> its points in order of size, of those axes that have enough of them for a line."""
    points = {name: sorted(Point(int(size), *cost) for size, *cost in rows) for name, rows in kept.items()}
    return {name: found for name, found in points.items() if len(found) > 2}


if __name__ == "__main__":
    main()
