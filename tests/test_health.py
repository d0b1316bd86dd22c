"""`rlreason health`: what it says of runs and of the committed rehearsal, and what a report has of it."""

import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlreason.health.watch import (
    describe_health,
    events_of,
    examine,
    findings_of,
    monitored,
    notes_on_learning,
    replay_monitors,
)
from tests.starts import ROOT
from tests.sweep_folders import ended
from tests.test_subcommands import subcommand

#: What the rehearsal breaks on purpose: too large a learning rate, and many updates without a clip.
BROKEN = ("grpo_learning_rate/learning_rate=0.01,", "grpo_off_policy_clip_ablation/loss=grpo_no_clip,")


def test_no_monitor_fires_on_the_rehearsal_but_where_it_breaks_a_run_on_purpose():
    fired, runs = Counter(), 0
    for archive in sorted((ROOT / "docs/rehearsal/metrics").glob("*.tar.gz")):
        with gzip.open(archive) as packed, tarfile.open(fileobj=io.BytesIO(packed.read())) as tar:
            for member in tar.getmembers():
                runs += 1
                rows = [json.loads(line) for line in tar.extractfile(member)]
                fired.update((member.name.startswith(BROKEN), one.rule) for one in monitored(rows, {}))
    assert (runs, fired[True, "accuracy"]) == (228, 5)
    assert not [rule for (broken, rule) in fired if not broken]
    assert fired[True, "gradient_norm"] >= 3


def test_rows_of_updates_make_steps_and_a_step_ends_with_its_last_row():
    rows = [
        {"rollout_step": 0, "eval/accuracy": 0.5},
        {"rollout_step": 1, "train/loss": 1.0, "reward/mean": 0.25},
        {"rollout_step": 0, "eval/accuracy": 0.75},  # between two updates
        {"rollout_step": 1, "train/loss": None},
        {"rollout_step": 2, "train/loss": 3.0},
    ]
    events = list(events_of(rows))
    seen = [(step, evaluates, len(updates)) for step, _, updates, evaluates in events]
    assert seen == [(0, True, 1), (0, True, 1), (1, False, 2), (2, False, 1)]
    assert events[2][1]["reward/mean"] == 0.25
    assert [first.rule for first, *_ in replay_monitors(rows, {})] == ["loss"]


def test_the_thresholds_of_a_run_are_its_own_and_what_it_switched_off_is_looked_at():
    rows = [{"rollout_step": step, "rollout/truncated": 0.6, "train/loss": 0.1} for step in (1, 2)]
    (one,) = monitored(rows, {"monitors": {"truncated": "off"}})
    assert (one.rule, "in 2 steps: 1-2" in one.evidence[0]) == ("truncated", True)
    assert monitored(rows, {"monitors": {"truncated_above": 0.7}}) == []


def test_notes_are_no_problems_and_what_a_sound_run_shows_now_and_then_is_a_note():
    rows = [{"rollout_step": k, "reward/frac_reward_zero_std": 0.9, "rollout/truncated": 0.2} for k in range(8)]
    assert [(f.rule, f.problem) for f in notes_on_learning(rows)] == [("few_live_groups", False), ("many_cut", False)]
    first = {"rollout_step": 0, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    fell = first | {"eval/accuracy": 0.1, "eval/accuracy_low": 0.0, "eval/accuracy_high": 0.2}
    assert [(f.rule, f.problem) for f in notes_on_learning([first, fell])] == [("accuracy_fell", True)]
    assert list(notes_on_learning([first, first])) == []
    dead, live = {"reward/frac_reward_zero_std": 1.0, "reward/mean": 1.0}, {"reward/frac_reward_zero_std": 0.5}
    for steps, is_problem in (((3, 9), False), (range(8, 20), True)):
        rows = [{"rollout_step": k, "train/loss": 0.1} | (dead if k in steps else live) for k in range(1, 20)]
        assert [(found.rule, found.problem) for found in monitored(rows, {})] == [("no_live_group", is_problem)]


def test_lost_grades_are_counted_with_their_reasons():
    rows = [{"rollout_step": k, "grading/responses": 100, "grading/timeouts": 2 * (k > 2)} for k in range(1, 5)]
    rows.append({"rollout_step": 4, "eval/accuracy": 0.5, "eval/samples": 10, "eval/grading_failures": 1})
    found = {one.rule: one for one in findings_of(rows, {}, [{"error": "TimeoutError: slow"}])}
    assert found["grader_timeouts"].what.startswith("4 of 400 responses (1.0%)")
    assert (found["grader_timeouts"].step, found["grader_eval"].figures) == (3, {"lost": 1})
    assert "1 times: TimeoutError: slow" in found["grader_eval"].evidence[1]


def test_the_subcommand_says_by_its_exit_code_whether_a_run_of_a_sweep_is_ill(tmp_path, capsys):
    for name, truncated in (("fine", 0.0), ("ill", 0.9)):
        ended(tmp_path / name, [True])
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"rollout_step": 1, "rollout/truncated": {truncated}}}\n')
    assert subcommand("health", tmp_path / "fine", "--json") == 0
    assert json.loads(capsys.readouterr().out)["healthy"]
    assert subcommand("health", tmp_path) == 1
    said = capsys.readouterr().out
    assert all(part in said for part in ("! truncated: 90%", "2 runs, 1 of them with problems"))
    assert subcommand("health", tmp_path / "nothing") == 2
    assert capsys.readouterr().err.count("\n") == 1


