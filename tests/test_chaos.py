"""What happens to machines: disks are full, files break, processes hang or vanish. A run ends, and can go on."""

import os
import re
import shutil

import psutil
import pytest

from rlreason import load_run
from rlreason.errors import ConfigError
from rlreason.runtime.files import holder
from rlreason.training.preflight import preflight
from tests.broken_runs import checkpoints_of
from tests.run_settings import settings
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
    done = runs.start("grpo", other)
    assert done.returncode == 2
    assert "holds no checkpoint that can be used" in done.stderr.splitlines()[-1]
    (other / "checkpoints").rename(other / "away")
    runs.goes_on("grpo", other)
    assert (other / "broken_off_1/metrics.jsonl").exists()
    assert runs.equal("grpo", other)


@pytest.mark.long
def test_a_worker_that_does_not_start_is_one_line_with_the_limit(tmp_path, monkeypatch):
    (tmp_path / "waits_late.py").write_text("import time\ntime.sleep(6000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    run = settings("prompt.reward=waits_late:f", "grading.start_timeout_s=2")
    with pytest.raises(ConfigError, match=r"^prompt.reward=waits_late:f: a worker .*within grading.start_timeout_s=2 "):
        preflight([run], tmp_path)
    assert not workers_of(os.getpid())


LOSS = """
import time
from pathlib import Path
def right(response, gold):
    return 1.0
def loss(advantages, policy_log_probs):
    while Path(__file__).with_name("hang").exists():
        time.sleep(0.1)
    return -advantages * policy_log_probs
"""


@pytest.mark.long
def test_a_run_whose_own_loss_hangs_ends_by_itself_with_all_its_processes_and_resumes(tmp_path):
    (tmp_path / "slow_loss.py").write_text(LOSS)
    words = [*SMALL, "loss=slow_loss:loss", "hydra.run.dir=run", "waits.run_s=20", "n_steps=80", "checkpoint.every=1"]
    words += ["prompt.reward=slow_loss:right"]  # graded in processes of their own
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
    assert [row["train_step"] for row in rows if "train/loss" in row] == list(range(1, 81))  # in more than 20 s
