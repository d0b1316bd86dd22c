"""The command line before a run starts: handout names, flags, a user's own options."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason.cli.check import check_command_line
from rlreason.cli.flags import composing, read
from rlreason.cli.names import translated
from rlreason.config.leaves import refuse_own_input, resource_dir
from rlreason.errors import ConfigError
from rlreason.records.files import CONTENTS
from rlreason.runtime.machine import SWEEP_VARIABLE
from tests.run_settings import settings

PACKAGE = Path(__file__).resolve().parents[1] / "rlreason"


def ours(*words: str) -> list[str]:
    with composing(read([])):
        return translated(words, note=lambda text: None)


def mistake(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_command_line(words, note=lambda text: None)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def python_m(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    argv = [sys.executable, "-m", *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(
    ("word", "means"),
    [
        ("n_ei_steps=range(1,4)", "n_steps=range(1,4)"),
        ("~use_std_normalization", "~std_norm"),
        ("sampling_temperature=tag(log,interval(0.5,1))", "sampling.temperature=tag(log,interval(0.5,1))"),
        ("use_std_normalization='True'", "std_norm=group_std"),
        ("use_std_normalization=choice(yes,0)", "std_norm=choice(group_std,none)"),
        ("importance_reweighting_method=none,noclip", "loss=reinforce_with_baseline,grpo_no_clip"),
        ("loss_type=GRPO-Clip,'No-Baseline',gspo", "loss=grpo_clip,no_baseline,gspo"),
        ("length_norm=masked_normalize,Masked-Mean", "length_norm=constant,masked_mean"),
        ("loss=glob(grpo*)", "loss=glob(grpo*)"),
        ("prompt.name=GRPO-Clip", "prompt.name=GRPO-Clip"),  # free text keeps its case
        ("std_norm=Off,group_std", "std_norm=none,group_std"),
        ("logger=[WandB,TensorBoard]", "logger=[wandb,tensorboard]"),
        ("loss=false", "loss=false"),  # it has no option none
        ("seed", "seed"),
    ],
)
def test_handout_names_and_option_names_in_every_form_of_the_grammar(word, means):
    assert ours(word) == [means]


def test_the_names_of_the_handouts_start_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = [
        "learning_rate=1e-5", "group_size=8", "sampling_temperature=1.0", "sampling_min_tokens=4",
        "sampling_max_tokens=48", "train_batch_size=256", "gradient_accumulation_steps=128",
    ]  # fmt: skip
    grpo = [
        "n_grpo_steps=200", "advantage_eps=1e-6", "rollout_batch_size=256", "epochs_per_rollout_batch=1",
        "gpu_memory_utilization=0.85", "loss_type=reinforce_with_baseline", "use_std_normalization=True",
    ]  # fmt: skip
    check_command_line([*common, *grpo])
    check_command_line(
        [*common, "loss_type=grpo_clip", "cliprange=0.2", "length_norm=constant", "normalize_constant=48"]
    )
    check_command_line(["algorithm=ei", *common[:-2], "n_ei_steps=5", "D_b=512"])


def test_a_sweep_over_a_handouts_switch_runs_both_arms():
    asked = check_command_line(["-m", "use_std_normalization=True,False"], note=lambda text: None)
    assert [run.setting for run in asked.design.runs] == [{"std_norm": "group_std"}, {"std_norm": "none"}]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["use_std_normalization=maybe"], "use_std_normalization=maybe"),
        (["use_std_normalization=[True]"], "is none of"),
        (["G=4", "group_size=8"], "G and group_size"),
    ],
)
def test_a_value_that_a_handouts_name_does_not_have_is_refused(words, says):
    assert says in mistake(*words)


def test_what_a_name_is_here_is_said_once():
    said: list[str] = []
    check_command_line(["n_grpo_steps=3", "n_grpo_steps=4", "use_std_normalization=False"], said.append)
    assert [re.findall(r"[\w=]+", line)[1] for line in said] == ["n_grpo_steps=4", "use_std_normalization=False"]


def test_no_two_options_of_a_group_differ_in_case_and_hyphens_alone():
    from rlreason.cli.names import fold

    for group in (p for p in resource_dir("conf").iterdir() if p.is_dir()):
        names = [p.stem for p in group.glob("*.yaml")]
        assert len({fold(name) for name in names}) == len(names), group


@pytest.fixture
def mine(tmp_path) -> Path:
    """A user's own options."""
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss/mine.yaml").write_text("loss_type: grpo_clip\ncliprange: 0.1\n")
    return tmp_path


