"""Runs of discovery that are killed, stopped and given more to spend: nothing is paid twice, and nothing is lost."""

import json

import pytest

from examples.scripted_server import serving
from rlreason.errors import ConfigError
from tests.discovery_runs import AXES, DETOURS, axes, calls_in, discover, log_in, program, run_here
from tests.killed import AT, SIGNAL
from tests.some import some

JOURNAL, LOOP, ASKING = "rlreason.discovery.journal", "rlreason.discovery.loop", "rlreason.discovery.asking"
#: Before and after what is written down, while requests are under way, and while programs run.
PLACES = (
    f"{JOURNAL}:Journal.write:return:4",
    f"{LOOP}:Discovery.write_documents:call:2",
    "rlreason.discovery.client:read_answer:return:4",
)
MORE = (
    f"{JOURNAL}:Journal.write:call:1",
    f"{JOURNAL}:Journal.write:return:1",
    f"{JOURNAL}:Journal.write:call:8",
    f"{ASKING}:Asker._answered:call:5",
    f"{ASKING}:Asker._answered:return:6",
    f"{LOOP}:Discovery.write_documents:return:3",
    f"{LOOP}:Discovery.conclude:call:1",
    "rlreason.discovery.client:Client.ask:call:3",
    "rlreason.discovery.score:score_program:call:3",
    "rlreason.records.writer:RunWriter.summary:call:1",
)
WORDS = {"refine": ("strategy=refine", "budget.calls=9"), "hybrid": ("strategy=hybrid", "replies=3", "budget.calls=12")}


@pytest.mark.parametrize("strategy", ["refine", pytest.param("hybrid", marks=pytest.mark.long)])
@pytest.mark.parametrize("place", some([*PLACES, *MORE], len(PLACES + MORE)))
def test_a_killed_run_goes_on_with_every_paid_call_exactly_once(tmp_path, place, strategy):
    samples = 3 if strategy == "hybrid" else 1
    folder = tmp_path / "run"
    with serving(DETOURS, samples) as server:
        killed = discover(server, folder, *WORDS[strategy], **{AT: place})
        assert killed.returncode == -9, killed.stdout + killed.stderr
        done = discover(server, folder, *WORDS[strategy])
        assert done.returncode == 0, done.stdout + done.stderr
        sent = [request.id.removeprefix("s0-") for request in server.requests]
    logged = {call["id"]: call["outcome"] for call in calls_in(folder)}
    assert len(sent) == len(set(sent)), "a request was sent twice"
    assert len(logged) == len(calls_in(folder)), "a call stands twice in the log"
    assert set(sent) <= set(logged), "a paid call is not in the log"
    assert {logged[id] for id in set(logged) - set(sent)} <= {"interrupted"}
    assert len(logged) == log_in(folder)["spent"]["calls"] <= int(WORDS[strategy][-1].partition("=")[2])
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


@pytest.mark.long
def test_what_was_answered_before_a_kill_is_the_same_after_it(tmp_path):
    logs = []
    for name, more in (("whole", {}), ("killed", {AT: f"{LOOP}:Discovery.write_documents:return:3"})):
        (tmp_path / name).mkdir()
        folder = tmp_path / name / "run"
        with serving(DETOURS) as server:
            if more:
                assert discover(server, folder, *WORDS["refine"], **more).returncode == -9
            assert discover(server, folder, *WORDS["refine"]).returncode == 0
        logs.append((folder / "conversation_log.json").read_text().replace(str(tmp_path / name), ""))
    assert logs[0] == logs[1]


@pytest.mark.long
def test_a_stopped_run_keeps_the_answers_that_still_come(tmp_path):
    script = [axes(4), {"kind": "slow", "seconds": 1.0, "then": axes(6)}]
    with serving(script) as server:
        place = f"{ASKING}:Asker._send:return:2"
        stopped = discover(server, tmp_path / "run", "budget.calls=2", **{AT: place, SIGNAL: "SIGINT"})
        assert stopped.returncode == 130, stopped.stdout + stopped.stderr
        asked = len(server.requests)
        done = discover(server, tmp_path / "run", "budget.calls=2")
        assert len(server.requests) == asked == 2
    assert done.returncode == 0, done.stderr
    assert [call["outcome"] for call in calls_in(tmp_path / "run")] == ["ok", "ok"]


