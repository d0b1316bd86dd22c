"""A sweep as jobs of Slurm: the real submitit, its real scripts and jobs, and Slurm's commands from `fake_slurm.py`."""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from rlreason.cli.options import set_up
from rlreason.errors import ConfigError
from rlreason.sweeps.elsewhere import SlurmCluster
from rlreason.sweeps.gpus import GpuPlan
from rlreason.sweeps.state import read_state
from tests.fake_slurm import installed
from tests.starts import SMALL, Started, rlreason
from tests.waiting import wait_for

WORDS = ["-m", "hydra/launcher=submitit_slurm", "gpus_per_run=1", "hydra.sweep.dir=grid", *SMALL, "save_model=false"]
WORDS += ["n_steps=1", "eval_every=0", "threads=1"]
PARTITION = "hydra.launcher.partition=course"
LONG = ["seed=0,1,2", PARTITION, "n_steps=80", "checkpoint.every=1", "model.warm_start.steps=0", "data.n_train=4096"]


def test_what_a_job_asks_for_follows_from_its_gpus_and_from_what_was_typed():
    def asked(plan: GpuPlan, jobs: int | None = None, *typed: str) -> dict[str, str]:
        words = set_up("submitit_slurm", typed, jobs, 8, plan).words
        return dict(word.removeprefix("hydra.launcher.").split("=") for word in words)

    two = {"timeout_min": "1440", "cpus_per_task": "16", "mem_gb": "128", "gpus_per_node": "2"}
    assert asked(GpuPlan(per_run=2)) == asked(GpuPlan(most=2)) == two
    assert asked(GpuPlan(per_run=0)) == {"timeout_min": "1440", "cpus_per_task": "4", "mem_gb": "16"}
    assert asked(GpuPlan(per_run=2), 3)["array_parallelism"] == "3"
    assert "gpus_per_node" not in asked(GpuPlan(), None, "hydra.launcher.gres=gpu:a100:1")
    assert "timeout_min" not in asked(GpuPlan(), None, "hydra.launcher.timeout_min=60")


def test_a_machine_that_is_none_of_the_clusters_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"sbatch.* cannot be found here: start the sweep on a machine of the cluster"
    ):
        SlurmCluster(tmp_path, {"submitit_folder": str(tmp_path)})


@pytest.mark.long
def test_a_sweep_on_slurm_ends_in_the_same_table_and_exit_code(tmp_path):
    slurm = installed(tmp_path / "slurm")
    done = rlreason(*WORDS, "model.freeze=[],[nonesuch]", PARTITION, cwd=tmp_path, **slurm)
    assert done.returncode == 1, done.stdout + done.stderr
    state = read_state(tmp_path / "grid")
    assert sorted(run.status for run in state.runs) == ["failed", "finished"]
    (failed,) = [run for run in state.runs if run.status == "failed"]
    assert failed.reason.startswith("exit code 2: model.freeze: nonesuch")
    assert "== 2 jobs in Slurm's queue: 101_0 to 101_1" in done.stdout
    assert re.search(
        r"launcher +submitit_slurm: timeout_min=1440, cpus_per_task=8, mem_gb=64, gpus_per_node=1", done.stdout
    )
    assert done.stdout.count(": started") == 2
    assert "2 of 2 done" in done.stdout
    assert f"! {failed.name}: failed (exit code 2" in done.stdout
    assert (state.status, state.launcher) == ("failed", "submitit_slurm")
    (ran,) = (tmp_path / "grid").glob("*/provenance.json")
    assert json.loads(ran.read_text())["environment"]["CUDA_VISIBLE_DEVICES"] == "0"  # as Slurm gave it
    assert not (tmp_path / "grid/.submitit_slurm").exists()


def test_what_slurm_refuses_is_said_in_one_line(tmp_path):
    wrong = rlreason(*WORDS, "seed=0,1", "hydra.launcher.partition=x", cwd=tmp_path, **installed(tmp_path / "slurm"))
    assert wrong.returncode == 2
    assert "Slurm does not take the jobs" in wrong.stderr
    assert "invalid partition specified: x" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def states(slurm: dict[str, str]) -> list[str]:
    found = []
    for path in sorted(Path(slurm["FAKE_SLURM"], "jobs").glob("*.job")):
        found.append(json.loads(path.read_text())["state"])
    return found


def started(place: Path, slurm: dict[str, str]) -> Started:
    """A sweep of which two runs are under way, and one waits in the queue."""
    sweep = Started(*WORDS, *LONG, cwd=place, **slurm)
    wait_for(lambda: len(list((place / "grid").glob("*/metrics.jsonl"))) == 2 or not sweep.process.is_alive())
    assert sweep.process.is_alive(), sweep.finished().stdout
    assert states(slurm) == ["RUNNING", "RUNNING", "PENDING"]
    return sweep


