"""What a sweep knows of its runs, what it does with those that ended before, and the table at its end."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import SWEEP_OF_TWO

from rlreason.cli.start_sweep import print_table
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.records.reader import write_status
from rlreason.report.read import read_study
from rlreason.report.tables import accuracy_of
from rlreason.report.verdicts import verdicts_of
from rlreason.runtime.files import holder, run_lock
from rlreason.runtime.machine import usable_processors
from rlreason.sweeps.closing import JudgedSetting, closing, settings_table
from rlreason.sweeps.launcher import jobs_of
from rlreason.sweeps.state import (
    FILE,
    Design,
    RunState,
    SweepState,
    new_state,
    read_state,
    refuse_changed,
    write_state,
)
from tests.starts import rlreason
from tests.sweep_folders import sweep

CONFIG = "algorithm: grpo\nn_steps: 10\nthreads: 1\n"


def design(folder: Path, *learning_rates: str, seeds: int = 2, words: tuple[str, ...] = ()) -> Design:
    runs = [
        RunState(f"learning_rate={lr},seed={s}", [f"learning_rate={lr}", f"seed={s}", *words], {"learning_rate": lr}, s)
        for lr in learning_rates
        for s in range(seeds)
    ]
    return Design("grid", folder, runs, ["learning_rate"], {"learning_rate": learning_rates[0]})


def finished(folder: Path, accuracy: float | None = 0.5, config: str = CONFIG, **more: object) -> None:
    """A run folder as a run leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    summary = {"status": "finished", "reason": "", "accuracy": accuracy, "accuracy_interval": [0.4, 0.6]}
    summary |= {
        "accuracy_before": 0.25,
        "length": 12.0,
        "eval_problems": 64,
        "protocol": {"hash": "ab"},
        "seconds": 9.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary | more))


def test_what_is_known_of_a_sweep_comes_from_its_folders(tmp_path):
    grid = design(tmp_path, "1", "2")
    finished(tmp_path / "learning_rate=1,seed=0")
    finished(tmp_path / "learning_rate=1,seed=1", 0.7)
    write_state(tmp_path, new_state(grid, 1, "processes", "", []))
    state = read_state(tmp_path)
    assert [run.status for run in state.runs] == ["finished", "finished", "waiting", "waiting"]
    assert (state.status, state.axes, state.reference) == ("interrupted", ["learning_rate"], {"learning_rate": "1"})
    first = state.runs[0]
    assert (first.accuracy, first.accuracy_interval, first.accuracy_before) == (0.5, (0.4, 0.6), 0.25)
    assert (first.length, first.problems, first.protocol, first.seconds) == (12.0, 64, "ab", 9.0)
    (tmp_path / "learning_rate=1,seed=1").rename(tmp_path / "moved away")
    (tmp_path / "learning_rate=2,seed=0").mkdir()
    write_status(tmp_path / "learning_rate=2,seed=0", "running")  # and nobody holds it
    statuses = {run.name: run.status for run in read_state(tmp_path).runs}
    assert statuses["learning_rate=1,seed=1"] == "waiting"
    assert statuses["learning_rate=2,seed=0"] == "interrupted"


@pytest.mark.parametrize("text", [None, "", "{", '{"version": 1}', '{"version": 99}', "[]"])
def test_a_damaged_file_is_made_again_from_the_run_folders(tmp_path, text):
    for seed in (0, 1):
        finished(tmp_path / f"learning_rate=1,seed={seed}", 0.5 + seed / 4)
    if text is not None:
        (tmp_path / FILE).write_text(text)
    state = read_state(tmp_path)
    assert [(run.setting, run.seed, run.accuracy) for run in state.runs] == [
        ({"learning_rate": "1"}, 0, 0.5),
        ({"learning_rate": "1"}, 1, 0.75),
    ]
    assert state.status == "finished"
    with pytest.raises(ConfigError, match="is no folder of a sweep"):
        read_state(tmp_path / "learning_rate=1,seed=0")


