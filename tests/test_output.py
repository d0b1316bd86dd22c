"""What is printed: any text on any stream, any width, any reader; every wait is shown; nobody else's noise."""

import fcntl
import json
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rlreason.config.store import typed
from rlreason.engines.base import Prompt, Sampling
from rlreason.errors import ConfigError, ReaderGone, UnwritableError
from rlreason.evaluation.cases import curves_table
from rlreason.health.watch import Monitors
from rlreason.main import mark_ended
from rlreason.objectives.card import imitation_card
from rlreason.objectives.objective import LengthNormConfig
from rlreason.records.console import Console, closing_table
from rlreason.records.ending import exit_code_of
from rlreason.records.files import CONTENTS
from rlreason.records.reader import RunFolder, write_status
from rlreason.records.training_curves import draw_curves
from rlreason.records.writer import RunWriter
from rlreason.runtime.files import append_line, write_whole
from rlreason.runtime.streams import width_of
from rlreason.training.summary import describe_prompt
from rlreason.types import Grade, Problem, Response, Sample
from tests.test_end_to_end import SMALL
from tests.waiting import MINUTES, wait_for

ENV = {key: value for key, value in os.environ.items() if key not in ("WANDB_SILENT", "COLUMNS")}
ENV |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
DO = "import sys; from rlreason.records.ending import exit_code_of; sys.exit(exit_code_of(lambda: {}))"


def python(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *words]
    return subprocess.run(argv, cwd=cwd, env=ENV | env, capture_output=True, text=True, check=False, timeout=600)


