"""GPUs of their own for the runs of a sweep: none is another run's at the same time, and each comes back.

The GPUs are names in RLREASON_GPUS: a sweep knows nothing else of them.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlreason.cli.flags import split_sweep_options
from rlreason.cli.options import set_up
from rlreason.errors import ConfigError
from rlreason.runtime.machine import usable_processors
from rlreason.sweeps.design import Composed
from rlreason.sweeps.gpus import GpuPlan, gpu_plan, machine_gpus, own_gpus
from rlreason.sweeps.runner import SweepWork, run_sweep
from rlreason.sweeps.state import read_state
from tests.starts import ENV, SMALL, rlreason
from tests.test_sweeps import BROKEN, CONFIG, design

USER = """
import random, sys, time
from pathlib import Path
from rlreason.sweeps.gpus import own_gpus
for _ in range(12):
    with own_gpus(["0", "1", "2"], random.choice([1, 2]), Path(sys.argv[1]), bool) as mine:
        print("took", *mine, time.monotonic_ns(), flush=True)
        time.sleep(random.uniform(0, 0.02))
        print("gave", *mine, time.monotonic_ns(), flush=True)
"""
HOLDER = """
import sys
from pathlib import Path
from rlreason.sweeps.gpus import own_gpus
with own_gpus(["0", "1"], 2, Path(sys.argv[1]), bool) as mine:
    print(*mine, flush=True)
    sys.stdin.read()
