"""Rewards, data and losses of one's own: by `module:function`, by a name that a package announces, as objects."""

import functools
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose

from rlreason import train
from rlreason.api.start import evaluation_settings, plain
from rlreason.cli.check import reading
from rlreason.cli.compose import changed_run, composed_run
from rlreason.cli.flags import composing, group_options, read
from rlreason.config.data import of_function
from rlreason.data.prepare import read_splits
from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.objectives.card import objective_card
from rlreason.objectives.losses import Formula, Loss, broken_contract
from rlreason.objectives.objective import own_loss_config
from rlreason.objectives.published import GRPO, check_objective
from rlreason.records.reader import RunFolder
from rlreason.runtime.plugins import announced, as_settings, find_modules_here, label_of, no_reward
from rlreason.settings import Range
from rlreason.training.laboratory import read_run
from rlreason.training.preflight import mistakes_of
from rlreason.types import Problem
from tests.starts import ROOT, SMALL
from tests.waiting import patient

MINE = '''
import torch

def asymmetric(advantages, policy_log_probs, *, tau=0.5, shift):
    """-A log pi, where a negative advantage weighs tau."""
    return -advantages.where(advantages > 0, tau * advantages) * (policy_log_probs + shift)
def leaky(advantages, policy_log_probs, old_log_probs):
    ratio = (policy_log_probs - old_log_probs).mean(-1, keepdim=True).exp()
    return -(ratio * advantages).expand_as(policy_log_probs)
def in_a_batch(advantages, policy_log_probs): return -(advantages - advantages.mean()) * policy_log_probs
def one_number(advantages, policy_log_probs): return (-advantages * policy_log_probs).mean()
def detached(advantages, policy_log_probs): return -advantages * policy_log_probs.detach()
def infinite(advantages, policy_log_probs): return -advantages * policy_log_probs / 0
def odd_statistics(advantages, policy_log_probs): return -advantages * policy_log_probs, {"mean": advantages.mean()}
def raising(advantages, policy_log_probs): raise ValueError("no such thing")
def three(advantages, policy_log_probs, rewards): ...
def sums(count: int = 30, start: int = 0):
    for n in range(start, start + count):
        yield {"question": f"What is {n} plus 1?", "answer": n + 1, "level": "easy"}
def halves(): return {"train": [{"question": "1+1?", "answer": 2}], "validation": [{"question": "2+1?", "answer": 3}]}
def broken(): return 7
def misnamed(): return {"question": "q"}
def half(response, truth): return 0.5
'''


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    """A module of the user's, in the current folder."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return name


def settings(*words: str):
    """The checked settings of these words, with the options that are no files."""
    with reading(read(words), str) as asked:
        return composed_run(asked.overrides, "config").run


def test_a_loss_of_ones_own_is_an_option_with_its_numbers(mine):
    """Bug: a number of a loss that is not checked, shown or kept."""
    run = settings(f"loss={mine}:asymmetric", "loss.tau=0.25", "loss.shift=1")
    assert run.loss.numbers() == {"tau": 0.25, "shift": 1.0}
    assert mistakes_of(run) == []
    with composing(read([])):
        assert repr(changed_run(plain(run), []).run) == repr(run)
    card = objective_card(run)
    assert f"{mine}:asymmetric; tau=0.25, shift=1" in " ".join(card.fitted(1000).split())
    assert "-A log pi, where a negative advantage weighs tau\n" in card.markdown
    mine_with = replace(GRPO, loss=own_loss_config(f"{mine}:asymmetric"))
    for shift, said in ((None, "loss.shift=null"), (float("nan"), "loss.shift=nan")):
        mine_with.loss.shift = shift
        (line,) = check_objective(mine_with)
        assert line.startswith(said)
    with pytest.raises(ConfigError, match=r"loss.taw .*loss.tau\?"):
        settings(f"loss={mine}:asymmetric", "loss.taw=1")


BROKEN = {
    "leaky": "where response_mask is false",
    "in_a_batch": "when other responses stand next to it",
    "one_number": r"returns the loss as \(\) for",
    "detached": "has no gradient",
    "infinite": "is not finite",
    "odd_statistics": "returns mean as",
    "raising": r"ValueError: no such thing \(.*, line",
}


def test_what_is_no_loss_is_refused_in_one_line(mine):
    """Bug: a loss that reads other responses or has no gradient trains for hours."""
    for name, why in {"asymetric": f"{mine}:asymmetric", "three": "rewards"}.items():
        with pytest.raises(ConfigError, match=why):
            own_loss_config(f"{mine}:{name}")
    for name, why in BROKEN.items():
        assert re.search(why, broken_contract(f"{mine}:{name}", {}))


def test_a_loss_object_brings_its_formula_ranges_and_title():
    """Bug: a setting beyond the loss's own range, or a card without its formula."""

    def function(advantages, policy_log_probs, *, tau):
        return -tau * advantages * policy_log_probs

    ranges = {"tau": Range(0, 1, "try 0.5")}
    loss = Loss(function, lambda tau: Formula(f"l = -{tau:g} A log pi", r"\ell", "scaled"), ranges, notes=("Mine: 2.",))
    with as_settings(loss=loss) as words:
        name = words[0].partition("=")[2]
        chosen = replace(GRPO, loss=replace(own_loss_config(name), tau=0.5))
        text = " ".join(objective_card(chosen).fitted().split())
        assert ("l = -0.5 A log pi" in text, "Note Mine: 2." in text) == (True, True)
        chosen.loss.tau = 2
        assert check_objective(chosen)[0].startswith("loss.tau=2 ")
    with pytest.raises(ConfigError, match="Python object"):
        own_loss_config(name)


