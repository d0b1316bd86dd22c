"""GPUs of their own for the runs of sweeps: none is another run's at the same time, and each comes back.

The GPUs are names in RLREASON_GPUS: the lease knows nothing else of them.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rlreason.cli.launchers import set_up
from rlreason.cli.sweep_words import without_sweep_words
from rlreason.errors import ConfigError
from rlreason.runtime.processors import usable_processors
from rlreason.sweeps.before import Composed
from rlreason.sweeps.gpus import GpuPlan, gpu_plan
from rlreason.sweeps.lease import Lease, Pool, lock_folder, machine_gpus
from rlreason.sweeps.processes import Child, Start
from rlreason.sweeps.runner import Work, run_sweep
from rlreason.sweeps.state import read_state
from tests.starts import ENV, SMALL, Started, rlreason
from tests.test_sweeps import BROKEN, CONFIG, design
from tests.waiting import wait_for

USER = """
import random, sys, time
from rlreason.sweeps.lease import Pool
pool = Pool(sys.argv[1].split(","))
for _ in range(12):
    lease = pool.when_free(random.choice([1, 2]), "x", print)
    print("took", *lease.gpus, time.monotonic_ns(), flush=True)
    time.sleep(random.uniform(0, 0.02))
    print("gave", *lease.gpus, time.monotonic_ns(), flush=True)
    lease.close()