@pytest.mark.parametrize("flag", ["--config-dir {}", "-cd={}"])
def test_flags_are_read_wherever_they_stand(mine, flag, monkeypatch):
    monkeypatch.chdir(mine.parent)
    asked = read(["loss=mine", *flag.format(mine.name).split(), "seed=1", "-m"])
    assert (asked.flags, asked.overrides) == ({"multirun": True, "config_dir": str(mine)}, ["loss=mine", "seed=1"])
    assert (asked.multirun, asked.starts, asked.for_hydra()) == (True, True, ["--multirun", "loss=mine", "seed=1"])


def test_a_folder_of_ones_own_options_is_composed_and_checked(mine):
    flags = ["--config-dir", str(mine)]
    check_command_line(["loss=Mine", *flags, "seed=1"])
    check_command_line([*flags, "-m", "loss=glob(m*)"])
    assert "mine" in mistake(*flags, "loss=typo").replace("loss=typo", "")
    assert mistake(*flags, "loss=mine", "learning_rate=-1").startswith("learning_rate=-1.0 ")
    assert "loss=mine" in mistake("loss=mine")  # nothing of it stays


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--resolve"], "--resolve"),
        (["--cfg", "job", "-p", "nope"], "--package=nope"),
        (["--info", "defaults-tree", "loss=typo"], "loss=typo"),
        (["-m", "seed=0,1", "hydra/launcher=nope"], "hydra/launcher=nope"),
        (["hydra.mode=MULTIRUN", "learning_rate=1e-3,abc"], "learning_rate=abc"),
        (["-m", "learning_rate=interval(1e-5,1e-3)"], "interval"),
        (["loss=gspo", "loss.foo=1"], "loss.loss_type"),
        (["-m", "seed=range(100)", "learning_rate=1e-3,-1"], "learning_rate=-1.0"),
    ],
)
def test_no_flag_and_no_size_of_a_sweep_hides_a_mistake(words, says):
    assert says in mistake(*words)


def test_a_config_that_breaks_rules_is_shown_and_the_rules_are_said(tmp_path):
    done = python_m("rlreason", "--cfg", "job", "learning_rate=-1", "G=7", cwd=tmp_path)
    assert done.returncode == 2
    assert "learning_rate: -1" in done.stdout
    assert "note: " not in done.stdout  # what is shown stays a config
    assert "learning_rate=-1.0" in done.stderr
    assert "group_size=7" in done.stderr


def test_a_sweep_may_set_what_some_of_its_runs_read_and_no_other(capsys, monkeypatch):
    check_command_line(["-m", "loss_type=grpo_clip,grpo_no_clip", "cliprange=0.1"])
    assert "note: in some runs of this sweep, loss.cliprange=0.1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"loss.cliprange=0.1 .*loss=grpo_clip or loss=gspo"):
        check_command_line(["-m", "loss=grpo_no_clip,reinforce_with_baseline", "loss.cliprange=0.1"])
    monkeypatch.setenv(SWEEP_VARIABLE, "grid")  # as in the process of one run of a sweep
    check_command_line(["loss=grpo_no_clip", "loss.cliprange=0.1"])
    assert "note: in some runs of this sweep, loss.cliprange=0.1" in capsys.readouterr().out


def test_what_a_run_reads_is_not_among_what_it_sets_aside(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    run = settings("algorithm=evaluate", "model=local", "data=stories", f"model.path={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"model.path=.* hydra.run.dir="):
        refuse_own_input(run, tmp_path / "run", CONTENTS)
    refuse_own_input(run, tmp_path / "other", CONTENTS)


def test_a_python_without_the_packages_is_told_which_environment_has_them(tmp_path):
    bare = [sys.executable, "-S", "-c", "import rlreason.__main__ as m; m.main()", "seed=1"]
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(bare, cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "hydra, torch, transformers" in done.stderr
    assert len(done.stderr.splitlines()) == 1
