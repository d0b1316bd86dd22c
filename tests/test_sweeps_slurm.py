"""A sweep as jobs of Slurm: the real submitit, its real scripts and jobs, and Slurm's commands from `fake_slurm.py`."""

import json
import re

import pytest

from rlreason.config.store import typed
from rlreason.sweeps.launcher import jobs_of
from rlreason.sweeps.state import read_state
from tests.fake_slurm import installed
from tests.starts import SMALL, rlreason

WORDS = ["-m", "hydra/launcher=submitit_slurm", "gpus_per_run=1", "hydra.sweep.dir=grid", *SMALL, "save_model=false"]
WORDS += ["n_steps=1", "eval_every=0", "threads=1"]
PARTITION = "hydra.launcher.partition=course"


def test_what_a_job_asks_for_follows_from_its_gpus_and_from_what_was_typed(composed):
    def asked(*typed_words: str, jobs: int | None = None, per_run: int | None = None) -> dict[str, str]:
        words = ["hydra/launcher=submitit_slurm", *typed_words]
        found = jobs_of(words, [typed(composed())] * 8, jobs, per_run, str).words
        return dict(word.removeprefix("hydra.launcher.").split("=") for word in found)

    always = {"timeout_min": "1440", "max_num_timeout": "10"}
    assert asked(per_run=2) == always | {"cpus_per_task": "16", "mem_gb": "128", "gpus_per_node": "2"}
    assert asked(per_run=0) == always | {"cpus_per_task": "4", "mem_gb": "16"}
    assert asked(jobs=3)["array_parallelism"] == "3"
    assert "gpus_per_node" not in asked("hydra.launcher.gres=gpu:a100:1", per_run=1)
    assert "timeout_min" not in asked("hydra.launcher.timeout_min=60")


@pytest.mark.long
def test_a_sweep_on_slurm_ends_in_the_same_table_and_exit_code(tmp_path):
    slurm = installed(tmp_path / "slurm")
    done = rlreason(*WORDS, "model.freeze=[],[nonesuch]", PARTITION, cwd=tmp_path, **slurm)
    assert done.returncode == 1, done.stdout + done.stderr
    state = read_state(tmp_path / "grid")
    assert sorted(run.status for run in state.runs) == ["failed", "finished"]
    (failed,) = [run for run in state.runs if run.status == "failed"]
    assert "model.freeze: nonesuch" in failed.reason
    assert re.search(r"launcher +submitit_slurm: timeout_min=1440, .*gpus_per_node=1", done.stdout)
    assert f"! {failed.name}: failed (" in done.stdout
    assert (state.status, state.launcher) == ("failed", "submitit_slurm")
    for ran in (tmp_path / "grid").glob("*/provenance.json"):
        assert json.loads(ran.read_text())["environment"]["CUDA_VISIBLE_DEVICES"] == "0"  # as Slurm gave it


def test_what_slurm_refuses_is_said_and_is_a_failure(tmp_path):
    wrong = rlreason(*WORDS, "seed=0,1", "hydra.launcher.partition=x", cwd=tmp_path, **installed(tmp_path / "slurm"))
    assert wrong.returncode == 1
    assert "submitit_slurm gave up" in wrong.stdout
    assert "Traceback" not in wrong.stderr
