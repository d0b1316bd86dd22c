"""Whole runs on several ranks: the numbers of one process, gone on with on another number, killed and stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlreason import load_run
from tests.starts import ENV, ROOT, rlreason
from tests.test_trainer import SMALL, trained
from tests.waiting import wait_for

ANY = (
    "n_steps=5", "eval_every=2", "eval_problems=8", "micro_batch_tokens=100", "prompt.reward=own_reward:halves",
    "sampling.max_tokens=24", "waits.run_s=120", "checkpoint.keep_final=true",
)  # fmt: skip
WORDS = (*ANY, "rollout_batch_size=16", "group_size=4")
TIMES = ("time/", "perf/", "busy/", "grading/ms", "memory/", "final/seconds")
COMMAND = [sys.executable, "-m", "rlreason"]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "-m", "rlreason"]


def whole_steps(rows: list[dict]) -> list[dict]:
    """The rows of optimizer steps: a run that was given more steps has evaluations that one at once has not."""
    return [{k: v for k, v in row.items() if k.startswith("train/")} for row in rows if "train/loss" in row]


def assert_same(rows: list[dict], expected: list[dict]) -> None:
    """The same numbers in each row, but for times."""
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() ^ other.keys() <= {"time/checkpoint"}  # due by the clock
        for name, value in other.items():
            if isinstance(value, float) and not name.startswith(TIMES):
                looked_at = 0.02 if name == "train/weights_changed" else 1e-4  # a few elements: others, in parts
                assert row[name] == pytest.approx(value, rel=1e-4, abs=looked_at), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    rows, _ = trained(tmp_path_factory.mktemp("alone"), *WORDS)
    assert any(row.get("train/grad_norm", 0) > 0 for row in rows)
    return rows


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("gpus=2", "parallel=shard"), ()),
        pytest.param(("gpus=2", "parallel=replicate"), ("gpus=3", "parallel=shard"), marks=pytest.mark.long),
    ],
)
def test_a_run_has_the_numbers_of_one_process_and_goes_on_with_any_number_in_any_mode(tmp_path, alone, first, then):
    trained(tmp_path, *WORDS, "n_steps=3", *first)
    assert not (tmp_path / "ranks.log").exists()  # no rank had anything to say
    assert_same(whole_steps(trained(tmp_path, *WORDS, *then)[0]), whole_steps(alone))


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
@pytest.mark.parametrize(
    "more",
    [
        (*WORDS, "loss=grpo_clip", "epochs_per_rollout=2", "kl_placement=loss", "kl_coef=0.05"),
        (*ANY, "algorithm=ei", "restart=true", "question_batch_size=8", "group_size=4", "train_batch_size=8"),
        (*ANY, "algorithm=sft", "eval_every=0", "train_batch_size=8", "model.freeze=[model.layers.0.*]"),
    ],
)
def test_every_algorithm_has_the_numbers_of_one_process(tmp_path, more, parallel):
    expected, _ = trained(tmp_path / "one", *more, "n_steps=2")
    rows, _ = trained(tmp_path / "two", *more, "n_steps=2", "gpus=2", f"parallel={parallel}")
    assert_same(rows, expected)


ENVIRONMENT = os.environ | ENV | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


class Killed:
    """A command on two ranks, from its first updates on."""

    def __init__(self, folder: Path, start: list[str], *more: str) -> None:
        words = [*SMALL, *WORDS, "n_steps=500", "eval_every=0", "waits.run_s=3000", f"hydra.run.dir={folder}", *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*start, *words], env=ENVIRONMENT, cwd=folder.parent, **pipes)
        rows = folder / "metrics.jsonl"
        wait_for(lambda: rows.exists() and rows.read_text().count("\n") >= 3)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.ranks = {process.environ().get("RANK"): process.pid for process in reversed(self.family)}

    def end(self) -> tuple[int, str]:
        """(exit code, what was printed); nothing may be left of it after ten seconds."""
        out, _ = self.process.communicate(timeout=600)
        assert psutil.wait_procs(self.family, timeout=10)[1] == []
        return self.process.returncode, out


LOSS = """
import os
def loss(advantages, policy_log_probs):
    begun = policy_log_probs.numel() >= 20
    if begun and os.environ.get("RANK", "0") in os.environ["FAILS_ON"]:
        raise ValueError("no such loss here")
    return -advantages * policy_log_probs
"""


@pytest.mark.long
@pytest.mark.parametrize(("fails_on", "parallel"), [("0", "shard"), ("1", "shard"), ("0,1", "replicate")])
def test_an_error_of_one_rank_alone_ends_the_run_soon(tmp_path, fails_on, parallel):
    """The other ranks wait in a sum; nobody may wait for them to hear anything."""
    (tmp_path / "fails.py").write_text(LOSS)
    words = [*SMALL, *WORDS, "loss=fails:loss", "gpus=2", f"parallel={parallel}", "hydra.run.dir=run"]
    words += ["waits.run_s=3000"]  # which would end it too, and later
    done = rlreason(*words, cwd=tmp_path, FAILS_ON=fails_on, PYTHONPATH=f"{ENVIRONMENT['PYTHONPATH']}:{tmp_path}")
    assert done.returncode == 1, done.stdout
    assert "no such loss here" in done.stderr
    assert load_run(tmp_path / "run").status == "failed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "victim", "number", "says"),
    [
        (COMMAND, "1", signal.SIGKILL, "rank 1 ended with signal 9"), (COMMAND, "1", signal.SIGSTOP, "waits.run_s=10"),
        (COMMAND, "0", signal.SIGKILL, ""), (TORCHRUN, "1", signal.SIGKILL, ""),
        (TORCHRUN, "the launcher", signal.SIGKILL, ""),
    ],
)  # fmt: skip
def test_nothing_is_left_of_a_run_that_loses_a_part_or_waits_for_one(tmp_path, start, victim, number, says):
    gpus = ["gpus=2"] if start is COMMAND else []
    run = Killed(tmp_path / "run", start, *gpus, *["waits.run_s=10"] * (number == signal.SIGSTOP))
    parts = run.ranks | {"0": run.process.pid, "the launcher": run.process.pid}  # torchrun's rank 0 is no victim
    os.kill(parts[victim], number)
    code, out = run.end()
    assert (code != 0, says in out) == (True, True)
    assert not says or load_run(tmp_path / "run").status == "failed"


@pytest.mark.long
def test_a_signal_ends_ranks_in_order_and_the_run_goes_on(tmp_path):
    run = Killed(tmp_path / "run", COMMAND, "gpus=2", "parallel=shard")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    done = rlreason(f"resume={tmp_path / 'run'}", "n_steps=8", "gpus=1", "parallel=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_torchrun_trains_on_the_processor_and_a_command_that_trains_nothing_ends(tmp_path, alone):
    def done(*words: str) -> int:
        return subprocess.run([*TORCHRUN, *words], env=ENVIRONMENT, timeout=600, cwd=tmp_path, check=False).returncode

    assert done(*SMALL, *WORDS, "hydra.run.dir=run") == 0
    assert_same(whole_steps(load_run(tmp_path / "run").metrics), whole_steps(alone))
    assert [done("--version"), done("n_steps=x"), done("-m", "seed=0,1")] == [0, 1, 1]
