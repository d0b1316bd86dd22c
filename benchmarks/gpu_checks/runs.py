"""Whole runs by the command line: sampling ahead of learning, and training on two GPUs."""

import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gpu_checks.common import Asked, Found

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
#: Metric -> how far two ways of summing may be apart in the first step, as a share; later ones follow other roundings.
COMPARED = {"train/loss": 5e-3, "train/grad_norm": 2e-2, "train/entropy": 5e-3}


def overlap(asked: Asked) -> Found:
    """Seconds per step of two short runs, with sampling after learning and beside it."""
    if not torch.cuda.is_available():
        return Found(None, "left out: on a processor sampling and learning share its cores")
    chosen = ["rollout=vllm", "rollout.sleep=false", "rollout.kv_cache_gb=4", "n_steps=6", "eval_problems=16"]
    chosen += ["rollout_batch_size=64", "group_size=8", "train_batch_size=64"]
    figures: dict[str, Any] = {}
    for ahead in (0, 1):
        rows = _rows(_run(asked, f"async_{ahead}", *chosen, f"rollout.async_level={ahead}"))
        ends = [row["time/total"] for row in rows]
        figures[f"async_{ahead}_s"] = statistics.median(b - a for a, b in pairwise(ends))
    gain = figures["async_0_s"] / figures["async_1_s"]
    words = "{async_0_s:.2f} s a step one after the other, {async_1_s:.2f} s side by side".format(**figures)
    return Found(gain > 0.95, words, figures | {"gain": gain})


def ranks(asked: Asked) -> Found:
    """SFT on one GPU and on two, in both modes: the same samples in the first step, so the same gradient."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        return Found(None, "left out: one GPU is here, and it takes two")
    chosen = [
        "algorithm=sft",
        f"n_steps={STEPS}",
        "epochs=null",
        "eval_every=0",
        "eval_problems=4",
        "save_model=false",
    ]
    chosen += ["train_batch_size=16"]
    alone = _rows(_run(asked, "one", *chosen, "gpus=1", "rollout=hf"))
    if not alone[0]["train/grad_norm"]:
        return Found(False, "the run on one GPU has no gradient, so there is nothing to compare")
    figures: dict[str, Any] = {}
    for mode in ("replicate",) if asked.quick else ("replicate", "shard"):
        engine = "vllm" if mode == "shard" and gpus else "hf"  # which samples from a whole model alone, on a GPU
        two = _rows(_run(asked, mode, *chosen, "gpus=2", f"parallel={mode}", f"rollout={engine}"))
        figures[mode] = {key: _apart(alone[0][key], two[0][key]) for key in COMPARED}
        figures[mode]["steps"] = len(two)
    ok = all(row[key] <= COMPARED[key] and row["steps"] == len(alone) for row in figures.values() for key in COMPARED)
    told = ", ".join(f"{mode} {max(row[key] for key in COMPARED):.1g}" for mode, row in figures.items())
    return Found(ok, f"largest relative difference of the first step's metrics: {told}", figures)


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), 1e-6)


def _run(asked: Asked, name: str, *words: str) -> Path:
    """The folder of a run of the model on stories; raises where it fails, with what it said."""
    folder = asked.folder / name
    usual = ["model=local", f"model.path={asked.model}", "data=stories", "eval.final_problems=16"]
    usual += ["sampling.max_tokens=48", "micro_batch_tokens=512", f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "rlreason", *usual, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return folder


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "train/loss" in row]
