"""A sweep that is killed or stopped: its command finishes it, with the same figures."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from rlreason.sweeps.state import read_state
from tests.test_signals import Process
from tests.waiting import wait_for

#: The shipped start model, so that there are right answers, on batches as small as can be.
WORDS = [
    "-m", "rlreason", "-m", "learning_rate=0.0001,0.0003,0.001", "seed=0,1", "n_steps=6",
    "rollout_batch_size=16", "group_size=4", "eval_problems=16", "eval_every=2", "sampling.max_tokens=48",
    "checkpoint.every=1", "save_model=false", "threads=1",
]  # fmt: skip
FIGURES = ("accuracy", "accuracy_before", "accuracy_interval", "length", "train_step", "tokens/generated")
JOBLIB, SUBMITIT = "hydra/launcher=joblib", "hydra/launcher=submitit_local"


def figures(grid: Path) -> dict[str, dict]:
    """Run -> its final figures, of those that are done."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(grid.glob("*/summary.json"))}
    return {name: {key: summary[key] for key in FIGURES} for name, summary in found.items()}


def start(place: Path, *words: str, grid: Path = Path("grid")) -> Process:
    place.mkdir()
    return Process(place, *WORDS, f"hydra.sweep.dir={grid}", *words)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The figures of the sweep that nobody disturbed."""
    process = start(tmp_path_factory.mktemp("unbroken") / "x")
    assert process.popen.wait(900) == 0, process.said
    found = figures(process.cwd / "grid")
    assert len(found) == 6
    assert len({figure["tokens/generated"] for figure in found.values()}) > 3
    assert any(figure["accuracy"] for figure in found.values())
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("kill the sweep", ["jobs=2"]),
        ("Ctrl-C", ["jobs=2"]),
        ("kill a run", ["jobs=2"]),
        ("kill the sweep", ["jobs=2", SUBMITIT]),
        ("SIGTERM", ["jobs=2", JOBLIB]),
    ],
)
def test_a_sweep_that_was_ended_in_the_middle_is_finished_by_its_command(tmp_path, unbroken, end, words):
    process = start(tmp_path / "x", *words)
    grid, popen = process.cwd / "grid", process.popen

    def steps() -> int:
        return sum(path.read_text().count("reward/mean") for path in grid.glob("*/metrics.jsonl"))

    wait_for(lambda: popen.poll() is not None or steps() >= 9)
    assert popen.poll() is None, process.said
    family = psutil.Process(popen.pid).children(recursive=True)
    if end == "kill the sweep":
        popen.kill()
        popen.wait()
    elif end == "kill a run":
        os.kill(next(int(path.read_text().split()[0]) for path in grid.glob("*/.lock")), signal.SIGKILL)
        assert popen.wait(900) == 1, process.said
        assert "failed (signal SIGKILL)" in process.said
    else:
        process.send(signal.SIGINT if end == "Ctrl-C" else signal.SIGTERM, group=end == "Ctrl-C")
        if SUBMITIT in words:  # its own processes print how they were interrupted
            assert popen.wait(600) == 130, process.said
        else:
            process.ends()
    assert psutil.wait_procs(family, timeout=600)[1] == []
    if end in ("Ctrl-C", "SIGTERM"):
        assert read_state(grid).status == "interrupted"
        statuses = [run.status for run in read_state(grid).runs]
        assert "interrupted" in statuses or SUBMITIT in words  # which kills its jobs before a step ends
    done_before = set(figures(grid))
    assert len(done_before) < 6
    again = start(process.cwd / "again", *words, grid=grid)
    assert again.popen.wait(900) == 0, again.said
    assert again.said.count("not run again") == len(done_before)
    assert figures(grid) == unbroken
    assert read_state(grid).status == "finished"