def left_after(lines: int, *words: str, cwd: Path | None = None) -> tuple[int, str]:
    """(exit code, standard error) of a command whose reader leaves after so many lines, as `head` does."""
    ours, theirs = os.pipe()
    reader = os.fdopen(ours)
    if lines == 0:
        reader.close()  # before the command can write anything
    argv = [sys.executable, *words]
    with subprocess.Popen(argv, cwd=cwd, env=ENV, stdout=theirs, stderr=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        for _ in range(lines):
            reader.readline()
        reader.close()
        _, said = process.communicate(timeout=MINUTES)
        return process.returncode, said


# Any text, any reader


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict"])
def test_what_cannot_be_encoded_is_replaced(encoding):
    done = python("-c", DO.format("print('r\\ufffd', 'e\\ufffd', file=sys.stderr) or print('\\ufffd')"))
    assert (done.returncode, done.stdout) == (0, "\ufffd\n")
    words = DO.format("print('r\\ufffd', file=sys.stderr) or print('\\ufffd \\udc80 ok')")
    done = python("-c", words, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, "? ? ok\n", "r\\ufffd\n")


@pytest.mark.parametrize("option", ["--regrade", "--rollouts"])
def test_every_command_prints_to_any_stream(option, tmp_path):
    response = Response("p", [5], [1], [-0.5], "so \ufffd 7", "stop")
    records = RunWriter(tmp_path, "prompt: {reward: r1_zero}\n")
    records.responses("rollouts", 1, [Sample(response, Grade(1.0, 1.0, 1.0, "correct"))], [Problem("p", "q", "7")])
    done = python("-m", "rlreason", "inspect", str(tmp_path), option, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "so ? 7" in done.stdout


def test_a_reader_may_leave():
    assert left_after(1, "-c", DO.format("[print(i) for i in range(10**5)] and 0")) == (141, "")
    assert left_after(0, "-m", "rlreason", "inspect", "--help") == (141, "")
    words = (
        "import threading; threading.Thread(target=print, args=('x',)).start() or [print(i) for i in range(9)] and 0"
    )
    code, said = left_after(0, "-c", DO.format("exec(" + repr(words) + ")"))
    assert (code, said) == (141, "")


@pytest.mark.long
def test_a_terminal_may_be_closed():
    ours, theirs = pty.openpty()
    words = DO.format("exec('import time; time.sleep(0.5); print(1)')")
    process = subprocess.Popen([sys.executable, "-c", words], env=ENV, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    os.close(ours)
    assert process.communicate(timeout=600)[1] == b""
    assert process.returncode == 141


def test_a_full_disk_behind_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-c", DO.format("print('x')")]
        done = subprocess.run(argv, env=ENV, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("rlreason: standard output cannot be written")
    assert len(done.stderr.splitlines()) == 1


def test_a_run_whose_reader_left_was_interrupted(tmp_path):
    write_status(tmp_path, "running")
    mark_ended(tmp_path, ReaderGone("nobody read its output any more"))
    row = json.loads((tmp_path / "status.json").read_text())
    assert (row["status"], row["reason"]) == ("interrupted", "nobody read its output any more")


@pytest.mark.long
def test_a_training_run_ends_quietly_when_its_reader_leaves(tmp_path):
    words = [*SMALL, "save_model=false", "n_steps=1000", "eval_every=0", "hydra.run.dir=x"]
    assert left_after(2, "-m", "rlreason", *words, cwd=tmp_path) == (141, "")
    assert json.loads((tmp_path / "x/status.json").read_text())["status"] == "interrupted"
    assert not (tmp_path / "x/summary.json").exists()


# A full disk


@contextmanager
def files_of_at_most(size: int):
    """As on a full disk: files beyond so many bytes cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_writer_names_its_file_and_leaves_nothing_half(tmp_path, policy):
    records = RunWriter(tmp_path / "run", "seed: 0\n")
    records.metrics({"train_step": 0, "eval_step": 1, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4})
    write_whole(tmp_path / "a.json", "old")
    size = (tmp_path / "run/metrics.jsonl").stat().st_size
    writers = {
        "a.json": lambda: write_whole(tmp_path / "a.json", "x" * 9999),
        "run/metrics.jsonl": lambda: [records.metrics({"train_step": 1}) for _ in range(500)],
        "run/model": lambda: policy.save(tmp_path / "run/model"),
        "run/objective.md": lambda: records.document("objective.md", "x" * 9999),
        "run/curves.png": lambda: draw_curves(RunFolder(tmp_path / "run")),
    }
    for name, write in writers.items():
        with files_of_at_most(size + 100 if "metrics" in name else 1000), pytest.raises(UnwritableError) as caught:
            write()
        assert str(caught.value).startswith(f"{tmp_path / name} cannot be written")
        assert caught.value.exit_code == 4
    assert (tmp_path / "a.json").read_text() == "old"
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".partial")]
    assert not (tmp_path / "run/model").exists()
    assert all(json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open())


def test_a_place_that_is_gone_is_one_line_too(tmp_path):
    for write in (write_whole, append_line):
        with pytest.raises(ConfigError, match="No such file or directory") as caught:
            write(tmp_path / "nowhere/a", "x")
        assert caught.value.exit_code == 2
        assert isinstance(caught.value, OSError)


@pytest.mark.long
def test_a_run_on_a_full_disk_ends_in_one_line(tmp_path):
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)); "
        "sys.argv[0] = 'rlreason'; from rlreason.cli.command import cli; cli()"
    )
    done = python("-c", limited, *SMALL, "n_steps=1", "eval_every=0", "hydra.run.dir=x", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert re.fullmatch(r"rlreason: .*/x/checkpoints/\S+ cannot be written \(File too large\): .*\n", done.stderr)
    assert json.loads((tmp_path / "x/status.json").read_text())["reason"] in done.stderr
    assert not list(tmp_path.rglob("*.partial"))


# Widths and waits


@contextmanager
def terminal(columns: int):
    """(stream to a terminal of this width, a function that returns what was written there so far)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(ours, False)

    def written() -> str:
        parts = []
        with suppress(OSError):  # nothing more is there
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        return b"".join(parts).decode().replace("\r\n", "\n")

    with open(theirs, "w") as stream:
        yield stream, written
    os.close(ours)


def lines_of(written: str) -> list[str]:
    """What was to be seen, one after the other: lines that stay, and lines shown in place."""
    return [shown for line in written.split("\n") for shown in re.split(r"\r\x1b\[K", line)]


LONG = "engine and trainer disagree by 0.200 nats per token (monitors.parity_bound=0.05): weights or precision differ"
METRICS = dict.fromkeys(("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/format"), 0.5)
METRICS |= {"eval/problems": 1024, "eval/samples": 1024, "eval/length": 1024.0, "eval/truncated": 0.5}
ROW = {
    "reward/mean": -0.25,
    "reward/format": 0.5,
    "rollout/length": 1024.0,
    "train/entropy": 1.5,
    "train/grad_norm": 1e-9,
}


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_everything_fits_the_terminal(columns, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    with terminal(columns) as (stream, written):
        console = Console(stream)
        console.say(f"! step 3: {LONG}\nrecords    {LONG}")
        console.start(200)
        console.step(100, 0.5, ROW, keep=True)
        console.step(101, 0.5, ROW, keep=False)
        console.progress(LONG + LONG)
        console.table(closing_table(METRICS, METRICS))
        curves = {f"best by number {i}": [[0.2, 0.1, 0.3]] for i in range(4)}
        console.table(curves_table([1], curves, console.width))
        console.table(imitation_card(LengthNormConfig("token"), sampled=True).fitted(console.width))
        lines = lines_of(written())
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()).count(f"! step 3: {LONG}") == 1
    assert sum("100/200" in line and "-0.250" in line and "1e-09" in line for line in lines) == 1


def test_a_log_file_gets_its_lines_whole_up_to_120_columns(tmp_path):
    with (tmp_path / "log").open("w") as out:
        Console(out=out).say(f"{LONG[:100]}\n! {LONG} and {LONG}")
        assert width_of(out) == 120
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == LONG[:100]
    assert all(len(line) <= 120 for line in lines)


def test_errors_are_wrapped_on_a_terminal_alone(capsys):
    long = f"raise ConfigError('{LONG}')"
    words = f"from rlreason.errors import ConfigError; {DO.format('exec(' + repr(long) + ')')}"
    done = python("-c", words)
    assert done.stderr == f"rlreason: {LONG}\n"
    with terminal(60) as (stream, written):
        argv = [sys.executable, "-c", words]
        assert subprocess.run(argv, env=ENV, stderr=stream, check=False).returncode == 2
        lines = written().splitlines()
    assert " ".join(" ".join(lines).split()) == f"rlreason: {LONG}"
    assert max(map(len, lines)) <= 60


def test_a_wait_is_shown_with_how_far_it_has_come(tmp_path):
    with terminal(80) as (stream, written):
        console = Console(out=stream)
        console.shown_after_s = 600
        with console.wait("quick"):
            pass
        with console.wait("evaluation", more=lambda: ", 12 tokens") as wait:
            console.part("3/16 responses")
            console.shown_after_s = 0.1
            wait_for(lambda: wait.shown)
        console.say("done")
        seen = lines_of(written())
    assert any(re.fullmatch(r"evaluation: \[##\.{10}\] 3/16 responses, 12 tokens, \d:\d\d", line) for line in seen)
    assert "quick" not in " ".join(seen)
    assert seen[-2:] == ["done", ""]
    with (tmp_path / "log").open("w") as out:
        console = Console(out=out)
        console.logged_after_s = 0.1
        with console.wait("reading True", logged=True):
            time.sleep(1.2)  # what is printed elsewhere is not printed here, however long it takes
        with console.wait("reading False") as wait:
            wait_for(lambda: wait.logged)
            wait_for(lambda: "..." in (tmp_path / "log").read_text())
    assert (tmp_path / "log").read_text() == "reading False ...\n"


def test_an_engine_counts_what_it_draws(policy, engine):
    prompts = [Prompt(str(i), policy.encode_prompt("User: 1?"), i) for i in range(3)]
    responses = engine.generate(prompts, Sampling(1.0, 0, 9), 2)
    assert engine.drawn == sum(len(r.token_ids) for r in responses)


# The words of a run


def test_the_prompt_that_is_used_is_named(composed):
    assert describe_prompt(typed(composed()).prompt, traces=False) == "prompt=r1_zero_short"
    run = typed(composed("prompt.file=my.prompt", "prompt.reward=mine:judge", "prompt.trace=x"))
    assert describe_prompt(run.prompt, traces=False).endswith(" prompt.file=my.prompt, prompt.reward=mine:judge")
    assert describe_prompt(typed(composed("algorithm=sft", "prompt.trace=x")).prompt, traces=True).endswith(
        " with prompt.trace=x"
    )


def test_a_job_without_steps_names_none():
    said: list[str] = []
    monitors = Monitors(1, said.append)
    monitors.check(None, {"rollout/truncated": 0.9, "eval/mismatch_mean": 0.2})
    monitors.check(0, {"train/skipped_updates": 1})
    assert [line.startswith("! step 0: ") for line in said] == [False, False, True, True]


# The noise of others

NOISE = """
import logging, os, sys, threading, warnings
from pathlib import Path
from rlreason.runtime.streams import log_stderr_in, stderr_logged
with stderr_logged():
    warnings.warn("early")
    if {folder!r}:
        log_stderr_in(Path({folder!r}))
    logging.getLogger("peft").warning("logged")
    os.write(2, b"native\\n")
    print("rlreason: ours", file=sys.stderr)
    thread = threading.Thread(target=lambda: 1 / 0, name="beside")
    thread.start()
    thread.join()
    {last}
print("after", file=sys.stderr)
"""


def test_stray_lines_are_kept_in_the_runs_log(tmp_path):
    done = python("-c", NOISE.format(folder=str(tmp_path), last="pass"))
    assert done.returncode == 0
    log = (tmp_path / "log.txt").read_text()
    assert all(word in log for word in ("UserWarning: early", "logged", "native"))
    assert done.stderr.startswith("rlreason: ours\nException in thread beside:\nTraceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\nafter\n")
    assert not any(word in done.stderr for word in ("early", "logged", "native"))
    assert "log.txt" in CONTENTS


def test_noise_of_a_failure_without_a_folder_is_shown():
    done = python("-c", NOISE.format(folder="", last="raise ValueError('a bug')"))
    assert "early" in done.stderr
    assert "ValueError: a bug" in done.stderr
    quiet = "raise SystemExit(2)"
    assert "early" not in python("-c", NOISE.format(folder="", last=quiet)).stderr


def test_a_crash_in_native_code_is_told(tmp_path):
    done = python("-c", NOISE.format(folder=str(tmp_path), last="import ctypes; ctypes.string_at(0)"))
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr


def test_an_answer_is_flushed_before_the_code_is_returned(capsys):
    assert exit_code_of(lambda: print("seen")) == 0
    assert capsys.readouterr().out == "seen\n"
