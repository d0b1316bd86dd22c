"""A run with vLLM that is killed goes on with the same problems, seeds and schedule.

Its numbers need not be equal bit for bit: which responses share a batch of vLLM's is decided by timing.
"""

import json
from pathlib import Path

import pytest

from tests.broken_runs import Runs, norms_of, parts_of
from tests.run_records import lines_of, rows_of

pytest.importorskip("vllm")
VLLM = ("rollout=vllm", "rollout.kv_cache_gb=0.25", "rollout.max_rows=16", "eval_every=0")
AHEAD = ("rollout.async_level=1", "rollout.sleep=false", "loss=grpo_clip")
STEP = "rlreason.learner:Learner._step:{}:2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Where the runs of these tests are."""
    return Runs(tmp_path_factory)


def asked_in(folder: Path) -> dict[str, list[str]]:
    """File -> the problems whose responses it holds, in order."""
    files = [path for kind in ("rollouts", "evals") for path in sorted((folder / kind).glob("*"))]
    return {
        str(path.relative_to(folder)): [json.loads(line)["problem_id"] for line in lines_of(path)] for path in files
    }


def schedule_of(folder: Path) -> list[tuple[float | None, ...]]:
    """What stands in every row whatever was sampled."""
    names = ("rollout_step", "train_step", "eval_step", "train/learning_rate", "rollout/staleness")
    return [tuple(row.get(name) for name in names) for row in rows_of(folder)]


@pytest.mark.long
@pytest.mark.parametrize("more", [(), AHEAD], ids=["in step", "ahead"])
@pytest.mark.parametrize("by", ["SIGKILL", "SIGTERM"])
def test_a_run_with_vllm_goes_on_with_the_same_problems(runs, more, by):
    folder, words = runs.new(), (*VLLM, *more)
    whole = runs.unbroken("grpo", *words)
    done = runs.start("grpo", folder, *words, at=STEP.format("return"), by=by)
    assert done.returncode == (-9 if by == "SIGKILL" else 130), done.stdout + done.stderr
    runs.goes_on("grpo", folder, *words)
    assert parts_of(folder) == 2
    assert asked_in(folder) == asked_in(whole)
    assert schedule_of(folder) == schedule_of(whole)
    assert min(norms_of(folder)) > 0
