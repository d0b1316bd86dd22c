"""What a sweep knows of its runs, their launchers and GPUs, what ended before, its table, and what a kill leaves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import SWEEP_OF_TWO

from hydra_plugins.rlreason_sweeps import Processes
from rlreason.cli.sweep import run_looks, written_report
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.records.provenance import provenance
from rlreason.records.reader import write_status
from rlreason.report.read import read_study
from rlreason.report.verdicts import verdicts_of
from rlreason.runtime.files import holder, run_lock
from rlreason.runtime.machine import usable_processors
from rlreason.sweeps.launcher import Jobs, jobs_of, machine_gpus, outcome_text, places
from rlreason.sweeps.state import (
    FILE,
    Judged,
    RunState,
    Setting,
    SweepState,
    begun,
    looks_text,
    read_state,
    refuse_changed,
    write_state,
)
from rlreason.sweeps.texts import closing, settings_table
from tests.starts import ENV, SMALL, rlreason
from tests.sweep_folders import answers, checked, ended
from tests.waiting import wait_for

JOBLIB, SUBMITIT = "hydra/launcher=joblib", "hydra/launcher=submitit_local"
CONFIG = "algorithm: grpo\nn_steps: 10\nthreads: 1\n"
SUMMARY = {"status": "finished", "reason": "", "accuracy_interval": [0.4, 0.6], "accuracy_before": 0.25, "length": 12.0}
SUMMARY |= {"eval_problems": 64, "protocol": {"hash": "ab"}, "seconds": 9.0}


def design(*rates: str, seeds: int = 2) -> SweepState:
    runs = [RunState(f"lr={lr},seed={s}", [], {"lr": lr}, s) for lr in rates for s in range(seeds)]
    return SweepState("grid", "", ["lr"], {"lr": rates[0]}, "waiting", 1, "processes", runs)


def finished(folder: Path, accuracy: float | None = 0.5, **more: object) -> None:
    """A run folder as a run leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"accuracy": accuracy} | more))


def test_what_is_known_of_a_sweep_comes_from_its_folders(tmp_path):
    finished(tmp_path / "lr=1,seed=0")
    finished(tmp_path / "lr=1,seed=1", None, status="diverged:weights", reason="no numbers")
    write_state(tmp_path, begun(design("1", "2"), tmp_path))
    finished(tmp_path / "noted", notices={"truncated": 2, "entropy": 1})  # its lines may be shown nowhere else
    assert outcome_text(tmp_path, "noted").endswith("finished, notices: 3")
    shutil.rmtree(tmp_path / "noted")
    state = read_state(tmp_path)
    assert [run.status for run in state.runs] == ["finished", "diverged:weights", "waiting", "waiting"]
    assert (state.status, state.axes, state.reference) == ("interrupted", ["lr"], {"lr": "1"})
    first = state.runs[0]
    assert (first.accuracy, first.accuracy_interval, first.accuracy_before) == (0.5, (0.4, 0.6), 0.25)
    assert (first.length, first.problems, first.protocol, first.seconds) == (12.0, 64, "ab", 9.0)
    text = closing(state, tmp_path, {})
    assert " 0.250 " in text  # a diverged run without a figure counts as zero, and says so
    assert "diverged:weights (no numbers; without a figure" in text
    (tmp_path / "lr=1,seed=1").rename(tmp_path / "moved away")
    (tmp_path / "lr=2,seed=0").mkdir()
    write_status(tmp_path / "lr=2,seed=0", "running")  # and nobody holds it
    assert [run.status for run in read_state(tmp_path).runs] == ["finished", "waiting", "interrupted", "waiting"]
    (tmp_path / FILE).write_text("{")  # damaged: the names say all but the reference, as where there is none
    assert {"lr": "1"} in [run.setting for run in read_state(tmp_path).runs]
    with pytest.raises(ConfigError, match="is no folder of a sweep"):
        read_state(tmp_path / "lr=1,seed=0")


