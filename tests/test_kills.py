"""A run that is killed, stopped, damaged or hung anywhere, and started again, equals the unbroken one bit for bit.

With vLLM it asks the same problems: which responses share a batch of vLLM's is decided by timing, so numbers differ.
"""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from rlreason import load_run
from rlreason.runtime.files import holder
from tests.broken_runs import Runs, checkpoints_of, norms_of, parts_of
from tests.run_records import differences, lines_of, rows_of
from tests.starts import ROOT, SMALL, Started, rlreason
from tests.test_checkpoints import DAMAGE
from tests.waiting import wait_for

OF, TRAINING = "rlreason.records.writer:RunWriter.", "rlreason.training."
EVALUATE, STEP = "rlreason.evaluation.evaluator:Evaluator.figures:", f"{TRAINING}learner:Learner.take_step:"
SAVE, TENSORS = f"{TRAINING}checkpoint:Resumable.save_model:call:1", f"{TRAINING}checkpoint:write_tensors:"
#: Phase -> the place in the code, and how many parts the run has then (1: it had no checkpoint and began anew). All
#: places between two checkpoints leave the same, but for files that are being written.
PHASES = {
    "first evaluation": (f"{EVALUATE}return:1", 1), "behind the update": (f"{STEP}return:2", 2),
    "sampling the first step": ("rlreason.engines.decoding:Batch.step:call:30", 1),
    "row": (f"{OF}metrics:return:4", 2), "responses": (f"{OF}responses:call:4", 2),
    "model of the checkpoint": ("rlreason.model.policy:Policy.save:return:2", 2),
    "before the manifest": ("rlreason.records.files:digest:call:10", 2), "saving": (SAVE, 2),
    "pruning": ("rlreason.records.files:remove:call:1", 2), "last evaluation": (f"{EVALUATE}call:4", 2),
    "summary": (f"{OF}_write_summary:call:1", 2),
}  # fmt: skip
OF_KINDS = [
    ("off_policy", f"{STEP}return:6"), ("off_policy", f"{EVALUATE}call:3"), ("ei", f"{STEP}return:5"),
    ("star", f"{STEP}call:5"), ("sft", f"{STEP}return:2"), ("lora", f"{TENSORS}return:2"),
    ("adamw_8bit", f"{STEP}call:3"), ("skip_solved", f"{TRAINING}algorithms:GRPO.collect:return:2"),
    ("reference", f"{STEP}return:3"), ("refilled", f"{TRAINING}algorithms:GRPO._refill:return:2"),
    ("final_problems", f"{EVALUATE}return:4"), ("cosine", f"{OF}responses:return:3"), ("float16", f"{STEP}return:3"),
    ("sets", f"{OF}responses:return:10"),
]  # fmt: skip
KILLED = [
    pytest.param("grpo", at, parts, id=phase, marks=[pytest.mark.long] * (phase != "behind the update"))
    for phase, (at, parts) in PHASES.items()
] + [pytest.param(kind, at, 2, marks=pytest.mark.long) for kind, at in OF_KINDS]
STOPPED = [
    ("grpo", f"{TRAINING}algorithms:GRPO.collect:call:2", "SIGINT"), ("grpo", f"{STEP}call:2", "SIGTERM"),
    ("grpo", f"{EVALUATE}call:3", "SIGHUP"), ("grpo", SAVE, "SIGINT"), ("grpo", f"{TENSORS}call:1", "SIGTERM"),
    ("off_policy", f"{STEP}return:2", "SIGINT"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "at", "parts"), KILLED)
def test_a_killed_run_goes_on_bit_for_bit(runs, kind, at, parts):
    folder = runs.new()
    runs.killed(kind, folder, at)
    assert not (folder / "summary.json").exists()
    runs.goes_on(kind, folder)
    assert parts_of(folder) == parts
    assert len(norms := norms_of(folder)) >= 2
    assert min(norms) > 0  # equal is not equally still
    assert runs.equal(kind, folder)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "at", "by"), STOPPED)
def test_a_run_that_a_signal_stops_leaves_a_checkpoint_of_that_step_and_goes_on_bit_for_bit(runs, kind, at, by):
    folder = runs.new()
    runs.interrupted(kind, folder, at, by, "checkpoint.every=1000")
    assert json.loads((folder / "status.json").read_text())["reason"].startswith(f"by {by} after step ")
    assert checkpoints_of(folder)  # whatever checkpoint.every says
    assert "goes on    from" in runs.goes_on(kind, folder).stdout
    assert runs.equal(kind, folder)


