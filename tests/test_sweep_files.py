"""The sweeps of `multirun_sweeps/`: every cell composes at every scale and experiment; names, folders and blocks."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hydra import compose
from omegaconf import OmegaConf

from rlreason.cli.check import check_command_line
from rlreason.cli.check_runs import designed as design_of
from rlreason.cli.check_runs import file_of, stage_of
from rlreason.cli.flags import Request, composing, read
from rlreason.config.leaves import resource_dir
from rlreason.config.store import register, run_name, sweep_file, typed
from rlreason.errors import ConfigError
from tests.sweep_folders import designed

FILES = sorted(resource_dir("multirun_sweeps").glob("*.yaml"))
SWEEPS = [path.stem for path in FILES]
EXPERIMENTS = [f"experiment={name}" for name in ("cs336_2025", "cs336_2026", "pku_hw3")]
PRETRAINED = ["model=smollm2_135m", "data=gsm8k"]  # the tiny model reads too little for the paper's responses
PLACES = [["scale=embedded"], ["scale=laptop", *PRETRAINED], ["scale=paper", *PRETRAINED], *([e] for e in EXPERIMENTS)]


def own(folder: Path, blocks: str, more: str = "") -> list[str]:
    """Write a sweep of one's own, with these blocks below `hydra.sweeper` and `more` at the top."""
    (folder / "sweep").mkdir()
    below = textwrap.indent(blocks, "    ")
    (folder / "sweep/mine.yaml").write_text(f"# @package _global_\n{more}hydra:\n  sweeper:\n{below}")
    return ["--config-dir", str(folder), "sweep=mine"]


