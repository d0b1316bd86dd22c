"""What every process of a run does, on request and where a wait took too long."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlreason.runtime import hang as stacks
from rlreason.runtime.machine import STACKS_VARIABLE
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
LISTENING = """
import sys, time
from rlreason.runtime.hang import listen
listen()
def waiting_for_godot():
    print("ready", flush=True)
    time.sleep(6000)
waiting_for_godot()
"""
DEAF = "print('ready', flush=True); import time; time.sleep(6000)"


@pytest.fixture
def child():
    """Starts a process below this one and waits until it says that it is ready."""
    started = []

    def start(code: str, **env: str) -> subprocess.Popen[str]:
        all_ = os.environ | {"PYTHONPATH": str(ROOT)} | env
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=all_)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
def test_the_stacks_of_a_run_and_of_what_it_started_are_in_one_file(tmp_path, child):
    with stacks.stacks_in(tmp_path) as path:
        told, deaf = child(LISTENING), child(DEAF)
        said = stacks.write_stacks(path, "the grader did not answer")
        assert stacks.dump("again") == said  # of the run that is under way
    assert said.endswith(f" {tmp_path}/stacks.txt")
    text = path.read_text()
    first = text.split("again")[0]
    assert "the grader did not answer" in first
    assert "test_the_stacks_of_a_run" in first  # this process's
    for process in (told, deaf):
        assert f"-- process {process.pid}, sleeping" in first
        assert process.poll() is None  # nobody was ended by the signal
    assert "in waiting_for_godot" in first.split(f"process {told.pid}")[1]
    assert "(it writes no stacks)" in first.split(f"process {deaf.pid}")[1]
    assert STACKS_VARIABLE not in os.environ
    assert stacks.dump("nothing is under way") == ""


@pytest.mark.long
def test_a_process_that_is_stopped_is_said_to_be_and_not_waited_for(tmp_path, child):
    with stacks.stacks_in(tmp_path) as path:
        process = child(LISTENING)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: "stopped" in stacks.described(process.pid))
        began = time.monotonic()
        stacks.write_stacks(path, "why")
        assert time.monotonic() - began < 10
        text = path.read_text().split(f"process {process.pid}")[1]
    assert text.startswith(", stopped")
    assert "(no answer" in text


@pytest.mark.long
def test_a_person_asks_one_process(tmp_path, child):
    with stacks.stacks_in(tmp_path) as path:
        process = child(LISTENING)
        os.kill(process.pid, signal.SIGUSR1)
        wait_for(lambda: "in waiting_for_godot" in path.read_text())
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "test_a_person_asks_one_process" in path.read_text()


def test_nothing_stays_where_nobody_asked(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with stacks.stacks_in(tmp_path):
        assert stacks.listens(os.getpid())
        assert (tmp_path / "stacks.txt").exists()
    assert not stacks.listens(os.getpid())
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGUSR1) is before


def test_of_two_runs_in_one_process_the_later_is_asked_first(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with stacks.stacks_in(tmp_path / "a") as a:
        with stacks.stacks_in(tmp_path / "b") as b:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (bool(a.read_text()), bool(b.read_text())) == (False, True)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert a.read_text()


def test_a_place_that_cannot_be_written_to_is_no_further_error(tmp_path):
    (tmp_path / "file").touch()
    assert stacks.write_stacks(tmp_path / "file/stacks.txt", "why") == ""
    with stacks.stacks_in(tmp_path / "file"):
        pass


def test_a_process_that_is_gone_is_no_error(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert stacks.write_stacks(tmp_path / "stacks.txt", "why", process.pid)
    assert f"process {process.pid}, gone" in (tmp_path / "stacks.txt").read_text()
    assert not stacks.listens(process.pid)


def test_other_threads_are_shown_too(tmp_path):
    end = threading.Event()

    def in_the_other_thread() -> None:
        end.wait(600)

    thread = threading.Thread(target=in_the_other_thread)
    thread.start()
    try:
        stacks.write_stacks(tmp_path / "stacks.txt", "why")
    finally:
        end.set()
        thread.join()
    assert "in in_the_other_thread" in (tmp_path / "stacks.txt").read_text()
