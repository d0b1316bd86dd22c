"""What happens to machines: disks are full, files break, processes hang or vanish. A run ends, and can go on."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlreason import load_run
from rlreason.config.groups import GradingConfig
from rlreason.runtime.files import holder
from rlreason.training.preflight import unusable
from tests.broken_runs import checkpoints_of
from tests.starts import ROOT, SMALL, Started, rlreason
from tests.test_checkpoints import DAMAGE
from tests.test_grading_processes import workers_of
from tests.test_kills import PHASES
from tests.waiting import wait_for


@pytest.mark.long
def test_checkpoints_are_broken_and_the_metrics_cut_in_a_line(runs):
    """Killed behind the last step: of the checkpoints the two newest are there, and the best one."""
    killed, other = runs.new(), runs.new()
    runs.killed("grpo", killed, PHASES["last evaluation"][0])
    newest = checkpoints_of(killed)[-1]
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"rollout_step": 3, "train')
    DAMAGE["a flipped bit"](killed / "checkpoints" / newest / "state.json")
    shutil.copytree(killed, other)
    done = runs.goes_on("grpo", killed)
    assert f"{newest} cannot be used" in re.sub(r"\s+", " ", done.stderr + done.stdout)
    assert runs.equal("grpo", killed)
    for name in checkpoints_of(other):
        DAMAGE["half a file"](other / "checkpoints" / name / "state.safetensors")
    for _ in range(2):
        done = runs.start("grpo", other)
        assert done.returncode == 2
        assert "holds no checkpoint that can be used" in done.stderr.splitlines()[-1]
    (other / "checkpoints").rename(other / "away")
    runs.goes_on("grpo", other)
    assert (other / "broken_off_1/metrics.jsonl").exists()
    assert runs.equal("grpo", other)


#: Where the package asks what time it is: to write it down, to see whether a file has changed, to tidy a cache.
CLOCKS = {"grading/grader.py", "training/warm_start.py", "records/reader.py", "runtime/files.py", "model/chat.py"}
CLOCKS |= {"sweeps/texts.py"}  # when a run began; which runs are the newest to estimate by
CLOCKS |= {"report/assignment.py", "report/carry.py"}  # the newest of a name
CLOCKS |= {"training/distributed.py"}  # torch wants its limits as a timedelta


def test_no_decision_follows_the_clock_on_the_wall():
    """A clock that jumps moves nothing: waits, limits and shares of time are counted on the monotonic one."""
    asks = re.compile(r"time\.time\(|time_ns\(|from time import (?!monotonic)|datetime|st_[amc]time|getmtime")
    modules = {path.relative_to(ROOT / "rlreason").as_posix(): path for path in (ROOT / "rlreason").rglob("*.py")}
    found = {name for name, path in modules.items() if asks.search(path.read_text("utf-8"))}
    assert found <= CLOCKS
    assert "time.time(" in modules["grading/grader.py"].read_text("utf-8")


# What hangs


LATE = "import time\ntime.sleep(6000)\ndef f(response, gold):\n    return 1.0\n"
REWARDS = """
import time
def right(response, gold):
    return 1.0
def stubborn(response, gold):
    while response.startswith("hang"):
        time.sleep(0.1)
    return 1.0
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch) -> Path:
    """A folder with modules of rewards that a worker can import."""
    for name, text in (("waits_rewards", REWARDS), ("waits_late", LATE)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return tmp_path


@pytest.mark.long
def test_a_worker_that_does_not_start_is_one_line_with_the_limit(rewards):
    why = unusable("prompt.reward=waits_late:f", "waits_late:f", GradingConfig(start_timeout_s=2.0))
    assert why.startswith("prompt.reward=waits_late:f: a worker did not start within grading.start_timeout_s=2 ")
    assert not workers_of(os.getpid())


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
    done = subprocess.run(words, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
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


@pytest.mark.long
def test_a_run_whose_own_loss_hangs_ends_by_itself_with_all_its_processes_and_resumes(rewards, tmp_path):
    (tmp_path / "slow_loss.py").write_text(LOSS)
    words = [*SMALL, "loss=slow_loss:loss", "hydra.run.dir=run", "waits.run_s=20", "n_steps=40", "checkpoint.every=1"]
    words += ["prompt.reward=waits_rewards:stubborn"]  # graded in processes of their own
    env, rows = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, tmp_path / "run/metrics.jsonl"
    started = Started(*words, cwd=tmp_path, **env)
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 4)
    (tmp_path / "hang").touch()
    family = psutil.Process(started.process.pid).children(recursive=True)
    assert family
    assert started.finished(600).returncode == 1
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert load_run(tmp_path / "run").status == "running"  # as after kill -9
    assert holder(tmp_path / "run") is None
    assert "slow_loss.py" in (tmp_path / "run/stacks.txt").read_text()
    (tmp_path / "hang").unlink()
    assert rlreason(*words, cwd=tmp_path, **env).returncode == 0
    rows = load_run(tmp_path / "run").metrics
    assert [row["train_step"] for row in rows if "train/loss" in row] == list(range(1, 41))