def mistake(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_command_line(list(words), note=str)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def everywhere() -> list[object]:
    """Every sweep in every place. The quick tests: two cells of every third sweep in one place."""
    cases = []
    for number, name in enumerate(SWEEPS):
        for turn, place in enumerate(PLACES):
            if turn == number % len(PLACES):
                marks = [pytest.mark.long] * (number % 3 > 0)
                cases.append(pytest.param(name, place, False, marks=marks, id=f"{name} {place[0]} two"))
            cases.append(pytest.param(name, place, True, marks=pytest.mark.long, id=f"{name} {place[0]}"))
    return cases


@pytest.mark.parametrize(("name", "place", "every"), everywhere())
def test_every_cell_of_every_sweep_composes_and_keeps_the_rules(name, place, every, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for before in ("stage_1_sft", "stage_2_ei", "pku_grpo"):  # what other sweeps leave
        for seed in range(3):
            (model := tmp_path / f"runs/sweeps/{before}/seed={seed}/model").mkdir(parents=True)
            (model / "config.json").write_text("{}")
    if name.startswith("stage_") and place != PLACES[0]:
        return  # three stages of the tiny model
    asked: Request = read(["-m", f"sweep={name}", *place])
    with composing(asked):
        if file_of(asked.overrides).chain:
            return
        runs = design_of(asked, note=str).runs
        for run in runs if every else (runs[0], runs[-1]):
            cfg = compose("config", run.overrides)
            OmegaConf.resolve(cfg)
            typed(cfg)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sweep_file_says_what_it_is_for_and_names_no_model_and_no_data_of_its_own(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    content = OmegaConf.to_container(OmegaConf.load(path))
    file = sweep_file(path.stem, lambda name: OmegaConf.to_container(OmegaConf.load(path.with_stem(name))))
    if path.stem.startswith("stage_"):
        return
    assert "Paper:" in "".join(head)
    assert "Built-in task:" in "".join(head)
    assert not {"data", "model", "scale"} & (file.settings | set(file.chosen) | set(content))
    assert file.chain or file.embedded


def test_designing_a_sweep_loads_no_torch():
    code = (
        "import sys; from rlreason.config.store import register; from rlreason.cli.flags import read, composing; "
        "from rlreason.cli.check_runs import designed; register(); asked = read(['-m', 'sweep=grpo_baselines'])\n"
        "with composing(asked): assert len(designed(asked).runs) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_names_say_the_swept_values_in_full_in_one_order_with_the_seed_last():
    one = designed("learning_rate=0.0003,1e-3", "loss=grpo_clip,gspo", "seed=0,1", "n_steps=3")
    other = designed("seed=1,0", "n_steps=3", "loss=grpo_clip,gspo", "learning_rate=3e-4,0.001")
    assert [run.name for run in one.runs][:3] == [
        "learning_rate=3e-4,loss=grpo_clip,seed=0",
        "learning_rate=3e-4,loss=gspo,seed=0",
        "learning_rate=1e-3,loss=grpo_clip,seed=0",
    ]
    assert {run.name: run.setting for run in one.runs} == {run.name: run.setting for run in other.runs}
    assert (one.axes, one.seeds, len(one.settings())) == (["learning_rate", "loss"], [0, 1], 4)
    assert [run.seed for run in one.runs] == [0] * 4 + [1] * 4  # every setting once, then again
    assert designed("loss=gspo,grpo_clip").runs[0].name == "loss=gspo,seed=0"


def test_long_and_odd_values_stay_apart():
    words = [f"data.path=/{'x' * 60}/{n}" for n in "ab"] + ["data.path='a b'", "data.path='a-b'"]
    assert len({run_name([word, "seed=0"]) for word in words}) == 4
    name = run_name(["data.path=" + "/x" * 90, *(f"key_{n}={'v' * 50}" for n in range(6)), "seed=7"])
    assert name.endswith(",seed=7")
    assert len(name) <= 190
    assert run_name(["a=1,b=2", "seed=0"]) != run_name(["a=1", "b=2", "seed=0"])


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["sweep=grpo_baselines", "seed=0,1"], "grpo_baselines"),
        (["sweep=grpo_baselines", "data=stories", "n_steps=3"], "grpo_baselines,data=stories"),
        (["loss=gspo,cispo", "learning_rate=1e-3,1e-4", "seed=0,1"], "learning_rate,loss"),
        (["seed=0,1"], "seeds"),
        (["seed=0,1", "hydra.sweep.dir=/tmp/mine"], "/tmp/mine"),
    ],
)
def test_a_sweep_has_a_folder_of_its_own(words, folder):
    assert designed(*words).folder == Path("runs/sweeps") / folder


def test_the_words_of_a_sweep_reach_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = check_command_line(["-m", "loss=gspo,cispo", "jobs=2", "dry=true", "sweep_name=mine"], note=str)
    assert (asked.options.jobs, asked.options.dry, asked.folder) == (2, True, Path("runs/sweeps/mine"))
    assert asked.design is not None
    assert asked.design.runs[0].overrides == ["loss=gspo", "seed=0"]
    for word in ("jobs=0", "dry=maybe", "sweep_name=a/b", "carry=nowhere", "carry=[]"):
        assert mistake("-m", "seed=0,1", word).startswith(f"{word} ")
    assert mistake("seed=0", "jobs=2").startswith("jobs=2 ")
    assert "the sweep's folder" in mistake("-m", "seed=0,1", "sweep_name=a", "hydra.sweep.dir=b")


def test_the_embedded_block_is_read_at_its_scale_alone_and_typed_words_win():
    rates = {run.setting["learning_rate"] for run in designed("sweep=grpo_learning_rate").runs}
    assert rates == {"3e-5", "1e-4", "3e-4", "1e-3", "0.01"}
    paper = designed("sweep=grpo_learning_rate", "experiment=cs336_2025")
    assert paper.runs[0].overrides == [
        "sweep=grpo_learning_rate",
        "experiment=cs336_2025",
        "learning_rate=1e-6",
        "seed=0",
    ]
    assert paper.reference == {"learning_rate": "1e-5"}
    mine = designed("sweep=grpo_learning_rate", "data=stories", "n_steps=2", "learning_rate=1e-3,2e-3")
    assert [run.setting["learning_rate"] for run in mine.runs] == ["1e-3", "2e-3"]
    assert mine.runs[0].overrides[1:3] == ["data=stories", "n_steps=2"]
    assert mine.reference is None
    assert "run a sweep for each scale" in mistake("-m", "sweep=grpo_learning_rate", "scale=embedded,laptop")


def test_cells_multiply_with_axes_and_seeds_and_are_named_in_full():
    star = designed("sweep=expert_iteration", "seed=0,1")
    assert len(star.runs) == 14
    assert star.axes == ["group_size", "question_batch_size", "sft_epochs"]
    assert star.runs[0].name == "group_size=4,question_batch_size=256,sft_epochs=2,seed=0"
    assert star.reference == star.runs[0].setting
    assert [word for word in star.runs[1].overrides if word.startswith("question_batch_size")] == [
        "question_batch_size=128"
    ]
    after = designed("sweep=pku_before_and_after", "experiment=pku_hw3", "model=qwen3_0_6b_base").runs[1]
    assert after.overrides[-2:] == ["model.path='runs/sweeps/pku_grpo/seed=${seed}'", "seed=0"]
    assert len(designed("sweep=sft_dataset_size", "data=gsm8k", "model=smollm2_135m").runs) == 10
    sizes = designed("sweep=sft_dataset_size")
    assert len(sizes.settings()) == 10
    assert sizes.reference == {"data.limit": "2048", "epochs": "4", "n_steps": "null"}


@pytest.mark.parametrize(
    ("words", "cell"),
    [
        (["sweep=expert_iteration", "group_size=8"], "group_size=2"),
        (["sweep=kl", "kl_coef=0.01,0.02"], "kl_coef=0.001"),
        (["sweep=controls", "prompt.reward=r1_zero"], "prompt.reward="),
    ],
)
def test_a_typed_word_that_takes_a_cells_own_setting_away_is_refused(words, cell):
    """Cells without what they differ in fell together, and fewer runs were made without a word."""
    said = mistake("-m", *words)
    assert words[-1] in said
    assert cell in said


def test_a_stage_that_goes_on_with_a_model_keeps_it_where_the_first_one_was_typed(tmp_path):
    """model.path=DIR took the second cell of pku_before_and_after away."""
    runs = designed("sweep=pku_before_and_after", "experiment=pku_hw3", f"model.path={tmp_path}").runs
    paths = [[word for word in run.overrides if word.startswith("model.path=")] for run in runs]
    assert paths == [[f"model.path={tmp_path}"], ["model.path='runs/sweeps/pku_grpo/seed=${seed}'"]]


def test_an_option_of_an_axis_gives_way_to_the_settings_that_it_stands_for():
    """The header's own advice made sixteen runs, twelve of them copies."""
    two = designed("sweep=grpo_off_policy_focused", "epochs_per_rollout=1,2", "train_batch_size=128,256")
    assert len(two.runs) == 4
    assert two.axes == ["epochs_per_rollout", "train_batch_size"]
    assert two.reference == {"epochs_per_rollout": "1", "train_batch_size": "256"}


@pytest.mark.parametrize(
    "words",
    [
        ["sweep=grpo_off_policy_focused", "epochs_per_rollout=1"],
        ["off_policy=on_policy,e1_quarter", "train_batch_size=64"],
        ["sampling.temperature=1,1.0"],
    ],
)
def test_settings_that_are_equal_once_resolved_are_refused_by_name(words):
    said = mistake("-m", *words)
    assert "make the same run" in said
    assert words[0].partition("=")[2].partition(",")[0] in said or "off_policy" in said or "objective" in said


def test_a_file_of_ones_own_works_the_same(tmp_path):
    cells = "cells: [[loss=gspo], [loss=cispo, n_steps=7]]\nreference: first\n"
    words = own(tmp_path, f"{cells}embedded: {{data: stories_long, n_steps: 40, seed: '3,4'}}\n")
    design = designed(*words)
    assert design.reference == {"loss": "gspo", "n_steps": "40"}
    assert [run.name for run in design.runs][:2] == ["loss=gspo,n_steps=40,seed=3", "loss=cispo,n_steps=7,seed=3"]
    assert "data=stories_long" in design.runs[0].overrides
    check_command_line(["-m", *words], note=str)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cells: [loss=gspo]", "sweep/mine.yaml"),
        ("cells: [['loss=gspo,cispo']]", "loss=gspo"),
        ("cells: [[los=gspo]]", "los"),
        ("cell: [[loss=gspo]]", "sweep/mine.yaml"),
        ("embedded: 3", "embedded=3"),
        ("embedded: {data: {name: x}}", "data is nested"),
        ("cells: [[seed=a]]", "seed=a"),
        ("carries: 3", "carries=3"),
        ("chain: [mine]", "is a chain"),
        ("reference: loss", "reference=loss"),
        ("cells: [[loss=gspo], [loss=cispo]]\nreference: [los=cispo]", "los=cispo"),
        ("chain: [grpo_assignment]", "grpo_assignment"),
    ],
)
def test_a_wrong_block_is_answered_in_one_line(text, says, tmp_path):
    assert says in mistake("-m", *own(tmp_path, text + "\n"))


