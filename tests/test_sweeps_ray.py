"""A sweep as tasks of Ray, where Ray is installed; where it is not, what is said."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from rlreason.sweeps.state import read_state
from tests.starts import ENV, SMALL, rlreason
from tests.waiting import wait_for

WORDS = ["-m", "hydra/launcher=ray", "hydra.launcher.num_cpus=1", "hydra.sweep.dir=grid", *SMALL, "save_model=false"]
WORDS += ["eval_every=0", "threads=1"]
has_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the extra ray)")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_one_line_says_what_to_install(tmp_path):
    done = rlreason(*WORDS, "seed=0,1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "rlreason: hydra/launcher=ray: Ray is not installed: pip install 'rlreason[ray]'\n"


def begun(place: Path, *words: str) -> subprocess.Popen:
    """A sweep in a process that was not forked, as Ray wants it; what it says is in the file `said`."""
    with (place / "said").open("w") as said:
        argv = [sys.executable, "-m", "rlreason", *WORDS, *words]
        return subprocess.Popen(argv, cwd=place, env=os.environ | ENV, stdout=said, stderr=said)


@has_ray
@pytest.mark.long
def test_a_sweep_on_ray_ends_in_the_same_table_and_exit_code(tmp_path):
    code = begun(tmp_path, "n_steps=1", "model.freeze=[],[nonesuch]").wait(600)
    said = (tmp_path / "said").read_text()
    assert code == 1, said
    state = read_state(tmp_path / "grid")
    assert sorted(run.status for run in state.runs) == ["failed", "finished"]
    assert "== 2 tasks given to Ray" in said
    assert "2 of 2 done" in said
    assert (state.status, state.launcher) == ("failed", "ray")
    assert begun(tmp_path, "seed=0,1", "gpus_per_run=1", "hydra.sweep.dir=other").wait(600) == 2
    said = (tmp_path / "said").read_text()
    assert "a run asks for 1 GPUs and 1 processors, and no machine of the cluster has both" in said


@has_ray
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_sweep_ends_its_tasks_in_order_and_typed_again_it_goes_on(tmp_path, number):
    long = ["seed=0,1", "n_steps=60", "checkpoint.every=1", "data.n_train=4096"]
    sweep = begun(tmp_path, *long)
    wait_for(lambda: len(list(tmp_path.glob("grid/*/metrics.jsonl"))) == 2 or sweep.poll() is not None)
    assert sweep.poll() is None, (tmp_path / "said").read_text()
    family = psutil.Process(sweep.pid).children(recursive=True)
    sweep.send_signal(number)
    assert sweep.wait(600) == (130 if number == signal.SIGTERM else -9), (tmp_path / "said").read_text()
    left = psutil.wait_procs(family, timeout=10)[1]  # agents of Ray's own need longer when its driver is killed
    assert [one for one in left if "Agent" not in " ".join(one.cmdline())] == []
    assert {run.status for run in read_state(tmp_path / "grid").runs} == {"interrupted"}
    assert begun(tmp_path, *long).wait(600) == 0, (tmp_path / "said").read_text()
