"""What the folders given to a report become: settings told apart, seeds, references, and what is left out by name."""

import shutil
from pathlib import Path

import pytest

from rlreason.records.reader import write_status
from rlreason.report.read import differing_keys, read_study
from rlreason.report.sections import build_report
from rlreason.report.study import Study
from tests.sweep_folders import CONFIG, answers, ended, sweep


def loose(folder: Path, settings: str, seed: int) -> Path:
    """A run outside of any sweep."""
    ended(folder, answers(seed, 0.5), config=f"{CONFIG}seed: {seed}\n{settings}")
    return folder


@pytest.fixture
def two_rates(tmp_path: Path) -> Path:
    """A sweep of two learning rates that are equally good."""
    sweep(tmp_path / "s", "lr", ["1", "2"], lambda value, seed: answers(seed, 0.5), reference={"lr": "1"})
    return tmp_path / "s"


def seen(study: Study) -> dict[str, list[int]]:
    return {one.label: [run.seed for run in one.runs] for one in study.settings}


def test_loose_runs_are_told_apart_by_what_differs_between_their_configs(tmp_path: Path):
    runs = [
        loose(tmp_path / f"{lr}_{seed}", f"optimizer: {{lr: {lr}}}\nthreads: {seed + 1}\n", seed)
        for lr in (1, 2)
        for seed in (1, 0)
    ]
    study = read_study(runs)
    assert seen(study) == {"1": [0, 1], "2": [0, 1]}
    assert study.axes == ["optimizer.lr"]
    assert study.question == "Which optimizer.lr?"


def test_runs_that_differ_in_too_much_or_nothing_are_told_apart_by_their_folders(tmp_path: Path):
    many = [loose(tmp_path / name, "".join(f"k{k}: {name}\n" for k in range(6)), 0) for name in ("old", "new")]
    assert [dict(one.key)["run"] for one in read_study(many).settings] == ["old", "new"]
    twice = [loose(tmp_path / place / "run", "", 0) for place in ("monday", "tuesday")]
    assert list(seen(read_study(twice))) == ["monday/run", "tuesday/run"]


def test_a_sweep_has_its_reference_first_and_a_part_of_one_what_was_given_first(tmp_path: Path):
    folder = tmp_path / "s"
    sweep(folder, "lr", ["1", "2", "3"], lambda value, seed: answers(seed, int(value) / 4), reference={"lr": "2"})
    assert list(seen(read_study([folder]))) == ["2", "1", "3"]
    part = read_study([folder / "lr=3", folder / "lr=2"])
    assert seen(part) == {"3": [0, 1, 2, 3], "2": [0, 1, 2, 3]}
    assert part.notes[0].startswith("lr=3 was the best of 3")
    assert read_study([folder / "lr=1", folder / "lr=2"]).notes == []
    sweep(tmp_path / "t", "lr", ["1", "2"], lambda value, seed: answers(seed, 0.5), reference={"lr": "9"})
    assert read_study([tmp_path / "t"]).reference.label == "1"


def test_a_run_given_twice_counts_once_and_is_named(two_rates: Path):
    study = read_study([two_rates, two_rates])
    assert seen(study) == {"1": [0, 1, 2, 3], "2": [0, 1, 2, 3]}
    assert (len(study.problems), "seed 0" in study.problems[0]) == (8, True)


def test_a_run_that_is_gone_waits_and_one_without_a_summary_is_what_its_status_says(two_rates: Path):
    shutil.rmtree(two_rates / "lr=2,seed=3")
    (two_rates / "lr=2,seed=0/summary.json").write_text("[]")
    write_status(two_rates / "lr=2,seed=0", "finished")
    study = read_study([two_rates])
    runs = study.settings[1].runs
    assert [run.status for run in runs] == ["finished"] * 3 + ["waiting"]
    assert [run.final is None for run in runs] == [False] * 3 + [True]
    assert ["summary.json" in problem for problem in study.problems] == [True]


def test_a_setting_that_was_chosen_on_these_problems_is_said_to_be(tmp_path: Path):
    folder = tmp_path / "s"
    sweep(folder, "lr", ["1", "2", "3"], lambda value, seed: answers(seed, int(value) / 4), reference={"lr": "1"})
    report = build_report(read_study([folder / "lr=1", folder / "lr=3"]))
    assert "3 was chosen on these same problems" in report.verdicts[0].sentence
    assert "was the best of 3 settings" in report.warnings[-1]


def test_what_changes_no_figure_makes_no_setting():
    base = {"seed": 0, "model.path": "a", "save_model": True, "hydra.run.dir": "x"}
    assert differing_keys([base, base | {"seed": 1, "save_model": False, "hydra.run.dir": "y"}]) == []
    assert differing_keys([base, base | {"model.path": "b"}, {"seed": 3}]) == ["model.path"]