def test_the_table_has_a_line_for_each_setting_best_first(tmp_path):
    def run_of(lr: str, seed: int, accuracy: float | None, status: str = "finished", **more) -> RunState:
        return RunState(f"lr={lr},seed={seed}", [], {"lr": lr}, seed, status, accuracy=accuracy, length=8.0, **more)

    state = SweepState("grid", "", ["lr"], {"lr": "1e-4"}, "finished", 2, "processes", [
        run_of("1e-4", 0, 0.5), run_of("1e-4", 1, 0.6), run_of("1e-3", 0, 0.8, protocol="aa"),
        run_of("1e-3", 1, None, "failed", reason="x"), run_of("1", 0, None, "waiting", protocol="bb"),
    ])  # fmt: skip
    _, first, second, third = settings_table(state, {}).splitlines()
    assert first.split() == ["1e-3", "1", "of", "2", "0.800", "-", "-", "8.0", "1", "finished,", "1", "failed"]
    assert second.split()[:3] == ["1e-4", "2", "0.550"]
    assert second.endswith("finished (reference)")
    assert third.split() == ["1", "0", "of", "1", "-", "-", "-", "8.0", "waiting"]
    judged: Judged = None, "cannot tell"  # but there is no figure of it
    assert "cannot tell" not in settings_table(state, {(("lr", "1"),): judged})
    card = tmp_path / "lr=1e-3,seed=0/compliance.md"
    card.parent.mkdir()
    card.write_text("# Compliance\n\nleaderboard: FAIL (hours); accuracy 0.8\n")
    text = closing(state, tmp_path, {})
    for part in ("leaderboard: FAIL (hours)", str(card), "! lr=1e-3,seed=1: failed (x)", "protocol aa, bb"):
        assert part in text
    state.runs = [run_of("1", 0, 0.5, shared_machine=True), run_of("2", 0, 0.6)]
    assert "0.500 to 0.700" in closing(state, tmp_path, {run.key: ((0.6, 0.5, 0.7), "better") for run in state.runs})


def test_a_run_with_other_settings_or_that_another_process_writes_is_refused(tmp_path):
    runs, place = design("1", seeds=1).runs, tmp_path / "lr=1,seed=0"
    finished(place)
    refuse_changed(tmp_path, runs, lambda run: CONFIG)
    (place / "config.yaml").write_text(CONFIG + "model: {name: tiny}\n")  # of a run from before `device`
    refuse_changed(tmp_path, runs, lambda run: CONFIG + "model: {name: tiny}\ndevice: auto\n")
    (place / "config.yaml").write_text(CONFIG)
    refuse_changed(tmp_path, runs, lambda run: CONFIG.replace("threads: 1", "threads: 2"))  # the figures stay
    with pytest.raises(ConfigError, match=r"lr=1,seed=0 .*n_steps=10 there, 20 here\).*sweep_name=NAME"):
        refuse_changed(tmp_path, runs, lambda run: CONFIG.replace("10", "20"))
    sources = {"loss=mine:tapered": "def tapered(): ..."}
    (place / "provenance.json").write_text(json.dumps(provenance(sources=sources)))
    refuse_changed(tmp_path, runs, lambda run: CONFIG, lambda run: sources)
    with pytest.raises(ConfigError, match=r"loss=mine:tapered has another source"):  # which is one more setting
        refuse_changed(tmp_path, runs, lambda run: CONFIG, lambda run: {"loss=mine:tapered": "def tapered(): pass"})
    with run_lock(place, print), pytest.raises(ConfigError, match=r"seed=0 is being written by process \d+ since"):
        refuse_changed(tmp_path, runs, lambda run: CONFIG)
    assert holder(place) is None


