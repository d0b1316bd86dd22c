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
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.runtime.machine import usable_processors
from rlreason.sweeps.launcher import Jobs, jobs_of, machine_gpus
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


def set_up(runs, *words: str, jobs: int | None = None, per_run: int | None = None, absent=None) -> Jobs:
    return jobs_of(words, runs, jobs, per_run, str, absent)


def test_runs_side_by_side_follow_from_gpus_and_what_was_typed(monkeypatch, composed):
    nine = [typed(composed())] * 9
    monkeypatch.setenv("RLREASON_GPUS", "0,1,2,3")
    mine = set_up(nine)
    assert (mine.side_by_side, mine.words[1]) == (4, "hydra.launcher.gpus=['0', '1', '2', '3']")
    assert set_up(nine, jobs=8).side_by_side == 4
    assert [set_up(nine, jobs=jobs, per_run=0).side_by_side for jobs in (None, 8)] == [1, 8]
    assert (set_up(nine, per_run=2).side_by_side, set_up(nine[:1]).side_by_side) == (2, 1)
    joblib, local = "hydra/launcher=joblib", "hydra/launcher=submitit_local"
    assert set_up(nine, joblib).words == ["hydra.launcher.n_jobs=1"]  # they would all use the first
    assert "hydra.launcher.gpus_per_node=4" in set_up(nine, local, jobs=2).words
    monkeypatch.setenv("RLREASON_GPUS", "")
    assert set_up(nine * 9, joblib).side_by_side == usable_processors()
    assert (set_up(nine).side_by_side, set_up(nine, jobs=4).side_by_side) == (1, 4)  # a machine without: as ever
    assert set_up(nine).lines() == {"launcher": "", "GPUs": ""}
    with pytest.raises(ConfigError, match="this machine has 0 for runs"):
        set_up(nine, per_run=1)
    absent: list[str] = []
    assert set_up(nine, per_run=1, absent=absent).side_by_side == 1  # a plan for elsewhere
    assert len(absent) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["gpus_per_run=3"],
            r"asks for 3 GPUs .* this machine has 2 for runs \(GPU-a, GPU-b\)",
        ),
        pytest.param(
            ["rollout=vllm", "rollout.placement=second_gpu", "gpus_per_run=1"],
            r"gpus_per_run=1: a run .* asks for 2 GPUs",
            marks=pytest.mark.long,
        ),
        (["hydra/launcher=joblib", "gpus_per_run=1"], "hydra/launcher=joblib hands out no GPUs"),
        (["gpus=3"], r"a run of this sweep asks for 3 GPUs .*and this machine has 2 for runs"),
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
    assert f"GPUs       {', '.join(names)}: 1 a run, 2 runs at a time (jobs=N" in done.stdout
    assert check_apart(done.stdout, 1) == 2
    assert sorted(visible(tmp_path / "grid")) == names
    assert [run.gpus for run in read_state(tmp_path / "grid").runs] == [names[:1], names[1:]]
    again = rlreason(*words, "dry=true", cwd=tmp_path)
    assert "GPU" not in again.stdout
