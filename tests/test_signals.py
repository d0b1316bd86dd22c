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
from tests.test_end_to_end import SMALL
from tests.waiting import wait_for

psutil = pytest.importorskip("psutil")
ROOT = Path(__file__).parents[1]
SLOW_REWARD = """
import time
calls = 0
def slowly(response, gold):  # but for the probe and the first evaluation
    global calls
    calls += 1
    time.sleep(1 if calls > 9 else 0)
    return 0.5
"""


class Process:
    """A command in a process group and with a temporary folder of its own."""

    def __init__(self, cwd: Path, *argv: str) -> None:
        self.cwd, self.temporary = cwd, cwd / "temporary"
        self.temporary.mkdir()
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{cwd}", "TMPDIR": str(self.temporary)}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(cwd / "cache")  # torch's cache of compiled code outlives every run
        with (cwd / "out").open("w") as out:
            self.popen = subprocess.Popen(
                [sys.executable, *argv], cwd=cwd, env=os.environ | own, stdout=out, stderr=out, start_new_session=True
            )
        self.family: list[psutil.Process] = []
        self.shared: set[str] = set()

    @property
    def said(self) -> str:
        return (self.cwd / "out").read_text()

    def send(self, number: int, group: bool = False) -> None:
        if not self.family:
            top = psutil.Process(self.popen.pid)
            self.family = top.children(recursive=True)
            for process in (top, *self.family):
                with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
                    self.shared |= {m.path for m in process.memory_maps() if "/dev/shm" in m.path}
        os.killpg(self.popen.pid, number) if group else self.popen.send_signal(number)

    def ends(self, seconds: float = 120, at_once: bool = False) -> None:
        """In time, with this code, without a traceback; no process, shared memory or temporary file is left."""
        try:
            assert self.popen.wait(seconds) == 130, self.said
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        assert "Traceback" not in self.said
        assert at_once or "left at once" not in self.said
        assert psutil.wait_procs(self.family, timeout=600)[1] == []
        assert not [path for path in self.shared if Path(path).exists()]
        assert [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
        assert not list(self.cwd.rglob("*.partial"))


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
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), signals.stoppable():
            me(number)
        assert signals.stop_signal() == signal.Signals(number).name
        assert signal.getsignal(number) is signal.default_int_handler
        signal.signal(number, signal.SIG_IGN)
        with signals.stoppable():
            me(number)
        assert signals.stop_signal() is None
    finally:
        signal.signal(number, before)


def test_a_block_that_is_held_is_never_cut_in_two_and_its_notice_printed_at_once(monkeypatch, capfd):
    """The blocks of files that a step writes would raise in its middle."""
    monkeypatch.setattr(signals, "ONCE_S", 600.0)
    done: list[str] = []

    def work() -> None:
        with signals.held("after this step"):
            with signals.held():
                me(signal.SIGTERM)
            done.append(capfd.readouterr().err)
            me(signal.SIGTERM)  # sent twice at once, as `timeout` does
            done.append("outer")
        done.append("behind")

    with pytest.raises(KeyboardInterrupt), signals.stoppable():
        work()
    assert done == ["rlreason: after this step\n", "outer"]


def test_whoever_tidies_up_is_not_interrupted_by_the_same_signal_again():
    tidied = []
    with signals.stoppable(patient=(signal.SIGTERM,)):
        try:
            me(signal.SIGINT)
        except KeyboardInterrupt:
            signals.arrived()
            time.sleep(signals.ONCE_S)
            me(signal.SIGTERM)
            with signals.held():
                tidied.append(True)
    assert tidied


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
    folder = tmp_path / "run"
    argv = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} ") as refused, run_lock(folder, print):
            pass
        assert refused.value.exit_code == 2
        assert f"process {process.pid} " in (folder / ".lock").read_text()  # it is the other's
        assert str(holder(folder)).startswith(f"process {process.pid} since ")
        process.kill()
        process.wait()
        assert holder(folder) is None
        twice = f"process {os.getpid()} "
        with run_lock(folder, print), pytest.raises(ConfigError, match=twice), run_lock(folder, print):
            pass
        assert not (folder / ".lock").exists()
    finally:
        process.kill()
        process.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_a_start_that_wrote_nothing_leaves_no_folder_and_one_that_cannot_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no"), run_lock(tmp_path / "a/b/run", print):
        raise ValueError("no")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match=r"file/run cannot be written"), run_lock(tmp_path / "file/run", print):
        pass
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    said: list[str] = []
    with run_lock(tmp_path / "run", said.append):  # on a file system that knows no locks
        assert len(said) == 1