def test_only_runs_of_the_same_sweep_join_and_its_reference_stays(tmp_path):
    """Bug: runs of a later sweep with other settings or axes join those of an earlier one, or its own do not."""

    def typed_later(shared: str, *settings: Setting, reference: Setting | None = None, seed: int = 1) -> SweepState:
        runs = []
        for setting in settings:
            words = [*(f"group@{key}={value}" for key, value in setting.items()), f"seed={seed}"]
            runs.append(RunState(",".join(words), [*shared.split(), *words], setting, seed))
        return SweepState("grid", "", [*settings[0]], reference, "waiting", 1, "processes", runs)

    a, b, _ = cells = {"loss": "a"}, {"loss": "b", "loss.low": "2"}, {"loss": "c"}
    first = typed_later("lr=1 threads=2 api_key=swordfish", *cells[:2], reference=a, seed=0)
    for run in first.runs:
        finished(tmp_path / run.name)
    write_state(tmp_path, first)
    for threads, more in (("", cells[:2]), ("threads=1 logger.mode=offline", cells)):
        later = begun(typed_later(f"{threads} api_key=swordfish lr=1", *more), tmp_path)
        assert ([run.seed for run in later.runs], later.reference) == ([1] * len(more) + [0, 0], a)
    same = "lr=1 api_key=swordfish"
    for shared in ("api_key=swordfish", f"{same} lr=2", f"{same} loss.high=2"):
        with pytest.raises(ConfigError, match="sweep_name=NAME"):
            begun(typed_later(shared, a, b), tmp_path)
    assert len(begun(typed_later("lr=1.0 api_key='SWORDFISH' save_model=false", a, b), tmp_path).runs) == 4
    for setting in ({}, {"loss": "c", "steps": "3"}):  # what has other axes stays where it is, and out of the tables
        assert [run.seed for run in begun(typed_later(same, setting), tmp_path).runs] == [1]


def set_up(runs, *words: str, jobs: int | None = None, per_run: int | None = None, absent=None) -> Jobs:
    return jobs_of(words, runs, jobs, per_run, str, absent)


