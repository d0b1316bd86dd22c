"""The exact verifier of the shipped problem, programs that solve it, and `rlreason score` with its sandboxes."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import combinations

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreason.config.algorithms import ScoreConfig
from rlreason.discovery.inside import Refused
from rlreason.discovery.problems.kissing_11.verify import verify
from rlreason.discovery.score import problem_named, read_set, score_program
from rlreason.errors import ConfigError, DataError
from tests.starts import ROOT, Started, rlreason
from tests.waiting import MINUTES, wait_for

Rows = list[list[int]]
EXAMPLES, PROGRAMS = ROOT / "examples" / "kissing_11", ("roots_220", "lexicographic_438", "constant_weight_582")
AXES = b"points = [[2 * s * (i == j) for j in range(11)] for i in range(11) for s in (1, -1)]\n"
STARTER = [[sign if k == i else 0 for k in range(11)] for i in range(11) for sign in (2, -2)]


def padded(*rows: list[int]) -> Rows:
    """The rows with zeros up to dimension 11."""
    return [row + [0] * (11 - len(row)) for row in rows]


def test_a_valid_set_scores_its_points_and_one_above_the_proved_bound_is_an_alarm():
    assert verify(STARTER) == {
        "score": 22, "num_points": 22, "valid": True, "error": None, "error_kind": None, "alarm": None,
        "raw_points": 22, "dimension": 11, "duplicates": 0, "min_squared_distance": 8, "max_squared_norm": 4,
        "worst_pair": {"first": 0, "second": 2, "vectors": padded([2], [0, 2])}, "compared_rows": 22,
    }  # fmt: skip
    alone = verify(padded([0, -3]))
    assert (alone["score"], alone["min_squared_distance"], alone["worst_pair"]) == (1, None, None)
    assert verify(STARTER, upper_bound=22)["score"] == 22
    result = verify(STARTER, upper_bound=21)
    assert (result["error_kind"], result["score"], result["valid"]) == ("alarm", 0, False)
    assert "21" in result["alarm"]
    assert verify([*STARTER, STARTER[0]], upper_bound=21)["error_kind"] == "too_close"  # no alarm for one that is not


@pytest.mark.parametrize("s", [3, 2**16, 2**32, 2**53, 8_700_000_000_001, 2**64, 10**200 + 7])
def test_equality_is_allowed_and_one_less_is_not_whatever_the_size(s):
    """64-bit integers wrap around and floats round, from 2**16 on: neither may decide. 8.7e12: norms of 26 digits."""
    good = verify(padded([1, s], [2, 0]))
    assert (good["score"], good["min_squared_distance"], good["max_squared_norm"]) == (2, 1 + s * s, 1 + s * s)
    bad = verify(padded([1, s], [1, 0]))
    told = bad["error_kind"], bad["score"], bad["min_squared_distance"], bad["max_squared_norm"]
    assert told == ("too_close", 0, s * s, 1 + s * s)
    shown = f"{s * s} < maximum squared norm {1 + s * s}" if s < 10**20 else "100000000000... (401 digits)"
    assert shown in bad["error"]
    json.dumps(bad)


@pytest.mark.parametrize(
    ("rows", "kind", "error"),
    [
        ([], "empty", "empty"), ([[*row, 0] for row in STARTER], "dimension", "is 12, expected 11"),
        ([*STARTER, [0] * 11], "zero_vector", "Row 22"), ([*STARTER, [True] * 11], "type", "Row 22"),
        ([*STARTER, [2] * 10, []], "ragged", "row 22 has 10, expected 11"), ([[2.0] + [0] * 10], "type", "Row 0"),
        (STARTER * 455, "size", "10010 points"),
        ([*STARTER, STARTER[3], STARTER[0]], "too_close", "0 < maximum squared norm 4"),
    ],
)  # fmt: skip
def test_what_is_no_set_of_vectors_is_told_in_plain_words(rows, kind, error):
    result = verify(rows)
    assert (result["error_kind"], result["score"], result["num_points"], result["valid"]) == (kind, 0, 0, False)
    assert error in result["error"]
    assert (result["raw_points"], result["alarm"]) == (len(rows), None)
    assert (result["worst_pair"] is None) == (kind != "too_close")
    assert kind in ("empty", "type", "size") or result["duplicates"] == len(rows) - len({*map(tuple, rows)})


def test_a_large_set_is_compared_to_its_end_unless_its_first_part_is_too_close(monkeypatch):
    monkeypatch.setattr("rlreason.discovery.problems.kissing_11.verify.COMPARED", 200)
    rng = random.Random(1)
    rows = [[rng.randint(1, 10**30) for _ in range(11)] for _ in range(10_000)]
    rows[200] = rows[0]  # the first that is not compared any more
    result = verify(rows)
    assert result["error"].endswith(" (among the first 200 of 10000 points)")
    assert (result["error_kind"], result["compared_rows"]) == ("too_close", 200)
    assert verify(rows[:200])["worst_pair"] == result["worst_pair"]
    pairs = combinations(range(11), 2)  # the 220 roots of D11
    rows = [[a * (k == i) + b * (k == j) for k in range(11)] for i, j in pairs for a in (1, -1) for b in (1, -1)]
    good = verify(rows)
    assert (good["score"], good["compared_rows"], good["min_squared_distance"]) == (220, 220, 2)
    late = verify([*rows, rows[0]])  # the only pair that is too close
    assert (late["error_kind"], late["worst_pair"]["first"], late["worst_pair"]["second"]) == ("too_close", 0, 220)


@pytest.mark.parametrize("name", [*PROGRAMS, pytest.param("numeric_600", marks=pytest.mark.long)])
def test_every_program_of_the_ladder_gives_what_it_says(name):
    load = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['run_code']()))"
    command = [sys.executable, "-I", "-B", "-c", load, str(EXAMPLES / f"{name}.py")]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {type(x) for row in rows for x in row} == {int}
    result = verify(rows)
    assert (result["score"], result["error"], result["duplicates"]) == (int(name[-3:]), None, 0)
    products = np.array(rows) @ np.array(rows).T  # once more, in another way
    norms = np.diag(products)
    distances = norms[:, None] + norms - 2 * products
    assert distances[~np.eye(len(rows), dtype=bool)].min() >= norms.max() > 0


def test_a_set_is_told_in_the_courses_words_with_the_exit_code(tmp_path):
    done = rlreason("score", str(EXAMPLES / "roots_220.py"), "--json", "out.json", cwd=tmp_path)
    assert (done.returncode, done.stdout[:17]) == (0, "valid: 220 points"), done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["num_points"], told["raw_points"], told["dimension"], told["validity"]) == (220, 220, 11, 1.0)
    assert (told["error"], told["error_kind"], told["alarm"], told["seconds"] > 0) == (None, None, None, True)
    assert told["protections"]
    (tmp_path / "mine.py").write_text("points = [[2, 6] + [0] * 9, [2, 0] + [0] * 9]\n")
    command = f"{sys.executable} -m rlreason score {tmp_path}/mine.py --json {tmp_path}/out.json <&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, check=False).returncode == 1
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["num_points"], told["raw_points"], told["validity"], told["error_kind"]) == (0, 2, 0.0, "too_close")
    assert told["worst_pair"] == {"first": 0, "second": 1, "vectors": [[2, 6] + [0] * 9, [2, 0] + [0] * 9]}


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_with_the_process_that_scores_it(tmp_path, number):
    (tmp_path / "mine.py").write_text(
        "import subprocess, time\n"
        f"subprocess.Popen(['{tmp_path}', '600'], executable='/bin/sleep', start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "temporary").mkdir()

    def running() -> list[psutil.Process]:
        every = psutil.process_iter(["cmdline"])
        return [one for one in every if " ".join(one.info["cmdline"] or []).startswith(f"{tmp_path} ")]

    started = Started("score", "mine.py", cwd=tmp_path, TMPDIR=str(tmp_path / "temporary"))
    wait_for(running)
    of_it = running()
    os.kill(int(started.process.pid or 0), number)
    assert started.finished(600).returncode in (-9, 130)
    assert of_it and psutil.wait_procs(of_it, timeout=MINUTES)[1] == []  # noqa: PT018
    if number != signal.SIGKILL:
        assert not list((tmp_path / "temporary").glob("rlreason-program-*"))


def test_a_verifier_that_fails_is_the_problems_fault_and_one_that_is_not_sound_is_named_with_its_file(tmp_path):
    (own := tmp_path / "problem.yaml").write_text("title: Broken\nprompt: ask.txt\n")
    for name in ("ask.txt", "verify.py"):
        (tmp_path / name).touch()
    (tmp_path / "starter.py").write_bytes(AXES)
    for verifier, says in (("def verify(rows): return 1", "gave no score"), ("1 / 0", "ZeroDivisionError")):
        (tmp_path / "verify.py").write_text(verifier)
        with pytest.raises(DataError, match=says):
            score_program(AXES, problem_named(str(tmp_path)), ScoreConfig())
    (tmp_path / "verify.py").write_text("def verify(rows):\n    while True: pass\n")
    holds = b"import time\nheld = bytes(1) * (100 << 20)\ntime.sleep(2)\n" + AXES
    score = score_program(holds, problem_named(str(tmp_path)), ScoreConfig(check_timeout_s=0.5))
    assert (score["error_kind"], score["validity"]) == ("timeout", 0.0)
    assert 90 < score["peak_memory_mb"] < 200
    for text, says in (("title: x", "prompt"), ("title: x\nprompt: ask.txt\ncolour: red", "colour")):
        own.write_text(text)
        with pytest.raises(ConfigError, match=says):
            problem_named(str(tmp_path))


NEARLY = r"""
    [[1]] {"rows":[[1_0]]} {"rows":[[+1]]} {"rows":[[01]]} {"rows":[[1.0]]} {"rows":[[1e3]]} {"rows":[["1"]]}
    {"rows":[[true]]} {"rows":[[NaN]]} {"rows":[[null]]} {"rows":[1]} {"rows":[[\u0661]]} {"rows":[[1]]}{"rows":[[1]]}
    {"rows":[[1]] {"rows":[[1]],"score":9} {"kind":"nothing"} {"kind":"exception","error":7} {"error":"\ud800"}
"""


@given(st.lists(st.lists(st.integers(-(10**19), 10**19), min_size=1, max_size=4), max_size=5), st.binary(max_size=60))
def test_rows_come_through_the_channel_as_they_were_and_anything_else_is_no_set(rows, data):
    """Bug: a large integer is rounded, what int() alone takes for one counts, or garbage ends the whole run."""
    assert read_set(json.dumps({"rows": rows}).encode(), 10, 20) == rows
    with suppress(Refused):
        assert isinstance(read_set(data, 10, 20), list)
    for nearly in NEARLY.split():
        with pytest.raises(Refused, match="channel"):
            read_set(nearly.encode(), 10, 20)
