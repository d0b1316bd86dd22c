"""Wrong command lines, as people and scripts mistype them: one line with the cure, exit code 2, at once."""

import cProfile
import os
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason.cli import mistakes
from rlreason.cli import suggestions as nearest
from rlreason.cli.check import check_words
from rlreason.cli.flags import composing, read
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.modules import PACKAGE
from rlreason.errors import ConfigError
from rlreason.main import answer_question
from tests.some import some

ANOTHER = "choose one of "
QUOTES = "cannot be read: a value with = : , ( ) quotes or brackets needs quotes"
LINES = [
    # words that are no texts, where an option is named
    (["std_norm=true"], "std_norm=true is no option of std_norm: choose one of batch_std, group_mean, group_std, none"),
    (["loss=1"], "loss=1 is no option of loss: choose one of cispo"),
    (["loss=1.5"], "loss=1.5 is no option of loss"),
    (["loss=null"], "loss=null is no option of loss"),
    (["off_policy=true"], "off_policy=true is no option of off_policy: choose one of e1_quarter"),
    (["logger=true"], "logger=true is no option of logger: choose one of none, tensorboard, trackio, wandb"),
    (["logger=[none,wandb]"], "logger=[none,wandb] chooses none beside others: leave none out"),
    (["-m", "logger=none,[tensorboard,none]"], "logger=[tensorboard,none] chooses none beside others"),
    (["logger=[wandb,tensorbord]"], "logger=tensorbord is no option of logger: did you mean tensorboard?"),
    (["logger=wandb,tensorboard"], "add -m to run each of them, or use [a,b] for a list"),
    (["prompt=no"], "prompt=no is no option of prompt"),
    (["prompt=null"], "prompt=null is no option of prompt"),
    (["algorithm=1"], "algorithm=1 is no option of algorithm"),
    (["objective=sapo"], "did you mean loss=sapo?"),
    (["objective=opo"], "did you mean baseline=opo?"),
    (["objective=false"], "objective=false is no option of objective"),
    (["model=tiny", "model=null"], "model=null is no option of model"),
    (["experiment=1"], "experiment=1 is no option of experiment"),
    (["experiment=[]"], "experiment=[] chooses no option of experiment"),
    (["experiment=[cs336_2026,nope]"], "experiment=nope is no option of experiment"),
    (["data=[stories,gsm8k]"], "a run has one option of data"),
    (["loss={a:1}"], "loss.a is no setting of the chosen option of loss"),
    (["-m", "std_norm=false,group_std,1"], "std_norm=1 is no option of std_norm"),
    (["-m", "loss=1,2"], "loss=1 is no option of loss"),
    (["-m", "loss=range(3)"], "loss=0 is no option of loss"),
    (["-m", "loss=glob(x*)"], "loss=glob(x*) chooses no option of loss"),
    (["-m", "sweep=grpo_learning_rate,grpo_baselines"], "one sweep is one name: give one of controls"),
    (["-m", "sweep=[grpo_learning_rate]"], "one sweep is one name"),
    (["-m", "sweep=grpo_lr"], "did you mean grpo_learning_rate? choose one of "),
    (["model=qwen3"], "did you mean qwen3_"),
    # flags
    (["loss=grpo_clip", "--config-dir", "/nope", "seed=1"], "--config-dir=/nope is no folder: give one"),
    (["--config-dir"], "expected one argument"),
    (["--config-dir=", "seed=1"], "--config-dir= is no folder"),
    (["--config-dri=/tmp", "seed=1"], "did you mean --config-dir=/tmp?"),
    (["--config-name", "nonesuch"], "--config-name=nonesuch is no config (there is config, discover): leave it out"),
    (["--config-path=pkg://nowhere"], "--config-path=pkg://nowhere holds no config.yaml: give a folder that does"),
    (["--config-path=/"], "--config-path=/ holds no config.yaml"),
    (["--mutlirun", "seed=1"], "did you mean --multirun?"),
    (["--learning_rate=3"], "a setting has no dashes (learning_rate=3)"),
    (["--seed", "3"], "a setting has no dashes (seed=VALUE)"),
    (["--cfg", "nonsense"], "invalid choice: 'nonsense'"),
    (["--cfg"], "expected one argument"),
    (["--package", "x"], "--package=x belongs to --cfg: write --cfg job -p x"),
    (["--info", "x"], "invalid choice: 'x'"),
    (["--run", "--multirun"], "exclude each other: give one"),
    (["--help", "--cfg", "job"], "exclude each other: give one"),
    (["--help", "loss=typo"], "loss=typo is no option of loss"),
    (["--experimental-rerun", "nowhere"], "--experimental-rerun=nowhere is no file: give a config.pickle"),
    (["--experimental-rerun", __file__], "holds no pickled config"),
    (["--shell-completion"], "write -sc install=SHELL with bash, fish or zsh"),
    (["-sc", "install=nosh"], "No completion plugin for 'nosh' found, available: write -sc install=SHELL"),
    # the nearest right word, of the chosen options
    (["sampling.max_token=4"], "did you mean sampling.max_tokens?"),
    (["lr=1e-4"], "lr is no setting of this run: did you mean learning_rate?"),
    (["temperature=1"], "did you mean sampling.temperature or eval.sampling.temperature?"),
    (["path=/x"], "did you mean model.path or data.path?"),
    (["wandb=true"], "did you mean logger=wandb?"),
    (["dapo=1"], "did you mean objective=dapo?"),
    (["n_grpo_step=3"], "did you mean n_grpo_steps (n_steps here)?"),
    (["use_std_normalisation=true"], "did you mean use_std_normalization (std_norm here)?"),
    (["algorithm=ei", "lr=1", "std_norm=none"], "std_norm is no option of the chosen algorithm"),
    (["gsm9k"], "gsm9k is neither an option nor an override: did you mean data=gsm8k?"),
    (["gspo"], "did you mean loss=gspo or objective=gspo?"),
    (["multirun"], "did you mean --multirun?"),
    (["algorithm"], "write key=value, as in algorithm=best_of_n (best_of_n, discover, ei, evaluate, grpo, sft)"),
    (["loss/gspo"], "write loss=gspo"),
    (["seed:1"], "seed:1 cannot be read: write seed=1"),
    (["algorithm=gropo"], "did you mean grpo? choose one of"),
    (["data=gsm9k"], "did you mean gsm8k?"),
    (["model=Qwen/Qwen3-0.6B"], "did you mean qwen3_0_6b?"),
    (["model.lora.rnk=4"], "did you mean model.lora.rank?"),
    (["data.n_trian=4"], "data.n_trian is no setting of the chosen option of data: did you mean data.n_train?"),
    (["eval.sampling.top_p=0.5"], "eval.sampling.top_p is no setting of eval.sampling: leave it out (it has eval.samp"),
    (["top_p=0.5"], "top_p is no setting of this run: python -m rlreason --cfg job lists every key"),
    (["eval.sampling.max_token=5"], "is no setting of eval.sampling: did you mean eval.sampling.max_tokens?"),
    (["eval.data=jsonl", "eval.data.n_train=5"], "it is one of eval.data=countdown and eval.data=reasoning_gym and"),
    (["hydra.run.dri=x"], "hydra.run.dri is no setting of Hydra: did you mean hydra.run.dir?"),
    (["hydra.nope=1"], "hydra.nope is no setting of Hydra: python -m rlreason --cfg hydra lists them"),
    (["hydra/launcher=x"], "or install the plug-in that brings it"),
    (["hydra/job_logging=nope"], "hydra/job_logging=nope is no option of hydra/job_logging"),
    (["algorithm=sft", "group_size=4"], "it is one of algorithm=ei's and algorithm=grpo's: leave it out"),
    (["algorithm=ei", "epochs_per_rollout=2"], "it is one of algorithm=grpo's: algorithm=ei has sft_epochs"),
    # empty, odd and long words
    (["loss="], "loss= is no option of loss"),
    (["seed="], "seed= must be of type Integer: give a whole number"),
    (["=3"], "=3 names no setting in front of the equals sign: write key=value"),
    (["="], "= names no setting"),
    ([""], "an empty word ('') is neither an option nor an override"),
    (["\n"], r"an empty word ('\n') is neither"),
    (["seed=1,2"], "names several values: add -m"),
    (["-m", "seed="], "seed= must be of type Integer"),
    (["-m", "seed=range(3,1)"], "seed=range(3,1) holds no value: give at least one"),
    (["-m", "seed=range(1,3,0)"], "seed=range(1,3,0) cannot be composed"),
    (["-m", "seed=1,,2"], QUOTES),
    (["-m", "seed=choice()"], QUOTES),
    (["hydra.run.dir="], "hydra.run.dir= names no folder"),
    (["-m", "hydra.sweep.dir="], "hydra.sweep.dir= names no folder"),
    (["hydra.run.dir=${nope}"], "hydra.run.dir=${nope} cannot be resolved"),
    (["seed=${nope}"], "seed=${nope} cannot be resolved (Interpolation key 'nope' not found): give a value"),
    (["hydra.searchpath=[file:///nope]"], "hydra.searchpath=file:///nope is no folder"),
    (["hydra.mode=NOPE"], "hydra.mode=NOPE does not fit there"),
    (["-m", "hydra.sweeper=1"], "hydra/sweeper is chosen with a slash: choose hydra/sweeper=basic"),
    (["-m", "hydra.sweeper.params.seed=0,1"], "Hydra's own settings have one value in all runs"),
    (["-m", "hydra.sweeper.max_batch_size=0", "seed=0,1"], "hydra.sweeper.max_batch_size=0 must be above 0"),
    (["seed =3"], "write seed=3, without the space"),
    (["~loss"], "~loss takes away what a run needs: choose an option instead"),
    (["~std_norm"], "as in std_norm=none"),
    (["~seed"], "~seed: no setting of a run can be taken away"),
    (["+new=1"], "new is no setting of this run"),
    (["++seed=abc"], "seed=abc must be of type Integer"),
    (["+seed=1"], "+seed adds what is there already: take the + away"),
    (["+loss=gspo"], "loss is chosen already: write loss=OPTION"),
    (["loss@x=gspo"], "puts an option in another place than its own: write loss=OPTION"),
    (["schema=grpo"], "schema is no group to choose from"),
    (["seed.x=1"], "seed is one value, with nothing below it"),
    (["model.lora=4"], "model.lora=4 does not fit there (it is a group of settings"),
    (["seed=null"], "seed=null does not fit there (it cannot be without a value)"),
    (["n_steps=1.5"], "n_steps=1.5 must be of type Integer: give a whole number"),
    (["seed=ü"], "seed=ü must be of type Integer"),
    (["löss=1"], "no setting is called löss"),
    (["see\nd=1"], r"see\nd=1 cannot be read: no setting is called see\nd"),
    (["seed=1\nloss=2"], r"seed=1\nloss=2 must be of type Integer"),
    (["seed=\x1b[31mred"], r"seed=\x1b[31mred cannot be read"),
    (["seed='1"], QUOTES),
    (["prompt.stop=[a,b"], QUOTES),
    (["seed=$(1)"], QUOTES),
    (["loss..x=1"], QUOTES),
    (["seed=1", "inspect"], "inspect is neither an option nor an override: a verb comes first, as in rlreason inspect"),
    (["x" * 5000], "... (5000 characters) is neither an option nor an override"),
    (["x" * 3000 + "=1"], "... (3002 characters) cannot be composed"),
    (["seed=" + "9" * 5000], "... (5005 characters) cannot be composed"),
    (["loss=" + "y" * 3000], "... (3005 characters) is no option of loss"),
]  # fmt: skip


