"""How a command ends and what it prints: exit codes, any text on any stream and width, full disks, no secret."""

import io
import itertools
import json
import os
import pty
import re
import resource
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml

from rlreason.engines.vllm_process import hide_secrets, last_lines
from rlreason.errors import ConfigError, DataError, EngineError, UnwritableError
from rlreason.records.console import Console, closing_table, exit_code_of, run_lines
from rlreason.records.reader import RunFolder, write_status
from rlreason.records.training_curves import draw_curves
from rlreason.records.writer import RunWriter
from rlreason.runtime.files import append_line, write_whole
from rlreason.runtime.text import HIDDEN, redacted
from rlreason.sweeps.state import RunState, SweepState, write_state
from tests.starts import ENV as OF_STARTS
from tests.starts import ROOT, SMALL, rlreason

ENV = {key: value for key, value in os.environ.items() if key not in ("WANDB_SILENT", "COLUMNS")} | OF_STARTS
DO = "import sys; from rlreason.records.console import exit_code_of; sys.exit(exit_code_of(lambda: {}))"


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *words]
    return subprocess.run(argv, env=ENV | env, capture_output=True, encoding="utf-8", errors="replace")


def left_after(lines: int, *words: str) -> tuple[int, str]:
    """(exit code, standard error) of a command whose reader leaves after so many lines."""
    pipe = f'"$@" | head -n {lines}; exit ${{PIPESTATUS[0]}}'
    argv = ["bash", "-c", pipe, "bash", sys.executable, *words]
    done = subprocess.run(argv, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def test_an_end_is_one_line_and_its_exit_code_and_a_bug_keeps_its_traceback(capsys):
    """Bug: a user's mistake is a traceback, or a full disk counts as a failed run."""
    for command, code, says in (
        (lambda: 5, 5, ""), (lambda: torch.empty(10**15), 4, "out of memory ([enforce fail"),
        (Mock(side_effect=DataError("no problem is left")), 3, "rlreason: no problem is left"),
        (Mock(side_effect=EngineError("the engine died")), 1, "rlreason: the engine died"),
        (Mock(side_effect=KeyboardInterrupt()), 130, "rlreason: stopped by a signal"),
    ):  # fmt: skip
        assert exit_code_of(command) == code
        said = capsys.readouterr().err.strip()
        assert (says in said, len(said.splitlines())) == (True, bool(says))
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 // 0)


def test_what_cannot_be_encoded_is_escaped_and_a_reader_may_leave_or_have_no_room():
    """Bug: `| head` prints a traceback, or a command goes on unread where a thread met the end first."""
    words = DO.format("print('r\\ufffd', file=sys.stderr) or print('\\ufffd \\udc80 ok')")
    done = python("-c", words, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\ufffd \\udc80 ok\n", "r\\ufffd\n")
    assert left_after(1, "-c", DO.format("[print(i) for i in range(10**5)] and 0")) == (141, "")
    words = "import threading; threading.Thread(target=print, args=('x',)).start() or [print(i) for i in range(9)]"
    assert left_after(0, "-c", DO.format(f"exec({words!r})")) == (141, "")
    argv = ["bash", "-c", '"$@" > /dev/full', "bash", sys.executable, "-c", DO.format("print('x')")]
    done = subprocess.run(argv, env=ENV, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count(b"\n"), b"No space left" in done.stderr) == (4, 1, True)


def test_every_writer_names_its_file_and_leaves_nothing_half(tmp_path, policy):
    """Bug: a full disk leaves half a file, or ends the run with a traceback."""
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
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():  # as on a full disk, files beyond so many bytes cannot be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100 if "metrics" in name else 1000, before[1]))
        with pytest.raises(UnwritableError) as caught:
            write()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert str(caught.value).startswith(f"{tmp_path / name} cannot be written")
        assert caught.value.exit_code == 4
    assert (tmp_path / "a.json").read_text() == "old"
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".partial")]
    assert not (tmp_path / "run/model").exists()
    assert all(json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open())
    with pytest.raises(ConfigError, match="No such file or directory"):
        append_line(tmp_path / "nowhere/a", b"x")