def test_rows_of_a_function_are_data_like_those_of_a_file(mine):
    """Bug: a traceback of the reader for what a user returned, or an option that nothing reads."""
    said: list[str] = []
    sums = of_function(f"{mine}:sums")
    assert sums.options == {"count": 30, "start": 0}
    data = replace(sums, options={"count": 50, "start": 0}, n_validation=10)
    problems, validation = read_splits(data, said.append)
    assert (len(problems), len(validation), said) == (40, 10, [])
    assert problems[0].facts == {"level": "easy"}
    assert len(read_splits(sums, said.append)[1]) == 3
    assert said[0].startswith("3 of the 30 problems ")
    problems, validation = read_splits(of_function(f"{mine}:halves"), said.append)
    assert (problems[0].answer, validation[0].answer) == ("2", "3")
    given = Problem("own", "q?", "4", facts={"level": "2"})
    with as_settings(data=[given, {"id": "other", "question": "other?", "answer": 5}]) as words:
        problems, validation = read_splits(of_function(words[0].partition("=")[2]), said.append)
        found = {p.id: p for p in (*problems, *validation)}
        assert (found.keys(), found["own"].facts) == ({"own", "other"}, {"level": "2"})
    for name, why in (("broken", "TypeError: 'int'"), ("misnamed", r"the keys \['question'\]")):
        with pytest.raises(DataError, match=rf"^data\.function={mine}:{name} .*{why}"):
            read_splits(of_function(f"{mine}:{name}"), said.append)
    with pytest.raises(ConfigError, match="validation rows"):
        read_splits(replace(of_function(f"{mine}:halves"), n_validation=1), said.append)
    with pytest.raises(ConfigError, match=r"data.options.cuont .*data.options.count"):
        settings(f"data={mine}:sums", "data.options.cuont=5")


def test_an_installed_package_announces_names(mine, tmp_path, request):
    """Bug: one broken package takes the options of all others along."""
    announced.cache_clear()
    request.addfinalizer(announced.cache_clear)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[rlreason.rewards]\nhalved = {mine}:half\n[rlreason.data]\nplus_one = {mine}:sums\n"
        f"[rlreason.losses]\ntilted = {mine}:asymmetric\ngone = nowhere:loss\n"
    )
    importlib.invalidate_caches()
    run = settings("loss=tilted", "loss.shift=0", "prompt.reward=halved")
    assert run.loss.loss_type == f"{mine}:asymmetric"
    assert run.prompt.reward == f"{mine}:half"
    with pytest.raises(ConfigError, match=r"loss=tiled .*tilted\?"):
        settings("loss=tiled")
    assert no_reward("prompt.reward", "halvd")[0].endswith("prompt.reward=halved?")
    with pytest.raises(ConfigError, match="nowhere"):
        settings("loss=gone")
    with composing(read([])):
        assert {"tilted", "gone", "gspo"} <= set(group_options("loss"))
        assert {"plus_one", "stories"} <= set(group_options("data"))
    assert Grader(reward="halved").plugin == f"{mine}:half"


