"""Wrong command lines, as people and scripts mistype them: one line with the cure, exit code 2, at once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason.cli import flags as nearest
from rlreason.cli.check import check_command_line
from rlreason.cli.command import by_hydra
from rlreason.cli.flags import composing, read
from rlreason.cli.mistakes import mistakes_in
from rlreason.cli.names import HABITS
from rlreason.errors import ConfigError

LINES = [
    # options
    (["std_norm=true"], "std_norm=true"),
    (["objective=sapo"], "loss=sapo?"),
    (["model=Qwen/Qwen3-0.6B"], "qwen3_0_6b?"),
    (["logger=[wandb,tensorbord]"], "tensorboard?"),
    (["logger=wandb,tensorboard"], "add -m"),
    (["data=[stories,gsm8k]"], "a run has one option of data"),
    (["experiment=[]"], "experiment=[]"),
    (["hydra/launcher=x"], "rlreason[launchers]"),
    (["-m", "loss=glob(x*)"], "loss=x*"),
    (["-m", "sweep=grpo_learning_rate,grpo_baselines"], "one sweep"),
    (["-m", "sweep=grpo_learning_rat"], "grpo_learning_rate?"),
    (["-m", "jobs=0", "seed=0,1"], "jobs=0"),
    # flags
    (["loss=grpo_clip", "--config-dir", "/nope", "seed=1"], "--config-dir=/nope"),
    (["--learning_rate=3"], "without dashes"),
    (["--package", "x"], "--package"),
    (["--run", "--multirun"], "not allowed with argument --run"),
    (["--shell-completion"], "--shell-completion has no answer"),
    # keys
    (["temperature=1"], "sampling.temperature"),
    (["wandb=true"], "logger=wandb?"),
    (["n_grpo_step=3"], "n_grpo_steps"),
    (["seeds=0,1,2"], "mean seed?"),
    (["algorithm=ei", "lr=1"], "learning_rate?"),
    (["algorithm=ei", "std_norm=none"], "std_norm"),
    (["algorithm=sft", "group_size=4"], "algorithm=ei"),
    (["data.n_trian=4"], "data.n_train?"),
    (["eval.data=jsonl", "eval.data.n_train=5"], "eval.data=countdown"),
    (["hydra.run.dri=x"], "hydra.run.dir?"),
    (["schema=grpo"], "schema is no setting"),
    (["model.lora=4"], "model.lora=4"),
    (["model.name=qwen3_0_6b"], "model=qwen3_0_6b"),
    # values
    (["n_steps=1.5"], "n_steps=1.5"),
    (["learning_rate=fast"], "learning_rate=fast"),
    (["seed="], "seed="),
    (["seed=1,2"], "names several values: add -m"),
    (["seed=${nope}"], "seed=${nope}"),
    (["hydra.run.dir="], "hydra.run.dir="),
    # what is no override
    (["logger=[wandb"], "'logger=[wandb]'"),
    (["-m", "seed=0,", "1"], "-m seed=0,1"),
    (["-m", "seed=1,,2"], "needs quotes"),
    (["gspo"], "loss=gspo"),
    (["algorithm"], "key=value"),
    (["seed:1"], "seed=1"),
    (["=3"], "key=value"),
    (["~loss"], "~loss"),
    (["+seed=1"], "+seed"),
    (["seed=1", "inspect"], "as in rlreason inspect"),
    (["see\nd=1"], "see\\nd=1"),
    (["seed=\x1b[31mred"], "seed=\\x1b[31mred"),
    (["x" * 3000 + "=1"], " ... "),
]


def ask(words: list[str]) -> None:
    """What the command does with words, up to where a run would start."""
    with mistakes_in(words):
        asked = check_command_line(words, note=lambda text: None)
        assert not asked.starts, "these words would start a run"
        by_hydra(asked)


def answered_by(words: list[str]) -> str:
    """What is said of words that are wrong."""
    with pytest.raises(ConfigError) as caught:
        ask(words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(("words", "says"), LINES, ids=lambda value: str(value)[:60].encode("unicode_escape").decode())
def test_a_wrong_command_line_is_one_line_with_the_cure(words, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = answered_by(words)
    assert says in text
    assert re.search(r": |did you mean |write |choose |as in |add -m|leave |give ", text), text  # the cure
    assert text.isprintable()  # so it is one line, and no word can write to the terminal
    assert len(text) < 800
    assert not list(tmp_path.iterdir())


def test_every_habit_names_settings_that_there_are():
    known = set()
    with composing(read([])):
        for choice in ("algorithm=ei", "algorithm=sft", "algorithm=best_of_n", "model=local", "data=jsonl"):
            known |= set(nearest.keys_below(nearest.config_of([choice], "config")))
    assert {key.partition("=")[0] for keys in HABITS.values() for key in keys} <= known


def test_an_experiment_or_a_sweep_that_is_none_is_left_out():
    words = ["experiment=null", "sweep=None", "std_norm=off", "logger=null"]
    assert check_command_line(words).overrides == ["std_norm=none", "logger=none"]


def test_a_sweeps_file_may_use_a_handouts_names_and_spellings(tmp_path):
    (tmp_path / "sweep").mkdir()
    file = tmp_path / "sweep/mine.yaml"
    head = "# @package _global_\nhydra: {sweeper: {params: {"
    file.write_text(f"{head}n_grpo_steps: '1,2', std_norm: 'false', seed: 0}}}}}}\n")
    asked = check_command_line(["-cd", str(tmp_path), "-m", "sweep=mine"], note=lambda text: None)
    assert [run.setting for run in asked.design.runs] == [{"n_steps": "1"}, {"n_steps": "2"}]
    assert all("std_norm=none" in run.overrides for run in asked.design.runs)
    file.write_text(f"{head}loss: 'gspo,tpo'}}}}}}\n")
    assert "loss=tpo" in answered_by(["-cd", str(tmp_path), "-m", "sweep=mine"])
    file.write_text("# @package _global_\nn_grpo_steps: 3\n")
    assert "n_grpo_steps" in answered_by(["-cd", str(tmp_path), "-m", "sweep=mine"])


@pytest.mark.parametrize(
    ("file", "text", "words", "says"),
    [
        ("loss/mine.yaml", "a: [b\n", ["loss=mine"], "loss/mine.yaml, line 2"),
        ("loss/mine.yaml", "cliprang: 1\n", ["loss=mine"], "cliprang"),
        ("rollout/mine.yaml", "defaults: [hf]\nplacement: shared\n", ["rollout=mine"], "placement=shared"),
    ],
)
def test_a_broken_file_of_ones_own_options_is_named(file, text, words, says, tmp_path):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(text)
    said = answered_by(["-cd", str(tmp_path), *words])
    assert says in said
    assert said.isprintable()


RUN = Path(__file__).resolve().parents[1]


def process(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A real command, which tells what it imports."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RUN)} | env
    argv = [sys.executable, "-X", "importtime", "-m", "rlreason", *words]
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(
    ("words", "code", "shows"),
    [
        (["--help"], 0, "loss: cispo, grpo_clip, "),
        (["std_norm=true"], 2, ""),
    ],
)
def test_a_question_or_a_mistake_is_answered_without_the_large_libraries(words, code, shows, tmp_path):
    done = process(*words, cwd=tmp_path, HYDRA_FULL_ERROR="1")
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(said)) == (code, int(code == 2))
    assert all(line.startswith("rlreason: ") for line in said)
    assert shows in done.stdout
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hydra" in modules
    assert not modules & {"torch", "transformers", "matplotlib", "wandb", "sympy"}
    assert not list(tmp_path.iterdir())


def test_modules_of_the_current_folder_are_found_by_the_installed_script_as_by_python_m(tmp_path):
    """Unless Python was told not to look there."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/rlreason"
    script.write_text(
        "import importlib.util\nfrom rlreason.runtime.plugins import find_modules_here\n"
        "find_modules_here()\nprint(importlib.util.find_spec('my_module') is not None)\n"
    )
    (tmp_path / "my_module.py").touch()
    env = os.environ | {"PYTHONPATH": str(RUN)}
    for flags, found in (([], "True"), (["-P"], "False")):
        argv = [sys.executable, *flags, str(script)]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
        assert done.stdout.strip() == found, done.stderr
