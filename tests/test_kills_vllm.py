"""A run with vLLM that is killed goes on with the same problems, seeds and schedule; one whose vLLM is killed ends.

Its numbers need not be equal bit for bit: which responses share a batch of vLLM's is decided by timing.
"""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.broken_runs import Runs, norms_of, parts_of
from tests.run_records import lines_of, rows_of
from tests.starts import SMALL
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")  # slow to import
psutil = pytest.importorskip("psutil")
VLLM = ("rollout=vllm", "rollout.kv_cache_gb=0.25", "rollout.max_rows=16", "eval_every=0")
AHEAD = ("rollout.async_level=1", "rollout.sleep=false", "loss=grpo_clip")
STEP = "rlreason.training.learner:Learner.take_step:{}:2"


def asked_in(folder: Path) -> dict[str, list[str]]:
    """File -> the problems whose responses it holds, in order."""
    files = [path for kind in ("rollouts", "evals") for path in sorted((folder / kind).glob("*"))]
    return {
        str(path.relative_to(folder)): [json.loads(line)["problem_id"] for line in lines_of(path)] for path in files
    }


@pytest.mark.long
@pytest.mark.parametrize(("more", "by", "staleness"), [((), "SIGTERM", [0, 0, 0]), (AHEAD, "SIGKILL", [0, 1, 1])])
def test_a_run_with_vllm_goes_on_with_the_same_problems(tmp_path_factory, more, by, staleness):
    """Bug: a resumed run asks other problems, or samples the step after its checkpoint twice."""
    runs, words = Runs(tmp_path_factory), (*VLLM, *more)
    whole, folder = runs.unbroken("grpo", *words), runs.new()
    rows = [row for row in rows_of(whole) if "rollout/mismatch_mean" in row]
    assert rows[0]["rollout/mismatch_mean"] < 1e-3  # later ones that were sampled ahead are of older weights
    assert [row["rollout/staleness"] for row in rows_of(whole) if "rollout/staleness" in row] == staleness
    done = runs.start("grpo", folder, *words, at=STEP.format("return"), by=by)
    assert done.returncode == (-9 if by == "SIGKILL" else 130), done.stdout + done.stderr
    runs.goes_on("grpo", folder, *words)
    assert parts_of(folder) == 2
    assert asked_in(folder) == asked_in(whole)
    schedule = ("rollout_step", "train_step", "eval_step", "train/learning_rate", "rollout/staleness")
    one, other = ([[row.get(name) for name in schedule] for row in rows_of(run)] for run in (folder, whole))
    assert one == other
    assert min(norms_of(folder)) > 0


@pytest.mark.long
def test_one_killed_engine_of_two_ends_the_run_the_other_and_its_files(tmp_path):
    """Bug: the other engine, or its files, outlive the run."""
    tests = Path(__file__).parent  # where own_reward is
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "t"), "PYTHONPATH": f"{tests.parent}:{tests}"}
    (tmp_path / "t").mkdir()
    words = [*SMALL, *VLLM, "model.width=128", "prompt.reward=own_reward:halves", "rollout.gpus=2", "n_steps=100000"]
    argv = [sys.executable, "-m", "rlreason", *words, "hydra.run.dir=run"]
    with (out := tmp_path / "out").open("w") as file:
        process = subprocess.Popen(argv, cwd=tmp_path, env=os.environ | own, stdout=file, stderr=file)
    rows = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (rows.exists() and rows.read_text().count("\n") > 2))
    assert process.poll() is None, out.read_text()
    family = psutil.Process(process.pid).children(recursive=True)
    first, second = [p for p in family if "rlreason.engines.vllm_server" in p.cmdline()]
    os.kill(first.pid, signal.SIGTERM)  # as a scheduler sends it to all: the trainer ends its engines
    os.kill(second.pid, signal.SIGKILL)
    code, said = process.wait(600), out.read_text()
    assert code == 1, said
    assert psutil.wait_procs(family, timeout=600)[1] == []
    reason = json.loads((tmp_path / "run/status.json").read_text())["reason"]
    assert reason.startswith("vLLM on the processor (2 of 2)")
    assert "process has ended (exit code" in reason
    assert "Traceback" not in said.partition("last lines of")[0]
    assert [path.name for path in (tmp_path / "t").iterdir() if path.name.startswith("rlreason")] == []
