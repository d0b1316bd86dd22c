"""What happens to machines: disks are full, files break, processes vanish. Every run can go on, and ends equal."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broken_runs import Done, Runs, checkpoints_of
from tests.run_records import differences, rows_of
from tests.starts import ROOT, Started
from tests.test_checkpoints import DAMAGE
from tests.test_kills import PHASES
from tests.waiting import wait_for

psutil = pytest.importorskip("psutil")
END = PHASES["last evaluation"][0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Where the runs of these tests are."""
    return Runs(tmp_path_factory)


@pytest.fixture
def killed(runs: Runs) -> Path:
    """A run that was killed behind its last step; of its checkpoints the two newest are there, and the best one."""
    folder = runs.new()
    runs.killed("grpo", folder, END)
    return folder


def one_line(done: Done, code: int, *words: str) -> None:
    """The command ended with this exit code, and its last line is the cause; nothing of a traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rlreason: ")
    assert all(word in last for word in words), done.stderr


@pytest.mark.long
def test_checkpoints_are_broken_and_the_metrics_cut_in_a_line(runs, killed):
    newest, other = checkpoints_of(killed)[-1], runs.new()
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"rollout_step": 3, "train')
    DAMAGE["a flipped bit"](killed / "checkpoints" / newest / "state.json")
    shutil.copytree(killed, other)
    done = runs.goes_on("grpo", killed)
    assert f"{newest} cannot be used" in re.sub(r"\s+", " ", done.stderr + done.stdout)
    assert runs.equal("grpo", killed)
    for name in checkpoints_of(other):
        DAMAGE["half a file"](other / "checkpoints" / name / "state.safetensors")
    for _ in range(2):
        one_line(runs.start("grpo", other), 2, "holds no checkpoint that can be used", "move checkpoints/ away")
    (other / "checkpoints").rename(other / "away")
    runs.goes_on("grpo", other)
    assert (other / "broken_off_1/metrics.jsonl").exists()
    assert runs.equal("grpo", other)


@pytest.mark.long
def test_a_grading_worker_is_killed_and_another_takes_its_place(runs):
    folder = runs.new()
    started = Started(*runs.words("grpo", "n_steps=8"), f"hydra.run.dir={folder.name}", cwd=runs.place)
    run, gone = psutil.Process(started.process.pid), set[int]()
    wait_for(lambda: (folder / "evals").exists() or started.process.exitcode is not None)
    while started.process.exitcode is None and len(gone) < 3:
        with contextlib.suppress(psutil.NoSuchProcess):  # the run or its worker may just have ended
            for child in run.children(recursive=True):
                if child.pid not in gone and "grading" in " ".join(child.cmdline()):
                    child.kill()
                    gone.add(child.pid)
        time.sleep(0.05)
    done = started.finished()
    assert done.returncode == 0, done.stdout + done.stderr
    assert gone
    found = differences(runs.unbroken("grpo", "n_steps=8"), folder)
    incidents = folder / "grading_incidents.jsonl"
    assert not found or incidents.read_text()  # what was lost with a worker is counted and written down
    assert len(rows_of(folder)) == 17


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, which can be made full."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a disk cannot be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def filled(disk: Path, free: int) -> None:
    """Put a file on the disk that leaves so many bytes, whatever the disk says of its free ones."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        size = 1 << 20
        while size >= 1 << 12:
            try:
                file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
        file.truncate(file.tell() - free)


@pytest.mark.long
def test_the_disk_is_full_when_a_checkpoint_is_written(runs, disk):
    folder, steps = disk / "run", "n_steps=20"
    words = (*runs.words("grpo", steps, "eval_every=0"), f"hydra.run.dir={folder}")
    started = Started(*words, cwd=disk)
    wait_for(lambda: bool(checkpoints_of(folder)) or started.process.exitcode is not None)
    os.kill(started.process.pid, signal.SIGSTOP)  # or it takes room while the disk is being filled
    filled(disk, 1 << 20)  # room for rows and responses
    os.kill(started.process.pid, signal.SIGCONT)
    one_line(started.finished(), 4, "cannot be written (No space left on device)", "free some space", "checkpoints/")
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    assert not list(folder.rglob("*.partial"))
    assert checkpoints_of(folder)
    (disk / "ballast").unlink()
    done = Started(*words, cwd=disk).finished()
    assert done.returncode == 0, done.stdout + done.stderr
    assert differences(runs.unbroken("grpo", steps, "eval_every=0"), folder) == []


#: Where the package asks what time it is: to write it down, to see whether a file has changed, to tidy a cache.
CLOCKS = {"grading/pool.py", "training/warm_start.py", "records/reader.py", "runtime/files.py", "model/chat.py"}
CLOCKS |= {"sweeps/texts.py"}  # when a run began; which runs are the newest to estimate by
CLOCKS |= {"report/assignment.py", "sweeps/carry.py"}  # the newest of a name
CLOCKS |= {"training/ranks.py"}  # torch wants its limits as a timedelta


def test_no_decision_follows_the_clock_on_the_wall():
    """A clock that jumps moves nothing: waits, limits and shares of time are counted on the monotonic one."""
    asks = re.compile(r"time\.time\(|time_ns\(|from time import|datetime|st_[amc]time|getmtime")
    modules = {path.relative_to(ROOT / "rlreason").as_posix(): path for path in (ROOT / "rlreason").rglob("*.py")}
    found = {name for name, path in modules.items() if asks.search(path.read_text("utf-8"))}
    assert found <= CLOCKS
    assert "time.time(" in modules["grading/pool.py"].read_text("utf-8")
