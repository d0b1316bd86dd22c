"""Completion of words: the answers to a command line, and each real shell with the script that it is given."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlreason.cli.completion import SCRIPTS, answers, candidates, in_bash
from rlreason.cli.entry import PACKAGE, exit_code_of
from rlreason.cli.flags import composing, read
from rlreason.cli.mistakes import config_of, keys_to_set, options
from rlreason.cli.queries import answer
from rlreason.cli.setting_candidates import of_override
from rlreason.cli.subcommands import SUBCOMMANDS, named_subcommand, run_subcommand


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a run, a sweep of two, a folder whose name has a space, and a file."""
    for run in ("runs/grpo/2026-01-01", "runs/sweeps/grid/seed=0", "runs/sweeps/grid/seed=1"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "config.yaml").touch()
    (tmp_path / "runs/sweeps/grid/broken_off_1").mkdir()
    (tmp_path / "my models/one").mkdir(parents=True)
    (tmp_path / "notes.md").touch()
    (tmp_path / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


#: a word that follows nothing -> what it may become
WORDS = {
    "sampling.": ["sampling.max_tokens=", "sampling.min_tokens=", "sampling.temperature="],
    "lo": ["log_generations=", "logger.", "logger=", "loss.", "loss="],
    "sweep=grpo_l": ["sweep=grpo_learning_rate", "sweep=grpo_length_normalization"],
    "eval.prompt=r1": ["eval.prompt=r1_zero", "eval.prompt=r1_zero_short", "eval.prompt=r1_zero_three_shot"],
    "prompt@": ["prompt@eval.prompt="],
    "rollout.engine=": ["rollout.engine=hf", "rollout.engine=vllm"],
    "prompt.chat=": ["prompt.chat=false", "prompt.chat=true"],
    "++prompt.chat=f": ["++prompt.chat=false"],
    "++lo": ["++log_generations=", "++logger.", "++loss."],  # options are chosen without
    "++baseline=": [],
    "logger=[wandb,": ["logger=[wandb,tensorboard", "logger=[wandb,trackio"],
    "seed=": ["seed=0"],  # the value that it has
    "experiment=[pku_hw3,": ["experiment=[pku_hw3,cs336_2025", "experiment=[pku_hw3,cs336_2026"],
    "n_grpo": ["n_grpo_steps="],
    "use_std_normalization=": ["use_std_normalization=false", "use_std_normalization=true"],
    "hydra.run.d": ["hydra.run.dir="],
    "model.path=m": ["model.path=my models/"],
}
#: Words that can become nothing.
WRONG = ["=", ".", "a.b.", "seed.x=", "ü=", "[", "x" * 5000, "x" * 5000 + "=", "\\", "xyz", "~loss"]
WRONG += ["model.path=~nobody/", "model.path=/nowhere/", "loss=[", "sweep=,", "learning_rate=x"]


def test_what_an_override_may_become(here):
    with composing(read([])):
        cfg = config_of([], "config")
        for word, expected in (WORDS | {word: [] for word in WRONG}).items():
            assert sorted(one for one in of_override(word, cfg) if one.startswith(word)) == expected
        assert of_override("std_norm=none,group_mean,", cfg, multirun=True) == [
            "std_norm=none,group_mean,batch_std",
            "std_norm=none,group_mean,group_std",
        ]


def test_every_setting_and_every_choice_of_a_run_is_reached_by_tabs_alone():
    with composing(read([])):
        cfg = config_of([], "config")

        def reached(place: str) -> list[str]:
            keys = [key for key in of_override(place, cfg) if key.startswith(place)]
            return [one for key in keys for one in (reached(key) if key.endswith(".") else [key])]

        needed = {f"{key}=" for key in (*keys_to_set(cfg), *options())}
        assert set(reached("")) - {"hydra/launcher=", "hydra/sweeper="} == needed


#: a command line -> what its last word may become
ANSWERS = {
    "com": ["compare", "completion"],
    "algorithm=sft lo": ["log_generations=", "logger.", "logger="],  # no axes of an objective
    "eval.data=gsm8k eval.data.go": ["eval.data.gold="],  # of the option that was chosen before
    "seed=1 -m n_steps=2 n_grpo_steps=3 kl_placement=none,": ["kl_placement=none,loss", "kl_placement=none,reward"],
    "--version --config-dir /nowhere algorithm=nope log": ["log_generations=", "logger.", "logger="],  # as without them
    "--conf": ["--config-dir", "--config-name", "--config-path"],
    "--cfg ": ["all", "hydra", "job"],
    "--cfg=j": ["--cfg=job"],
    "inspect ": ["runs/grpo/2026-01-01", "runs/sweeps/grid/seed=0", "runs/sweeps/grid/seed=1"],
    "inspect 'my mo": ["my models/"],
    "inspect runs/grpo/2026-01-01 --re": ["--regrade"],
    "inspect --category f": ["format0", "format1_wrong"],
    "compare runs/sweeps/grid/seed=0 runs/sweeps/grid/": ["runs/sweeps/grid/seed=1"],
    "curves --json n": ["notes.md"],
    "completion ": ["bash", "fish", "zsh"],
    "inspect $(touch pwned) --n": [],
    "inspect `touch pwned`; /nowhere/": [],
    "inspect 'it\"s": [],
}


@pytest.mark.parametrize("line", ANSWERS)
def test_the_last_word_of_a_line_is_answered_and_nothing_is_printed(line, here, capfd):
    assert answers(f"A=1 .venv/bin/python -m rlreason {line}") == ANSWERS[line]
    assert capfd.readouterr() == ("", "")
    assert not (here / "pwned").exists()


def test_options_of_ones_own_are_answered_too(here):
    (here / "loss").mkdir()
    (here / "loss/mine.yaml").write_text("loss_type: gspo\n")
    assert candidates(["--config-dir", ".", "loss=mi"]) == ["loss=mine"]


def test_bash_gets_the_part_that_it_replaces_quoted_as_the_rest_of_the_word():
    found = ["model.path=my models/(1)/"]
    assert in_bash(found, r"rlreason model.path=my\ mo", r"my\ mo") == [r"my\ models/\(1\)/"]
    assert in_bash(found, "rlreason 'model.path=my mo", "model.path=my mo") == found
    assert in_bash(["a=$(x)'"], 'rlreason "a=', "a=") == [r"a=\$(x)'"]  # in quotes too, nothing is run
    assert in_bash(["a=$(x)'"], "rlreason 'a=", "a=") == [r"a=$(x)'\''"]
    assert in_bash(found, "rlreason model.path=", "") == [r"my\ models/\(1\)/"]
    assert in_bash(found, "rlreason model.path=my", "something else") == []
    assert in_bash(["logger=[wandb", "seed=0", "loss="], "rlreason ", "") == ["logger=[wandb", "seed=0 ", "loss="]


def test_the_subcommand_and_hydras_flag_print_the_script_and_refuse_other_shells(capsys):
    subcommand = named_subcommand(["completion"])
    assert subcommand in SUBCOMMANDS
    for shell, script in SCRIPTS.items():
        run_subcommand(subcommand, [shell])
        with composing(asked := read(["-sc", f"install={shell}"])):
            answer(asked)
        assert capsys.readouterr().out == 2 * script
    assert exit_code_of(lambda: run_subcommand(subcommand, ["nosh"])) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert "SHELL: invalid choice: 'nosh' (choose from " in said.err


@pytest.fixture
def environment(here) -> dict[str, str]:
    """Of a shell that finds `rlreason` and a home of its own."""
    (here / "bin").mkdir()
    for name, words in {"rlreason": "-m rlreason ", "python": ""}.items():
        command = here / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        command.chmod(0o755)
    home = {"HOME": str(here), "XDG_CONFIG_HOME": str(here), "XDG_DATA_HOME": str(here), "TERM": "dumb"}
    path = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE.parent)}
    return os.environ | home | path | {"OMP_NUM_THREADS": "1"}


