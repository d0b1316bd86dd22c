"""Every wait for another process ends with its limit's name, a run that hangs with its stacks; nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlreason.config.groups import GradingConfig
from rlreason.runtime.files import holder
from rlreason.training.preflight import unusable
from tests.starts import SMALL
from tests.test_grading_processes import workers_of
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
REWARDS = """
import time
def right(response, gold):
    return 1.0
def stubborn(response, gold):
    while response.startswith("hang"):
        time.sleep(0.1)
    return 1.0
"""
LATE = "import time\ntime.sleep(6000)\ndef f(response, gold):\n    return 1.0\n"


@pytest.fixture
def rewards(tmp_path, monkeypatch) -> Path:
    """A folder with modules of rewards that a worker can import."""
    for name, text in (("waits_rewards", REWARDS), ("waits_late", LATE)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.long
def test_a_worker_that_does_not_start_is_one_line_with_the_limit(rewards):
    began = time.monotonic()
    why = unusable("prompt.reward=waits_late:f", "waits_late:f", GradingConfig(start_timeout_s=2.0))
    assert time.monotonic() - began < 30
    assert why.startswith("prompt.reward=waits_late:f: a worker did not start within grading.start_timeout_s=2 ")
    assert not workers_of(os.getpid())


def grading_in(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if "rlreason.grading" in " ".join(p.cmdline())]


ORPHANS = """
import sys, threading, time
from rlreason.config.groups import GradingConfig
from rlreason.grading import Grader
grader = Grader(GradingConfig(timeout_s=2.0, start_timeout_s=3.0), sys.argv[1])
threading.Thread(target=grader.grade_batch, args=(["hang on"], ["1"]), daemon=True).start()  # which starts the worker
time.sleep(6000)
"""


@pytest.mark.long
@pytest.mark.parametrize("reward", ["waits_rewards:stubborn", "waits_late:f"])
def test_no_worker_that_hangs_outlives_a_killed_run_also_where_a_thread_started_it(rewards, reward):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{rewards}"}
    process = subprocess.Popen([sys.executable, "-c", ORPHANS, reward], env=env)
    try:
        wait_for(lambda: len(grading_in(process.pid)) == (1 if reward == "waits_late:f" else 2))
        time.sleep(1)  # until it hangs
        workers = grading_in(process.pid)
    finally:
        process.kill()
        process.wait()
    assert psutil.wait_procs(workers, timeout=600)[1] == []


HANGS = """
import sys, threading, time
from pathlib import Path
from rlreason.runtime import files
files.GRACE_S = 0.5
folder = Path(sys.argv[1])
def stuck_in_here():
    if sys.argv[2] == "works":
        for _ in range(8):
            time.sleep(0.5)
            files.alive()
    else:
        threading.Event().wait()
with files.run_lock(folder, print), files.ended_when_it_hangs(folder / "stacks.txt", float(sys.argv[3])):
    stuck_in_here()
print("finished")
"""


@pytest.mark.parametrize("how", ["hangs", pytest.param("works", marks=pytest.mark.long)])
def test_a_process_that_hangs_ends_itself_and_leaves_its_stacks_and_a_free_lock(tmp_path, how):
    words = [sys.executable, "-c", HANGS, str(tmp_path / "run"), how, "1.0" if how == "hangs" else "2.5"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert done.returncode == (how == "hangs")
    assert holder(tmp_path / "run") is None
    if how == "hangs":
        assert "in stuck_in_here" in (tmp_path / "run/stacks.txt").read_text()
        assert (tmp_path / "run/.lock").exists()
    else:
        assert not (tmp_path / "run").exists()  # nothing was written into it


LOSS = """
import time
from pathlib import Path
def loss(advantages, policy_log_probs):
    while Path(__file__).with_name("hang").exists():
        time.sleep(0.1)
    return -advantages * policy_log_probs
"""


def start(tmp_path: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"} | env
    argv = [sys.executable, "-m", "rlreason", *words]
    with (tmp_path / "out").open("w") as out:
        return subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=out, text=True)


def wait_for_rows(process: subprocess.Popen[str], tmp_path: Path, more_than: int) -> None:
    """Wait until the run has so many rows of metrics."""
    rows = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (rows.exists() and rows.read_text().count("\n") > more_than))
    assert process.poll() is None, (tmp_path / "out").read_text()


def status_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "status.json").read_text())


@pytest.mark.long
def test_a_run_whose_own_loss_hangs_ends_by_itself_with_all_its_processes_and_resumes(tmp_path):
    (tmp_path / "slow_loss.py").write_text(LOSS)
    words = [*SMALL, "loss=slow_loss:loss", "hydra.run.dir=run", "waits.run_s=20", "n_steps=40", "checkpoint.every=1"]
    words += ["prompt.reward=waits_rewards:stubborn"]  # graded in processes of their own
    (tmp_path / "waits_rewards.py").write_text(REWARDS)
    process = start(tmp_path, *words)
    wait_for_rows(process, tmp_path, 4)
    (tmp_path / "hang").touch()
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    assert process.wait(600) == 1, (tmp_path / "out").read_text()
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert status_of(tmp_path / "run")["status"] == "running"  # as after kill -9
    assert holder(tmp_path / "run") is None
    assert "slow_loss.py" in (tmp_path / "run/stacks.txt").read_text()
    (tmp_path / "hang").unlink()
    again = start(tmp_path, *words)
    assert again.wait(600) == 0, (tmp_path / "out").read_text()
    assert status_of(tmp_path / "run")["status"] == "finished"
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [row["train_step"] for row in rows if "train/loss" in row] == list(range(1, 41))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, None])  # None: the run itself is killed
def test_vllms_process_that_is_killed_ends_the_run_and_none_outlives_it(tmp_path, number):
    pytest.importorskip("vllm")
    (tmp_path / "t").mkdir()
    words = [*SMALL, "rollout=vllm", "rollout.kv_cache_gb=0.25", "n_steps=100000"]
    words += ["model.width=128", "hydra.run.dir=run", "eval_every=0"]
    process = start(tmp_path, *words, TMPDIR=str(tmp_path / "t"))
    wait_for_rows(process, tmp_path, 2)
    family = psutil.Process(process.pid).children(recursive=True)
    (engine,) = [p for p in family if "rlreason.engines.vllm.server" in p.cmdline()]
    shared = {m.path for p in family if p.is_running() for m in p.memory_maps() if "/dev/shm" in m.path}
    os.kill(engine.pid, number) if number else process.kill()
    assert process.wait(600) == (1 if number else -signal.SIGKILL), (tmp_path / "out").read_text()
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert not number or "exit code -9" in status_of(tmp_path / "run")["reason"]
    assert [path for path in shared if Path(path).exists()] == []
    wait_for(lambda: not list((tmp_path / "t").glob("rlreason*")))  # torch keeps a cache of compiled code there
