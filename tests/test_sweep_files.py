"""The sweeps of `multirun_sweeps/`: every cell composes at every scale; names, folders and blocks; chains."""

import itertools
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlreason.cli.check import check_command_line
from rlreason.cli.compose import composed, composed_alike, composed_run
from rlreason.cli.flags import composing, read
from rlreason.cli.sweep import checked_stage, file_of, shared_config
from rlreason.cli.sweep import designed as design_of
from rlreason.config.leaves import resource_dir
from rlreason.config.store import run_name
from rlreason.errors import ConfigError
from rlreason.sweeps.state import RunState, SweepState, write_state
from tests.some import some
from tests.sweep_folders import answers, checked, designed, ended

FILES = sorted(resource_dir("multirun_sweeps").glob("*.yaml"))
SWEEPS = [path.stem for path in FILES if "chain:" not in path.read_text()]
EXPERIMENTS = [f"experiment={name}" for name in ("cs336_2025", "cs336_2026", "pku_hw3")]
PRETRAINED = ["model=smollm2_135m", "data=gsm8k"]  # the tiny model reads too little for the paper's responses
PLACES = [["scale=embedded"], ["scale=laptop", *PRETRAINED], ["scale=paper", *PRETRAINED], *([e] for e in EXPERIMENTS)]


def own(folder: Path, blocks: str, more: str = "") -> list[str]:
    """Write a sweep of one's own, with these blocks below `hydra.sweeper` and `more` at the top."""
    (folder / "sweep").mkdir(exist_ok=True)
    below = textwrap.indent(blocks, "    ")
    (folder / "sweep/mine.yaml").write_text(f"# @package _global_\n{more}hydra:\n  sweeper:\n{below}")
    return ["--config-dir", str(folder), "sweep=mine"]