def test_runs_side_by_side_and_what_slurm_is_asked_for_follow_from_gpus_and_what_was_typed(monkeypatch, composed):
    """Bug: jobs=3 on two GPUs starts a third run without a GPU of its own, which sees them all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for given, found in (("GPU-a, 3", ["GPU-a", "3"]), ("", [])):
        monkeypatch.setenv("RLREASON_GPUS", given)
        assert machine_gpus() == found
    monkeypatch.delenv("RLREASON_GPUS")
    assert machine_gpus() == []
    nine = [typed(composed())] * 9
    monkeypatch.setenv("RLREASON_GPUS", "0,1,2,3")
    mine = set_up(nine)
    assert (mine.side_by_side, mine.words[1]) == (4, "hydra.launcher.gpus=['0', '1', '2', '3']")
    assert set_up(nine, jobs=8).side_by_side == 4
    assert [set_up(nine, jobs=jobs, per_run=0).side_by_side for jobs in (None, 8)] == [1, 8]
    assert (set_up(nine, per_run=2).side_by_side, set_up(nine[:1]).side_by_side) == (2, 1)
    assert set_up(nine, JOBLIB).words == ["hydra.launcher.n_jobs=1"]  # they would all use the first
    assert "hydra.launcher.gpus_per_node=4" in set_up(nine, SUBMITIT, jobs=2).words
    monkeypatch.setenv("RLREASON_GPUS", "")
    assert set_up(nine * 9, JOBLIB).side_by_side == usable_processors()
    assert set_up(nine, JOBLIB, "hydra.launcher.n_jobs=3").side_by_side == 3
    assert set_up(nine, SUBMITIT, "hydra.launcher.timeout_min=5", jobs=2).words == []
    assert (set_up(nine).side_by_side, set_up(nine, jobs=4).side_by_side) == (1, 4)  # a machine without: as ever
    with pytest.raises(ConfigError, match="this machine has 0 for runs"):
        set_up(nine, per_run=1)
    with pytest.raises(ConfigError, match="hydra/launcher=joblib"):
        set_up(nine, JOBLIB, per_run=1)
    absent: list[str] = []
    assert set_up(nine, per_run=1, absent=absent).side_by_side == len(absent) == 1  # a plan for elsewhere
    always = ["timeout_min=1440", "max_num_timeout=10"]
    typed_words = ("hydra.launcher.gres=gpu:a100:1", "hydra.launcher.timeout_min=60")
    for words, more, expected in (
        ((), {"per_run": 2}, [*always, "cpus_per_task=16", "mem_gb=128", "gpus_per_node=2"]),
        ((), {"per_run": 0, "jobs": 3}, [*always, "cpus_per_task=4", "mem_gb=16", "array_parallelism=3"]),
        (typed_words, {"per_run": 1}, [always[1], "cpus_per_task=8", "mem_gb=64"]),
    ):
        mine = set_up(nine, "hydra/launcher=submitit_slurm", *words, **more)
        assert mine.words == [f"hydra.launcher.{word}" for word in expected]
    for jobs, gpus, each, expected in ((3, "ab", 1, ["a", "b"]), (2, "abcd", 3, ["abc"]), (2, "", 1, ["", ""])):
        launcher = Processes(jobs, list(gpus), each, preload=False)
        assert ["".join(of_job) for of_job, _ in places(launcher)] == expected


def test_two_runs_side_by_side_are_said_written_down_and_not_run_again(finished_sweep, tmp_path):
    state = read_state(finished_sweep.folder)
    assert [(run.status, run.shared_machine, run.setting) for run in state.runs] == [("finished", True, {})] * 2
    assert all(run.accuracy is not None and run.protocol and run.seconds and run.ended for run in state.runs)
    assert (state.jobs, state.launcher, state.status) == (2, "processes", "finished")
    assert "2 of 2 done" in finished_sweep.printed
    assert f"report: {finished_sweep.folder.name}/report.html" in finished_sweep.printed
    assert (finished_sweep.folder / "report.html").exists()
    assert written_report(tmp_path).startswith("! no report (RUNS=")  # and the sweep has ended well
    assert len(list((finished_sweep.folder / "console").glob("*.log"))) == 2
    shutil.copytree(finished_sweep.folder, tmp_path / "sweep")
    again = rlreason("-m", *SWEEP_OF_TWO, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert again.stdout.count("not run again") == 2


#: Learning rate -> the chance of a right answer, and what makes its seeds others than the reference's, the first.
CHANCES = {"1e-4": (0.5, 0), "1e-3": (0.8, 30), "1e-5": (0.53, 60), "1e-6": (0.5, 0), "0.5": (0.6, 90)}
LATER = {"0.01": (0.9, 120)}


def test_seeds_are_added_where_they_decide(tmp_path, monkeypatch):
    """Bug: what is decided gets more seeds, what is open none, a sweep that was killed takes a look twice, or what is
    typed later, or failed, gets all seeds without a look, or the reference gets some for what is not typed now."""
    sweep = checked(f"learning_rate={','.join(CHANCES)}", "seed=auto", "max_seeds=6")[0]
    batches, fails = list[list[str]](), {"0.5"}

    def launched(grid, words, jobs, folder, left):
        batches.append([run.name for run in left])
        if "killed" in fails and len(batches) == 2:
            raise KeyboardInterrupt
        for run in left:
            if (rate := run.setting["learning_rate"]) not in fails:
                chance, first = (CHANCES | LATER)[rate]
                ended(folder / run.name, answers(run.seed + first, chance))
        return {}

    def begun_in(name: str) -> tuple[SweepState, dict[str, int]]:
        (tmp_path / name).mkdir(exist_ok=True)
        batches.clear()
        with suppress(KeyboardInterrupt):
            run_looks(None, replace(sweep, folder=tmp_path / name))
        state = read_state(tmp_path / name)
        return state, Counter(run.setting["learning_rate"] for run in state.runs if run.of_its_own)

    monkeypatch.setattr("rlreason.cli.sweep.launched", launched)
    whole, seeds = begun_in("whole")
    assert (seeds, [look["seeds"] for look in whole.looks]) == ({"1e-4": 6, "1e-3": 3, "1e-5": 6, "1e-6": 4}, [3, 4, 6])
    assert sum(map(len, batches)) == 15 + 3 + 4  # what has failed is not begun again, and gets no more
    fails.add("killed")
    assert begun_in("killed")[0].status == "interrupted"
    shutil.copytree(tmp_path / "killed", tmp_path / "part")
    fails.remove("killed")
    batches.clear()
    part = checked("learning_rate=1e-4,0.01", "seed=auto", "max_seeds=6")[0]
    run_looks(None, replace(part, folder=tmp_path / "part"))
    of_rate = Counter(name.split(",")[0] for batch in batches for name in batch)
    assert of_rate == {"learning_rate=1e-4": 1, "learning_rate=0.01": 4}
    (file := tmp_path / "killed" / FILE).write_text(file.read_text().replace('"open"', '"of old"'))  # has no such key
    again, seeds_again = begun_in("killed")
    assert again.looks.pop(1)["open"] == again.looks[0].pop("of old")  # looked again
    again.looks[0]["open"] = whole.looks[0]["open"]
    assert (again.looks, seeds_again) == (whole.looks, seeds)
    fails.clear()  # typed again, it goes on with what had failed, and with nothing else
    again, seeds_again = begun_in("whole")
    assert (seeds_again, again.status) == (seeds | {"0.5": 6}, "finished")
    assert [look["seeds"] for look in again.looks] == [3, 4, 6] * 2
    assert looks_text(again).endswith("up with 3: learning_rate=1e-3; with 4: learning_rate=1e-6")
    assert begun_in("whole")[0].looks == again.looks
    batches.clear()
    more = checked(f"learning_rate={','.join(CHANCES | LATER)}", "seed=auto", "max_seeds=6")[0]
    run_looks(None, replace(more, folder=tmp_path / "whole"))
    assert [name for batch in batches for name in batch] == [f"learning_rate=0.01,seed={n}" for n in range(4)]  # of 6
    verdicts = [(one.outcome, one.difference.seeds) for one in verdicts_of(read_study([tmp_path / "whole"]))]
    assert verdicts[:3] == [("better", 3), ("cannot tell", 6), ("same", 4)]
    assert read_study(sorted((tmp_path / "whole").glob("learning*"))).max_seeds == 6  # given one by one, too
    with pytest.raises(ConfigError, match="seed=6"):  # of equal settings, 7 to 11% were told apart by more seeds
        begun(checked("learning_rate=1e-4,1e-3", f"seed={','.join('0123456')}")[0].design, tmp_path / "whole")
    sweep.design.max_seeds = 8
    with pytest.raises(ConfigError, match="max_seeds=8"):
        begun_in("whole")


WORDS = ["-m", "hydra.sweep.dir=grid", *SMALL, "n_steps=1", "eval_every=0", "save_model=false"]


@pytest.mark.long
def test_real_runs_see_their_gpus_alone(tmp_path):
    """Bug: a GPU has two runs at a time; of three runs, the last gets the GPU of the one that has ended."""
    done = rlreason(*WORDS, "seed=0,1,2", cwd=tmp_path, RLREASON_GPUS="GPU-a,GPU-b")
    assert done.returncode == 0, done.stdout + done.stderr
    busy, of_run = set(), {}
    for name, started, gpu in re.findall(r"^== (\S+?): (started on GPU )?(\S+)", done.stdout, re.M):
        assert (of_run.setdefault(name, gpu) in busy) == (not started)
        busy ^= {of_run[name]}
    assert busy == set()
    for run in read_state(tmp_path / "grid").runs:
        seen = json.loads((tmp_path / "grid" / run.name / "provenance.json").read_text())["environment"]
        assert [seen["CUDA_VISIBLE_DEVICES"]] == run.gpus == [of_run[run.name]]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["processes", "joblib", "submitit_local"])
def test_a_failing_run_leaves_the_others_alone_and_is_named_whatever_the_launcher(tmp_path, launcher):
    words = [*WORDS, f"hydra/launcher={launcher}", "jobs=2", "model.freeze=[],[nonesuch]"]
    argv = [sys.executable, "-m", "rlreason", *words]  # a forked command would wait for joblib's idle workers
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    state = read_state(tmp_path / "grid")
    failed, finished = sorted(state.runs, key=lambda run: run.status)
    assert (state.status, state.launcher, failed.status, finished.status) == ("failed", launcher, "failed", "finished")
    assert "model.freeze: nonesuch" in failed.reason
    assert f"! {failed.name}: failed (" in done.stdout


def test_a_launcher_that_gives_up_is_a_failure(tmp_path):
    words = [*WORDS, "hydra/launcher=submitit_slurm", "gpus_per_run=1", "seed=0,1"]
    wrong = rlreason(*words, cwd=tmp_path, PATH="/usr/bin:/bin")  # where there is no Slurm
    assert (wrong.returncode, "submitit_slurm gave up" in wrong.stdout, "Traceback" in wrong.stderr) == (1, True, False)


#: The shipped start model, so that there are right answers, on batches as small as can be.
SIX_RUNS = [
    "-m", "learning_rate=0.0001,0.0003,0.001", "seed=0,1", "n_steps=6", "rollout_batch_size=16", "group_size=4",
    "eval_problems=16", "eval_every=2", "sampling.max_tokens=48", "checkpoint.every=1", "save_model=false", "threads=1",
]  # fmt: skip
FIGURES = ("accuracy", "accuracy_before", "accuracy_interval", "length", "train_step", "tokens/generated")


def figures(grid: Path) -> dict[str, dict]:
    """Run -> its final figures, of those that are done."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(grid.glob("*/summary.json"))}
    return {name: {key: summary[key] for key in FIGURES} for name, summary in found.items()}


