"""A process that is told to end: in order the first time, at once the second; and one process for each run folder."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from rlreason.errors import ConfigError, UnwritableError
from rlreason.runtime import signals
from rlreason.runtime.files import FileLock, holder, run_lock
from tests.starts import ENV, SMALL
from tests.waiting import wait_for

psutil = pytest.importorskip("psutil")
RUN = ["-m", "rlreason", *SMALL, "n_steps=100000", "hydra.run.dir=run"]


class Process(subprocess.Popen):
    """A run in `cwd`, in a process group and with a temporary folder of its own."""

    def __init__(self, cwd: Path, *more: str) -> None:
        self.cwd, self.out, self.temporary = cwd, cwd / "out", cwd / "temporary"
        self.temporary.mkdir()
        env = os.environ | ENV | {"TMPDIR": str(self.temporary)}
        env["TORCHINDUCTOR_CACHE_DIR"] = str(cwd / "cache")  # torch's cache of compiled code outlives every run
        given = {word.split("=")[0]: word for word in [*RUN[2:], *more]}  # the last one counts
        argv = [sys.executable, *RUN[:2], *given.values()]
        with self.out.open("w") as out:
            super().__init__(argv, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True)

    def comes_to(self, condition: Callable[[Path, str], object]) -> None:
        wait_for(lambda: self.poll() is not None or condition(self.cwd / "run", self.out.read_text()), every=0.2)
        assert self.poll() is None, self.out.read_text()

    def ends(self, number: int, group: bool = False) -> tuple[dict[str, str], list[dict[str, float]], str]:
        """In time at this signal, without a traceback; no process and no temporary file is left."""
        family = psutil.Process(self.pid).children(recursive=True)
        os.killpg(self.pid, number) if group else self.send_signal(number)
        try:
            assert self.wait(120) == 130, self.out.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        assert "Traceback" not in self.out.read_text()
        assert psutil.wait_procs(family, timeout=600)[1] == []
        assert [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
        assert not list(self.cwd.rglob("*.partial"))
        return (*left(self.cwd / "run"), self.out.read_text())


def left(folder: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """(status, rows) of a run that was stopped, after a look at what every such run leaves."""
    assert not (folder / "summary.json").exists()
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "interrupted"
    return status, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _no_signal_left() -> Iterator[None]:
    yield
    with signals.stoppable():  # forgets the signal
        pass


def me(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_interrupts_and_has_a_name_and_an_ignored_one_stays_ignored(number):
    """Bug: a run under nohup ends with its terminal."""
    before = signal.signal(number, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), signals.stoppable():
        me(number)
    assert signals.stop_signal() == signal.Signals(number).name
    assert signal.signal(number, signal.SIG_IGN) is signal.default_int_handler
    with signals.stoppable():
        me(number)
    assert signals.stop_signal() is None
    signal.signal(number, before)


def test_a_block_that_is_held_is_never_cut_in_two_and_its_notice_printed_at_once(monkeypatch, capfd):
    """Bug: a signal leaves half of what a step writes."""
    monkeypatch.setattr(signals, "ONCE_S", 600.0)
    done: list[str] = []

    with pytest.raises(KeyboardInterrupt), signals.stoppable():  # noqa: PT012 - it is raised at the end of a block
        with signals.held("after this step"):
            with signals.held():
                me(signal.SIGTERM)
            done.append(capfd.readouterr().err)
            me(signal.SIGTERM)  # sent twice at once, as `timeout` does
            done.append("outer")
        done.append("behind")
    assert done == ["rlreason: after this step\n", "outer"]


def test_whoever_tidies_up_is_not_interrupted_by_the_same_signal_again():
    """Bug: a sweep's signal, sent on, ends the clean-up of a run that the terminal has already stopped."""
    with signals.stoppable(patient=(signal.SIGTERM,)):
        with pytest.raises(KeyboardInterrupt):
            me(signal.SIGINT)
        signals.arrived()
        time.sleep(signals.ONCE_S)
        me(signal.SIGTERM)
        with signals.held():
            pass


HOLDER = """
import subprocess, sys, time
from pathlib import Path
from rlreason.runtime.files import run_lock
with run_lock(Path(sys.argv[1]), print):
    child = subprocess.Popen(["sleep", "6000"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(6000)
"""