def typed_in(argv: list[str], lines: list[str], environment: dict[str, str]) -> str:
    """What an interactive shell shows on its terminal while these lines are typed; it has ten minutes for each."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(argv[0], argv, environment)
    shown = b""
    for number, line in enumerate(lines):
        os.write(terminal, f"{line}\necho do''ne{number}\n".encode())  # the quotes tell what is typed from its output
        end = time.monotonic() + 600
        while f"done{number}\r\n".encode() not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 4096)
    os.write(terminal, b"exit\n")
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown.decode(errors="replace")


TO_THE_START, TO_THE_END = "\x01", "\x05"


@pytest.mark.long
@pytest.mark.parametrize(("shell", "plain"), [("bash", "--norc"), ("zsh", "-f")])
def test_tab_in_a_real_shell(shell, plain, environment):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    print_words = f"{TO_THE_START}printf '<%s>' {TO_THE_END}"
    setting, folder = f"rlreason loss=grpo_n\tseed=0{print_words}", f"rlreason inspect my\t{print_words}"
    shown = typed_in([shell, plain, "-i"], [f'eval "$(rlreason completion {shell})"', setting, folder], environment)
    assert "<rlreason><loss=grpo_no_clip><seed=0>" in shown
    assert "<rlreason><inspect><my models/>" in shown
    assert "Traceback" not in shown


@pytest.mark.long
def test_tab_in_fish(environment):
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    script = "rlreason completion fish | source; for line in $argv; complete -C $line; end"
    lines = ["rlreason loss=grpo_n", "python -m rlreason inspect my", "rlreason inspect /nowhere/"]
    argv = ["fish", "--no-config", "-c", script, "--", *lines]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert (done.stdout.splitlines(), done.stderr) == (["loss=grpo_no_clip", "my models/"], "")
