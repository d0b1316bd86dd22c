"""Groups by id, the same problems for the same step, notices as text, records that are whole or not there."""

import json
import random
from dataclasses import replace

import pytest

from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts, rollout_metrics
from rlreason.errors import ConfigError
from rlreason.objectives.objective import Objective
from rlreason.records import files
from rlreason.records.files import opened
from rlreason.records.reader import RunFolder, compared, without_clock
from rlreason.records.resume import drop_later, refuse_occupied
from rlreason.records.rows import TO_LEARN, sample_of
from rlreason.records.writer import RunWriter
from rlreason.training.algorithms import with_advantages
from rlreason.training.learner import Learner
from rlreason.types import Grade, Problem, Response, Sample
from tests.run_records import lines_of
from tests.test_subcommands import subcommand


def graded(problem_id, reward, ids=(1, 2)):
    response = Response(problem_id, [5], list(ids), [-0.5] * len(ids), "", "stop")
    return Sample(response, Grade(1.0, reward, reward, "correct" if reward else "wrong"))


class Echo:
    """A grader that says which ground truth each response met."""

    def grade_batch(self, responses, golds):
        return [Grade(0.0, float(g), 0.0, "unformatted") for g in golds]


def test_advantages_follow_the_problem_id_through_a_shuffle_and_a_filter():
    """Bug: groups are formed by position, so a filtered batch compares responses to different problems."""
    samples = [graded(f"p{i // 4}", float(i % 4 == 0)) for i in range(16)]
    expected = {id(s.response): s.advantage for s in with_advantages(samples, Objective())[0]}
    assert expected[id(samples[0].response)] == pytest.approx(1.5, abs=1e-4)  # (1 - 1/4) / 0.5, unbiased std of 1000
    random.Random(1).shuffle(samples)
    for chosen in (samples, [s for s in samples if s.group != "p2"]):
        for s in with_advantages(chosen, Objective())[0]:
            assert s.advantage == pytest.approx(expected[id(s.response)], abs=1e-12)
    assert with_advantages([], Objective()) == ([], set())
    samples = [graded("a", 1.0, (1,)), graded("a", 0.0, (1,)), graded("b", 0.0, (1,)), graded("b", 0.0, (2, 3))]
    m = rollout_metrics(samples)
    assert (m["reward/mean"], m["rollout/distinct"], m["rollout/length"]) == (0.25, 0.75, 1.25)  # within groups


def test_rollouts_are_graded_in_order_and_the_engine_is_never_behind_the_trainer(policy, engine, problems):
    """Bug: a response meets another problem's ground truth, a step repeats its samples, or weights are stale."""
    rollouts = Rollouts(engine, Echo(), lambda p: policy.encode_prompt(p.question), seed=0)
    learner = Learner(policy, Objective(), OptimizationConfig(1e-2))
    drawn = set()
    for step in range(3):
        samples = rollouts.sample(problems[:4], Sampling(0.7, 2, 8), n=2, purpose=step)
        assert [s.group for s in samples] == [p.id for p in problems[:4] for _ in range(2)]
        assert all(s.grade.answer == float(next(p for p in problems if p.id == s.group).answer) for s in samples)
        drawn.add(tuple(map(tuple, (s.response.token_ids for s in samples))))
        learner.temperature = 0.7
        samples = [replace(s, advantage=(-1.0) ** k) for k, s in enumerate(samples)]
        assert learner.update(samples, mismatch_from=2)["rollout/mismatch_max"] < 1e-4
        assert engine.load_weights(policy) == {}
    assert samples[0].response.weight_version == 2
    assert len(drawn) == 3


def test_records_are_whole_and_a_finished_run_or_another_folder_is_refused(tmp_path):
    """Bug: a second run writes into a finished one, or into a folder of the user's own."""
    folder = tmp_path / "run"
    records = RunWriter(folder, "seed: 0\n")
    records.metrics({"train_step": 1, "reward/mean": float("nan")})
    records.responses("rollouts", 1, [graded("p", 1.0)], [Problem("p", "q", "7")])
    row = json.loads(*lines_of(folder / "rollouts/step_00001.jsonl.gz"))
    assert (row["gold"], row["reward"], row["token_ids"], row["outcome"]) == ("7", 1.0, [1, 2], "correct")
    refuse_occupied(folder)  # not finished yet
    RunWriter(folder, "seed: 1\n")  # a broken-off run is started again: its records are set aside, not mixed in
    assert not (folder / "rollouts").exists()
    assert (folder / "metrics.jsonl").read_text() == ""
    assert (folder / "broken_off_1/rollouts/step_00001.jsonl.gz").exists()
    row = json.loads((folder / "broken_off_1/metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert without_clock(row) == {"train_step": 1, "reward/mean": None}
    records.summary({"status": "finished", "accuracy": 1.0})
    with pytest.raises(ConfigError, match="holds a finished run"):
        refuse_occupied(folder)
    assert not list(folder.rglob("*.partial"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("precious")
    with pytest.raises(ConfigError, match="holds"):
        refuse_occupied(tmp_path)
    assert (tmp_path / "model/weights").read_text() == "precious"


def test_responses_are_read_as_written_always_in_the_same_bytes_and_a_file_that_was_cut_is_refused(tmp_path):
    """Bug: a field is lost between writing and learning from it; a file holds its time; a torn one seems shorter."""
    log_probs, right = [-0.5, -0.25, -1.0], Grade(1.0, 1.0, 1.0, "correct")
    told = [Response("p", [5, 6], [1, n, 3], log_probs, "so </think> <answer>7</answer>", "stop") for n in range(40)]
    samples = [Sample(response, right, log_probs=log_probs) for response in told]
    for name in "ab":
        records = RunWriter(tmp_path / name, "prompt: {reward: r1_zero}\nalgorithm: grpo\nseed: 0\n")
        for kind, step in ((files.ROLLOUTS, 1), (files.ROLLOUTS, 2), (files.EVALS, 2)):
            records.responses(kind, step, samples, [Problem("p", "3+4?", "7")])
    folder, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    first, second = folder.rollouts()
    assert [sample_of(row) for row in folder.rows(first, TO_LEARN).values()] == samples
    assert first.path.read_bytes() == other.rollouts()[0].path.read_bytes()
    assert first.path.stat().st_size < len(opened(first.path).read()) / 5  # compressed
    assert compared(folder, other)[0]["responses"]
    assert subcommand("inspect", folder.path, "--regrade", "--write") == 0
    assert not compared(folder, other)[0]["responses"]
    second.path.write_bytes(second.path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=f"^{second.path} cannot be read"):
        folder.rows(second, ())
    drop_later(folder.path, {"step": 1, "lines": {}, "parts": {"validation": []}})
    assert [file.step for file in folder.rollouts()] == [1]
    assert not list((folder.path / "evals").iterdir())
