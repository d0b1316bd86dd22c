"""`resume=RUN` and `rlreason rerun RUN`: the words of a run again, in its folder or beside it; what comes of them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from rlreason import Run, compose, evaluate, load_run, train
from rlreason.cli.flags import composing, read
from rlreason.cli.rerun import compared, first_difference
from rlreason.cli.resume import expand_resume, recorded_start
from rlreason.errors import ConfigError
from rlreason.records.reader import RunFolder
from rlreason.runtime.text import HIDDEN
from tests.starts import rlreason
from tests.test_api import TINY

SMALL = (*TINY, "save_model=true")
JOB = [word for word in TINY if not word.startswith(("n_steps", "rollout_batch", "group_size"))]


@pytest.fixture
def left(tmp_path, monkeypatch):
    """A function that leaves a run's folder, `runs/a`, whose command was this one, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def leave(command: str = "python -m rlreason seed=1", folder: str = "runs/a", **told: object) -> Path:
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / "config.yaml").write_text("algorithm: grpo\n")
        facts = {"schema_version": 1, "command": command, "directory": str(tmp_path)} | told
        (place / "provenance.json").write_text(json.dumps(facts))
        return Path(folder)

    return leave


def test_words_without_the_word_are_left_alone(left):
    for words in ([], ["seed=1"], ["-m", "seed=1,2"], ["--help"], ["resume"], ["resumes=1"]):
        assert expand_resume(words).words == words


@pytest.mark.parametrize(
    ("command", "given", "words"),
    [
        ("loss=gspo seed=1", ["resume=runs/a"], ["loss=gspo", "seed=1"]),
        ("loss=gspo n_steps=20", ["resume=runs/a", "n_steps=40"], ["loss=gspo", "n_steps=40"]),
        ("n_grpo_steps=20", ["n_steps=40", "resume='runs/a'"], ["n_steps=40"]),  # one setting, under two names
        ("eval_problems=8", ["resume=runs/a", "eval.problems=9"], ["eval.problems=9"]),
        ("'loss=gspo' seed=1 hydra.run.dir='/far/x=y'", ["resume=runs/a"], ["loss=gspo", "seed=1"]),
        ("resume=runs/z seed=1", ["+resume=runs/a"], ["seed=1"]),
        ("loss=grpo_clip loss.cliprange=0.3", ["resume=runs/a", "loss=gspo"], ["loss.cliprange=0.3", "loss=gspo"]),
        ("'data.path=my data' --config-dir=/", ["resume=runs/a"], ["--config-dir=/", "data.path=my data"]),
    ],
)
def test_the_word_stands_for_the_words_of_the_run_in_its_folder(command, given, words, left):
    left(f"python -m rlreason {command}")
    assert expand_resume(given).words == [*words, "hydra.run.dir=runs/a"]