def test_a_second_process_is_refused_until_the_first_is_gone_even_where_its_child_lives_on(tmp_path):
    """Bug: two runs write into one folder, or a grading process that outlives a run keeps it locked."""
    folder = tmp_path / "run"
    argv = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | ENV)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} "), run_lock(folder, print):
            pass
        assert str(holder(folder)).startswith(f"process {process.pid} since ")
        process.kill()
        process.wait()
        assert holder(folder) is None
        with run_lock(folder, print), pytest.raises(ConfigError), run_lock(folder, print):
            pass
        assert not (folder / ".lock").exists()
    finally:
        process.kill()
        process.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_a_start_that_wrote_nothing_leaves_no_folder_and_one_that_cannot_is_one_line(tmp_path, monkeypatch):
    """Bug: a refused start takes the user's own folder along."""
    (tmp_path / "own").mkdir()
    for folder in ("a/run", "own"):
        with pytest.raises(ValueError, match="no"), run_lock(tmp_path / folder, print):
            raise ValueError("no")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match=r"file/run cannot be written"), run_lock(tmp_path / "file/run", print):
        pass
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    said: list[str] = []
    with run_lock(tmp_path / "run", said.append):  # on a file system that knows no locks
        assert len(said) == 1


@pytest.mark.long
def test_a_run_whose_reader_leaves_ends_its_step_and_keeps_model_and_rows(tmp_path):
    """Bug: a stopped run loses its step, its model or its place. By a signal: test_api.py and test_kills.py."""
    command = [sys.executable, *RUN, "epochs_per_rollout=20", "loss=grpo_clip"]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | ENV, stdout=-1, stderr=-1) as process:
        wait_for(lambda: process.poll() is not None or updates(tmp_path / "run") > 2)
        process.stdout.close()
        assert process.wait(600) == 141
    status, rows = left(tmp_path / "run")
    step = rows[-1]["rollout_step"]
    assert status["reason"].endswith(f"after step {step} of 100000")
    assert rows[-1]["train_step"] == 20 * step
    assert list((tmp_path / "run/checkpoints").glob(f"step_{step:05d}_*"))
    assert (tmp_path / "run/model/model.safetensors").exists()


def updates(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("train/loss") if path.exists() else 0


@pytest.mark.long
def test_a_second_signal_ends_a_run_in_the_middle_of_a_step(tmp_path):
    """Bug: a step of an hour cannot be left."""
    process = Process(tmp_path, "epochs_per_rollout=100000", "loss=grpo_clip", "eval_every=1000000")
    process.comes_to(lambda run, said: updates(run) > 2)
    process.send_signal(signal.SIGINT)
    process.comes_to(lambda run, said: "stopping at the end of this step" in said)
    time.sleep(signals.ONCE_S + 0.1)
    assert "left at once" in process.ends(signal.SIGINT)[2]


#: Phase -> (settings, what shows that it has begun, from the run folder and what was said).
ASKED = "eval_problems=4000 data.n_validation=4000 sampling.max_tokens=220 sampling.min_tokens=219"
PHASES: dict[str, tuple[str, Callable[[Path, str], object]]] = {
    "warm start": ("model.warm_start.steps=100000", lambda run, said: "teaching a new" in said),
    "evaluation": (ASKED, lambda run, said: "records " in said),
    "vLLM starts": ("rollout=vllm rollout.kv_cache_gb=0.5", lambda run, said: "starting vLLM" in said),
}


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_ends_politely(tmp_path, phase, number):
    """Bug: a traceback, a process or a file is left. Steps of training: tests/test_kills.py."""
    more, begun = PHASES[phase]
    if phase.startswith("vLLM"):
        pytest.importorskip("vllm")
    process = Process(tmp_path, *more.split())
    process.comes_to(begun)
    time.sleep(0.5)
    status, rows, said = process.ends(number, group=number == signal.SIGINT)
    assert "left at once" not in said
    assert not [row for row in rows if row["train_step"]]
    assert status["reason"].startswith(f"by {signal.Signals(number).name}")
    assert not (tmp_path / "run/model/model.safetensors").exists()
    assert "stopping at the end of this step" not in said
