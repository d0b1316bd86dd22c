"""The command line before a run starts: handout names, flags, a user's own options, and mistakes in one line."""

import re
import shlex
import subprocess
import sys

import pytest
import yaml

from rlreason.cli.check import check_command_line
from rlreason.cli.command import do
from rlreason.cli.flags import composing, config_of, keys_below, read
from rlreason.cli.names import HABITS, fold, translated
from rlreason.config.leaves import resource_dir
from rlreason.errors import ConfigError
from rlreason.runtime.machine import SWEEP_VARIABLE
from tests.some import some
from tests.starts import ROOT
from tests.sweep_folders import checked

WRONG = yaml.safe_load((ROOT / "tests/wrong_command_lines.yaml").read_text("utf-8"))
LINES = [(shlex.split(line), says) for part in WRONG.values() for line, says in part.items()]


def answered_by(words: list[str]) -> str:
    """Return what is said of words that are wrong, up to where a run would start."""
    with pytest.raises(ConfigError) as caught:  # noqa: PT012
        if (asked := read(words)).multirun and asked.starts:
            checked(*words)
        do(words)
    assert caught.value.exit_code == 2
    assert str(caught.value).isprintable()  # so it is one line, and no word can write to the terminal
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"), some(LINES, 3), ids=lambda value: str(value)[:60].encode("unicode_escape").decode()
)
def test_a_wrong_command_line_is_one_line_with_the_cure(words, says, monkeypatch, tmp_path):
    """Bug: a mistake ends in a traceback, in a line that does not say what to type, or in a folder."""
    monkeypatch.chdir(tmp_path)
    text = answered_by(words)
    assert says in text
    assert re.search(r": |did you mean |write |choose |as in |add -m|leave |give ", text), text  # the cure
    assert not list(tmp_path.iterdir())


#: A word as it is typed, and what it means.
MEANINGS = {
    "~use_std_normalization": "~std_norm",
    "sampling_temperature=tag(log,interval(0.5,1))": "sampling.temperature=tag(log,interval(0.5,1))",
    "use_std_normalization=choice(yes,0)": "std_norm=choice(group_std,none)",
    "importance_reweighting_method=none,noclip,gspo": "loss=reinforce_with_baseline,grpo_no_clip,gspo_2026",
    "loss_type=GRPO-Clip,'No-Baseline',gspo": "loss=grpo_clip,no_baseline,gspo",
    "prompt.name=GRPO-Clip": "prompt.name=GRPO-Clip",  # free text keeps its case
    "std_norm=Off,group_std": "std_norm=none,group_std",
    "logger=[WandB,TensorBoard]": "logger=[wandb,tensorboard]",
}
HANDOUT = """learning_rate=1e-5 group_size=8 sampling_temperature=1.0 sampling_min_tokens=4 sampling_max_tokens=48
    n_grpo_steps=200 advantage_eps=1e-6 rollout_batch_size=256 epochs_per_rollout_batch=1 train_batch_size=256
    gradient_accumulation_steps=128 gpu_memory_utilization=0.85 loss_type=reinforce_with_baseline
    use_std_normalization=True"""


def test_handout_names_and_option_names_are_ours_in_every_form_of_the_grammar(tmp_path, monkeypatch):
    """Bug: a name of a handout is unknown in a list, a sweep or a function, or its run cannot start."""
    monkeypatch.chdir(tmp_path)
    with composing(read([])):
        assert {word: translated([word], note=str)[0] for word in MEANINGS} == MEANINGS
    check_command_line(HANDOUT.split())
    check_command_line(["algorithm=ei", *HANDOUT.split()[:5], "n_ei_steps=5", "D_b=512"])
    words = ["experiment=null", "sweep=None", "std_norm=off", "logger=null", "hydra.run.dir=läufe/größe"]
    ours = ["std_norm=none", "logger=none", "hydra.run.dir='läufe/größe'"]  # an option that is none is left out
    assert check_command_line(["--cfg=job", *words]).overrides == ours