"""
HOLDER = """
import sys
from rlreason.sweeps.lease import Pool
lease = Pool(sys.argv[1].split(",")).lease(int(sys.argv[2]), "another sweep")
print(*lease.gpus, flush=True)
sys.stdin.read()
"""


def gpus(count: int) -> list[str]:
    """Names that no other test uses."""
    mark = uuid.uuid4().hex[:8]
    return [f"GPU-{mark}-{number}" for number in range(count)]


def holding(names: list[str], count: int) -> subprocess.Popen:
    """A process that has so many of them, until its input ends."""
    argv = [sys.executable, "-c", HOLDER, ",".join(names), str(count)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().split() == names[:count]
    return process


def test_a_lease_takes_what_is_free_in_order_and_all_or_nothing():
    names = gpus(3)
    pool = Pool(names)
    first = pool.lease(2, "one run")
    assert first.gpus == names[:2]
    assert first.environment == {"CUDA_VISIBLE_DEVICES": ",".join(names[:2])}
    assert pool.lease(2, "another") is None  # and the one that is free stays so
    assert list(pool.taken()) == names[:2]
    second = Pool(names).lease(1, "another")
    assert second.gpus == names[2:]
    said = pool.waiting(1)
    assert said.startswith(f"waiting for a GPU: {names[0]}, {names[1]} taken by one run (process {os.getpid()}); ")
    assert f"{names[2]} taken by another" in said
    first.close()
    first.close()
    assert pool.lease(2, "x").gpus == names[:2]
    assert pool.lease(0, "one without").environment == {}


@pytest.mark.long
def test_processes_that_take_and_give_back_at_random_never_share_a_gpu():
    names = gpus(3)
    argv = [sys.executable, "-c", USER, ",".join(names)]
    users = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    events = []
    for user in users:
        out = user.communicate(timeout=600)[0]
        assert user.returncode == 0
        events += [line.split() for line in out.splitlines() if not line.startswith("waiting")]
    held: Counter[str] = Counter()
    for what, *mine, _ in sorted(events, key=lambda event: int(event[-1])):
        held.update(dict.fromkeys(mine, 1 if what == "took" else -1))
        assert set(held.values()) <= {0, 1}, events
    assert len(events) == 3 * 12 * 2
    assert not +held


@pytest.mark.long
def test_a_gpu_comes_back_however_its_process_ends():
    names = gpus(2)
    pool = Pool(names)
    other = holding(names, 2)
    assert pool.lease(1, "me") is None
    other.send_signal(signal.SIGKILL)
    other.wait(600)
    lease = pool.lease(2, "me")
    assert lease is not None
    lease.close()


@pytest.mark.long
def test_a_run_keeps_its_gpus_without_its_starter_and_gives_them_back_when_it_is_killed(tmp_path):
    names = gpus(2)
    pool = Pool(names)
    lease = pool.lease(2, "it")
    console = tmp_path / "console"
    child = Child(Start("s", (), tmp_path, console, lease=lease), tmp_path / "run", [*SMALL, "n_steps=100000"], None)
    try:
        told = Path(f"/proc/{child.process.pid}/environ")
        wait_for(lambda: b"CUDA_VISIBLE_DEVICES" in told.read_bytes())
        assert f"CUDA_VISIBLE_DEVICES={','.join(names)}".encode() in told.read_bytes().split(b"\0")
        child.lease.close()  # as if this process had ended
        assert list(pool.taken()) == names
    finally:
        child.process.kill()
        child.process.wait(600)
    assert pool.taken() == {}
    again = Child(Start("s", (), tmp_path, console, lease=pool.lease(1, "it")), tmp_path / "run", [BROKEN], None)
    again.process.kill()
    wait_for(lambda: again.look() is not None)
    assert pool.taken() == {}


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
    names = gpus(3)
    plan = GpuPlan(tuple(names), per_run)
    grid = design(tmp_path, "1", seeds=side_by_side + 1, words=(BROKEN,))
    work = Work(grid, lambda run: Composed(CONFIG, 60.0), gpus=plan)
    assert plan.side_by_side(None, 4) == side_by_side
    run_sweep(work, 4)  # more than there are GPUs for: the others wait
    said = capfd.readouterr().out
    assert check_apart(said, per_run) == side_by_side
    assert "waiting for " in said
    assert all(len(run.gpus) == per_run for run in read_state(tmp_path).runs)
    assert Pool(names).taken() == {}


@pytest.mark.long
def test_a_sweep_waits_for_what_another_one_has_and_says_so_once(tmp_path, capfd):
    names = gpus(1)
    other = holding(names, 1)
    free = subprocess.Popen(["sleep", "3"], stdin=subprocess.DEVNULL)
    watcher = subprocess.Popen(
        [sys.executable, "-c", f"import os, time\ntime.sleep(3)\nos.kill({other.pid}, 9)"], stdin=subprocess.DEVNULL
    )
    work = Work(
        design(tmp_path, "1", seeds=1, words=(BROKEN,)), lambda _: Composed(CONFIG, 60.0), gpus=GpuPlan((*names,))
    )
    run_sweep(work, 1)
    free.wait(), watcher.wait(), other.wait()
    said = capfd.readouterr().out
    assert said.count(f"== waiting for a GPU: {names[0]} taken by another sweep (process {other.pid})") == 1
    assert f"on GPU {names[0]}" in said


def test_gpus_are_found_by_their_variable_and_by_nothing_on_a_machine_without():
    assert machine_gpus({"RLREASON_GPUS": "GPU-a, 3", "CUDA_VISIBLE_DEVICES": ""}) == ["GPU-a", "3"]
    assert machine_gpus({"RLREASON_GPUS": ""}) == []
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_a_job_of_slurm_counts_its_gpus_for_itself(monkeypatch):
    usual = lock_folder()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert lock_folder() != usual
    assert lock_folder().stat().st_mode & 0o077 == 0
    lock_folder().rmdir()


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
            r"gpus_per_run=3: this machine has 2 GPUs \(GPU-.*-0, GPU-.*-1\) for runs: set it to 2 or",
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
    done = rlreason("-m", "seed=0,1", *words, "hydra.sweep.dir=grid", cwd=tmp_path, RLREASON_GPUS=",".join(gpus(2)))
    assert done.returncode == 2
    assert re.search(said, done.stderr), done.stderr
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize("value", ["-1", "1.5", "x", ""])
def test_gpus_per_run_is_a_number_or_auto(value):
    with pytest.raises(ConfigError, match=f"gpus_per_run={value} must be a whole number or auto"):
        without_sweep_words([f"gpus_per_run={value}"], multirun=True)
    assert without_sweep_words(["gpus_per_run=auto"], multirun=True)[1].gpus_per_run is None
    assert without_sweep_words(["gpus_per_run=0"], multirun=True)[1].gpus_per_run == 0


def visible(grid: Path) -> list[str]:
    """What each run saw, as it has written it down."""
    found = [json.loads(path.read_text())["environment"] for path in sorted(grid.glob("*/provenance.json"))]
    return [one["CUDA_VISIBLE_DEVICES"] for one in found]


@pytest.mark.long
def test_real_runs_see_their_gpus_alone_and_a_machine_without_says_no_word_of_them(tmp_path):
    words = ["-m", "seed=0,1", "hydra.sweep.dir=grid", *SMALL, "n_steps=1", "eval_every=0", "save_model=false"]
    names = gpus(2)
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
    names = gpus(3)
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


@pytest.mark.long
def test_two_sweeps_side_by_side_share_no_gpu_and_a_killed_one_frees_its_own(tmp_path):
    names = gpus(2)
    words = ["-m", "seed=0,1", *SMALL, "eval_every=0", "save_model=false"]
    env = {"RLREASON_GPUS": ",".join(names)}
    first = Started(*words, "n_steps=100000", "hydra.sweep.dir=first", cwd=tmp_path, **env)
    wait_for(lambda: len(list(tmp_path.glob("first/*/metrics.jsonl"))) == 2 or not first.process.is_alive())
    assert first.process.is_alive(), first.finished().stdout
    family = psutil.Process(first.process.pid).children(recursive=True)
    second = Started(*words, "n_steps=1", "hydra.sweep.dir=second", cwd=tmp_path, **env)
    out = second.said / "out"
    wait_for(lambda: out.exists() and "waiting for a GPU" in out.read_text())
    assert not list(tmp_path.glob("second/*/provenance.json"))
    os.kill(first.process.pid, signal.SIGKILL)
    first.finished()
    done = second.finished()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"taken by {tmp_path / 'first'}" in done.stdout or "taken by first/seed=" in done.stdout
    assert sorted(visible(tmp_path / "second")) == names
    assert psutil.wait_procs(family, timeout=600)[1] == []


def test_a_lease_of_nothing_says_nothing():
    assert Lease([]).environment == {}
    assert GpuPlan().line(4, 8) == ""
    with pytest.raises(ConfigError, match="this machine has no GPU for runs: leave it out"):
        gpu_plan([], [], 1, here=True)