@pytest.mark.long
def test_a_run_that_is_stopped_twice_and_killed_again_and_again_while_it_is_put_back(runs):
    """Also where a command with other settings, which is refused, comes between."""
    folder = runs.new()
    runs.interrupted("grpo", folder, f"{STEP}call:1", "SIGINT")
    runs.interrupted("grpo", folder, f"{EVALUATE}call:2", "SIGTERM")
    for at in (
        "records.resume:drop_later:return:1", "records.writer:RunWriter.__init__:return:1",
        "training.checkpoint:Resumable.restore:return:1", "training.train:close_records:call:1",
    ):  # fmt: skip
        runs.killed("grpo", folder, f"rlreason.{at}")
    done = runs.start("grpo", folder, "seed=1", "n_steps=2")
    assert (done.returncode, done.stderr.count("\n"), "seed=0 there, 1 here" in done.stderr) == (2, 1, True), (
        done.stderr
    )
    runs.goes_on("grpo", folder, "checkpoint.keep=5", "log_generations=1", "logger=tensorboard")  # which may change
    assert runs.equal("grpo", folder)


@pytest.mark.long
def test_a_finished_run_is_given_more_steps_and_equals_one_that_had_them_from_the_start(runs):
    """Also where the commands that give it more are stopped, and killed, before one has taken a step."""
    folder = runs.new()
    runs.killed("grpo", folder, "rlreason.records.writer:RunWriter.summary:return:1")  # which makes it a finished one
    build = "rlreason.training.build:build_components:call:1"
    assert runs.start("grpo", folder, "n_steps=5", at=build, by="SIGTERM").returncode == 130
    assert "holds a finished run" in runs.start("grpo", folder).stderr
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    assert differences(runs.unbroken("grpo"), folder) == []
    runs.killed("grpo", folder, "rlreason.records.resume:drop_later:call:1", "n_steps=5")
    runs.goes_on("grpo", folder, "n_steps=5")
    assert (folder / "summary_of_3_steps.json").exists()
    assert runs.equal("grpo", folder, "n_steps=5")


without_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")  # slow to import
VLLM = ("rollout=vllm", "rollout.kv_cache_gb=0.25", "rollout.max_rows=16", "eval_every=0")
AHEAD = ("rollout.async_level=1", "rollout.sleep=false", "loss=grpo_clip")


def asked_in(folder: Path) -> dict[str, list[str]]:
    """File -> the problems whose responses it holds, in order."""
    files = [path for kind in ("rollouts", "evals") for path in sorted((folder / kind).glob("*"))]
    return {
        str(path.relative_to(folder)): [json.loads(line)["problem_id"] for line in lines_of(path)] for path in files
    }


@pytest.mark.long
@without_vllm
@pytest.mark.parametrize(("more", "by", "staleness"), [((), "SIGTERM", [0, 0, 0]), (AHEAD, "SIGKILL", [0, 1, 1])])
def test_a_run_with_vllm_goes_on_with_the_same_problems(tmp_path_factory, more, by, staleness):
    """Bug: a resumed run asks other problems, or samples the step after its checkpoint twice."""
    runs, words = Runs(tmp_path_factory), (*VLLM, *more)
    whole, folder = runs.unbroken("grpo", *words), runs.new()
    rows = [row for row in rows_of(whole) if "rollout/mismatch_mean" in row]
    assert rows[0]["rollout/mismatch_mean"] < 1e-3  # later ones that were sampled ahead are of older weights
    assert [row["rollout/staleness"] for row in rows_of(whole) if "rollout/staleness" in row] == staleness
    done = runs.start("grpo", folder, *words, at=f"{STEP}return:2", by=by)
    assert done.returncode == (-9 if by == "SIGKILL" else 130), done.stdout + done.stderr
    runs.goes_on("grpo", folder, *words)
    assert parts_of(folder) == 2
    assert asked_in(folder) == asked_in(whole)
    schedule = ("rollout_step", "train_step", "eval_step", "train/learning_rate", "rollout/staleness")
    one, other = ([[row.get(name) for name in schedule] for row in rows_of(run)] for run in (folder, whole))
    assert one == other
    assert min(norms_of(folder)) > 0


@pytest.mark.long
@without_vllm
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


@pytest.mark.long
def test_checkpoints_are_broken_and_the_metrics_cut_in_a_line(runs):
    """Killed behind the last step: of the checkpoints the two newest are there, and the best one."""
    killed = runs.new()
    runs.killed("grpo", killed, PHASES["last evaluation"][0])
    newest = checkpoints_of(killed)[-1]
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"rollout_step": 3, "train')
    DAMAGE["a flipped bit"](killed / "checkpoints" / newest / "state.json")
    done = runs.goes_on("grpo", killed)
    assert f"{newest} cannot be used" in re.sub(r"\s+", " ", done.stderr + done.stdout)
    assert runs.equal("grpo", killed)


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