def test_what_stands_in_the_wrong_place_of_a_file_is_answered_in_one_line(tmp_path):
    blocks = "chain: [grpo_baselines]\n"
    assert "n_steps" in mistake("-m", *own(tmp_path, blocks, "n_steps: 3\n"))
    (tmp_path / "sweep/mine.yaml").write_text("# @package _global_\ncells: [[loss=gspo]]\n")
    assert "write cells below hydra.sweeper" in mistake("-m", "--config-dir", str(tmp_path), "sweep=mine")


def test_what_is_carried_gives_way_to_what_was_typed_and_to_what_the_sweep_sets():
    def carried(*words: str) -> list[str]:
        return (
            designed(*words, carried=["learning_rate=1e-3", "loss=no_baseline", "off_policy=e4_full"]).runs[0].overrides
        )

    words = carried("sweep=grpo_off_policy_clip_ablation", "learning_rate=3e-3")
    assert [word for word in words if word.startswith(("learning_rate", "loss", "off_policy"))] == [
        "learning_rate=3e-3", "off_policy=e4_full", "loss=grpo_clip",
    ]  # fmt: skip
    assert "loss=no_baseline" in carried("sweep=grpo_length_normalization")


@pytest.fixture
def chain(tmp_path, monkeypatch) -> Request:
    monkeypatch.chdir(tmp_path)
    register()
    words = own(tmp_path, "chain: [grpo_baselines, pku_before_and_after]\nparams: {seed: '0,1'}\n")
    return check_command_line(["-m", *words, "n_steps=2", "group_size=4", "experiment=null"], note=str)


@pytest.mark.long
def test_a_chain_has_its_stages_in_folders_below_its_own(chain):
    assert (chain.design, chain.folder) == (None, Path("runs/sweeps/mine"))
    with composing(chain):
        first = stage_of(chain, chain.chain[0], note=str)
        assert first.design is not None
        assert first.design.folder == Path("runs/sweeps/mine/grpo_baselines")
        assert first.design.seeds == [0, 1]
        assert "n_steps=2" in first.design.runs[0].overrides
        second = stage_of(chain, chain.chain[1], note=str, started=False)
    assert second.design is not None
    assert "n_steps=2" not in second.design.runs[0].overrides  # nothing is trained there
    assert "model.path='runs/sweeps/mine/pku_grpo/seed=${seed}'" in second.design.runs[1].overrides
