"""A run that is killed at any place and started again equals the run that nobody has interrupted, bit for bit."""

import json
from itertools import pairwise

import pytest
from safetensors.torch import load_file

from tests.broken_runs import KINDS, Runs, norms_of, parts_of
from tests.run_records import differences
from tests.starts import rlreason

#: Phase -> the place in the code; and how many parts the run has then (1: it had no checkpoint and began anew). All
#: places between two checkpoints leave the same, but for files that are being written.
PHASES = {
    "first evaluation": ("rlreason.evaluation.evaluator:Evaluator.evaluate:return:1", 1),
    "sampling the first step": ("rlreason.engines.hf.decoding:Batch.step:call:30", 1),
    "behind the update": ("rlreason.training.learner:Learner._step:return:2", 2),
    "row": ("rlreason.records.writer:RunWriter.metrics:return:4", 2),
    "responses": ("rlreason.records.writer:RunWriter.responses:call:4", 2),
    "evaluation": ("rlreason.evaluation.evaluator:Evaluator.evaluate:call:3", 2),
    "model of the checkpoint": ("rlreason.model.policy:Policy.save:return:2", 2),
    "before the manifest": ("rlreason.records.files:digest:call:10", 2),
    "pruning": ("rlreason.records.files:remove:call:1", 2),
    "saving": ("rlreason.training.checkpoint:Checkpoints.save_model:call:1", 2),
    "last evaluation": ("rlreason.evaluation.evaluator:Evaluator.evaluate:call:4", 2),
    "summary": ("rlreason.records.writer:RunWriter._write_summary:call:1", 2),
}
QUICK = ("behind the update",)
STEP = "rlreason.training.learner:Learner._step:{}:{}"
PLACES = {
    "off_policy": [STEP.format("return", 6), "rlreason.evaluation.evaluator:Evaluator.evaluate:call:3"],
    "ei": [STEP.format("return", 5)],
    "star": [STEP.format("call", 5)],
    "sft": [STEP.format("return", 2)],
    "lora": ["rlreason.training.checkpoint:write_tensors:return:2"],
    "adamw_8bit": [STEP.format("call", 3)],
    "skip_solved": ["rlreason.training.algorithms:GRPO.collect:return:2"],
    "reference": [STEP.format("return", 3)],
    "refilled": ["rlreason.training.algorithms:GRPO._refill:return:2"],
    "final_problems": ["rlreason.evaluation.evaluator:Evaluator.evaluate:return:4"],
    "cosine": ["rlreason.records.writer:RunWriter.responses:return:3"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Where the runs of these tests are."""
    return Runs(tmp_path_factory)


def killed_and_started_again(runs: Runs, kind: str, at: str, parts: int = 2) -> None:
    folder = runs.new()
    runs.killed(kind, folder, at)
    assert not (folder / "summary.json").exists()
    runs.goes_on(kind, folder)
    assert parts_of(folder) == parts
    assert runs.equal(kind, folder)


@pytest.mark.parametrize("phase", QUICK)
def test_a_killed_run_goes_on_bit_for_bit(runs, phase):
    killed_and_started_again(runs, "grpo", *PHASES[phase])


@pytest.mark.long
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in QUICK])
def test_a_run_killed_in_any_other_phase_goes_on_bit_for_bit(runs, phase):
    killed_and_started_again(runs, "grpo", *PHASES[phase])


@pytest.mark.long
@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, places in PLACES.items() for at in places])
def test_a_killed_run_of_every_other_kind_goes_on_bit_for_bit(runs, kind, at):
    killed_and_started_again(runs, kind, at)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("off_policy", marks=pytest.mark.long)])
def test_a_repetition_of_an_unbroken_run_is_equal_and_each_of_its_updates_moves_the_weights(runs, kind):
    """What the comparisons above rest on: another process repeats the run, and equal is not equally still."""
    folder = runs.new()
    runs.goes_on(kind, folder)
    assert min(norms_of(folder)) > 0
    assert runs.equal(kind, folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_really_learns(runs, kind):
    folder = runs.unbroken(kind)
    norms = norms_of(folder)
    assert len(norms) >= 2
    assert min(norms) > 0
    saved = sorted(folder.glob("checkpoints/*/model/model.safetensors"))
    for one, other in pairwise([load_file(path) for path in saved]):
        assert any(not one[name].equal(other[name]) for name in one)


@pytest.mark.long
def test_a_run_killed_while_its_model_is_taught_begins_anew(runs):
    words = ("model=tiny", "model.width=32", "model.warm_start.steps=4", "model.cache=null")
    keep = [word for word in runs.words("grpo") if not word.startswith(("model", "prompt", "scale"))]
    folders = runs.new(), runs.new()
    at = {"KILL_AT": "rlreason.training.warm_start:warm_up:call:1"}
    done = [
        rlreason(*keep, *words, f"hydra.run.dir={folder.name}", cwd=runs.place, **env)
        for folder, env in ((folders[0], {}), (folders[1], at), (folders[1], {}))
    ]
    assert [d.returncode for d in done] == [0, -9, 0]
    assert differences(*folders) == []


@pytest.mark.long
def test_a_run_killed_when_its_summary_is_there_is_finished(runs):
    folder = runs.new()
    runs.killed("grpo", folder, "rlreason.records.writer:RunWriter.summary:return:1")
    again = runs.start("grpo", folder)
    assert again.returncode == 2
    assert "holds a finished run" in again.stderr
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    assert runs.equal("grpo", folder)


@pytest.mark.long
def test_a_run_killed_again_while_it_is_put_back(runs):
    folder = runs.new()
    runs.killed("grpo", folder, PHASES["row"][0])
    for at in ("resume:drop_later:call:1", "resume:drop_later:return:1", "writer:RunWriter.__init__:return:1"):
        runs.killed("grpo", folder, f"rlreason.records.{at}")
    for at in ("Checkpoints.restore:call:1", "Checkpoints.restore:return:1"):
        runs.killed("grpo", folder, f"rlreason.training.checkpoint:{at}")
    runs.goes_on("grpo", folder)
    assert runs.equal("grpo", folder)
