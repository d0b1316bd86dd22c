"""Runs that are forked from a process with their libraries: each is like one that Python starts anew."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlreason.runtime import signals
from rlreason.runtime.machine import FORKS_VARIABLE, SWEEP_VARIABLE
from rlreason.sweeps.forks import THREADS, Forked, Forks, can_fork
from rlreason.sweeps.runner import Child, RunStart, stop
from tests.starts import SMALL
from tests.waiting import wait_for

PACKAGE = Path(__file__).resolve().parents[1] / "rlreason"
pytestmark = pytest.mark.skipif(not can_fork(), reason="runs are not forked here")
ENDLESS = [*SMALL, "n_steps=100000", "eval_every=100000", "checkpoint.every=0", "hydra.run.dir=run"]


@pytest.fixture(scope="module")
def forks():
    server = Forks("1")
    assert server.ready()
    yield server
    server.close()


def start(forks: Forks, place: Path, *words: str, processors: list[int] | None = None, **env: str) -> Forked:
    """A forked run in this folder, whose output goes to the file `out` there."""
    before = Path.cwd()
    os.chdir(place)
    try:
        own = {THREADS: "1", SWEEP_VARIABLE: "a", signals.FOLLOWS: str(os.getpid())}
        with (place / "out").open("ab") as out:
            process = forks.start(words, os.environ | own | env, out, processors)
    finally:
        os.chdir(before)
    assert process is not None
    return process


@pytest.mark.long
def test_it_is_a_child_with_a_folder_environment_streams_and_processors_of_its_own(forks, tmp_path):
    (processor, *_) = os.sched_getaffinity(0)
    process = start(forks, tmp_path, *ENDLESS, processors=[processor], PYTHONHASHSEED="7")
    seen = psutil.Process(process.pid)
    try:
        wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists() or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "out").read_text()
        assert seen.ppid() == os.getpid()
        assert process.pid in signals.below(os.getpid())
        assert seen.cwd() == str(tmp_path)
        assert seen.cpu_affinity() == [processor]
        assert [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 1)] == [
            os.readlink("/proc/self/fd/0"),
            str(tmp_path / "out"),
        ]
    finally:
        process.terminate()
        assert process.wait(600) == 130
    told = json.loads((tmp_path / "run/provenance.json").read_text())
    assert told["command"] == "python -m rlreason " + " ".join(ENDLESS)
    assert told["directory"] == str(tmp_path)
    assert told["sweep"] == "a"
    assert told["cpu_count"] == 1
    assert told["environment"]["PYTHONHASHSEED"] == "7"
    assert told["environment"][THREADS] == "1"
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "interrupted"
    assert "stopped by SIGTERM" in (tmp_path / "out").read_text()
    assert "Traceback" not in (tmp_path / "out").read_text()


@pytest.mark.long
@pytest.mark.parametrize(("words", "code", "says"), [(["--version"], 0, "rlreason "), (["n_stepz=1"], 2, "n_steps")])
def test_its_exit_code_and_its_words_arrive(forks, tmp_path, words, code, says):
    process = start(forks, tmp_path, *words)
    assert process.wait(600) == process.poll() == code
    assert says in (tmp_path / "out").read_text()
    process.kill()  # of what has ended: nothing happens


@pytest.mark.long
def test_a_death_by_a_signal_is_told_as_such(forks, tmp_path):
    process = start(forks, tmp_path, *ENDLESS)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(600) == -signal.SIGKILL


@pytest.mark.long
def test_a_signal_that_was_ignored_stays_ignored_and_the_others_are_heeded(forks, tmp_path):
    process = start(forks, tmp_path, *ENDLESS)
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists())
    told = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    blocked, ignored, caught = (int(told[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt"))
    for number in signals.SIGNALS:
        bit = 1 << (number - 1)
        assert not blocked & bit
        assert bool(ignored & bit) == (signal.getsignal(number) is signal.SIG_IGN)
        assert bool(caught & bit) != bool(ignored & bit)
    process.terminate()
    assert process.wait(600) == 130


SWEEP = """
import os, sys, time
from pathlib import Path
from rlreason.sweeps.forks import Forks
from rlreason.sweeps.runner import Child, RunStart
forks = Forks("1")
assert forks.ready()
start = RunStart("a", [], Path.cwd(), threads=1, forks=forks)
child = Child(start, Path("run"), sys.argv[1:], None)
print(child.process.pid, forks._server.pid, flush=True)
time.sleep(6000)
"""


@pytest.mark.long
def test_all_end_with_the_sweep_that_is_killed(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), THREADS: "1"}
    argv = [sys.executable, "-c", SWEEP, *ENDLESS[:-1]]
    sweep = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=(tmp_path / "out").open("w"))
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists() or sweep.poll() is not None)
    run, server = (psutil.Process(int(word)) for word in (tmp_path / "out").read_text().split()[:2])
    sweep.kill()
    sweep.wait()
    assert psutil.wait_procs([run, server], timeout=600)[1] == []
    told = json.loads((tmp_path / "run/status.json").read_text())
    assert told["status"] == "interrupted"
    assert told["reason"].startswith("by SIGTERM")


@pytest.mark.long
def test_where_the_server_has_gone_a_run_is_started_anew(tmp_path, capfd):
    forks = Forks("1", modules=())
    assert forks.ready()
    forks._server.kill()
    forks._server.wait()
    given = RunStart("a", [], tmp_path, threads=1, forks=forks)
    for number in range(2):
        child = Child(given, tmp_path / f"run{number}", ["n_steps=0"], None)
        assert isinstance(child.process, subprocess.Popen)
        wait_for(lambda child=child: child.look() is not None)
        assert child.process.returncode == 2
    forks.close()
    assert "n_steps=0" in capfd.readouterr().err


@pytest.mark.long
def test_where_the_code_has_changed_a_run_loads_it_anew(tmp_path):
    (tmp_path / "copy").mkdir()
    package = Path(shutil.copytree(PACKAGE, tmp_path / "copy/rlreason", ignore=shutil.ignore_patterns("__pycache__")))
    asks = """
import os, time
from pathlib import Path
from rlreason.sweeps.forks import Forks
forks = Forks(None, modules=())
env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
assert forks.ready()
first = forks.start(["--version"], env, None, None)
assert first is not None and first.wait(600) == 0
Path("copy/rlreason/types.py").write_text(Path("copy/rlreason/types.py").read_text() + "# changed\\n")
assert forks.start(["--version"], env, None, None) is None
forks.close()
"""
    env = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", asks], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rlreason ") == 1


@pytest.mark.long
def test_two_at_once_are_stopped_together(forks, tmp_path):
    consoles = [tmp_path / name for name in ("one", "two")]
    children = [
        Child(
            RunStart("a", [], tmp_path, path, threads=1, forks=forks), tmp_path / f"{path.name} run", ENDLESS[:-1], None
        )
        for path in consoles
    ]
    assert all(isinstance(child.process, Forked) for child in children)
    wait_for(lambda: all((child.folder / "metrics.jsonl").exists() for child in children))
    assert [run.status for run in stop(children)] == ["interrupted"] * 2
    assert all("stopped by SIGTERM" in path.read_text() for path in consoles)


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(FORKS_VARIABLE, "0")
    assert not can_fork()


@pytest.mark.long
def test_the_server_waits_in_one_thread_and_heeds_no_signal(forks):
    server = psutil.Process(forks._server.pid)
    assert server.num_threads() == 1
    for number in signals.SIGNALS:
        server.send_signal(number)
    time.sleep(0.2)
    assert server.is_running()
    assert server.status() == psutil.STATUS_SLEEPING
