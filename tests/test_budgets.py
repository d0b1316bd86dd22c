"""A budget ends a run cleanly, with its last evaluation inside, over all parts of a run that was interrupted."""

import json
from pathlib import Path

import pytest

from rlreason.config.training import BudgetConfig
from rlreason.training.progress import budget_spent
from tests.killed import AT
from tests.small_runs import words_of
from tests.starts import rlreason


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize(
    ("budget", "seconds", "problems", "says"),
    [
        ({}, 1e9, 100, ""),
        ({"hours": 0.1}, 360 - 25, 100, ""),  # 1.2 (10 + 0.1 x 100) = 24 s are needed
        ({"hours": 0.1}, 360 - 23, 100, "budget.hours=0.1: 23 s"),
        ({"hours": 0.1}, 360 - 25, 150, "budget.hours=0.1: 25 s"),
        ({"tokens": 100}, 0.0, 0, ""),
        ({"tokens": 99}, 0.0, 0, "budget.tokens=99: 39 "),
        ({"steps": 2}, 0.0, 0, ""),
        ({"steps": 1}, 0.0, 0, "budget.steps=1 "),
    ],
)
def test_what_a_budget_still_allows(budget, seconds, problems, says):
    used, pace = {"tokens/generated": 60, "time/total": seconds}, {"step": 10.0, "problem": 0.1, "tokens": 40.0}
    found = budget_spent(BudgetConfig(**budget), 1, used, pace, problems)
    assert found.startswith(says)
    assert bool(found) == bool(says)


@pytest.mark.long
def test_steps_that_are_spent_end_a_run_and_more_of_them_let_it_go_on(tmp_path):
    words = words_of("budget.steps=2", "eval_problems=null", "interim_eval_problems=4")
    done = rlreason(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["reason"]) == ("budget", "budget.steps=2 are done")
    assert (summary["rollout_step"], summary["eval_problems"]) == (2, 16)  # the last evaluation asks all
    assert list((tmp_path / "run/checkpoints").iterdir())
    again = rlreason(*words, cwd=tmp_path)
    assert again.returncode == 2
    assert "budget" in again.stderr
    assert rlreason("resume=run", "budget.steps=9", cwd=tmp_path).returncode == 0
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert summary_of(tmp_path / "run")["rollout_step"] == 3


def test_tokens_are_never_exceeded_once_a_step_is_known(tmp_path):
    done = rlreason(*words_of("budget.tokens=600"), cwd=tmp_path)  # 256 in a step at most, and nearly so
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["rollout_step"]) == ("budget", 2)
    assert summary["tokens/generated"] <= 600


@pytest.mark.long
def test_the_clock_of_a_budget_goes_on_where_the_run_was_interrupted(tmp_path):
    """A budget that the first part has spent leaves the second the last evaluation alone."""
    at = "rlreason.training.algorithms:GRPO.collect:call:3"
    killed = rlreason(*words_of("checkpoint.every=1", "n_steps=40"), cwd=tmp_path, **{AT: at})
    assert killed.returncode == -9
    spent_before = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["time/total"]
    hours = spent_before / 3600
    done = rlreason("resume=run", f"budget.hours={hours}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["rollout_step"]) == ("budget", 2)
    assert summary["reason"].startswith("budget.hours=")
    assert summary["eval_problems"] == 8