"""


def test_a_job_takes_the_first_gpus_that_are_free_all_or_nothing(tmp_path):
    names = ["0", "GPU-a/b", "2"]
    with own_gpus(names, 2, tmp_path, bool) as first:
        assert first == names[:2]
        with own_gpus(names, 2, tmp_path, iter([False, True]).__next__) as none:  # and the one that is free stays so
            assert none is None
        with own_gpus(names, 1, tmp_path, bool) as second:
            assert second == names[2:]
    with own_gpus(names, 3, tmp_path, bool) as all_of_them:
        assert all_of_them == names
    with own_gpus([], 0, tmp_path / "none", bool) as nothing:
        assert nothing == []


@pytest.mark.long
def test_processes_that_take_and_give_back_at_random_never_share_a_gpu(tmp_path):
    argv = [sys.executable, "-c", USER, tmp_path]
    users = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    events = []
    for user in users:
        out = user.communicate(timeout=600)[0]
        assert user.returncode == 0
        events += [line.split() for line in out.splitlines()]
    held: Counter[str] = Counter()
    for what, *mine, _ in sorted(events, key=lambda event: int(event[-1])):
        held.update(dict.fromkeys(mine, 1 if what == "took" else -1))
        assert set(held.values()) <= {0, 1}, events
    assert len(events) == 3 * 12 * 2
    assert not +held


@pytest.mark.long
def test_a_gpu_comes_back_when_its_job_is_killed(tmp_path):
    argv = [sys.executable, "-c", HOLDER, tmp_path]
    other = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline().split() == ["0", "1"]
    with own_gpus(["0", "1"], 1, tmp_path, iter([False, True]).__next__) as mine:
        assert mine is None
    other.kill()
    other.wait(600)
    with own_gpus(["0", "1"], 2, tmp_path, bool) as mine:
        assert mine == ["0", "1"]


def of_runs(said: str) -> list[tuple[str, str, list[str]]]:
    """What a sweep said about its runs: (started or ended, run, GPUs)."""
    found = []
    for line in said.splitlines():
        if match := re.match(r"== (\S+?)(?:: started)? on GPU (.*?)(?:, beside .*)?$", line):
            found.append(("started", match[1], match[2].split(", ")))
        elif match := re.match(r"== (\S+): (failed|finished|accuracy|interrupted)", line):
            found.append(("ended", match[1], []))
    return found


def check_apart(said: str, each: int) -> int:
    """No GPU has two runs at a time; the most runs that there were at a time."""
    running: dict[str, list[str]] = {}
    most = 0
    for what, run, mine in of_runs(said):
        if what == "started":
            assert len(mine) == each
            assert not set(mine) & set(itertools.chain(*running.values())), said
            running[run] = mine
            most = max(most, len(running))
        else:
            running.pop(run)
    assert not running
    return most


@pytest.mark.long
@pytest.mark.parametrize(("per_run", "side_by_side"), [pytest.param(1, 3, marks=pytest.mark.long), (2, 1)])
def test_the_runs_of_a_sweep_have_gpus_of_their_own(tmp_path, capfd, per_run, side_by_side):
    plan = GpuPlan(("0", "1", "2"), per_run)
    grid = design(tmp_path, "1", seeds=side_by_side + 1, words=(BROKEN,))
    work = SweepWork(grid, lambda run: Composed(CONFIG, 60.0), gpus=plan)
    assert plan.side_by_side(None, 4) == side_by_side
    run_sweep(work, 4)  # more than there are GPUs for: the others wait
    said = capfd.readouterr().out
    assert check_apart(said, per_run) == side_by_side
    assert all(len(run.gpus) == per_run for run in read_state(tmp_path).runs)


def test_gpus_are_found_by_their_variable_and_by_nothing_on_a_machine_without():
    assert machine_gpus({"RLREASON_GPUS": "GPU-a, 3", "CUDA_VISIBLE_DEVICES": ""}) == ["GPU-a", "3"]
    assert machine_gpus({"RLREASON_GPUS": ""}) == []
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_runs_side_by_side_follow_from_gpus_and_what_was_typed():
    four = GpuPlan(("0", "1", "2", "3"))
    assert [set_up(name, [], None, 9, four).side_by_side for name in ("basic", "joblib", "submitit_local")] == [4, 4, 4]
    assert set_up("joblib", [], None, 9, four).words == ["hydra.launcher.n_jobs=4"]
    assert set_up("submitit_local", [], 2, 9, four).batch == 2
    assert set_up("basic", [], 8, 9, four).side_by_side == 4
    shared = GpuPlan(("0", "1", "2", "3"), per_run=0)
    assert (set_up("basic", [], None, 9, shared).side_by_side, set_up("basic", [], 8, 9, shared).side_by_side) == (1, 8)
    assert set_up("joblib", [], None, 99, GpuPlan()).side_by_side == usable_processors()
    assert set_up("basic", [], None, 9, GpuPlan()).side_by_side == 1  # a machine without: as ever


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["gpus_per_run=3"],
            r"gpus_per_run=3: this machine has 2 GPUs \(GPU-a, GPU-b\) for runs: set it to 2 or",
        ),
        pytest.param(
            ["rollout=vllm", "rollout.placement=second_gpu", "gpus_per_run=1"],
            r"gpus_per_run=1: a run .* asks for 2 GPUs",
            marks=pytest.mark.long,
        ),
        (["gpus=3"], r"a run of this sweep asks for 3 GPUs by its settings .*and this machine has 2 GPUs"),
    ],
)
def test_more_gpus_than_there_are_are_refused_before_anything_starts(tmp_path, words, said):
    done = rlreason("-m", "seed=0,1", *words, "hydra.sweep.dir=grid", cwd=tmp_path, RLREASON_GPUS="GPU-a,GPU-b")
    assert done.returncode == 2
    assert re.search(said, done.stderr), done.stderr
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize("value", ["-1", "1.5", "x", ""])
def test_gpus_per_run_is_a_number_or_auto(value):
    with pytest.raises(ConfigError, match=f"gpus_per_run={value} must be a whole number or auto"):
        split_sweep_options([f"gpus_per_run={value}"], multirun=True)
    assert split_sweep_options(["gpus_per_run=auto"], multirun=True)[1].gpus_per_run is None
    assert split_sweep_options(["gpus_per_run=0"], multirun=True)[1].gpus_per_run == 0


def visible(grid: Path) -> list[str]:
    """What each run saw, as it has written it down."""
    found = [json.loads(path.read_text())["environment"] for path in sorted(grid.glob("*/provenance.json"))]
    return [one["CUDA_VISIBLE_DEVICES"] for one in found]


@pytest.mark.long
def test_real_runs_see_their_gpus_alone_and_a_machine_without_says_no_word_of_them(tmp_path):
    words = ["-m", "seed=0,1", "hydra.sweep.dir=grid", *SMALL, "n_steps=1", "eval_every=0", "save_model=false"]
    names = ["GPU-a", "GPU-b"]
    done = rlreason(*words, cwd=tmp_path, RLREASON_GPUS=",".join(names))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"GPUs       {', '.join(names)}: 1 a run, 2 runs side by side (jobs=N" in done.stdout
    assert check_apart(done.stdout, 1) == 2
    assert sorted(visible(tmp_path / "grid")) == names
    assert [run.gpus for run in read_state(tmp_path / "grid").runs] == [names[:1], names[1:]]
    again = rlreason(*words, "dry=true", cwd=tmp_path)
    assert "GPU" not in again.stdout


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
@pytest.mark.parametrize("per_run", [1, 2])
def test_launchers_give_their_runs_gpus_of_their_own_too(tmp_path, launcher, per_run):
    names = ["GPU-a", "GPU-b", "GPU-c"]
    words = ["-m", "seed=0,1,2", f"hydra/launcher={launcher}", f"gpus_per_run={per_run}", "hydra.sweep.dir=grid"]
    more = [*SMALL, "n_steps=1", "eval_every=0", "save_model=false", "jobs=2"]
    env = os.environ | ENV | {"RLREASON_GPUS": ",".join(names), "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", "rlreason", *words, *more]  # loky starts processes from none that was forked
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_apart(done.stdout, per_run) == (2 if per_run == 1 else 1)
    saw = [one.split(",") for one in visible(tmp_path / "grid")]
    assert len(saw) == 3
    assert all(len(set(one)) == per_run and set(one) <= set(names) for one in saw)


def test_a_machine_without_gpus_says_nothing_and_has_none_for_runs():
    assert GpuPlan().line(4, 8) == ""
    with pytest.raises(ConfigError, match="this machine has no GPU for runs: leave it out"):
        gpu_plan([], [], 1, here=True)