def test_the_name_of_an_object_tells_all_that_it_holds():
    """Bug: two rewards of one name, so that a run is resumed with the other one."""

    def over(held):
        return lambda response, truth: held

    one, two = Namespace(factor=1), Namespace(factor=2)
    states = [one, two, one.__eq__, [one], {"a": two}, {"x", "y"}, torch.zeros(2), torch.ones(2), re, 1.0, "1.0"]
    made = [*map(over, states), one, functools.partial(over, "a")]
    names = [label_of(thing) for thing in made]
    assert len(set(names)) == len(names)
    assert [label_of(thing) for thing in made] == names
    assert label_of(over(threading.Lock())) != label_of(over(threading.Lock()))


def test_numbers_of_numpy_and_torch_are_rewards_and_tables_of_pandas_are_rows():
    """Bug: a reward of another number's type counts as no verdict, or a table's missing value as a fact."""
    returned = [np.float32(0.5), torch.tensor(0.5), np.bool_(True), {"reward": np.int64(1)}, np.ones(2), b"1"]
    with Grader(patient(), lambda response, truth: returned[int(response)]) as grader:
        grades = grader.grade_batch([str(n) for n in range(6)], ["x"] * 6)
    assert [grade.reward for grade in grades] == [0.5, 0.5, 1, 1, 0, 0]
    table = pd.DataFrame({"question": ["1+1?", "2+1?"], "answer": [2, 3], "level": [None, 1.0]})
    for given in (table, {"train": table, "validation": table[1:]}):
        with as_settings(data=given) as words:
            problems = [p for half in read_splits(of_function(words[0].partition("=")[2]), print) for p in half]
        assert {p.answer for p in problems} == {"2", "3"}
        assert [p.facts for p in problems if p.answer == "2"] == [{}]


def test_a_function_that_cannot_be_imported_judges_in_its_worker(mine):
    """Bug: a closure loses what it holds on its way to a worker."""

    def scaled(factor: float):
        return lambda response, truth: factor * len(response)

    for factor in (1, 2):
        with Grader(reward=scaled(factor)) as grader:
            assert grader.grade_batch(["abc"], ["d"])[0].reward == 3 * factor
    assert Grader(reward=importlib.import_module(mine).half).reward == f"{mine}:half"
    lock = threading.Lock()
    for given, why in ((lambda response, truth: lock.locked(), "cannot be sent"), (3, "nor a function")):
        with pytest.raises(ConfigError, match=why):
            Grader(reward=given)


