"""A run that a signal ends leaves a checkpoint of that step; and what a run may go on with, and what not."""

import json
import shutil
from pathlib import Path

import pytest

from tests.broken_runs import Runs, checkpoints_of, parts_of
from tests.run_records import differences, responses_of, rows_of, weights_of
from tests.test_kills import PHASES, runs

__all__ = ["runs"]  # a fixture
PLACES = {
    "sampling": "rlreason.training.algorithms:GRPO.collect:call:2",
    "update": "rlreason.training.learner:Learner._step:call:2",
    "evaluation": "rlreason.evaluation.evaluator:Evaluator.evaluate:call:3",
    "checkpoint": "rlreason.training.checkpoint:write_tensors:call:2",
    "saving": "rlreason.training.checkpoint:Checkpoints.save_model:call:1",
}
STOPS = [("sampling", "SIGINT"), ("update", "SIGTERM"), ("evaluation", "SIGHUP"), ("saving", "SIGINT")]


@pytest.mark.long
@pytest.mark.parametrize(("phase", "by"), STOPS)
def test_a_run_that_a_signal_stops_in_any_phase_goes_on_bit_for_bit(runs: Runs, phase: str, by: str) -> None:
    folder = runs.new()
    runs.interrupted("grpo", folder, PLACES[phase], by, "checkpoint.every=1000")
    begun = json.loads((folder / "status.json").read_text())["reason"]
    assert begun.startswith(f"by {by} after step ")
    assert checkpoints_of(folder)  # of the step in which it was stopped, whatever checkpoint.every says
    done = runs.goes_on("grpo", folder)
    assert "goes on    from" in done.stdout + done.stderr
    assert parts_of(folder) == 2
    assert runs.equal("grpo", folder)


@pytest.mark.long
def test_a_signal_while_a_checkpoint_is_written_waits_for_it(runs):
    folder = runs.new()
    runs.interrupted("grpo", folder, PLACES["checkpoint"], "SIGTERM")
    assert checkpoints_of(folder)
    assert not [name for name in checkpoints_of(folder) if name.endswith(".partial")]
    runs.goes_on("grpo", folder)
    assert runs.equal("grpo", folder)


@pytest.mark.long
def test_a_run_that_is_stopped_twice_in_other_phases_and_then_killed(runs):
    folder = runs.new()
    runs.interrupted("grpo", folder, "rlreason.training.learner:Learner._step:call:1", "SIGINT")
    runs.interrupted("grpo", folder, "rlreason.evaluation.evaluator:Evaluator.evaluate:call:2", "SIGTERM")
    runs.killed("grpo", folder, "rlreason.training.train:close_records:call:1")
    runs.goes_on("grpo", folder)
    assert parts_of(folder) == 4
    assert runs.equal("grpo", folder)


@pytest.mark.long
def test_an_off_policy_run_that_is_stopped_between_two_updates(runs):
    folder = runs.new()
    runs.interrupted("off_policy", folder, "rlreason.training.learner:Learner._step:return:2", "SIGINT")
    assert runs.goes_on("off_policy", folder)
    assert runs.equal("off_policy", folder)


@pytest.mark.long
@pytest.mark.parametrize(("every", "parts"), [("2", 2), ("null", 2), ("0", 1)])
def test_however_often_checkpoints_are_written_the_run_comes_out_equal(runs, every, parts):
    """With null this run is too short for one but at its end; with 0 it begins anew, even after a signal."""
    folder = runs.new()
    at, word = "rlreason.evaluation.evaluator:Evaluator.evaluate:call:4", f"checkpoint.every={every}"
    if every == "2":
        runs.killed("grpo", folder, at, word)
    else:
        runs.interrupted("grpo", folder, at, "SIGTERM", word)
    assert bool(checkpoints_of(folder)) == (every != "0")
    runs.goes_on("grpo", folder, word)
    assert parts_of(folder) == parts
    assert (folder / "broken_off_1").exists() == (every == "0")
    assert runs.equal("grpo", folder)


@pytest.mark.long
@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_checkpoints_are_kept_and_the_best_besides(runs, keep):
    folder = runs.new()
    words = ("n_steps=6", f"checkpoint.keep={keep}", "eval_problems=16")
    runs.killed("grpo", folder, "rlreason.evaluation.evaluator:Evaluator.evaluate:call:7", *words)
    names = checkpoints_of(folder)
    states = {name: json.loads((folder / f"checkpoints/{name}/state.json").read_text()) for name in names}
    measured = {row["rollout_step"]: row["eval/accuracy"] for row in rows_of(folder) if "eval/accuracy" in row}
    at_ends = {step: accuracy for step, accuracy in measured.items() if 0 < step < 6}
    best = max(at_ends, key=lambda step: (at_ends[step], step))
    newest = [f"step_{i:05d}" for i in range(7 - keep, 7)]
    assert [name[:10] for name in names] == sorted({*newest, f"step_{best:05d}"})
    assert {s["step"]: s["accuracy"] for s in states.values()}.get(best) == at_ends[best]
    runs.goes_on("grpo", folder, *words)