ENDS = {
    "running": ("killed", True),
    "interrupted": ("interrupted", False),
    "failed": ("failed", True),
    "diverged:kl": ("ended:kl", True),
    "finished": ("lost_metrics", True),
}


@pytest.mark.parametrize("status", ENDS)
def test_how_a_run_ended_is_a_finding(status: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
    (tmp_path / "metrics.jsonl").write_text('{"rollout_step": 2}\n{half')
    (tmp_path / "stacks.txt").write_text("in a grader\n")
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "rollout_step": 9}))
    ending = {"status": status, "reason": "CUDA error: no kernel", "time": "x"}
    (tmp_path / "status.json").write_text(json.dumps(ending))
    state, findings = examine(tmp_path)
    found, (rule, is_problem) = {one.rule: one for one in findings}, ENDS[status]
    assert describe_health("run", state, findings, 100).startswith(f"run: {state}")
    assert found.keys() == {rule, "hung", "broken_files"}
    assert found[rule].problem is is_problem
    if status == "failed":
        assert "driver" in found[rule].causes


def course(n: int = 20, evaluations: Callable[[float], float] | None = None, **metrics: Any) -> list[dict[str, float]]:
    """Rows of n steps; each metric and the accuracy a function of the share of the run, from 0 to 1."""
    rows = []
    for k in range(n):
        x = k / (n - 1)
        row = {name.replace("__", "/"): float(of(x) if callable(of) else of) for name, of in metrics.items()}
        rows.append({"rollout_step": k + 1, "train/loss": 0.1} | row)
        if evaluations is not None and k % 4 == 0:
            p = evaluations(x)
            ends = {"eval/accuracy_low": p - 0.06, "eval/accuracy_high": p + 0.06, "eval/problems": 256}
            rows.append({"rollout_step": k + 1, "eval/accuracy": p} | ends)
    return rows


def line(start: float, gain: float) -> Callable[[float], float]:
    return lambda x: start + gain * x


RARER, RISES = {"rollout__right": line(0.3, -0.28)}, {"reward__mean": line(0.4, 0.4)}  # right answers
ONE = {"rollout__same_answer": line(0, 1), "rollout__same_answer_right": 0.1}
SAME = {"rollout__same_answer": 0.9, "rollout__same_answer_right": 0.8}
SHORTER = {"rollout__length_correct": line(100, -70)}
#: What it is -> its rows, and whether the reward is hacked.
COURSES = {
    "right answers become fewer": (course(reward__mean=line(0.2, 0.7), **RARER), True),
    "right answers stay as rare": (course(reward__mean=line(0.2, 0.7), rollout__right=0.03), True),
    "rewards of -1 to 1": (course(reward__mean=line(-0.9, 1.8), reward__min=-1, reward__max=1, **RARER), True),
    "one answer": (course(reward__mean=line(0.3, 0.5), **ONE), True),
    "evaluations get worse": (course(evaluations=line(0.5, -0.45), reward__mean=line(0.5, 0.5)), True),
    "shorter and worse": (course(evaluations=line(0.6, -0.4), reward__mean=line(0.5, 0.2), **SHORTER), True),
    "points up to 10": (
        course(evaluations=line(0.3, 0.6), reward__mean=line(3, 6), reward__max=10, rollout__right=line(0.3, 0.6)),
        False,
    ),
    "a format that is learned first": (
        course(reward__mean=line(0.1, 0.45), reward__format=line(0.2, 0.8), rollout__right=line(0.08, 0.02)),
        False,
    ),
    "shorter and as good": (
        course(evaluations=line(0.95, 0), reward__mean=line(0.7, 0.2), rollout__right=0.95, **SHORTER),
        False,
    ),
    "one evaluation by chance": (course(evaluations=lambda x: 0.5 - 0.2 * (x > 0.8), **RISES), False),
    "one right answer to everything": (course(**SAME, **RISES), False),
}


@pytest.mark.parametrize(("rows", "is_hacked"), COURSES.values(), ids=COURSES)
def test_signs_of_a_reward_that_is_hacked(rows, is_hacked):
    rules = {one.rule for one in monitored(rows, {}) if one.problem}
    assert "reward_hacking" in rules if is_hacked else not rules
