"""What the folders given to a report become: settings told apart, seeds, references, and what is left out by name."""

import json
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
    study = read_study([tmp_path / "t"])
    assert (study.reference.label, ["(lr=9)" in note for note in study.notes]) == ("1", [True])


def test_a_run_given_twice_counts_once_and_is_named(two_rates: Path):
    study = read_study([two_rates, two_rates])
    assert seen(study) == {"1": [0, 1, 2, 3], "2": [0, 1, 2, 3]}
    assert len(study.problems) == 8
    assert "seed 0" in study.problems[0]


@pytest.mark.parametrize(
    ("field", "value"), [("reference", [1]), ("axes", [1, None]), ("runs", "x"), ("name", "../../etc"), ("seed", "x")]
)
def test_a_field_of_a_sweeps_state_that_is_no_such_field_is_a_damaged_state(two_rates: Path, field, value):
    state = json.loads((two_rates / "sweep.json").read_text())
    (state["runs"][0] if field in ("name", "seed") else state)[field] = value
    (two_rates / "sweep.json").write_text(json.dumps(state))
    study = read_study([two_rates])
    assert "sweep.json cannot be read" in study.problems[0]
    assert seen(study) == {"1": [0, 1, 2, 3], "2": [0, 1, 2, 3]}


def test_figures_that_no_run_writes_are_no_figures(two_rates: Path):
    huge = [f'{{"rollout_step": {k}, "reward/mean": {"-" * (k % 2)}1e308, "eval/accuracy": 0.5}}' for k in range(9)]
    (two_rates / "lr=1,seed=0/metrics.jsonl").write_text("\n".join(huge))
    (two_rates / "lr=1,seed=1/metrics.jsonl").write_text(f'{{"rollout_step": 1{"0" * 400}, "eval/accuracy": 0.5}}')
    (two_rates / "lr=1,seed=2/config.yaml").write_text("a: " + "[" * 3000 + "]" * 3000)
    study = read_study([two_rates])
    assert "reward/mean" not in study.settings[0].runs[0].series
    assert "holds no settings" in study.problems[0]
    assert build_report(study).figures


def test_a_run_that_is_gone_from_its_sweep_is_waiting_and_not_compared(two_rates: Path):
    shutil.rmtree(two_rates / "lr=2,seed=3")
    study = read_study([two_rates])
    gone = study.settings[1].runs[3]
    assert (gone.accuracy, gone.final) == (None, None)
    assert gone.status == "waiting"


def test_a_broken_summary_leaves_a_run_what_its_status_and_its_answers_say(two_rates: Path):
    for seed, text in ((0, "[]"), (1, '{"sta')):
        (two_rates / f"lr=2,seed={seed}/summary.json").write_text(text)
        write_status(two_rates / f"lr=2,seed={seed}", "finished")
    study = read_study([two_rates])
    assert [run.status for run in study.settings[1].runs] == ["finished"] * 4
    assert all(run.final for run in study.settings[1].runs)
    assert len(study.problems) == 2
    assert "summary.json" in study.problems[0]


def test_a_setting_that_was_chosen_on_these_problems_is_said_to_be_everywhere(tmp_path: Path):
    folder = tmp_path / "s"
    sweep(folder, "lr", ["1", "2", "3"], lambda value, seed: answers(seed, int(value) / 4), reference={"lr": "1"})
    report = build_report(read_study([folder / "lr=1", folder / "lr=3"]))
    assert "3 was chosen on these same problems" in report.verdicts[0].sentence
    assert "3 was chosen by its result" in report.lead
    assert "nothing was chosen" in build_report(read_study([folder])).lead


def test_what_changes_no_figure_makes_no_setting():
    base = {"seed": 0, "model.path": "a", "save_model": True, "hydra.run.dir": "x"}
    assert differing_keys([base, base | {"seed": 1, "save_model": False, "hydra.run.dir": "y"}]) == []
    assert differing_keys([base, base | {"model.path": "b"}, {"seed": 3}]) == ["model.path"]