def mistake(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


#: Every sweep that is no chain in every place; the three stages are of the tiny model..
CELLS = [one for one in itertools.product(SWEEPS, PLACES) if one[1] == PLACES[0] or not one[0].startswith("stage_")]


@pytest.mark.parametrize(("name", "place"), some(CELLS, 200))
def test_every_cell_of_every_sweep_composes_and_keeps_the_rules(name, place, tmp_path, monkeypatch):
    """Bug: a shipped sweep has no runs, or one that is refused only when its turn comes; composed apart, it differs."""
    monkeypatch.chdir(tmp_path)
    for before, seed in itertools.product(("stage_1_sft", "stage_2_ei", "pku_grpo"), range(3)):  # which others leave
        (model := tmp_path / f"runs/sweeps/{before}/seed={seed}/model").mkdir(parents=True)
        (model / "config.json").write_text("{}")
    asked = read(["-m", f"sweep={name}", *place])
    with composing(asked):
        runs = design_of(asked, shared_config(asked), note=str)[0].runs
        assert runs
        for run in runs:
            composed_run(run.overrides, "config", of_sweep=True)
        whole, alike = (OmegaConf.to_container(of(runs[-1].overrides, "config")) for of in (composed, composed_alike))
    for config in (whole, alike):
        del config["hydra"]["job"]["override_dirname"], config["hydra"]["overrides"]["task"]
    assert whole == alike


def test_names_say_the_swept_values_in_full_in_one_order_with_the_seed_last():
    one = designed("learning_rate=0.0003,1e-3", "loss=grpo_clip,gspo", "seed=0,1", "n_steps=3")
    other = designed("seed=1,0", "n_steps=3", "loss=grpo_clip,gspo", "learning_rate=3e-4,0.001")
    settings = [("3e-4", "grpo_clip"), ("3e-4", "gspo"), ("1e-3", "grpo_clip")]
    assert [run.name for run in one.runs][:3] == [f"learning_rate={lr},loss={loss},seed=0" for lr, loss in settings]
    assert {run.name: run.setting for run in one.runs} == {run.name: run.setting for run in other.runs}
    assert (one.axes, len(one.settings())) == (["learning_rate", "loss"], 4)
    assert [run.seed for run in one.runs] == [0] * 4 + [1] * 4  # every setting once, then again
    odd = [f"data.path=/{'x' * 60}/{n}" for n in "ab"] + ["data.path='a b'", "data.path='a-b'"]
    assert len({run_name([word, "seed=0"]) for word in odd}) == 4
    assert re.fullmatch(".{1,183},seed=7", run_name([f"key_{n}={'v' * 50}" for n in range(6)] + ["seed=7"]))


def test_a_sweep_has_a_folder_of_its_own_and_its_options_reach_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, folder in (
        (["sweep=grpo_baselines", "seed=0,1"], "grpo_baselines"),
        (["sweep=grpo_baselines", "data=stories", "n_steps=3"], "grpo_baselines,data=stories"),
        (["loss=gspo,cispo", "learning_rate=1e-3,1e-4", "seed=0,1"], "learning_rate,loss"),
        (["seed=0,1", "hydra.sweep.dir=/tmp/mine"], "/tmp/mine"),
    ):
        with composing(request := read(["-m", *words])):
            assert design_of(request, shared_config(request), note=str)[1] == Path("runs/sweeps") / folder
    (asked,) = checked("loss=gspo,cispo", "jobs=2", "dry=true", "gpus_per_run=auto", "sweep_name=mine")
    assert {"hydra.sweeper.jobs=2", "hydra.sweeper.dry=true"} <= set(asked.overrides)
    assert asked.folder == Path("runs/sweeps/mine")
    assert asked.design.runs[0].overrides == ["loss=gspo", "seed=0"]
    for word in ("jobs=0", "dry=maybe", "sweep_name=a/b", "carry=nowhere", "carry=[]", "gpus_per_run=-1"):
        assert mistake("seed=0,1", word).startswith(f"{word} ")
    for word in ("max_seeds=3", "loss=gspo", "monitors.dominated=stop", "sweep=grpo_assignment", "seed=0,1"):
        loss = ["loss=gspo,cispo"] * word.startswith(("m", "seed"))
        assert mistake("seed=auto", word, *loss).startswith((word, "seed=auto"))
    with pytest.raises(ConfigError, match=r"^jobs=2 "):
        check_command_line(["seed=0", "jobs=2"])
    assert "the sweep's folder" in mistake("seed=0,1", "sweep_name=a", "hydra.sweep.dir=b")


def test_a_file_may_name_the_sweeps_folder_and_an_empty_name_is_refused(tmp_path):
    """Bug: hydra.sweep.dir of a sweep's own file is ignored; an empty one writes the runs beside each other here."""
    words = own(tmp_path, "cells: [[loss=gspo], [loss=cispo]]\n")
    with (tmp_path / "sweep/mine.yaml").open("a") as file:
        file.write("  sweep:\n    dir: elsewhere/mine\n")
    assert checked(*words)[0].folder == Path("elsewhere/mine")
    assert mistake("seed=0,1", "hydra.sweep.dir=").startswith("hydra.sweep.dir= names no folder")


def test_the_embedded_block_is_read_at_its_scale_alone_and_typed_words_win():
    rates = {run.setting["learning_rate"] for run in designed("sweep=grpo_learning_rate").runs}
    assert rates == {"3e-5", "1e-4", "3e-4", "1e-3", "0.01"}
    words = ["sweep=grpo_learning_rate", "experiment=cs336_2025"]
    paper = designed(*words)
    assert paper.runs[0].overrides == [*words, "learning_rate=1e-6", "seed=0"]
    assert paper.reference == {"learning_rate": "1e-5"}
    mine = designed("sweep=grpo_learning_rate", "data=stories", "learning_rate=1e-3,2e-3")
    assert [run.setting["learning_rate"] for run in mine.runs] == ["1e-3", "2e-3"]
    assert (mine.runs[0].overrides[1], mine.reference) == ("data=stories", None)


def test_cells_multiply_with_axes_and_seeds_and_are_named_in_full(tmp_path):
    star = designed("sweep=expert_iteration", "seed=0,1")
    assert len(star.runs) == 14
    assert star.axes == ["group_size", "question_batch_size", "sft_epochs"]
    assert star.runs[0].name == "group_size=4,question_batch_size=256,sft_epochs=2,seed=0"
    assert star.reference == star.runs[0].setting
    assert "question_batch_size=128" in star.runs[1].overrides
    # model.path=DIR took the second cell of pku_before_and_after away
    runs = designed("sweep=pku_before_and_after", "experiment=pku_hw3", f"model.path={tmp_path}").runs
    paths = [[word for word in run.overrides if word.startswith("model.path=")] for run in runs]
    assert paths == [[f"model.path={tmp_path}"], ["model.path='runs/sweeps/pku_grpo/seed=${seed}'"]]
    # an option of an axis gives way to the settings that it stands for: there were sixteen runs, twelve of them copies
    two = designed("sweep=grpo_off_policy_focused", "epochs_per_rollout=1,2", "train_batch_size=128,256")
    assert (len(two.runs), two.axes) == (4, ["epochs_per_rollout", "train_batch_size"])
    assert two.reference == {"epochs_per_rollout": "1", "train_batch_size": "256"}
    # with another rollout batch a chain was refused at its broad stage, whose train batches were larger
    broad = designed("sweep=grpo_off_policy_broad", "rollout_batch_size=64", "seed=0")
    assert [one["train_batch_size"] for one in broad.settings()[:5]] == ["4", "8", "16", "32", "64"]
    assert broad.reference == {"epochs_per_rollout": "1", "train_batch_size": "64"}


def test_words_that_leave_cells_without_their_difference_are_refused():
    """Cells without what they differ in fell together, and fewer runs were made without a word."""
    for words, says in (
        (["sweep=grpo_learning_rate", "scale=embedded,laptop"], "run a sweep for each scale"),
        (["sweep=expert_iteration", "group_size=8"], "group_size=8 takes group_size=2 away"),
        (["sweep=grpo_off_policy_focused", "epochs_per_rollout=1"], "make the same run"),
        (["sampling.temperature=1,1.0"], "make the same run"),
    ):
        assert says in mistake(*words)


def test_a_file_of_ones_own_works_the_same_and_a_wrong_block_is_answered_in_one_line(tmp_path):
    cells = "cells: [[loss=gspo], [loss=cispo, n_steps=7]]\nreference: first\n"
    words = own(tmp_path, f"{cells}embedded: {{data: stories_long, n_steps: 40, seed: '3,4'}}\n")
    design = designed(*words)
    assert design.reference == {"loss": "gspo", "n_steps": "40"}
    assert [run.name for run in design.runs][:2] == ["loss=gspo,n_steps=40,seed=3", "loss=cispo,n_steps=7,seed=3"]
    assert "data=stories_long" in design.runs[0].overrides
    for text, says in (
        ("cells: [loss=gspo]", "sweep/mine.yaml"),
        ("cells: [['loss=gspo,cispo']]", "loss=gspo"),
        ("embedded: {data: {name: x}}", "data="),
        ("cells: [[seed=a]]", "seed=a"),
        ("chain: [mine]", "is a chain"),
        ("cells: [[loss=gspo], [loss=cispo]]\nreference: [los=cispo]", "los=cispo"),
    ):
        assert says in mistake(*own(tmp_path, text + "\n")), text
    assert "n_steps" in mistake(*own(tmp_path, "chain: [grpo_baselines]\n", "n_steps: 3\n"))


def test_a_file_of_ones_own_may_give_sets_and_functions(tmp_path):
    """Bug: eval.sets=[] keeps the sets of a file, or a function of one's own is no reference."""
    ours = "examples.own_loss:tapered"
    blocks = f"params: {{loss: '{ours},grpo_clip'}}\nreference: [loss={ours}]\n"
    words = own(tmp_path, blocks, "defaults: [/data@eval.sets.hard.data: stories_hard, _self_]\n")
    whole, without = (checked(*words, *more)[0] for more in ([], ["eval.sets=[]"]))
    assert [[*run.by_set()] for sweep in (whole, without) for run in sweep.runs.values()] == [["hard"]] * 2 + [[]] * 2
    assert (whole.design.reference, whole.design.settings()[0]) == ({"loss": ours},) * 2
    assert "sweep/mine" in mistake(*own(tmp_path, blocks, "eval: {sets: [stories_hard]}\n"))


def test_what_is_carried_gives_way_to_what_was_typed_and_to_what_the_sweep_sets():
    given = ["learning_rate=1e-3", "loss=no_baseline", "off_policy=e4_full"]
    run = designed("sweep=grpo_off_policy_clip_ablation", "learning_rate=3e-3", carried=given).runs[0]
    words = [word for word in run.overrides if word.startswith(("learning_rate", "loss", "off_policy"))]
    assert words == ["learning_rate=3e-3", "off_policy=e4_full", "loss=grpo_clip"]
    assert "loss=no_baseline" in designed("sweep=grpo_length_normalization", carried=given).runs[0].overrides


def test_a_chain_has_its_stages_in_folders_below_its_own(tmp_path, monkeypatch):
    """Bug: a stage writes elsewhere, loses what was typed or gets what only another reads."""
    monkeypatch.chdir(tmp_path)
    words = own(tmp_path, "chain: [pku_grpo, pku_before_and_after]\nparams: {seed: '0,1'}\n")
    stages = checked(*words, "n_steps=2", "group_size=4", "experiment=null")
    first, second = (stage.design for stage in stages)
    assert stages[0].folder == Path("runs/sweeps/mine/pku_grpo")
    assert {run.seed for run in first.runs} == {0, 1}
    assert "n_steps=2" in first.runs[0].overrides
    assert "n_steps=2" not in second.runs[0].overrides  # nothing is trained there
    assert "model.path='runs/sweeps/mine/pku_grpo/seed=${seed}'" in second.runs[1].overrides
    for word in ("seed=auto", "carry=grpo_baselines"):
        assert mistake(*words, word).startswith(word)


def test_the_broad_sweep_hands_its_best_settings_to_the_focused_one(tmp_path):
    """The chain ran a focused sweep over four settings that nothing had chosen."""
    broad, focused = stages = ("grpo_off_policy_broad", "grpo_off_policy_focused")
    chances, runs = {(1, 256): 0.5, (1, 16): None, (2, 64): 0.7, (4, 64): 0.6, (1, 128): 0.55, (4, 16): 0.1}, []
    for ((epochs, batch), chance), seed in itertools.product(chances.items(), (0, 1)):  # None: diverged
        setting = {"epochs_per_rollout": str(epochs), "train_batch_size": str(batch)}
        name = run_name([*(f"{key}={value}" for key, value in setting.items()), f"seed={seed}"])
        ended(tmp_path / broad / name, None if chance is None else answers(seed, chance))
        runs.append(RunState(name, [], setting, seed))
    first = runs[0].setting
    state = SweepState(broad, "", list(first), first, "finished", 1, "processes", runs, sweep=broad)
    write_state(tmp_path / broad, state)
    asked = read(["-m", "sweep=grpo_assignment", "seed=0,1"])
    by_hand = replace(asked, overrides=[*asked.overrides, "off_policy=on_policy,e1_quarter"])
    with composing(asked):
        assert {*stages, "grpo_prompt_ablation"} <= set(file_of(asked.overrides).chain)
        of_broad, typed_arms = (checked_stage(one, stages, focused, tmp_path, str).design for one in (asked, by_hand))
    found = [(int(one["epochs_per_rollout"]), int(one["train_batch_size"])) for one in of_broad.settings()]
    assert found == [(1, 256), (2, 64), (4, 64), (1, 128)]
    assert of_broad.reference == of_broad.settings()[0]
    assert [one["off_policy"] for one in typed_arms.settings()] == ["on_policy", "e1_quarter"]
