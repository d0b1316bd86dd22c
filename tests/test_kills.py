"""A run that is killed or stopped anywhere and started again equals the one that nobody interrupted, bit for bit."""

import json

import pytest

from tests.broken_runs import checkpoints_of, norms_of, parts_of
from tests.run_records import differences

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
    folder = runs.new()
    runs.interrupted("grpo", folder, f"{STEP}call:1", "SIGINT")
    runs.interrupted("grpo", folder, f"{EVALUATE}call:2", "SIGTERM")
    for at in (
        "records.resume:drop_later:return:1", "records.writer:RunWriter.__init__:return:1",
        "training.checkpoint:Resumable.restore:return:1", "training.train:close_records:call:1",
    ):  # fmt: skip
        runs.killed("grpo", folder, f"rlreason.{at}")
    runs.goes_on("grpo", folder)
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


@pytest.mark.long
def test_other_settings_are_refused_by_name_and_nothing_is_touched(runs):
    folder = runs.new()
    runs.killed("grpo", folder, PHASES["last evaluation"][0])
    files = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size and not p.name.startswith(".lock")]
    before = {path: path.read_bytes() for path in files}
    for words, said in {
        ("seed=1", "learning_rate=1e-4"): "seed=0 there, 1 here", ("n_steps=2",): "n_steps=2",
        ("loss=grpo_clip",): "loss.loss_type=",
    }.items():  # fmt: skip
        done = runs.start("grpo", folder, *words)
        assert (done.returncode, done.stderr.count("\n"), said in done.stderr) == (2, 1, True), done.stderr
    assert {path: path.read_bytes() for path in files} == before
    runs.goes_on("grpo", folder, "checkpoint.keep=5", "checkpoint.every=2", "log_generations=1", "logger=tensorboard")
    assert differences(runs.unbroken("grpo"), folder) == []