def test_a_diverged_run_without_a_figure_counts_as_zero_and_says_so(tmp_path):
    grid = design(tmp_path, "1", seeds=2)
    finished(tmp_path / "learning_rate=1,seed=0", 0.6)
    finished(tmp_path / "learning_rate=1,seed=1", None, status="diverged:weights", reason="no numbers")
    state = new_state(grid, 1, "processes", "", [])
    text = closing(state, tmp_path, {})
    assert " 0.300 " in text
    assert "diverged:weights (no numbers; without a figure of its own, it counts as accuracy 0)" in text
    assert state.code == 0


def test_the_table_that_ends_a_sweep_has_the_intervals_and_verdicts_of_the_report(tmp_path, capsys):
    """Bug: 0.645 to 1.042, and 0.625 to 0.625 where two seeds tie."""
    shares = {"1": (0.5, 0.5, 0.5), "2": (0.95, 0.75, 0.8), "3": (0.55, 0.5, 0.6), "4": (0.97, 0.96, 0.97)}
    folder = tmp_path / "s"

    def right(value: str, seed: int) -> list[bool]:
        return (np.random.default_rng(seed).permutation(100) < round(100 * shares[value][seed])).tolist()

    sweep(folder, "lr", list(shares), right, seeds=(0, 1, 2), reference={"lr": "1"})
    state = print_table(folder)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    study = read_study([folder])
    words = {v.setting: v.word for v in verdicts_of(study)}
    assert len(state.runs) == 12
    assert len(study.settings) == 4
    for one in study.settings:
        mean, low, high = accuracy_of(one)
        assert 0 <= low < mean < high <= 1
        line = lines[dict(one.key)["lr"]]
        assert f" {mean:.3f} {low:.3f} to {high:.3f} " in " ".join(line.split())
        assert words.get(one.label, "reference") in line
    assert "better" in lines["4"]


def state_of(*runs: RunState, reference: dict[str, str] | None = None) -> SweepState:
    return SweepState("grid", "", ["lr"], reference, "finished", 2, "processes", list(runs))


def test_the_table_has_a_line_for_each_setting_best_first(tmp_path):
    def run(lr: str, seed: int, accuracy: float | None, status: str = "finished", reason: str = "") -> RunState:
        name, interval = f"lr={lr},seed={seed}", None if accuracy is None else (accuracy - 0.1, accuracy + 0.1)
        return RunState(
            name, [], {"lr": lr}, seed, status, reason, accuracy=accuracy, accuracy_interval=interval, length=8.0
        )

    low, high = [run("1e-4", 0, 0.5), run("1e-4", 1, 0.6)], [run("1e-3", 0, 0.8), run("1e-3", 1, None, "failed", "x")]
    state = state_of(*low, *high, run("1", 0, None, "waiting"), reference={"lr": "1e-4"})
    head, first, second, third = settings_table(state, {}).splitlines()
    assert head.split() == ["lr", "seeds", "accuracy", "95%,", "over", "seeds", "length", "status"]
    assert first.split() == ["1e-3", "1", "of", "2", "0.800", "-", "8.0", "1", "finished,", "1", "failed"]
    assert second.split()[:3] == ["1e-4", "2", "0.550"]
    assert second.endswith("finished (reference)")
    assert third.split() == ["1", "0", "of", "1", "-", "-", "8.0", "waiting"]
    text = closing(state, Path("nowhere"), {})
    assert "! lr=1e-3,seed=1: failed (x)" in text
    assert "left: 2 of 5 runs; type the sweep again" in text
    assert "a setting with one seed has no interval over seeds" in text
    assert "wall clock" not in text
    (tmp_path / "lr=1e-3,seed=0").mkdir()
    (tmp_path / "lr=1e-3,seed=0/compliance.md").write_text("# Compliance\n\nleaderboard: FAIL (hours); accuracy 0.8\n")
    card = tmp_path / "lr=1e-3,seed=0/compliance.md"
    said = f"lr=1e-3,seed=0: leaderboard: FAIL (hours); accuracy 0.8; see {card}"
    assert closing(state, tmp_path, {}).endswith(said)
    alone = state_of(run("1", 0, 0.5), run("2", 0, 0.6))
    alone.runs[0].shared_machine = True
    text = closing(alone, Path("nowhere"), {run.key: JudgedSetting((0.6, 0.5, 0.7), "better") for run in alone.runs})
    assert "95%, over problems" in text
    assert "0.500 to 0.700" in text
    assert "one seed: the intervals are over problems" in text
    assert "no verdict on wall clock" in text