def ask(words: list[str]) -> None:
    """What the command does with words, up to where a run would start."""
    with mistakes_in(words):
        asked = check_words(words, note=lambda text: None)
        assert not asked.starts, "these words would start a run"
        with composing(asked), in_one_line(asked.overrides, composing=True):
            answer_question(asked)


def answered_by(words: list[str]) -> str:
    """What is said of words that are wrong."""
    with pytest.raises(ConfigError) as caught:
        ask(words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"), some(LINES), ids=lambda value: str(value)[:60].encode("unicode_escape").decode()
)
def test_a_wrong_command_line_is_one_line_with_the_cure(words, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = answered_by(words)
    assert says in text
    assert text.isprintable()  # so it is one line, and no word can write to the terminal
    assert len(text) < 800
    assert not list(tmp_path.iterdir())


def test_a_key_of_another_option_is_answered_with_the_settings_of_the_chosen_one():
    text = answered_by(["data=jsonl", "data.n_train=256"])
    cure, _, has = text.partition(" (the chosen one has ")
    others = "data=countdown and data=reasoning_gym and data=stories and data=stories_hard"
    said = "data.n_train is no setting of the chosen option of data"
    assert cure == f"{said}: it is one of {others}: choose one of those, or leave it out"
    assert "data.hub_config" in has
    assert "data.n_train," not in has


def test_what_another_algorithm_calls_a_setting_is_said():
    text = answered_by(["algorithm=ei", "rollout_batch_size=16"])
    assert "it is one of algorithm=grpo's: algorithm=ei has question_batch_size" in text
    assert "micro_batch_size" not in text


def test_every_habit_and_every_equivalent_names_settings_that_there_are():
    from rlreason.cli.habits import EQUIVALENTS, HABITS

    known = set(nearest.keys_of_options())
    for algorithm, table in EQUIVALENTS.items():
        with composing(read([])):
            keys = nearest.keys_below(nearest.chosen([f"algorithm={algorithm}"], "config"))
        known |= set(keys)
        for theirs, ours in table.items():
            assert ours.partition(",")[0] in keys, (algorithm, ours)
            assert theirs not in keys
            assert nearest.algorithms_with(theirs)
    assert {key for keys in HABITS.values() for key in keys} <= known


def test_an_experiment_or_a_sweep_that_is_none_is_left_out():
    words = ["experiment=null", "sweep=None", "std_norm=off", "logger=null"]
    assert check_words(words).overrides == ["std_norm=none", "logger=none"]


def test_a_sweeps_file_may_use_a_handouts_names_and_spellings(tmp_path):
    (tmp_path / "sweep").mkdir()
    file = tmp_path / "sweep/mine.yaml"
    head = "# @package _global_\nhydra: {sweeper: {params: {"
    file.write_text(f"{head}n_grpo_steps: '1,2', std_norm: 'false', seed: 0}}}}}}\n")
    asked = check_words(["-cd", str(tmp_path), "-m", "sweep=mine"], note=lambda text: None)
    assert asked.overrides == [
        "sweep=mine",
        "~hydra.sweeper.params.n_grpo_steps",
        "~hydra.sweeper.params.std_norm",
        "n_steps=1,2",
        "std_norm=none",
    ]
    file.write_text(f"{head}loss: 'gspo,tpo'}}}}}}\n")
    assert "loss=tpo is no option of loss" in answered_by(["-cd", str(tmp_path), "-m", "sweep=mine"])
    file.write_text("# @package _global_\nn_grpo_steps: 3\n")
    text = answered_by(["-cd", str(tmp_path), "-m", "sweep=mine"])
    assert text == "sweep/mine.yaml: n_grpo_steps is no setting of this run: did you mean n_steps?"


@pytest.mark.parametrize(
    ("file", "text", "words", "says"),
    [
        ("loss/mine.yaml", "a: [b\n", ["loss=mine"], "loss/mine.yaml, line 2: expected ',' or ']'"),
        ("loss/mine.yaml", "a: [b\n", ["loss=gspo", "loss.dual_clip=3"], "is no YAML"),  # looked at, and not chosen
        ("loss/mine.yaml", "- a\n", ["loss=mine"], "loss/mine.yaml does not compose ("),
        ("loss/mine.yaml", "cliprang: 1\n", ["loss=mine"], "loss/mine.yaml: cliprang is no setting of this run: did"),
        ("loss/mine.yaml", "defaults: [/nowhere]\n", ["loss=mine"], "does not compose (Could not load 'nowhere')"),
        ("rollout/mine.yaml", "defaults: [hf]\nplacement: shared\n", ["rollout=mine"], "placement=shared is none"),
        ("sweep/mine.yaml", "n_steps: 3\n", ["-m", "sweep=mine"], "begin it with the line # @package _global_"),
    ],
)
def test_a_broken_file_of_ones_own_options_is_named(file, text, words, says, tmp_path):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(text)
    said = answered_by(["-cd", str(tmp_path), *words])
    assert says in said
    assert said.isprintable()


def test_a_broken_config_is_named_whether_it_is_run_or_shown(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [b\n")
    for words in (["seed=1"], [], ["--cfg", "job"], ["--help"]):
        assert "config.yaml, line 2: expected" in answered_by([f"--config-path={tmp_path}", *words])


def test_a_path_with_letters_beyond_ascii_needs_no_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_words(["hydra.run.dir=läufe/größe"]).overrides == ["hydra.run.dir='läufe/größe'"]


def test_every_option_can_be_listed_without_a_copy_of_the_store():
    """Hydra's own listing copies it once per question, so that help grew slower with every option."""
    profile = cProfile.Profile()
    with composing(read([])), profile:
        assert "sapo" in nearest.options()["loss"]
    called = {name for (_, _, name) in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert "get_group_options" in called
    assert "deepcopy" not in called


RUN = Path(PACKAGE).parent


def process(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A real command, which tells what it imports."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RUN)} | env
    argv = [sys.executable, "-X", "importtime", "-m", "rlreason", *words]
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(
    ("words", "code", "shows"),
    [
        (["--help"], 0, "loss: cispo, grpo_clip, "),
        (["algorithm=sft", "--help", "lr_schedule=cosine"], 0, "\nlr_schedule: cosine\n"),
        (["--cfg", "job", "std_norm=null"], 0, "std_norm: none\n"),
        (["std_norm=true"], 2, ""),
        (["-m", "sampling.max_token=3"], 2, ""),
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


def test_a_word_is_shown_in_one_line():
    assert mistakes.shown("a\tb\u2028c\x07") == "a\\tb\\u2028c\\x07"


def test_modules_of_the_current_folder_are_found_by_the_installed_script_as_by_python_m(tmp_path):
    """Unless Python was told not to look there."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/rlreason"
    script.write_text(
        "import importlib.util\nfrom rlreason.cli.entry import find_modules_here\n"
        "find_modules_here()\nprint(importlib.util.find_spec('my_module') is not None)\n"
    )
    (tmp_path / "my_module.py").touch()
    env = os.environ | {"PYTHONPATH": str(RUN)}
    for flags, found in (([], "True"), (["-P"], "False")):
        argv = [sys.executable, *flags, str(script)]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
        assert done.stdout.strip() == found, done.stderr


def test_a_current_folder_that_is_gone_is_one_line(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    argv = ["sh", "-c", f"rmdir {gone}; exec {sys.executable} -m rlreason --version"]
    env = os.environ | {"PYTHONPATH": str(RUN)}
    done = subprocess.run(argv, cwd=gone, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("rlreason: the current folder is gone: go to another")