@pytest.mark.long
def test_a_finished_run_goes_on_where_it_may_spend_more(tmp_path):
    with serving([axes(n) for n in (4, 6, 8, 10)]) as server:
        discover(server, tmp_path / "run", "strategy=refine", "budget.calls=2")
        again = discover(server, tmp_path / "run", "strategy=refine", "budget.calls=2")
        assert again.returncode == 2
        assert "budget.calls=MORE" in again.stderr
        other = discover(server, tmp_path / "run", "strategy=refine", "history=1", "budget.calls=4")
        assert other.returncode == 2
        assert "history=4 there, 1 here" in other.stderr
        assert (tmp_path / "run" / "summary.json").exists()
        done = discover(server, tmp_path / "run", "strategy=refine", "budget.calls=4")
        assert done.returncode == 0, done.stderr
        assert len(server.requests) == 4
    assert log_in(tmp_path / "run")["best"]["score"] == 10


def test_a_journal_that_was_tampered_with_is_named(tmp_path):
    with serving([axes(4), axes(6)]) as server:
        discover(server, tmp_path / "run", "budget.calls=1")
        journal = tmp_path / "run" / "calls.jsonl"
        lines = journal.read_text().splitlines()
        journal.write_text("\n".join([lines[0], "{", *lines[1:]]) + "\n")
        done = discover(server, tmp_path / "run", "budget.calls=2")
    assert done.returncode == 2
    assert "calls.jsonl is damaged at line 2" in done.stderr


def test_a_problem_that_has_changed_is_not_gone_on_with(tmp_path):
    folder = tmp_path / "even"
    folder.mkdir()
    (folder / "problem.yaml").write_text("title: Numbers\nprompt: ask.txt\n")
    (folder / "ask.txt").write_text("Give numbers.")
    (folder / "starter.py").write_text("points = [[2]]\n")
    verifier = "def verify(rows):\n    return {'score': len(rows), 'valid': True}\n"
    (folder / "verify.py").write_text(verifier)
    with serving([axes(4)]) as server:
        words = (f"problem={folder}", "start=null")
        assert discover(server, tmp_path / "run", *words, "budget.calls=1").returncode == 0
        (folder / "verify.py").write_text(verifier.replace("True", "len(rows) > 1"))
        done = discover(server, tmp_path / "run", *words, "budget.calls=2")
    assert done.returncode == 2
    assert "its files have changed since this run began" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("code", [400, 401, 402, 503])
def test_what_an_endpoint_refused_is_asked_again_once_it_is_mended(tmp_path, code):
    refused, calls = {"kind": "status", "code": code, "retry_after": 0}, 5 if code == 503 else 4
    with serving([axes(4), refused]) as server, pytest.raises(ConfigError):
        run_here(server, tmp_path / "run", "strategy=refine", "client.retries=1", f"budget.calls={calls}")
    with serving([axes(4), [refused, axes(6)], axes(8)]) as server:
        log = run_here(server, tmp_path / "run", "strategy=refine", "client.retries=1", f"budget.calls={calls}")
        assert server.requests[0].messages[-1]["content"] == log["turns"][1]["prompt"]
    assert log["best"]["score"] == 8
    assert log["spent"]["calls"] == calls


@pytest.mark.long
def test_a_program_ends_with_the_hours_that_a_run_may_take(tmp_path):
    sleeps = program("import time\ntime.sleep(60)\n" + AXES.format(count=4))
    with serving([sleeps]) as server:
        log = run_here(server, tmp_path / "run", "budget.calls=null", "budget.hours=0.0007", "score.timeout_s=90")
    assert log["ended"] == "budget.hours=0.0007 are spent"
    assert log["turns"][0]["result"] is None
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["seconds"] < 15


@pytest.mark.long
def test_time_before_a_kill_is_spent_too(tmp_path):
    slow = {"kind": "slow", "seconds": 60, "then": axes(4)}
    with serving([slow]) as server:
        place = "rlreason.discovery.journal:Journal.beat:call:6"
        killed = discover(server, tmp_path / "run", "budget.calls=1", **{AT: place})
        assert killed.returncode == -9
    last = json.loads((tmp_path / "run" / "calls.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "alive"
    assert last["at"] > 2