def test_a_folder_is_spelled_so_that_hydra_reads_it(left, tmp_path):
    odd = left(folder="runs/a=b c")
    (last,) = [word for word in expand_resume([f"resume={odd}"]).words if word.startswith("hydra.run.dir=")]
    assert last == "hydra.run.dir='runs/a=b c'"
    assert expand_resume([f"resume={tmp_path}/runs/a=b c"]).words[-1] == f"hydra.run.dir='{tmp_path}/runs/a=b c'"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["resume="], "resume= names no run: give the folder of one"),
        (["resume=nowhere"], "resume=nowhere is no folder"),
        (["resume=runs"], "resume=runs is a sweep with 2 runs: type its command again"),
        (["resume=runs/a", "resume=runs/b"], "ask for 2 runs to go on"),
        (["resume=runs/a", "hydra.run.dir=x"], "hydra.run.dir=x names one too: leave hydra.run.dir=x out"),
        (["-m", "resume=runs/a"], "leave -m out"),
        (["resume=runs/a", "hydra.mode=MULTIRUN"], "leave -m out"),
        (["resume=empty"], "has no provenance.json that tells its command"),
        (["resume=runs/b"], "has no provenance.json that tells its command"),
    ],
)
def test_what_cannot_go_on_is_one_line(given, says, left):
    left()
    left("something else", folder="runs/b")
    Path("empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        expand_resume(given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sweep_is_told_by_its_own_command(left):
    left(folder="grid/seed=0")
    command = "python -m rlreason -m sweep=grpo_baselines 'data.path=my data'"
    Path("grid/sweep.json").write_text(json.dumps({"command": command}))
    with pytest.raises(ConfigError, match=r"rlreason -m sweep=grpo_baselines 'data.path=my data'\), or give"):
        expand_resume(["resume=grid"])


def test_a_secret_that_was_not_written_down_must_be_given_again(left):
    left(f"python -m rlreason 'a.token={HIDDEN}' seed=1")
    with pytest.raises(ConfigError, match=r"a\.token was a secret.*give it again as a\.token=VALUE"):
        expand_resume(["resume=runs/a"])
    assert expand_resume(["resume=runs/a", "a.token=x"]).words == ["seed=1", "a.token=x", "hydra.run.dir=runs/a"]


def test_a_run_of_a_sweep_and_one_from_elsewhere_say_so(left):
    left(sweep="grid", directory="/far/away")
    found = expand_resume(["resume=runs/a"])
    assert found.sweep == "grid"
    assert found.notes == [
        "runs/a was started in /far/away: what its command names by a relative path is looked up here"
    ]
    assert recorded_start(Path("runs/a"), "RUN").request.overrides == ["seed=1"]


def test_settings_of_a_run_can_be_looked_at(left):
    left("python -m rlreason seed=7")
    done = rlreason("--cfg", "job", "resume=runs/a", "sampling.max_tokens=9", cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["seed"] == compose("resume=runs/a").seed == 7


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Run:
    """A run from the command line, in a folder with the runs of the tests below."""
    cwd = tmp_path_factory.mktemp("reruns")
    done = rlreason(*SMALL, "hydra.run.dir=one", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return load_run(cwd / "one")


@pytest.mark.long
def test_a_rerun_comes_out_equal_and_says_so(first):
    cwd = first.folder.parent
    done = rlreason("rerun", "one", cwd=cwd)
    assert done.returncode == 0, done.stderr
    rows, responses = len(first.metrics), len(list(first.folder.glob("[re]*s/step_*.jsonl.gz")))
    assert "nothing differs from what one says of code, libraries and machine\n" in done.stdout
    ending = done.stdout[done.stdout.index("\none and one_rerun:") :].splitlines()
    assert ending[2:4] == [f"  metrics are equal ({rows} rows)", f"  responses are equal (files: {responses})"]
    assert ending[4].startswith("  weights are equal (")
    again = load_run(cwd / "one_rerun")
    assert again.status == "finished"
    told = [json.loads((run.folder / "provenance.json").read_text()) for run in (first, again)]
    commands = [one["command"].replace("one_rerun", "one") for one in told]
    assert commands[0] == commands[1]
    done = rlreason("rerun", "one", "seed=5", "--json", cwd=cwd, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # and nothing else
    assert figures["rerun"] == "one_rerun_2"
    assert figures["equal"]["metrics"] is False
    assert "environment.OMP_NUM_THREADS: 1 then, 2 now" in figures["environment"]
    assert figures["said"][0].startswith("metrics differ from row 1 on: ")
    assert "records    one_rerun_2" in done.stderr  # what the run itself says
    assert not (cwd / "one_rerun_2/log.txt").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one", "seed"], "seed is no setting of a run"),
        (["one", "resume=one"], "resume=one is no setting of a run"),
        (["one", "hydra.run.dir=one"], "hydra.run.dir=one: rerun starts in a new folder"),
        (["one", "sed=1"], "sed is no setting of this run: did you mean seed?"),
        (["one", "-m"], "unrecognized arguments: -m"),
        (["nowhere"], "RUN=nowhere is no folder"),
    ],
)
def test_what_cannot_be_run_again_is_one_line_and_leaves_no_folder(words, says, finished_run, tmp_path):
    shutil.copytree(finished_run.folder, tmp_path / "one")
    done = rlreason("rerun", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.long
def test_a_run_that_diverges_again_keeps_its_exit_code(tmp_path):
    diverging = ["learning_rate=1e20", "weight_decay=1e20", "entropy_coef=0.1"]
    done = rlreason(*TINY, *diverging, "hydra.run.dir=bad", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    done = rlreason("rerun", "bad", cwd=tmp_path)
    assert done.returncode == 5
    assert "metrics are equal" in done.stdout


@pytest.mark.long
def test_a_finished_run_goes_on_with_more_steps_in_its_own_folder(tmp_path):
    done = rlreason(*SMALL, "hydra.run.dir=here/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = rlreason("resume=here/run", "n_steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "here/run")
    assert max(row["rollout_step"] for row in run.metrics) == 3
    told = json.loads((run.folder / "provenance.json").read_text())
    assert "n_steps=3" in told["command"]
    assert "resume" not in told["command"]
    assert ["n_steps=2" in part["command"] for part in told["earlier_parts"]] == [True]
    assert os.listdir(tmp_path / "here") == ["run"]
    again = train(f"resume={run.folder}", "n_steps=4", quiet=True)  # from Python, and from another folder
    assert again.folder == run.folder
    assert max(row["rollout_step"] for row in again.metrics) == 4


def test_an_evaluation_is_measured_again_too(tmp_path):
    run = evaluate(*JOB, f"hydra.run.dir={tmp_path / 'eval'}", quiet=True)
    done = rlreason("rerun", str(run.folder), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"] == {"metrics": True, "responses": True, "weights": None}


def test_the_first_difference_is_named(left, tmp_path):
    rows = [{"a": 1.0, "time/total": 1.0}, {"a": 2.0, "grading/ms_p99": 3.0}]
    cases = {
        "same": (rows, "metrics are equal (2 rows)"),
        "later": ([rows[0] | {"time/total": 2.0}, rows[1]], "metrics are equal (2 rows)"),
        "other": ([rows[0], {"a": 3.0}], "metrics differ from row 2 on: a was 2.0 then, 3.0 now"),
        "more": ([*rows, {"a": 1.0}], "metrics: 2 rows then, 3 now; the first 2 are equal"),
        "none": ([], "metrics: one of the two has no rows"),
        "key": ([rows[0] | {"b": 0.0}, rows[1]], "metrics differ from row 1 on: b was None then, 0.0 now"),
    }
    for name, (of_run, _) in (cases | {"first": (rows, "")}).items():
        left(folder=name)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_run))
    for name, (_, says) in cases.items():
        assert compared(RunFolder(tmp_path / "first"), RunFolder(tmp_path / name))[0].said == says
    assert first_difference([{"a": None}], [{"a": None}]) is None


def test_responses_and_weights_are_compared_byte_by_byte(left, tmp_path):
    for name in ("a", "b", "c"):
        left(folder=name)
        for inner in ("rollouts", "evals", "model"):
            (tmp_path / name / inner).mkdir()
        (tmp_path / name / "rollouts/step_00001.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
        (tmp_path / name / "model/model.safetensors").write_bytes(b"weights")
    runs = [RunFolder(tmp_path / name) for name in "abc"]
    assert [one.equal for one in compared(runs[0], runs[1])] == [None, True, True]
    (tmp_path / "b/rollouts/step_00001.jsonl").write_text('{"x": 1}\n{"x": 3}\n')
    (tmp_path / "b/model/model.safetensors").write_bytes(b"others")
    _, responses, weights = compared(runs[0], runs[1])
    assert responses.said == "responses differ from line 2 of rollouts/step_00001.jsonl on"
    assert weights.equal is False
    (tmp_path / "c/evals/step_00000.jsonl").write_text("{}\n")
    assert compared(runs[0], runs[2])[1].said == "responses differ: only one has evals/step_00000.jsonl"


def test_hydra_composes_what_the_word_stands_for(left):
    left("python -m rlreason loss=grpo_clip 'sampling.temperature=0.5'")
    with composing(read([])):
        cfg = compose("resume=runs/a", "seed=3")
    assert (cfg.loss.loss_type, cfg.sampling.temperature, cfg.seed) == ("grpo_clip", 0.5, 3)