def test_the_home_folder_may_stand_in_any_value(tmp_path, monkeypatch):
    """Bug: ~/ behind a dotted key, which no shell expands, is a folder called ~."""
    monkeypatch.setenv("HOME", "/home/me")
    words = ["model.path=~/a,~/b", "data.files=[~/c,d~/e]", "~std_norm"]
    assert read(words).overrides == ["model.path=/home/me/a,/home/me/b", "data.files=[/home/me/c,d~/e]", "~std_norm"]


def test_every_habit_names_settings_that_there_are_and_no_two_options_differ_in_case_and_hyphens_alone():
    known = set()
    with composing(read([])):
        for choice in ("algorithm=ei", "algorithm=sft", "algorithm=best_of_n", "model=local", "data=jsonl"):
            known |= set(keys_below(config_of([choice], "config")))
    assert {key.partition("=")[0] for keys in HABITS.values() for key in keys} <= known
    for group in (p for p in resource_dir("conf").iterdir() if p.is_dir()):
        names = [p.stem for p in group.glob("*.yaml")]
        assert len({fold(name) for name in names}) == len(names), group


def test_a_folder_of_ones_own_options_is_composed_and_checked(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss/mine.yaml").write_text("loss_type: grpo_clip\ncliprange: 0.1\n")
    flags = [f"-cd={tmp_path}"]
    asked = read(["loss=mine", *flags, "seed=1", "-m"])
    assert (asked.multirun, asked.starts, asked.overrides) == (True, True, ["loss=mine", "seed=1"])
    check_command_line(["loss=Mine", "--config-dir", str(tmp_path), "seed=1"])
    checked(*flags, "loss=glob(m*)")
    assert "mine" in answered_by([*flags, "loss=typo"]).replace("loss=typo", "")
    assert answered_by([*flags, "loss=mine", "learning_rate=-1"]).startswith("learning_rate=-1.0 ")
    assert "loss=mine" in answered_by(["loss=mine"])  # nothing of it stays
    for text, says in (("a: [b\n", "loss/mine.yaml, line 2"), ("cliprang: 1\n", "cliprang")):  # a broken file is named
        (tmp_path / "loss/mine.yaml").write_text(text)
        assert says in answered_by([*flags, "loss=mine"])
    (tmp_path / "sweep").mkdir()  # whose files may use a handout's names and spellings
    file = tmp_path / "sweep/mine.yaml"
    head = "# @package _global_\nhydra: {sweeper: {params: {"
    file.write_text(f"{head}n_grpo_steps: '1,2', std_norm: 'false', seed: 0}}}}}}\n")
    (asked,) = checked("-cd", str(tmp_path), "sweep=mine")
    assert [run.setting for run in asked.design.runs] == [{"n_steps": "1"}, {"n_steps": "2"}]
    assert all("std_norm=none" in run.overrides for run in asked.design.runs)
    for text, says in ((f"{head}loss: 'gspo,tpo'}}}}}}\n", "loss=tpo"), ("# @package _global_\nG: 3\n", "G")):
        file.write_text(text)
        assert says in answered_by(["-cd", str(tmp_path), "-m", "sweep=mine"])


def test_a_sweep_may_set_what_some_of_its_runs_read_and_no_other(capsys, monkeypatch):
    checked("loss_type=grpo_clip,grpo_no_clip", "cliprange=0.1", note=print)
    assert "note: in some runs of this sweep, loss.cliprange=0.1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"loss.cliprange=0.1 .*loss=grpo_clip or loss=gspo"):
        checked("loss=grpo_no_clip,reinforce_with_baseline", "loss.cliprange=0.1")
    monkeypatch.setenv(SWEEP_VARIABLE, "grid")  # as in the process of one run of a sweep
    check_command_line(["loss=grpo_no_clip", "loss.cliprange=0.1"])
    assert "note: in some runs of this sweep, loss.cliprange=0.1" in capsys.readouterr().out


def test_a_python_without_the_packages_is_told_which_environment_has_them():
    argv = [sys.executable, "-S", "-c", "import rlreason.__main__ as m; m.main()", "seed=1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "hydra, torch, transformers" in done.stderr
