"""`rlreason score` and the sandbox behind it, on what people type and on systems that allow less."""

import json
import os
import shutil
import signal
from contextlib import suppress

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreason.discovery.inside import Refused, read_channel
from rlreason.discovery.sandbox import Limits, sandbox_here
from rlreason.discovery.score import problem_named, score_program, shipped
from rlreason.errors import ConfigError, DataError
from tests.starts import ROOT, Started, rlreason
from tests.waiting import MINUTES, wait_for

EXAMPLES = ROOT / "examples" / "kissing_11"
AXES = b"points = [[2 * s * (i == j) for j in range(11)] for i in range(11) for s in (1, -1)]\n"
KISSING = problem_named("kissing_11")


@pytest.fixture(params=["", "unshare", "limits", "limits without Landlock"])
def limits(request, monkeypatch) -> Limits:
    """Limits with each of the sandboxes that work here."""
    sandbox, _, without = request.param.partition(" ")
    if without:
        monkeypatch.setattr("rlreason.discovery.sandbox.landlock_version", lambda: 0)
    try:
        sandbox_here(sandbox)
    except ConfigError as error:
        pytest.skip(str(error))
    return Limits(memory_mb=400, sandbox=sandbox)


def test_a_set_is_told_in_the_courses_words_with_the_exit_code(tmp_path):
    (tmp_path / "mine.py").write_text("points = [[2, 6] + [0] * 9, [2, 0] + [0] * 9]\n")
    done = rlreason("score", str(EXAMPLES / "roots_220.py"), "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("valid: 220 points")
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["num_points"], told["raw_points"], told["dimension"], told["validity"]) == (220, 220, 11, 1.0)
    assert told["error"] is told["error_kind"] is told["alarm"] is None
    assert told["seconds"] > 0
    assert told["protections"]
    done = rlreason("score", "mine.py", "--json", cwd=tmp_path)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["error"] == "Minimum squared distance 36 < maximum squared norm 40"
    assert (told["num_points"], told["raw_points"], told["validity"], told["error_kind"]) == (0, 2, 0.0, "too_close")
    assert told["worst_pair"] == {"first": 0, "second": 1, "vectors": [[2, 6] + [0] * 9, [2, 0] + [0] * 9]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.py"], "PROGRAM=nowhere.py cannot be read"),
        (["mine.py", "--memory", "2X"], "--memory 2X must be from 64M to 1T"),
        (["mine.py", "--timeout", "nan"], "--timeout nan must be above 0"),
        (["mine.py", "--problem", "kissing"], "--problem=kissing is no problem: choose one of kissing_11"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_cure(tmp_path, words, says):
    (tmp_path / "mine.py").write_bytes(AXES)
    done = rlreason("score", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rlreason: {says}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize("hidden", [[], ["bwrap"], ["bwrap", "unshare"]], ids=["best", "unshare", "limits"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_with_the_process_that_scores_it(tmp_path, number, hidden):
    (tmp_path / "mine.py").write_text(
        "import subprocess, time\n"
        f"subprocess.Popen(['{tmp_path}', '600'], executable='/bin/sleep', start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    for name in ("temporary", "bin"):
        (tmp_path / name).mkdir()
    for name in {"bwrap", "unshare", "sh", "mount", "umount", "mkdir", "ln", "cp", "rm"} - {*hidden}:
        if tool := shutil.which(name):
            (tmp_path / "bin" / name).symlink_to(tool)
    env = {"TMPDIR": str(tmp_path / "temporary"), "PATH": str(tmp_path / "bin")}
    started, of_its = Started("score", "mine.py", cwd=tmp_path, **env), f"{tmp_path} "
    wait_for(lambda: running_with(of_its))
    running = running_with(of_its)
    os.kill(int(started.process.pid or 0), number)
    assert started.finished(600).returncode in (-9, 130)
    gone, alive = psutil.wait_procs(running, timeout=MINUTES)
    assert gone
    assert not alive
    if number != signal.SIGKILL:
        assert not list((tmp_path / "temporary").glob("rlreason-program-*"))


def running_with(text: str) -> list[psutil.Process]:
    """The processes whose command line begins with a text."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found += [process] if " ".join(process.cmdline()).startswith(text) else []
    return found


def test_a_program_sees_neither_variables_nor_files_of_the_scoring_process(monkeypatch, limits, request, tmp_path):
    """Without Landlock and a namespace it reads what its user may; the variables are out of reach in every sandbox."""
    monkeypatch.setenv("OPENAI_API_KEY", "canary-0123456789")
    key = tmp_path / "key"
    key.write_text("canary-0123456789" if "without" not in request.node.name else "")
    thief = (
        "import glob, os, tempfile\nfound = b''\n"
        "assert os.getcwd() == os.environ['HOME'] == tempfile.gettempdir() == os.path.dirname(__file__)\n"
        "open('own', 'w').write('own')\n"
        f"for path in [{str(key)!r}, *glob.glob('/proc/*/environ')]:\n"
        "    try:\n        found += open(path, 'rb').read()\n    except OSError:\n        pass\n"
        "raise ValueError(found)\n"
    )
    score = score_program(thief.encode(), KISSING, limits)
    assert str(score["error"]).startswith('File "program.py", line 10')
    assert "ValueError" in score["error"]
    assert "canary" not in str(score)


def test_the_memory_that_a_program_held_for_a_while_is_in_its_record(limits):
    source = b"import time\nheld = bytes(1) * (100 << 20)\ntime.sleep(2)\n" + AXES  # long enough for many looks
    assert 90 < score_program(source, KISSING, limits)["peak_memory_mb"] < 200


def test_a_verifier_that_fails_is_the_problems_fault_and_no_score(tmp_path):
    (tmp_path / "problem.yaml").write_text("title: Broken\nprompt: ask.txt\n")
    (tmp_path / "ask.txt").write_text("?")
    (tmp_path / "starter.py").write_bytes(AXES)
    for verifier, says in (("def verify(rows): return 1", "gave no score"), ("1 / 0", "ZeroDivisionError")):
        (tmp_path / "verify.py").write_text(verifier)
        with pytest.raises(DataError, match=says):
            score_program(AXES, problem_named(str(tmp_path)))
    (tmp_path / "verify.py").write_text("def verify(rows):\n    while True: pass\n")
    score = score_program(AXES, problem_named(str(tmp_path)), Limits(check_timeout_s=0.5))
    assert (score["error_kind"], score["validity"]) == ("timeout", 0.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title: x", "missing required argument 'prompt'|missing required field `prompt`"),
        ("title: x\nprompt: none.txt", "none.txt cannot be read"),
        ("title: x\nprompt: ask.txt\ncolour: red", "colour"),
        ("title: x\nprompt: ask.txt\nrecord: [{score: many}]", "Expected `int | float`"),
        ("title: [", "cannot be used"),
    ],
)
def test_a_problem_that_is_not_sound_is_named_with_its_file(tmp_path, text, says):
    for name in ("ask.txt", "starter.py", "verify.py"):
        (tmp_path / name).touch()
    (tmp_path / "problem.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        problem_named(str(tmp_path))


def test_every_shipped_problem_has_a_starter_that_counts():
    assert shipped() == ["kissing_11"]
    score = score_program((KISSING.folder / KISSING.starter).read_bytes(), KISSING)
    assert 0 < score["score"] < KISSING.options["upper_bound"]


# The channel


def lines_of(rows: list[list[int]]) -> bytes:
    return "\n".join(["points", *(" ".join(map(str, row)) for row in rows), f"end {len(rows)}", ""]).encode()


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=4), max_size=5))
def test_rows_come_through_the_channel_as_they_were(rows):
    assert read_channel(lines_of(rows), 10, 1000) == rows


@given(st.binary(max_size=60))
def test_anything_else_in_the_channel_is_no_set(data):
    with suppress(Refused):
        assert lines_of(read_channel(b"points\n" + data, 10, 20)) == b"points\n" + data  # it happened to be one


@pytest.mark.parametrize(
    "data",
    [
        b"points\n1_0\nend 1\n", b"points\n+1\nend 1\n", b"points\n-0\nend 1\n", b"points\n01\nend 1\n",
        b"points\n1  2\nend 1\n", b"points\n1 2 \nend 1\n", b"points\n1\t2\nend 1\n", b"points\n1.0\nend 1\n",
        b"points\n\xd9\xa1\nend 1\n", b"points\n1\nend 2\n", b"points\n1\nend 1\nend 1\n", b"points\n1\nend 1",
        b"points\n1\nend 01\n", b"points\n1\r\nend 1\n", b"Points\n1\nend 1\n", b"error nothing\n", b"end 0\n",
        b"points\n1\nend 1\n\n",
    ],
)  # fmt: skip
def test_nearly_rows_are_none(data):
    with pytest.raises(Refused) as refused:
        read_channel(data, 10, 20)
    assert refused.value.kind == "channel"
