"""One process, and one run in it, for each run folder; and a lock that no dead process leaves behind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlreason.errors import ConfigError, UnwritableError
from rlreason.runtime import files as lock
from rlreason.runtime.files import alive, run_lock, sign_of_life
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from rlreason.runtime.files import run_lock
with run_lock(Path(sys.argv[1]), print):
    if len(sys.argv) > 2:
        subprocess.Popen(["sleep", "6000"], start_new_session=True)
    print("has it", flush=True)
    time.sleep(6000)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that has the folder `run` here."""
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), *words]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        started.append(process)
        assert process.stdout.readline() == "has it\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def take(folder: Path) -> list[str]:
    said: list[str] = []
    with run_lock(folder, said.append):
        assert (folder / ".lock").exists()
    return said


def test_a_second_process_is_refused_and_told_by_whom(tmp_path, holder):
    process = holder()
    with pytest.raises(ConfigError) as refused:
        take(tmp_path / "run")
    text = str(refused.value)
    assert text.startswith(f"hydra.run.dir={tmp_path}/run is being written by process {process.pid} ")
    assert "wait for it" in text
    assert "\n" not in text
    assert refused.value.exit_code == 2
    assert (tmp_path / "run/.lock").exists()  # it is the other's


@pytest.mark.parametrize("with_child", [False, True])
def test_a_killed_process_leaves_no_lock_even_where_one_that_it_started_lives_on(tmp_path, holder, with_child):
    process = holder(*["child"] * with_child)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == with_child
    try:
        process.kill()
        process.wait()
        assert (tmp_path / "run/.lock").exists()
        assert take(tmp_path / "run") == []
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)


def test_another_run_in_this_process_is_refused_until_the_first_has_ended(tmp_path):
    folder, link = tmp_path / "run", tmp_path / "link"
    with run_lock(folder, print):
        link.symlink_to(folder)
        (folder / "kept").touch()
        for same in (folder, link, tmp_path / "other/../run"):
            with pytest.raises(ConfigError, match="another run"):
                take(same)
        with run_lock(tmp_path / "second", print):
            pass
        assert (folder / ".lock").exists()
    assert take(folder) == []
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_start_that_wrote_nothing_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no"), run_lock(tmp_path / "a/b/run", print):
        raise ValueError("no")
    assert not (tmp_path / "a").exists()
    with run_lock(tmp_path / "a/b/run", print):
        (tmp_path / "a/b/run/log.txt").touch()
    assert [path.name for path in (tmp_path / "a/b/run").iterdir()] == ["log.txt"]


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path):
    """Whoever opens the file, waits, and locks it only after its holder has removed it, has locked nothing."""
    old = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    assert lock._is_still(tmp_path / ".lock", old)
    (tmp_path / ".lock").unlink()
    assert not lock._is_still(tmp_path / ".lock", old)
    (tmp_path / ".lock").touch()
    assert not lock._is_still(tmp_path / ".lock", old)
    os.close(old)


def test_a_fork_does_not_give_the_lock_back(tmp_path):
    with run_lock(tmp_path, print) as _:
        if (child := os.fork()) == 0:
            try:
                lock._released(tmp_path / ".lock", os.open(tmp_path / ".lock", os.O_RDWR))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / ".lock").exists()


def test_a_folder_that_cannot_be_written_to_is_said_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match=r"file/run cannot be written"):
        take(tmp_path / "file/run")


def test_a_file_system_without_locks_is_said_and_used_all_the_same(tmp_path, monkeypatch):
    def refuse(file: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)  # no such file system can be had here
    said = take(tmp_path / "run")
    assert len(said) == 1
    assert "without locks" in said[0]


@pytest.mark.long
def test_work_that_goes_on_changes_the_sign_of_life_and_nothing_else_does(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "EVERY_S", 0.05)
    assert sign_of_life(tmp_path / "run") is None
    with run_lock(tmp_path / "run", print):
        time.sleep(0.1)
        first = sign_of_life(tmp_path / "run")
        time.sleep(0.2)
        assert sign_of_life(tmp_path / "run") == first
        wait_for(lambda: alive() or sign_of_life(tmp_path / "run") != first)
        with pytest.raises(ConfigError):
            take(tmp_path / "run")
    alive()  # of no run
    assert sign_of_life(tmp_path / "run") is None