LONG = "engine and trainer disagree by 0.200 nats per token (monitors.parity_bound=0.05): weights or precision differ"
METRICS = {f"eval/{name}": 0.5 for name in ("accuracy", "accuracy_low", "accuracy_high", "format", "truncated")}
METRICS |= {"eval/problems": 1024, "eval/samples": 1024, "eval/length": 1024.0}
ROW = {"reward/format": 0.5, "reward/mean": -0.25, "rollout/length": 1024.0, "train/grad_norm": 1e-9}


def test_every_line_fits_and_none_is_cut():
    """Bug: a row or a table that wraps, or a sentence of which a log has a part."""
    console = Console(out=(out := io.StringIO()))
    console.say(f"{LONG[:100]}\n! {LONG} and {LONG}")
    console.start(200)
    console.step(100, 0.5, ROW, keep=True)
    console.table(closing_table(METRICS, METRICS))
    assert max(map(len, out.getvalue().splitlines())) <= 120
    assert " ".join(out.getvalue().split()).count(LONG) == 2
    assert re.search("100/200 .*-0.250 .*1e-09", out.getvalue())


@pytest.mark.parametrize(("live", "rows"), [(False, ["3", "4"]), (True, ["4"])])
def test_a_log_has_a_row_of_a_step_every_minute(monkeypatch, live, rows):
    """Bug: hours of a batch job that evaluates seldom leave nothing to see, or every step of a fast run a line."""
    console, clock = Console(out=(out := io.StringIO())), itertools.count(0, 25)
    monkeypatch.setattr("rlreason.records.console.time", SimpleNamespace(monotonic=lambda: next(clock)))
    console.live = live
    console.start(200)
    for step in range(1, 7):
        console.step(step, 0.5, ROW, keep=step == 4)
    lines = [re.findall(r"(\d)/200", line) for line in out.getvalue().split("\n")[:-1]]
    assert [shown[-1] for shown in lines if shown] == rows  # of those shown in place, none stays


def test_a_terminal_has_a_line_for_each_run_of_a_sweep_that_is_under_way(tmp_path, monkeypatch):
    """Bug: a run that was killed earlier has a line, rich's codes are escaped, or the cursor stays hidden."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    names = {name: tmp_path / name for name in ("killed", "new", "asks")}
    for folder in names.values():
        folder.mkdir()
        (folder / "config.yaml").write_text("n_steps: 4\n")
    rows = [{"rollout_step": k, "time/total": 10.0 * k, "eval/accuracy": (0.25, None)[k > 0]} for k in range(3)]
    write_status(names["killed"], "running")
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "__stdout__", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        with run_lines({folder: f"3e-4 {name}" for name, folder in names.items()}):
            (names["new"] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (names["asks"] / "responses.unfinished.jsonl").write_text("{}\n" * 8)
            for name in ("new", "asks"):
                write_status(names[name], "running")
            print("== new: started")
    written = ""
    while "\x1b[?25h" not in written:  # it arrives in parts; at its end the terminal raises
        written += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert re.search(r"== new: started\r\n.*3e-4 new +2/4 +0\.250 +20 s left *\r\n3e-4 asks +7 responses", written)
    assert "killed" not in written


NOISE = """
import logging, os, sys, threading, warnings
from pathlib import Path
from rlreason.runtime.streams import log_stderr_in, print_stderr, stderr_logged
with stderr_logged():
    warnings.warn("early swordfish-4")
    if {folder!r}:
        log_stderr_in(Path({folder!r}))
    logging.getLogger("peft").warning("logged swordfish-4")
    sys.stderr.flush()
    os.write(2, b"native \\xff swordfish-4\\n")
    print_stderr("ours")
    thread = threading.Thread(target=lambda: 1 / 0, name="beside")
    thread.start()
    thread.join()
    {last}
