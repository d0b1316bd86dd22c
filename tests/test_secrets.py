"""No password, key or token gets into a run folder: what is hidden, what is left alone, and a whole run around one."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from rlreason.engines.vllm.start import hide_secrets, last_lines
from rlreason.records.reader import write_status
from rlreason.runtime.text import HIDDEN, redacted
from rlreason.sweeps.state import RunState, SweepState, write_state
from tests.starts import ENV, ROOT, SMALL


@pytest.mark.parametrize(
    "text",
    [
        "logger.api_key=swordfish",
        "WANDB_API_KEY='swordfish'",
        "client:\n  password: swordfish\n  seed: 1",
        "- logger.token=swordfish",
        "git clone https://me:swordfish@host/repo",
        "postgres://:swordfish@host",
        "a library says environment-fish!",
        "data.options.apikey=swordfish",
        "  api_key: a sword and a fish",
        "client.api_key='sword fish'",
        '{"api_key": "swordfish"}',
        "failed with password: swordfish in a line",
        "https://me:sword@fish@host",
    ],
)
def test_the_value_of_a_secret_name_is_hidden(text, monkeypatch):
    monkeypatch.setenv("my_Secret", "environment-fish")
    shown = redacted(text)
    assert "fish" not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize(
    "text",
    [
        "sampling.max_tokens=4800000000 micro_batch_tokens: 1638400000",
        "tokenizer=some/long/name author: Somebody-Else",
        "rows.sort(key=natural_order)",
        "The answer key: everything",
        "https://host/path?x=1 git@github.com:a/b http://localhost:8080/a@b",
        "an 1234567 of a short token",
    ],
)
def test_what_is_no_secret_is_left_alone(text, monkeypatch):
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "somebody")
    assert redacted(text) == text


def test_settings_read_back_with_the_same_names(monkeypatch):
    monkeypatch.setenv("A_SECRET", "swordfish-2")
    settings = {"path": "https://me:swordfish@host", "limit": 1e-06, "note": ["ünï: swordfish-2", None, True]}
    hidden = {"path": f"https://me:{HIDDEN}@host", "limit": 1e-06, "note": [f"ünï: {HIDDEN}", None, True]}
    assert redacted(settings) == hidden
    assert yaml.safe_load(redacted(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))) == hidden


def test_the_reason_of_a_status_is_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "swordfish-3")
    write_status(tmp_path, "failed", "ValueError: swordfish-3 is refused")
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == f"ValueError: {HIDDEN} is refused"


def test_the_log_hides_what_python_and_what_native_code_prints(tmp_path):
    program = f"""
import os, sys
from pathlib import Path
from rlreason.runtime.streams import log_stderr_in, stderr_logged
with stderr_logged():
    print("early swordfish-4", file=sys.stderr)
    log_stderr_in(Path({str(tmp_path)!r}))
    print("a library says swordfish-4", file=sys.stderr)
    sys.stderr.flush()
    assert b"swordfish-4" not in Path({str(tmp_path / "log.txt")!r}).read_bytes()
    os.write(2, b"native \\xff swordfish-4\\n")
"""
    env = os.environ | {"SOME_TOKEN": "swordfish-4", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    text = (tmp_path / "log.txt").read_bytes()
    assert text == f"early {HIDDEN}\na library says {HIDDEN}\nnative ".encode() + b"\xff" + f" {HIDDEN}\n".encode()


def test_the_log_of_vllm_is_hidden_where_it_is_quoted_and_when_the_engine_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "swordfish-5")
    log, said = tmp_path / "vllm.log", list[str]()
    log.write_bytes(b"native \xff swordfish-5\nplain\n")
    assert "swordfish" not in last_lines(log)
    assert "plain" in last_lines(log)
    hide_secrets(log, said.append)
    assert log.read_bytes().splitlines() == [b"native \xff " + HIDDEN.encode(), b"plain"]
    file = log.stat().st_ino
    hide_secrets(log, said.append)
    assert log.stat().st_ino == file  # nothing to hide: left alone
    hide_secrets(tmp_path / "none.log", said.append)
    assert (said, [path.name for path in tmp_path.iterdir()]) == ([], ["vllm.log"])


@pytest.mark.long
def test_a_run_keeps_no_secret_in_any_file(tmp_path):
    """Of the environment, of the command line, and of what a reward of the user's own says."""
    (tmp_path / "own_reward.py").write_text(
        "import os, sys\n"
        "def judged(response, ground_truth):\n"
        "    print('asked', os.environ['SERVICE_TOKEN'], file=sys.stderr, flush=True)\n"
        "    return {'reward': 1.0}\n"
    )
    secret = {"SERVICE_TOKEN": "environment-swordfish", "WANDB_API_KEY": f"swordfish{'0123456789' * 4}"[:40]}
    env = os.environ | ENV | secret | {"PYTHONPATH": str(ROOT)}
    words = [*SMALL, "prompt.reward=own_reward:judged", "logger=[wandb,tensorboard]", "logger.mode=offline"]
    words += [
        "model.cache=https://me:typed-swordfish@host",
        "hydra.job.name=environment-swordfish",
        "hydra.run.dir=run",
    ]
    argv = [sys.executable, "-m", "rlreason", *words]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    found = {path.name for path in files}
    assert {"provenance.json", "config.yaml", "own_functions.txt", "overrides.yaml"} <= found
    assert any(name.endswith(".wandb") for name in found), done.stdout
    for path in files:
        assert b"swordfish" not in path.read_bytes(), path


def test_the_record_of_a_sweep_hides_what_its_runs_hide(tmp_path):
    """Each run's folder hid a password that sweep.json beside them had, in the command and in every run's overrides."""
    words = ["data.options.db_password=swordfish", "seed=0"]
    runs = [RunState("seed=0", words, {"data.options.db_password": "swordfish"}, 0)]
    write_state(tmp_path, SweepState("mine", f"rlreason -m {words[0]}", ["seed"], None, "running", 1, "", runs))
    assert "swordfish" not in (tmp_path / "sweep.json").read_text()
