"""How a command ends: one line and the exit code of the table, or a traceback; and the same for a sweep's runs."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlreason.errors import ConfigError, DataError, EngineError, ResourceError
from rlreason.main import mark_ended
from rlreason.records.ending import exit_code_of
from rlreason.records.reader import read_status, write_status
from tests.test_end_to_end import SMALL, rlreason
from tests.waiting import wait_for


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (lambda: None, 0, ""),
        (lambda: 5, 5, ""),
        (raising(ConfigError("n_steps=0 must be above 0\nG=0 too")), 2, "rlreason: n_steps=0 must be above 0"),
        (raising(DataError("no problem is left")), 3, "rlreason: no problem is left"),
        (raising(EngineError("the engine died")), 1, "rlreason: the engine died"),
        (raising(ResourceError("too little memory")), 4, "rlreason: too little memory"),
        (raising(KeyboardInterrupt()), 130, "rlreason: stopped by a signal"),
        (lambda: torch.empty(10**15), 4, "out of memory ([enforce fail"),
        (lambda: bytearray(10**18), 4, "micro_batch_tokens"),
        (lambda: Path("/dev/full").write_text("x"), 4, "No space left"),
        (raising(RuntimeError("I/O error: No space left on device (os error 28)")), 4, "free some space"),
    ],
)
def test_an_end_is_one_line_and_its_exit_code(command, code, says, capsys):
    assert exit_code_of(command) == code
    said = capsys.readouterr().err.strip()
    assert says in said
    assert len(said.splitlines()) == says.count("rlreason: n_steps") + bool(says)


def test_an_error_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (KeyboardInterrupt(), "interrupted", "by a signal"),
        (DataError("no problem is left"), "failed", "no problem is left"),
        (ZeroDivisionError("by zero\nmore"), "failed", "ZeroDivisionError: by zero"),
    ],
)
def test_a_run_that_was_under_way_says_what_ended_it(tmp_path, error, status, reason):
    mark_ended(tmp_path, error)  # a folder that no run has taken stays as it is
    assert not list(tmp_path.iterdir())
    write_status(tmp_path, "running")
    mark_ended(tmp_path, error)
    row = json.loads((tmp_path / "status.json").read_text())
    assert (row["status"], row["reason"]) == (status, reason)
    mark_ended(tmp_path, ConfigError("another"))  # what has ended has ended
    assert json.loads((tmp_path / "status.json").read_text()) == row


def test_the_status_of_a_folder_is_read_from_either_file(tmp_path):
    assert read_status(tmp_path) is None
    (tmp_path / "summary.json").write_text('{"status": "diverged"}')
    assert read_status(tmp_path) == "diverged"
    write_status(tmp_path, "stopped:parity")
    assert read_status(tmp_path) == "stopped:parity"


@pytest.mark.long
def test_a_sweep_tells_runs_that_diverged_from_one_that_failed(tmp_path):
    diverging = ["learning_rate=1e20", "weight_decay=1e20", "entropy_coef=0.1", "save_model=false"]
    words = ["-m", "model.freeze=[],[nonesuch]", "hydra.sweep.dir=grid"]  # names of weights are known to the model only
    done = rlreason(*words, *SMALL, *diverging, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"^! .*seed=0.*: diverged:", done.stdout, re.MULTILINE)
    assert re.search(r"^! .*seed=0.*: failed \(model.freeze: nonesuch", done.stdout, re.MULTILINE)
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_sweep_that_is_stopped_stops_its_run_and_shows_what_there_is(tmp_path):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    argv = [sys.executable, "-m", "rlreason", "-m", "seed=0,1", "hydra.sweep.dir=grid", *SMALL, "n_steps=100000"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            wait_for(lambda: list(tmp_path.glob("grid/*/rollouts/step_00001.jsonl*")))
            os.killpg(process.pid, signal.SIGINT)  # as from a terminal: to the sweep and to its run
            assert process.wait(600) == 130
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path / "out").read_text()
    assert re.search(r"^! .*seed=0.*: interrupted", said, re.MULTILINE)
    assert "left: 2 of 2 runs; type the sweep again" in said
    assert "Traceback" not in said
    assert len(list((tmp_path / "grid").glob("*/metrics.jsonl"))) == 1  # the second run was not begun