@pytest.fixture
def examples(monkeypatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    sys.modules.pop("own_reward", None)  # the tests have one of this name


def test_a_run_with_ones_own_reward_and_loss(examples, tmp_path):
    """Bug: a run whose records do not have the sources of its functions."""
    folder = tmp_path / "run"
    words = ["loss=own_loss:tapered", "loss.cap=0.5", "epochs_per_rollout=2", f"hydra.run.dir={folder}"]
    run = train(*SMALL, *words, reward=lambda response, truth: len(response) % 2, quiet=True)
    assert any("train/clip_fraction" in row for row in run.metrics)
    assert {row["reward"] for row in run.responses} <= {0.0, 1.0}
    sources = (folder / "own_functions.txt").read_text()
    assert "len(response) % 2" in sources
    assert "def tapered(" in sources
    own = json.loads((folder / "provenance.json").read_text())["own_functions"]
    assert [word.partition("-")[0] for word in own] == ["prompt.reward=python:lambda", "loss=own_loss:tapered"]
    assert read_run(RunFolder(folder)).loss.numbers() == {"cap": 0.5}


def test_the_examples_judge_and_their_loss_is_its_formula(examples):
    """Bug: an example that users copy is wrong."""
    text = "x </think> <answer>14</answer>"
    with Grader(patient(), "own_reward:brief") as brief:
        right, wrong = brief.grade_batch([text] * 2, ["14", "15"])
    assert 0.5 < right.reward < 1 > wrong.reward == 0
    task = importlib.import_module("own_task")
    assert [task.r1_zero(text, problem)["reward"] for problem in ("7 10 24", "7 14 28")] == [1, 0]
    assert len({row["question"] for row in task.multiples()}) == 500
    tapered = importlib.import_module("own_loss").tapered  # a negative advantage weighs its ratio, at most cap
    policy, advantages = torch.full((2, 3), -1.0), torch.tensor([[1.0], [-2.0]])
    for old, weight in ((-1.0, 0.9), (0.0, math.exp(-3))):
        loss, _ = tapered(advantages, policy, torch.full((2, 3), old), torch.ones(2, 3).bool(), cap=0.9)
        assert loss[:, 0].tolist() == pytest.approx([1.0, -2 * weight])


@pytest.mark.parametrize("safe", [True, False])
def test_modules_of_the_current_folder_are_found_unless_python_was_told_not_to_look_there(safe, monkeypatch, tmp_path):
    """Bug: a module in a folder that is not trusted is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "flags", Namespace(safe_path=safe))
    monkeypatch.setattr(sys, "path", [])
    find_modules_here()
    assert sys.path == [str(tmp_path)] * (not safe)


def block(language: str) -> str:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a loss")[1]
    (code,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return code


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the project in which the two places are written."""
    for part in ("rlreason", "conf", "prompts", "multirun_sweeps"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "rlreason/objectives/losses.py").open("a") as losses:
        losses.write("\n\n" + block("python"))
    (tmp_path / "conf/loss/gmpo.yaml").write_text(block("yaml"))
    return tmp_path


#: Commands one after the other in one process, which imports torch once.
COMMANDS = """
import json, sys
from rlreason.__main__ import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["rlreason", *words]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
sys.exit(codes != [0, 2, 0, 0])
"""


@pytest.mark.long
def test_the_example_is_an_option_like_any_other(project):
    commands = [
        ["--help"],
        ["loss=gmpo", "loss.log_clip_low=-1"],
        ["loss=gmpo", "loss.log_clip_low=0.3", *SMALL, "epochs_per_rollout=2", "logger=none", "hydra.run.dir=run"],
        ["inspect", "run", "--gradients"],
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(project)}
    argv = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search("^loss: .*gmpo", done.stdout, re.MULTILINE)
    assert re.fullmatch("rlreason: loss.log_clip_low=-1.0 .*\n", done.stderr)
    assert "GMPO (arXiv 2507.20673) with other numbers" in " ".join(done.stdout.split())
    rows = [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]
    assert any("train/ratio" in row and "train/clip_fraction" in row for row in rows)
    assert re.search(r"^this run .* gmpo, masked_mean, mean/group_std$", done.stdout, re.MULTILINE)
    assert re.search(r"^loss=gmpo .* gmpo, masked_mean, mean/group_std$", done.stdout, re.MULTILINE)


def test_what_is_given_anew_takes_the_place_of_a_gone_object(tmp_path):
    """Bug: settings of the data that is gone are those of the data that is given."""
    rows = [{"question": "1+1?", "answer": 2}, {"question": "2+1?", "answer": 3}]
    with as_settings(reward=lambda response, truth: 0.5, data=rows) as own, composing(read([])):
        ran = plain(compose("config", ["data.limit=7", "eval_problems=1", *own]))
        ran["loss"]["loss_type"] = "python:gone-1"  # no evaluation has a use for it
    (tmp_path / "config.json").write_text("{}")
    anew = ["data=stories", "prompt.reward=r1_zero"]
    with composing(read([])):
        with pytest.raises(ConfigError, match="Python object"):
            changed_run(evaluation_settings(ran, tmp_path, set()), [])
        found = changed_run(evaluation_settings(ran, tmp_path, {"data", "prompt.reward"}), anew).config
        assert (found.data.name, found.data.get("limit"), found.algorithm) == ("stories", None, "evaluate")
        found = changed_run(ran, [*anew, "loss=gspo"]).config
        assert (found.data.name, found.eval_problems, found.prompt.reward) == ("stories", 1, "r1_zero")
