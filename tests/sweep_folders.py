"""Designs of sweeps, and folders of those that have run, written by hand: a test says what each run answered right."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.cli.check import reading
from rlreason.cli.flags import composing, read
from rlreason.cli.sweep import CheckedSweep, checked_sweep, shared_config
from rlreason.cli.sweep import designed as design_of
from rlreason.report.carry import look
from rlreason.sweeps.state import Key, RunState, Setting, SweepState, read_state, write_state

PROTOCOL = {"prompt": "{question}", "reward": "r1_zero", "sampling.temperature": 1.0, "data": "d", "hash": "aa"}
CONFIG = """\
algorithm: grpo
n_steps: 40
model: {name: tiny}
data: {name: stories_long}
"""
Answers = Callable[[str, int], Sequence[bool] | None]  # of a setting's value and a seed; None: it diverged


def designed(*words: str, **more: Any) -> SweepState:
    """The design of the sweep of these words. `more`: arguments of `sweep.designed`."""
    request = read(["-m", *words])
    with composing(request):
        return design_of(request, shared_config(request), note=str, **more)[0]


def checked(*words: str, note: Callable[[str], object] = str) -> list[CheckedSweep]:
    """The sweep of these words, or the stages of a chain, checked as before they start."""
    with reading(read(["-m", *words]), note) as request:
        return checked_sweep(request, note)


def answers(seed: int, chance: float, problems: int = 200) -> list[bool]:
    """Right answers with a chance, of problems equally hard to all settings; a seed is worth a point or two."""
    rng = np.random.default_rng(seed)
    hard = np.random.default_rng(99).random(problems)
    return (hard + 0.1 * rng.normal(0, 1, problems) < chance + 0.01 * rng.normal()).tolist()


def ended(
    folder: Path, right: Sequence[bool] | None, protocol: dict[str, Any] = PROTOCOL, config: str = CONFIG
) -> None:
    """The folder of a run that has finished; or of one that diverged, with the evaluation before its training alone."""
    (folder / "evals").mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    shown = [False] * 4 if right is None else right
    rows = [
        {"problem_id": f"p{k}", "question": f"What is {k} + 1?", "outcome": "correct" if ok else "wrong"}
        for k, ok in enumerate(shown)
    ]
    name = "step_00000.jsonl" if right is None else "step_00040.jsonl"
    (folder / "evals" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary: dict[str, Any] = {"status": "finished", "reason": "", "accuracy": float(np.mean(shown)), "length": 9.0}
    if right is None:
        summary |= {"status": "diverged:weights", "accuracy": None}
    summary |= {"eval_problems": len(shown), "protocol": protocol}
    (folder / "summary.json").write_text(json.dumps(summary))


def cut_short(file: Path) -> None:
    """Compress a file of responses, and lose half of it."""
    data = gzip.compress(file.read_bytes())
    file.unlink()
    file.with_name(f"{file.name}.gz").write_bytes(data[: len(data) // 2])


def sweep(
    folder: Path,
    key: str,
    values: Sequence[str],
    of: Answers,
    seeds: Sequence[int] = (0, 1, 2, 3),
    reference: Setting | None = None,
    protocols: dict[str, dict[str, Any]] | None = None,
) -> SweepState:
    """A sweep over one key whose runs have all ended; its state, as `sweep.json` has it too."""
    runs = []
    for value in values:
        for seed in seeds:
            name = f"{key}={value},seed={seed}"
            ended(folder / name, of(value, seed), (protocols or {}).get(value, PROTOCOL))
            runs.append(RunState(name, [f"{key}={value}", f"seed={seed}"], {key: value}, seed, seconds=60.0))
    command = "python -m rlreason -m x"
    state = SweepState(folder.name, command, [key], reference, "finished", 1, "processes", runs, sweep=folder.name)
    write_state(folder, state)
    return state


def looked(folder: Path, seeds: int) -> tuple[dict[Key, str], set[Key]]:
    """A look at all settings of a sweep."""
    return look(folder, seeds, {run.key for run in read_state(folder).runs})