RUN = ["-m", "rlreason", *SMALL, "n_steps=100000", "hydra.run.dir=run"]


@pytest.mark.parametrize("by", ["SIGTERM", "a reader that leaves"])
def test_a_run_that_is_stopped_ends_its_step_and_keeps_model_rows_and_curves(tmp_path, by):
    command = [sys.executable, *RUN, "epochs_per_rollout=20", "loss=grpo_clip", "eval_every=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        wait_for(lambda: process.poll() is not None or updates(tmp_path / "run") > 2)
        process.send_signal(signal.SIGTERM) if by == "SIGTERM" else process.stdout.close()
        error = process.stderr.read().decode()
        assert process.wait(600) == (130 if by == "SIGTERM" else 141)
    status, rows = left(tmp_path / "run")
    step = rows[-1]["rollout_step"]
    assert status["reason"].endswith(f"after step {step} of 100000")
    assert rows[-1]["train_step"] == 20 * step
    assert list((tmp_path / "run/checkpoints").glob(f"step_{step:05d}_*"))
    assert (tmp_path / "run/model/model.safetensors").exists()
    if by == "SIGTERM":
        assert f"by SIGTERM after step {step}" in error.splitlines()[-1]


@pytest.mark.long
def test_a_second_signal_ends_a_run_in_the_middle_of_a_step(tmp_path):
    process = Process(tmp_path, *RUN, "epochs_per_rollout=100000", "loss=grpo_clip", "eval_every=1000000")
    wait_for(lambda: process.popen.poll() is not None or updates(tmp_path / "run") > 2)
    process.send(signal.SIGINT)
    wait_for(lambda: "stopping at the end of this step" in process.said or process.popen.poll() is not None)
    time.sleep(signals.ONCE_S + 0.1)
    process.send(signal.SIGINT)
    process.ends(at_once=True)
    left(tmp_path / "run")


def updates(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("train/loss") if path.exists() else 0


#: Phase -> (settings, what shows that it has begun, from the run folder and what was said).
PHASES: dict[str, tuple[list[str], Callable[[Path, str], object]]] = {
    "warm start": (["model.warm_start.steps=100000"], lambda run, said: "teaching a new" in said),
    "grading": (
        ["prompt.reward=slow_reward:slowly", "grading.timeout_s=20", "eval_every=100"],
        lambda run, said: (run / "evals").exists(),
    ),
    "evaluation": (
        ["eval_problems=4000", "data.n_validation=4000", "sampling.max_tokens=220", "sampling.min_tokens=219"],
        lambda run, said: "records " in said,
    ),
    "vLLM starts": (["rollout=vllm", "rollout.kv_cache_gb=0.5"], lambda run, said: "starting vLLM" in said),
}


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_ends_politely(tmp_path, phase, number):
    """Sampling and learning: tests/test_kills.py, tests/test_kills_vllm.py."""
    more, begun = PHASES[phase]
    if phase.startswith("vLLM"):
        pytest.importorskip("vllm")
    given = {word.split("=")[0]: word for word in [*RUN[2:], *more]}  # the last one counts
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    process, folder = Process(tmp_path, *RUN[:2], *given.values()), tmp_path / "run"
    wait_for(lambda: process.popen.poll() is not None or begun(folder, process.said), every=0.2)
    assert process.popen.poll() is None, process.said
    time.sleep(0.5)
    process.send(number, group=number == signal.SIGINT)
    process.ends()
    status, rows = left(folder)
    learned = max((row["train_step"] for row in rows), default=0)
    place = f" after step {int(rows[-1]['rollout_step'])} of " if learned else ""
    assert status["reason"].startswith(f"by {signal.Signals(number).name}{place}")
    assert (folder / "model/model.safetensors").exists() == bool(learned)
    assert ("stopping at the end of this step" in process.said) == (phase == "grading")
