"""GPUs of their own for the runs of a sweep: none is another run's at the same time, and each comes back.

The GPUs are names in RLREASON_GPUS: a sweep knows nothing else of them.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from rlreason.cli.check import check_command_line
from rlreason.cli.flags import split_sweep_options
from rlreason.cli.launchers import set_up
from rlreason.errors import ConfigError
from rlreason.runtime.machine import usable_processors
from rlreason.sweeps.processes import GpuPlan, gpu_plan, machine_gpus
from rlreason.sweeps.state import read_state
from tests.starts import SMALL, rlreason


def of_runs(said: str) -> list[tuple[str, str, list[str]]]:
    """What a sweep said about its runs: (started or ended, run, GPUs)."""
    found = []
    for line in said.splitlines():
        if match := re.match(r"== (\S+?)(?:: started)? on GPU (.*?)(?:, beside .*)?$", line):
            found.append(("started", match[1], match[2].split(", ")))
        elif match := re.match(r"== (\S+): (failed|finished|accuracy|interrupted)", line):
            found.append(("ended", match[1], []))
    return found


def check_apart(said: str, each: int) -> int:
    """No GPU has two runs at a time; the most runs that there were at a time."""
    running: dict[str, list[str]] = {}
    most = 0
    for what, run, mine in of_runs(said):
        if what == "started":
            assert len(mine) == each
            assert not set(mine) & set(itertools.chain(*running.values())), said
            running[run] = mine
            most = max(most, len(running))
        else:
            running.pop(run)
    assert not running
    return most


def test_gpus_are_found_by_their_variable_and_by_nothing_on_a_machine_without():
    assert machine_gpus({"RLREASON_GPUS": "GPU-a, 3", "CUDA_VISIBLE_DEVICES": ""}) == ["GPU-a", "3"]
    assert machine_gpus({"RLREASON_GPUS": ""}) == []
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_runs_side_by_side_follow_from_gpus_and_what_was_typed():
    four = GpuPlan(("0", "1", "2", "3"))
    mine = set_up("processes", [], None, 9, four)
    assert (mine.side_by_side, mine.words[1]) == (4, "hydra.launcher.gpus=['0', '1', '2', '3']")
    assert set_up("processes", [], 8, 9, four).side_by_side == 4
    shared = GpuPlan(("0", "1", "2", "3"), per_run=0)
    assert [set_up("processes", [], jobs, 9, shared).side_by_side for jobs in (None, 8)] == [1, 8]
    assert set_up("joblib", [], None, 9, shared).words == ["hydra.launcher.n_jobs=1"]  # they would all use the first
    assert "hydra.launcher.gpus_per_node=4" in set_up("submitit_local", [], 2, 9, shared).words
    assert set_up("joblib", [], None, 99, GpuPlan()).side_by_side == usable_processors()
    assert set_up("processes", [], None, 9, GpuPlan()).side_by_side == 1  # a machine without: as ever


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["gpus_per_run=3"],
            r"gpus_per_run=3: this machine has 2 GPUs \(GPU-a, GPU-b\) for runs: set it to 2 or",
        ),
        pytest.param(
            ["rollout=vllm", "rollout.placement=second_gpu", "gpus_per_run=1"],
            r"gpus_per_run=1: a run .* asks for 2 GPUs",
            marks=pytest.mark.long,
        ),
        (["hydra/launcher=joblib", "gpus_per_run=1"], "hydra/launcher=joblib hands out no GPUs"),
        (["gpus=3"], r"a run of this sweep asks for 3 GPUs by its settings .*and this machine has 2 GPUs"),
    ],
)
def test_more_gpus_than_there_are_are_refused_before_anything_starts(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLREASON_GPUS", "GPU-a,GPU-b")
    with pytest.raises(ConfigError, match=said):
        check_command_line(["-m", "seed=0,1", *words, "hydra.sweep.dir=grid"], note=str)
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize("value", ["-1", "1.5", "x", ""])
def test_gpus_per_run_is_a_number_or_auto(value):
    with pytest.raises(ConfigError, match=f"gpus_per_run={value} must be a whole number or auto"):
        split_sweep_options([f"gpus_per_run={value}"], multirun=True)
    assert split_sweep_options(["gpus_per_run=auto"], multirun=True)[1].gpus_per_run is None
    assert split_sweep_options(["gpus_per_run=0"], multirun=True)[1].gpus_per_run == 0


def visible(grid: Path) -> list[str]:
    """What each run saw, as it has written it down."""
    found = [json.loads(path.read_text())["environment"] for path in sorted(grid.glob("*/provenance.json"))]
    return [one["CUDA_VISIBLE_DEVICES"] for one in found]


@pytest.mark.long
def test_real_runs_see_their_gpus_alone_and_a_machine_without_says_no_word_of_them(tmp_path):
    words = ["-m", "seed=0,1", "hydra.sweep.dir=grid", *SMALL, "n_steps=1", "eval_every=0", "save_model=false"]
    names = ["GPU-a", "GPU-b"]
    done = rlreason(*words, cwd=tmp_path, RLREASON_GPUS=",".join(names))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"GPUs       {', '.join(names)}: 1 a run, 2 runs side by side (jobs=N" in done.stdout
    assert check_apart(done.stdout, 1) == 2
    assert sorted(visible(tmp_path / "grid")) == names
    assert [run.gpus for run in read_state(tmp_path / "grid").runs] == [names[:1], names[1:]]
    again = rlreason(*words, "dry=true", cwd=tmp_path)
    assert "GPU" not in again.stdout


def test_a_machine_without_gpus_says_nothing_and_has_none_for_runs():
    assert GpuPlan().line(4, 8) == ""
    with pytest.raises(ConfigError, match="this machine has no GPU for runs: leave it out"):
        gpu_plan([], [], 1, here=True)
