"""A hundred kills at random moments, by the clock and by calls, several in one run: each run ends as the unbroken one.

A run is killed, started again, killed again ... until it comes to its end; then the next one begins, until the case has
had its kills.
"""

import json
import random
import time

import pytest

from tests.broken_runs import Runs
from tests.starts import Started

KILLS = 5  # of each case
CASES = [(kind, seed) for kind in ("grpo", "off_policy", "ei", "star", "sft", "lora") for seed in range(4)]
#: Places in the code, and how often a run comes there at most.
PLACES = {
    "rlreason.evaluation.evaluator:Evaluator.evaluate:call": 6,
    "rlreason.evaluation.evaluator:Validation.evaluate:return": 6,
    "rlreason.grading.grader:Grader.grade_batch:return": 60,
    "rlreason.engines.hf.decoding:Batch.step:call": 120,
    "rlreason.engines.hf.engine:HFEngine.load_weights:return": 4,
    "rlreason.training.algorithms:Batches.sample_ahead:call": 3,
    "rlreason.training.learner:Learner._backward:return": 6,
    "rlreason.training.learner:Learner._step:call": 6,
    "rlreason.training.learner:Learner._step:return": 6,
    "rlreason.records.rows:write_rows:return": 8,
    "rlreason.runtime.files:append_line:call": 10,
    "rlreason.runtime.files:append_line:return": 10,
    "rlreason.runtime.files:write_whole:call": 20,
    "rlreason.runtime.files:write_whole:return": 20,
    "rlreason.training.checkpoint:Checkpoints.restore:return": 1,
    "rlreason.training.checkpoint:write_tensors:return": 3,
    "rlreason.records.files:digest:return": 60,
    "rlreason.records.files:write_checkpoint:return": 3,
    "rlreason.records.files:remove:call": 3,
    "rlreason.records.resume:drop_later:return": 1,
    "rlreason.training.train:close_records:call": 1,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Where the runs of these tests are."""
    return Runs(tmp_path_factory)


def seconds_of(runs: Runs, kind: str) -> float:
    """About how long an unbroken run takes from its start on."""
    return 0.5 + float(json.loads((runs.unbroken(kind) / "summary.json").read_text())["seconds"])


def ended_at_random(runs: Runs, kind: str, folder: str, rng: random.Random) -> tuple[int | None, str, str]:
    """Start the run and kill it somewhere, if it gets there: (exit code, where, what it said)."""
    words = (*runs.words(kind), f"hydra.run.dir={folder}")
    if rng.random() < 0.5:
        place, most = rng.choice(list(PLACES.items()))
        where = f"{place}:{rng.randint(1, most)}"
        done = Started(*words, cwd=runs.place, KILL_AT=where).finished()
    else:
        after = rng.uniform(0.1, 1.0) * seconds_of(runs, kind)
        where, started = f"{after:.2f} s", Started(*words, cwd=runs.place)
        time.sleep(after)
        started.process.kill()
        done = started.finished()
    return done.returncode, where, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_run_that_is_killed_again_and_again_ends_as_the_unbroken_one(runs, kind, seed):
    rng, kills, history = random.Random(f"{kind}/{seed}"), 0, []
    runs.unbroken(kind)
    while kills < KILLS:
        folder, over = runs.new(), False
        while not over and kills < KILLS:
            code, where, said = ended_at_random(runs, kind, folder.name, rng)
            history.append(where)
            assert code in (0, -9), f"{history}: {said}"
            over, kills = (folder / "summary.json").exists(), kills + (code == -9)
        if not over:
            runs.goes_on(kind, folder)
        assert runs.equal(kind, folder), history
    print(f"{kills} kills: {', '.join(history)}")


def test_there_are_a_hundred_kills():
    assert KILLS * len(CASES) >= 100
