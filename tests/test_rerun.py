"""`resume=RUN` and `rlreason rerun RUN`: the config of a run again, in its folder or next to it; what comes of it."""

import json
import os
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlreason import compose, load_run, train
from rlreason.cli.check import check_command_line
from rlreason.cli.flags import OneRun
from rlreason.errors import ConfigError
from rlreason.records.reader import RunFolder, compared
from rlreason.runtime.text import HIDDEN
from tests.some import some
from tests.starts import rlreason, subcommand
from tests.test_api import TINY


@pytest.fixture
def left(tmp_path, monkeypatch):
    """A function that leaves a run's folder, `runs/a`, of these words in the current folder."""
    monkeypatch.chdir(tmp_path)

    def leave(*words: str, folder: str = "runs/a", **facts: object) -> Path:
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / "config.yaml").write_text(OmegaConf.to_yaml(compose(*words), resolve=True))
        (place / "provenance.json").write_text(json.dumps({"schema_version": 1, "directory": str(tmp_path)} | facts))
        return Path(folder)

    return leave


def one_run(*words: str, note=str) -> OneRun:
    """The run that a command line would start, not checked against the machine."""
    request = check_command_line(["--cfg=job", *words], note=note)
    assert request.one is not None
    return request.one


@pytest.mark.parametrize(
    ("before", "words", "settings"),
    some([
        (["loss=gspo", "seed=1"], ["n_grpo_steps=40"], {"loss.loss_type": "gspo", "seed": 1, "n_steps": 40}),
        (["logger=wandb"], ["logger=tensorboard"], {"logger.wandb": False, "logger.tensorboard": True}),
        (["eval.data=countdown"], ["eval.data=null"], {"data.name": "stories", "eval.data": None}),
        (["algorithm=sft", "epochs=2", "n_steps=null"], ["epochs=3"], {"epochs": 3, "algorithm": "sft"}),
        (["algorithm=discover"], ["budget.calls=9", "model=mine"], {"budget.calls": 9, "client.model": "mine"}),
    ], 2),
)  # fmt: skip
def test_overrides_are_merged_into_the_settings_of_the_run(before, words, settings, left):
    folder = left(*before)
    one = one_run(f"resume={folder}", *words)
    assert {key: OmegaConf.select(one.config, key) for key in settings} == settings


def test_what_cannot_resume_or_run_again_is_one_line_and_leaves_no_folder(left, capsys):
    """Bug: a sweep is resumed as a run, two folders are named, or a rerun writes into the run that it repeats."""
    left()
    left(folder="runs/b")
    for given, says in (
        (["resume=runs"], "resume=runs is a sweep with 2 runs"),
        (["resume=runs/a", "hydra.run.dir=x"], "leave hydra.run.dir=x out"),
        (["resume=runs/a", "group_size=7"], "group_size=7"),
        (["resume=runs/a", "objective=dapo"], "more than one setting"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            check_command_line(given, note=str)
    assert subcommand("rerun", "runs/a", "hydra.run.dir=runs/a") == 2
    assert "hydra.run.dir=runs/a: rerun starts in a new folder" in capsys.readouterr().err
    assert sorted(os.listdir("runs")) == ["a", "b"]


def test_an_option_of_ones_own_is_found_a_secret_given_again_and_another_place_said(left, tmp_path):
    folder = left("loss=grpo_clip", "epochs_per_rollout=2")
    assert OmegaConf.to_yaml(one_run(f"+resume='{folder}'").config) == (folder / "config.yaml").read_text()
    assert one_run("resume=last").folder == folder
    (tmp_path / "mine/loss").mkdir(parents=True)
    (tmp_path / "mine/loss/mine.yaml").write_text("loss_type: grpo_clip\ncliprange: 0.1\n")
    assert one_run(f"resume={folder}", "-cd", str(tmp_path / "mine"), "loss=mine").config.loss.cliprange == 0.1
    left("logger=wandb", f"logger.project='{HIDDEN}'", folder="runs/b", sweep="grid", directory="/far/away")
    with pytest.raises(ConfigError, match=r"logger\.project=VALUE"):
        one_run("resume=runs/b")
    notes: list[str] = []
    one = one_run("resume=runs/b", "logger.project=x", note=notes.append)
    assert (one.config.logger.project, one.sweep) == ("x", "grid")
    assert "/far/away" in notes[0]


def test_a_run_again_has_equal_numbers_and_that_is_said(finished_run, tmp_path):
    """Bug: a rerun has other settings or random numbers than its run, or differences are not told."""
    done = rlreason("rerun", str(finished_run.folder), "hydra.run.dir=again", "--json", cwd=tmp_path)
    figures = json.loads(done.stdout)
    assert (done.returncode, figures["rerun"], set(figures["equal"].values())) == (0, "again", {True}), figures


@pytest.mark.long
def test_a_rerun_comes_out_equal_and_says_so_and_a_finished_run_goes_on_in_its_own_folder(tmp_path):
    for words in ((*TINY, "save_model=true", "hydra.run.dir=one"), ("rerun", "one")):
        done = rlreason(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "nothing differs from what one says of code, libraries and machine\n" in done.stdout
    assert all(f"  {part} are equal" in done.stdout for part in ("metrics", "responses", "weights"))
    again = load_run(tmp_path / "one_rerun")
    assert (again.status, again.config) == ("finished", load_run(tmp_path / "one").config)
    done = rlreason("rerun", "one", "seed=5", "--json", cwd=tmp_path, OMP_NUM_THREADS="2")
    figures = json.loads(done.stdout)  # and nothing else
    assert (done.returncode, figures["rerun"], figures["equal"]["metrics"]) == (0, "one_rerun_2", False), done.stderr
    assert "environment.OMP_NUM_THREADS: 1 then, 2 now" in figures["environment"]
    assert not (tmp_path / "one_rerun_2/log.txt").exists()
    assert rlreason("resume=one", "n_steps=3", cwd=tmp_path).returncode == 0
    facts = json.loads((tmp_path / "one/provenance.json").read_text())
    steps = [re.findall(r"n_steps=\d", part["command"]) for part in (*facts["earlier_parts"], facts)]
    assert steps == [["n_steps=2"], ["n_steps=3"]]
    again = train(f"resume={tmp_path / 'one'}", "n_steps=4", quiet=True)  # from Python, and from another folder
    assert max(row["rollout_step"] for row in again.metrics) == 4


def test_the_first_difference_is_named_and_responses_and_weights_are_compared_byte_by_byte(left, tmp_path):
    for name in ("first", "later", "other"):
        place = tmp_path / left(folder=name)
        rows = [{"a": 1.0, "time/total": float(name == "later")}, {"a": 2.0 + (name == "other")}]
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for inner in ("rollouts/step_00001.jsonl", "model/model.safetensors"):
            (place / inner).parent.mkdir()
            (place / inner).write_text(f"{name == 'other'}\n")
    for name, says in (("later", "are equal (2)"), ("other", "differ: row 2's a was 2.0 then, 3.0 now")):
        equal, texts = compared(RunFolder(tmp_path / "first"), RunFolder(tmp_path / name))
        assert (texts[0], list(equal.values())) == (f"metrics {says}", [name == "later"] * 3)