@pytest.mark.long
def test_jobs_in_the_queue_are_found_again_and_must_be_those_that_are_asked_for(tmp_path):
    slurm = installed(tmp_path / "slurm", nodes=0)  # where nothing ever starts
    sweep = Started(*WORDS, "seed=0,1", PARTITION, cwd=tmp_path, **slurm)
    wait_for(lambda: (tmp_path / "grid/.submitit_slurm/jobs.json").exists() or not sweep.process.is_alive())
    os.kill(sweep.process.pid, signal.SIGKILL)
    sweep.finished()
    assert states(slurm) == ["PENDING"] * 2
    for words, said in (
        (["seed=0,1", "learning_rate=0.5"], r"go on with other settings \(seed=0, seed=1\): end them, or give this"),
        (["seed=0,2"], r"go on that this sweep does not have \(seed=1\): end them, or give this"),
    ):
        other = rlreason(*WORDS, *words, PARTITION, cwd=tmp_path, **slurm)
        assert other.returncode == 2
        assert re.search(said, other.stderr), other.stderr
    more = Started(*WORDS, "seed=0,1,2", PARTITION, cwd=tmp_path, **slurm)  # a seed more is a job more
    wait_for(lambda: len(states(slurm)) == 3 or not more.process.is_alive())
    os.kill(more.process.pid, signal.SIGTERM)
    done = more.finished()
    assert done.returncode == 130, done.stdout + done.stderr
    assert "== seed=1: its job of an earlier start goes on, and is followed" in done.stdout
    assert "== 1 job in Slurm's queue: 102\n" in done.stdout
    assert states(slurm) == []
    assert not (tmp_path / "grid/.submitit_slurm").exists()


@pytest.mark.long
def test_jobs_go_on_where_the_sweep_is_killed_and_are_found_again(tmp_path):
    slurm = installed(tmp_path / "slurm")
    sweep = started(tmp_path, slurm)
    os.kill(sweep.process.pid, signal.SIGKILL)
    sweep.finished()
    assert states(slurm)[:2] == ["RUNNING", "RUNNING"]
    again = rlreason(*WORDS, *LONG, cwd=tmp_path, **slurm)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "its job of an earlier start goes on, and is followed" in again.stdout
    assert "jobs in Slurm's queue" not in again.stdout  # none was started twice
    assert [run.status for run in read_state(tmp_path / "grid").runs] == ["finished"] * 3
    assert {path.stem for path in Path(slurm["FAKE_SLURM"], "jobs").iterdir()} == {"101_0", "101_1", "101_2"}


@pytest.mark.long
def test_a_sweep_that_is_stopped_ends_its_jobs_in_order_and_takes_the_others_off_the_queue(tmp_path):
    slurm = installed(tmp_path / "slurm")
    sweep = started(tmp_path, slurm)
    family = [one for one in psutil.process_iter() if str(tmp_path) in " ".join(_cmdline(one))]
    os.kill(sweep.process.pid, signal.SIGTERM)
    done = sweep.finished(600)
    assert done.returncode == 130, done.stdout + done.stderr
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert states(slurm) == []
    assert [run.status for run in read_state(tmp_path / "grid").runs] == ["interrupted", "interrupted", "waiting"]
    again = rlreason(*WORDS, *LONG, cwd=tmp_path, **slurm)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "== 3 jobs in Slurm's queue: 102_0 to 102_2" in again.stdout


@pytest.mark.long
def test_a_job_near_its_time_limit_writes_a_checkpoint_and_the_sweep_goes_on_from_there(tmp_path):
    slurm = installed(tmp_path / "slurm", nodes=1)
    words = [*WORDS, "seed=0", "n_steps=300", PARTITION, "checkpoint.every=1000", "model.warm_start.steps=0"]
    sweep = Started(*words, "data.n_train=4096", "hydra.launcher.timeout_min=5", cwd=tmp_path, **slurm)
    rows = tmp_path / "grid/seed=0/metrics.jsonl"
    wait_for(lambda: (rows.exists() and len(rows.read_text().splitlines()) > 5) or not sweep.process.is_alive())
    (tmp_path / "slurm/warn").touch()
    done = sweep.finished(600)
    assert done.returncode == 130, done.stdout + done.stderr
    assert [run.status for run in read_state(tmp_path / "grid").runs] == ["interrupted"]
    assert states(slurm) == []
    assert list((tmp_path / "grid/seed=0/checkpoints").iterdir())
    reached = len(rows.read_text().splitlines())
    again = rlreason(*words, "data.n_train=4096", "hydra.launcher.timeout_min=5", cwd=tmp_path, **slurm)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [run.status for run in read_state(tmp_path / "grid").runs] == ["finished"]
    assert len(rows.read_text().splitlines()) >= 300 > reached


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