print("after", file=sys.stderr)
"""


def test_stray_lines_are_kept_in_the_runs_log_without_secrets(tmp_path, monkeypatch):
    """Bug: a library's warning hides the run's own lines, or puts a token into the folder."""
    last = f'assert b"d swordfish" not in Path({str(tmp_path)!r}, "log.txt").read_bytes()'
    done = python("-c", NOISE.format(folder=str(tmp_path), last=last), SOME_TOKEN="swordfish-4")
    assert (done.returncode, done.stderr) == (0, "rlreason: ours\nafter\n")
    log = (tmp_path / "log.txt").read_bytes()
    for line in (f"UserWarning: early {HIDDEN}", f"logged {HIDDEN}", "Exception in thread beside", "division by zero"):
        assert line.encode() in log
    assert b"native \xff " + HIDDEN.encode() in log
    assert b"swordfish" not in log.replace(b'warnings.warn("early swordfish-4")', b"")
    monkeypatch.setenv("SOME_TOKEN", "swordfish-4")  # as in the log of vLLM
    assert "swordfish" not in last_lines(tmp_path / "log.txt")
    hide_secrets(tmp_path / "log.txt")
    assert "swordfish" not in (tmp_path / "log.txt").read_text()
    done = python("-c", NOISE.format(folder="", last="raise ValueError('a bug')"))
    assert "ValueError: a bug" in done.stderr


SECRETS = (
    "WANDB_API_KEY='swordfish'", "client:\n  password: swordfish\n  seed: 1", "a library says environment-fish!",
    "  api_key: a sword and a fish", "client.api_key='sword fish'", '{"api_key": "swordfish"}',
    "failed with password: swordfish in a line", "https://me:sword@fish@host",
)  # fmt: skip
NO_SECRETS = (
    "sampling.max_tokens=4800000000 micro_batch_tokens: 1638400000", "rows.sort(key=natural_order)",
    "tokenizer=some/long/name author: Somebody-Else", "The answer key: everything", "an 1234567 of a short token",
    "https://host/path?x=1 git@github.com:a/b http://localhost:8080/a@b",
)  # fmt: skip


def test_the_value_of_a_secret_name_is_hidden_and_nothing_else(monkeypatch, tmp_path):
    """Bug: a status or a sweep's file holds a token, or a number of tokens is hidden as one."""
    monkeypatch.setenv("my_Secret", "environment-fish")
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "somebody")
    assert all(HIDDEN in redacted(text) and "fish" not in redacted(text) for text in SECRETS)
    assert tuple(map(redacted, NO_SECRETS)) == NO_SECRETS
    settings = {"path": "https://me:swordfish@host", "limit": 1e-06, "note": ["ünï: environment-fish", None, True]}
    hidden = {"path": f"https://me:{HIDDEN}@host", "limit": 1e-06, "note": [f"ünï: {HIDDEN}", None, True]}
    assert redacted(settings) == yaml.safe_load(redacted(yaml.safe_dump(settings, allow_unicode=True))) == hidden
    write_status(tmp_path, "failed", "ValueError: environment-fish is refused")
    assert "fish" not in (tmp_path / "status.json").read_text()
    words, setting = ["data.options.db_password=swordfish"], {"data.options.db_password": "swordfish"}
    run = RunState("seed=0", words, setting, 0)
    write_state(tmp_path, SweepState("", words[0], ["seed"], None, "running", 1, "", [run]))
    assert "swordfish" not in (tmp_path / "sweep.json").read_text()


@pytest.mark.long
def test_a_run_keeps_no_secret_in_any_file(tmp_path):
    """Bug: a token of the environment, of the command line or of what the user's own reward says is in a file."""
    asks = "print('asked', os.environ['SERVICE_TOKEN'], file=sys.stderr, flush=True)"
    reward = f"import os, sys\ndef judged(response, ground_truth):\n    {asks}\n    return {{'reward': 1.0}}\n"
    (tmp_path / "own_reward.py").write_text(reward)
    secret = {"SERVICE_TOKEN": "environment-swordfish", "WANDB_API_KEY": f"swordfish{'0123456789' * 4}"[:40]}
    words = [*SMALL, "prompt.reward=own_reward:judged", "logger=[wandb,tensorboard]", "logger.mode=offline"]
    words += ["model.cache=https://me:typed-swordfish@host", "hydra.job.name=environment-swordfish"]
    done = rlreason(*words, "hydra.run.dir=run", cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}", **secret)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"provenance.json", "own_functions.txt", "config.yaml"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if b"swordfish" in path.read_bytes()] == []
