"""One process, and one run in it, for each run folder; and a lock that no dead process leaves behind."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason.errors import ConfigError, UnwritableError
from rlreason.runtime.files import FileLock, holder, run_lock

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
def other(tmp_path):
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


def test_a_second_process_is_refused_and_told_by_whom(tmp_path, other):
    process = other()
    with pytest.raises(ConfigError) as refused:
        take(tmp_path / "run")
    text = str(refused.value)
    assert text.startswith(f"hydra.run.dir={tmp_path}/run is being written by process {process.pid} ")
    assert "wait for it" in text
    assert "\n" not in text
    assert refused.value.exit_code == 2
    assert (tmp_path / "run/.lock").read_text().startswith(f"{process.pid}\n")  # it is the other's
    assert str(holder(tmp_path / "run")).startswith(f"process {process.pid} since ")


@pytest.mark.parametrize("with_child", [False, True])
def test_a_killed_process_leaves_no_lock_even_where_one_that_it_started_lives_on(tmp_path, other, with_child):
    process = other(*["child"] * with_child)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == with_child
    try:
        process.kill()
        process.wait()
        assert (tmp_path / "run/.lock").exists()
        assert holder(tmp_path / "run") is None
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
            with pytest.raises(ConfigError, match="by this process"):
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


def test_a_folder_that_cannot_be_written_to_is_said_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match=r"file/run cannot be written"):
        take(tmp_path / "file/run")


def test_a_file_system_without_locks_is_said_and_used_all_the_same(tmp_path, monkeypatch):
    def refuse(lock: FileLock) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(FileLock, "acquire", refuse)  # no such file system can be had here
    said = take(tmp_path / "run")
    assert len(said) == 1
    assert "without locks" in said[0]