def test_a_run_with_other_settings_is_refused_with_the_difference_and_the_cures(tmp_path):
    grid = design(tmp_path, "1", seeds=1)
    finished(tmp_path / "learning_rate=1,seed=0")
    refuse_changed(grid, lambda run: CONFIG)
    refuse_changed(grid, lambda run: CONFIG.replace("threads: 1", "threads: 2"))  # the figures stay
    words = r"a finished run learning_rate=1,seed=0 with other settings \(n_steps=10 there, 20 here\): move its folder"
    with pytest.raises(ConfigError, match=words) as refused:
        refuse_changed(grid, lambda run: CONFIG.replace("10", "20"))
    assert "sweep_name=NAME" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_that_another_process_writes_is_refused(tmp_path):
    place = tmp_path / "learning_rate=1,seed=0"
    code = (
        "import sys; from pathlib import Path; from rlreason.runtime.files import run_lock\n"
        "with run_lock(Path(sys.argv[1]), print): print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writer = subprocess.Popen([sys.executable, "-c", code, str(place)], **pipes)  # until its input ends
    try:
        assert writer.stdout.readline() == b"held\n"
        with pytest.raises(
            ConfigError, match=r"seed=0 is being written by process \d+ since .*: wait for it or end it"
        ):
            refuse_changed(design(tmp_path, "1", seeds=1), lambda run: CONFIG)
    finally:
        writer.communicate(timeout=600)
    assert holder(place) is None
    with run_lock(tmp_path / "mine", print):
        assert holder(tmp_path / "mine") == "this process"


def test_a_launcher_is_set_up_for_the_jobs_that_were_asked_for(composed):
    runs = [typed(composed())] * 6
    local = jobs_of(["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"], runs, 2, None, str)
    assert (local.batch, local.side_by_side, local.words) == (2, 2, [])
    joblib = "hydra/launcher=joblib"
    assert jobs_of([joblib, "hydra.launcher.n_jobs=3"], runs, None, None, str).side_by_side == 3
    assert jobs_of([joblib], runs * 9, None, None, str).side_by_side == usable_processors()
    assert jobs_of([joblib], runs * 9, 1, None, str).side_by_side == 1  # typed


def test_two_runs_side_by_side_are_said_written_down_and_not_run_again(finished_sweep, tmp_path):
    state = read_state(finished_sweep.folder)
    assert [(run.status, run.shared_machine, run.setting) for run in state.runs] == [("finished", True, {})] * 2
    assert all(run.accuracy is not None and run.protocol and run.seconds and run.ended for run in state.runs)
    assert (state.jobs, state.launcher, state.status) == (2, "processes", "finished")
    assert "2 of 2 done" in finished_sweep.printed
    assert "95%, over seeds" in finished_sweep.printed
    assert len(list((finished_sweep.folder / "console").glob("*.log"))) == 2
    shutil.copytree(finished_sweep.folder, tmp_path / "sweep")
    words = ["-m", *SWEEP_OF_TWO, "hydra.sweep.dir=sweep"]
    again = rlreason(*words, cwd=tmp_path)
    assert again.stdout.count("not run again") == 2
    changed = rlreason(*words, "group_size=2", cwd=tmp_path)
    assert changed.returncode == 2
    assert "with other settings (group_size=4 there, 2 here): move its folder away, or give" in changed.stderr