@pytest.mark.long
def test_a_finished_run_is_given_more_steps_and_equals_one_that_had_them_from_the_start(runs):
    """Also where the command that gives it more is killed before it has taken one."""
    folder = runs.new()
    shutil.copytree(runs.unbroken("grpo"), folder)
    runs.killed("grpo", folder, "rlreason.records.resume:drop_later:call:1", "n_steps=5")
    runs.goes_on("grpo", folder, "n_steps=5")
    assert (folder / "summary_of_3_steps.json").exists()
    assert runs.equal("grpo", folder, "n_steps=5")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that a run writes itself, but for empty ones, which a killed run leaves."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    files = {str(path.relative_to(folder)): path for path in found}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(".lock")}


@pytest.mark.long
def test_other_settings_are_refused_by_name_and_nothing_is_touched(runs):
    folder = runs.new()
    runs.killed("grpo", folder, PHASES["last evaluation"][0])
    before = contents(folder)
    for words, said in (
        (("seed=1", "learning_rate=1e-4"), ["seed=0 there, 1 here", "learning_rate="]),
        (("n_steps=2",), ["n_steps=2", "has come to step 3"]),
        (("loss=grpo_clip",), ["loss.loss_type="]),
    ):
        done = runs.start("grpo", folder, *words)
        assert done.returncode == 2
        assert all(word in done.stderr for word in said), done.stderr
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
    assert contents(folder) == before
    changed = ("checkpoint.keep=5", "checkpoint.every=2", "log_generations=1", "logger=tensorboard")
    runs.goes_on("grpo", folder, *changed)
    assert differences(runs.unbroken("grpo"), folder) == []


@pytest.mark.long
def test_a_finished_run_that_is_stopped_before_it_goes_on_is_a_finished_run(runs):
    folder = runs.new()
    shutil.copytree(runs.unbroken("grpo"), folder)
    at = "rlreason.training.build:build_components:call:1"
    assert runs.start("grpo", folder, "n_steps=5", at=at, by="SIGTERM").returncode == 130
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("finished", "")
    assert (folder / "summary.json").exists()
    assert "holds a finished run" in runs.start("grpo", folder).stderr
    assert runs.equal("grpo", folder)


@pytest.mark.long
def test_evaluations_may_come_at_other_steps_and_training_stays_the_same(runs):
    folder, whole = runs.new(), runs.unbroken("grpo")
    runs.killed("grpo", folder, PHASES["row"][0])
    runs.goes_on("grpo", folder, "eval_every=0")
    assert weights_of(folder) == weights_of(whole)
    texts, others = responses_of(folder), responses_of(whole)
    rollouts = [name for name in others if name.startswith("rollouts")]
    assert len(rollouts) == 3
    assert all(texts[name] == others[name] for name in rollouts)
    assert len(texts) < len(others)


@pytest.mark.long
def test_what_lies_behind_the_checkpoint_is_gone_when_the_run_goes_on_and_never_there_twice(runs):
    """It goes on by another way than before, so nothing of the first way may be left."""
    folder = runs.new()
    words = ("eval_every=1", "checkpoint.every=2")
    runs.killed("grpo", folder, "rlreason.records.writer:RunWriter.responses:return:6", *words)  # of the third step
    rows = rows_of(folder)
    (name,) = checkpoints_of(folder)
    state = json.loads((folder / f"checkpoints/{name}/state.json").read_text())
    there, lines = (folder / "metrics.jsonl").read_bytes().splitlines(), state["lines"]["metrics.jsonl"]
    assert len(list((folder / "rollouts").glob("*"))) == 3 > state["step"]
    assert len(there) > lines
    runs.killed("grpo", folder, "rlreason.training.checkpoint:Checkpoints.restore:return:1", *words)
    assert (folder / "metrics.jsonl").read_bytes().splitlines() == there[:lines]
    assert len(rows_of(folder)) < len(rows)
    assert len(list((folder / "rollouts").glob("*"))) == state["step"]
    assert len(list((folder / "evals").glob("*"))) == len(state["parts"]["validation"])
    runs.goes_on("grpo", folder, *words)
    steps = [(row["rollout_step"], row["train_step"], row["eval_step"]) for row in rows_of(folder)]
    assert len(set(steps)) == len(steps)
    assert runs.equal("grpo", folder)