def started(grid: Path, out: Path, *words: str) -> subprocess.Popen[bytes]:
    """The sweep of six runs in a process group of its own, which says what it says in `out`."""
    argv = [sys.executable, "-m", "rlreason", *SIX_RUNS, f"hydra.sweep.dir={grid}", *words]
    env = os.environ | ENV
    with out.open("w") as said:
        return subprocess.Popen(argv, cwd=out.parent, env=env, stdout=said, stderr=said, start_new_session=True)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The figures of the sweep that nobody disturbed."""
    place = tmp_path_factory.mktemp("unbroken")
    assert started(place / "grid", place / "out").wait(900) == 0, (place / "out").read_text()
    found = figures(place / "grid")
    assert (len(found), any(figure["accuracy"] for figure in found.values())) == (6, True)
    assert len({figure["tokens/generated"] for figure in found.values()}) > 3
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "launcher"), [("kill", []), ("Ctrl-C", []), ("kill a run", []), ("kill", [SUBMITIT]), ("SIGTERM", [JOBLIB])]
)
def test_a_sweep_that_was_ended_in_the_middle_is_finished_by_its_command(tmp_path, unbroken, end, launcher):
    grid, out = tmp_path / "grid", tmp_path / "out"
    process = started(grid, out, "jobs=2", *launcher)

    def steps() -> int:
        return sum(path.read_text().count("reward/mean") for path in grid.glob("*/metrics.jsonl"))

    wait_for(lambda: process.poll() is not None or steps() >= 9)
    assert process.poll() is None, out.read_text()
    family = psutil.Process(process.pid).children(recursive=True)
    if end == "kill":
        process.kill()
    elif end == "kill a run":
        os.kill(int(re.search(r"\d+", next(grid.glob("*/.lock")).read_text())[0]), signal.SIGKILL)
    elif end == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    assert process.wait(900) == {"kill": -9, "kill a run": 1}.get(end, 130), out.read_text()
    assert ("failed (signal SIGKILL)" in out.read_text()) == (end == "kill a run")
    assert psutil.wait_procs(family, timeout=600)[1] == []
    if end in ("Ctrl-C", "SIGTERM"):
        assert "interrupted" == read_state(grid).status in {run.status for run in read_state(grid).runs}
        assert launcher or "Traceback" not in out.read_text()  # joblib kills its processes
    done_before = set(figures(grid))
    assert len(done_before) < 6
    assert started(grid, tmp_path / "again", "jobs=2", *launcher).wait(900) == 0, (tmp_path / "again").read_text()
    assert (tmp_path / "again").read_text().count("not run again") == len(done_before)
    assert (figures(grid), read_state(grid).status) == (unbroken, "finished")
