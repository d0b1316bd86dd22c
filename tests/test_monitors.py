"""What a run watches itself for: each monitor on histories of metrics, and in real runs that it ends."""

import json
import math

import numpy as np
import pytest

from rlreason.config.groups import MODES, MonitorsConfig
from rlreason.config.groups import RULES as OF_MONITORS
from rlreason.health.monitors import MONITORS, RULES, collapsed
from rlreason.health.watch import Monitors
from rlreason.records.reader import ending
from tests.small_runs import words_of
from tests.starts import rlreason
from tests.test_trainer import trained

USUAL = {"train/grad_norm": 1.0, "train/approx_kl": 0.01, "train/loss": 0.1, "rollout/entropy": 0.5}
MOVED = {"train/learning_rate": 1e-6}
COURSE = {"train/learning_rate": 1e-6, "rollout/mismatch_mean": 1e-7, "rollout/length": 20.0}
DEAD = {"reward/frac_reward_zero_std": 1.0, "reward/mean": 0.0}


def watching(**settings) -> Monitors:
    """Monitors of groups of 4 that print nothing."""
    return Monitors(4, lambda line: None, MonitorsConfig(**settings))


def stopping() -> Monitors:
    """Monitors every one of which stops the run, after 10 usual steps."""
    modes = dict.fromkeys(MONITORS, "stop")
    monitors = watching(grader="stop", zero_reward_steps=1, still_weights_steps=1, **modes)
    for step in range(1, 11):
        monitors.check(step, USUAL | COURSE | {"reward/mean": 0.05 * step})
    assert not monitors.counts
    return monitors


NAN = float("nan")
#: Metrics of the step after ten usual ones, and how they end the run; "": not at all.
CASES = [
    ({"train/loss": NAN}, "diverged:loss"),
    ({"train/skipped_updates": 1}, "diverged:gradient"),
    ({"train/ratio": float("inf")}, "diverged:metric"),
    (USUAL | {"train/moments_not_finite": 2}, "diverged:optimizer"),
    (USUAL | {"train/grad_norm": 21.0}, "diverged:gradient_norm"),
    (USUAL | {"train/grad_norm": 19.0}, ""),
    (USUAL | {"train/approx_kl": 0.3}, "diverged:kl"),
    (USUAL | {"train/approx_kl": 0.09}, ""),  # 9 times the median, and small
    ({"rollout/entropy": 0.004}, "stopped:entropy"),
    ({"rollout/distinct": 0.25}, "stopped:identical_samples"),
    ({"rollout/improbable_copies": 0.1}, "stopped:identical_samples"),
    ({"rollout/truncated": 0.6}, "stopped:truncated"),
    ({"eval/same_answer": 0.9, "eval/same_answer_right": 0.1, "eval/problems": 40}, "stopped:same_answer"),
    ({"eval/same_answer": 0.9, "eval/same_answer_right": 0.8, "eval/problems": 40}, ""),  # which is mostly right
    ({"eval/same_answer": 1.0, "eval/same_answer_right": 0.0, "eval/problems": 4}, ""),
    ({"eval/mismatch_mean": 0.2}, "stopped:parity"),
    ({"rollout/mismatch_mean": 0.2, "rollout/staleness": 1.0}, ""),
    ({"rollout/mismatch_mean": 0.04}, "stopped:engine_weights"),
    ({"rollout/mismatch_mean": 1.9e-5}, ""),  # far from what it was, and small
    (USUAL | {"train/ratio": 1.2}, "stopped:first_ratio"),
    (USUAL | {"train/ratio": 1.0, "train/approx_kl": 0.09}, "stopped:first_ratio"),
    (USUAL | {"train/ratio": 1.2, "rollout/staleness": 1.0}, ""),
    (USUAL | MOVED | {"train/weights_changed": 0.004}, "stopped:still_weights"),
    (USUAL | {"train/learning_rate": 4e-7, "train/weights_changed": 0.02}, ""),  # the end of a schedule
    (USUAL | {"train/weights_changed": 0.0, "train/learning_rate": 0.0}, ""),
    (USUAL | MOVED | {"train/weights_changed": 0.0, "train/grad_norm": 0.0}, ""),
    ({"reward/mean": 0.0}, "stopped:zero_reward"),
    ({"reward/mean": 0.0, "reward/frac_reward_zero_std": 0.5}, ""),  # of both signs
    ({"rollout/length": 101.0}, "stopped:length"),
    ({"rollout/round_trip": 0.25}, "stopped:round_trip"),
    ({"rollout/same_answer": 0.9, "rollout/same_answer_right": 0.1}, "stopped:reward_hacking"),
]


@pytest.mark.parametrize(("metrics", "status"), CASES)
def test_each_monitor_ends_a_run_with_its_rule_its_numbers_and_its_step(metrics, status):
    monitors = stopping()
    monitors.check(11, metrics)
    if not status:
        assert monitors.reason_to_stop() is None
        return
    found, reason = monitors.reason_to_stop()
    assert found == status
    assert reason.startswith("step 11: ")
    assert (monitors.alarm()["step"], monitors.alarm()["rule"]) == (11, status.partition(":")[2])
    assert ending(status).exit_code == (5 if status.startswith("diverged") else 0)


def test_one_update_of_many_that_explodes_is_seen_and_steps_without_a_gradient_are_not_usual():
    monitors = stopping()
    monitors.check(11, USUAL | {"train/grad_norm": 6.0}, [USUAL, USUAL, USUAL | {"train/grad_norm": 50.0}])
    assert monitors.reason_to_stop()[0] == "diverged:gradient_norm"
    assert monitors.alarm()["numbers"] == {"gradient_norm": 50.0, "median": 1.0}
    monitors = watching(gradient_norm="stop")
    for step in range(1, 40):
        monitors.check(step, {"train/grad_norm": 0.0 if step % 4 else 1.0})
    monitors.check(40, {"train/grad_norm": 30.0})
    assert monitors.reason_to_stop() is None  # nine steps had one


def test_no_live_group_warns_of_every_step_and_ends_the_run_behind_so_many_in_a_row():
    monitors = watching(no_live_group="stop", no_live_group_steps=3)
    for step, metrics in enumerate([DEAD, DEAD, DEAD | {"reward/frac_reward_zero_std": 0.9}, DEAD, DEAD], 1):
        monitors.check(step, metrics)
    assert monitors.reason_to_stop() is None
    monitors.check(6, DEAD)
    assert monitors.reason_to_stop()[0] == "stopped:no_live_group"
    assert monitors.counts["no_live_group"] == 5


def evaluations(right, n: int, **more) -> list[dict[str, float]]:
    return [{"eval/accuracy": k / n, "eval/problems": n, **more} for k in right]


@pytest.mark.parametrize(
    ("course", "found"),
    [
        (evaluations([3, 0, 0, 0], 32), False),  # bug: an accuracy of 5% has evaluations with 0 right of 32
        (evaluations([1, 0, 0], 256), False),  # one lucky answer is no evidence
        (evaluations([40, 0, 30], 64), False),  # it came back
        (evaluations([5, 0, 0], 7), False),
        (evaluations([40, 30, 31], 64), False),  # worse, and no collapse
        (evaluations([40, 1, 0], 64), True),  # two lucky guesses do not hide it
        (evaluations([0] * 20 + [32, 32, 0, 0], 64), True),  # what was learned late can be lost
        (evaluations([64, 0, 0], 128, **{"eval/questions": 8}), False),  # repeated questions are no evidence
        ([{"eval/accuracy": 0.5, "eval/problems": 64}, *evaluations([math.nan, 0.0], 64)], False),
    ],
)
def test_which_courses_are_a_collapse(course, found):
    assert collapsed(course) is found


@pytest.mark.parametrize("n", [32, *(pytest.param(n, marks=pytest.mark.long) for n in (8, 64, 256))])
def test_accuracies_that_never_change_end_hardly_any_run(n):
    """Half a percent, and three standard errors of 1,500 runs; over all accuracies together half a percent.

    Bug: ten evaluations of 32 problems at an accuracy of 5% ended 62% of the runs.
    """
    rng, ended = np.random.default_rng(n), []
    courses, length, repeats = ((0.05, 0.3), 10, 200) if n == 32 else ((0.01, 0.05, 0.1, 0.3, 0.8), 20, 1500)
    for p in courses:
        runs = [evaluations(rng.binomial(n, p, length).tolist(), n) for _ in range(repeats)]
        ended.append(sum(any(collapsed(run[:k]) for k in range(3, length + 1)) for run in runs) / repeats)
    assert max(ended) <= 0.0105, ended
    assert np.mean(ended) <= 0.005, ended


@pytest.mark.parametrize(("p", "n"), [(0.05, 256), (0.2, 64), (0.8, 16)])
def test_collapses_are_caught_at_the_second_evaluation(p, n):
    rng = np.random.default_rng(n)
    found = [collapsed(evaluations([*rng.binomial(n, p, 5), *rng.binomial(n, 0.002, 2)], n)) for _ in range(200)]
    assert np.mean(found) >= 0.95


def test_what_is_off_is_not_looked_at_but_for_lost_weights():
    monitors = watching(**dict.fromkeys((*MONITORS, "grader"), "off"))
    monitors.check(1, DEAD | {"train/loss": float("nan"), "rollout/truncated": 1.0, "eval/mismatch_mean": 9.0})
    monitors.check_grades(1, ["a grader failed"])
    assert (monitors.counts, monitors.reason_to_stop()) == ({}, None)
    monitors.check(2, USUAL, finite_weights=False)
    assert monitors.reason_to_stop()[0] == "diverged:weights"


def test_a_resumed_run_has_the_history_and_the_verdict_of_the_one_before_unless_the_monitor_is_set_otherwise():
    monitors = stopping()
    monitors.check(11, {"rollout/entropy": 0.001})
    state = json.loads(json.dumps(monitors.state_dict()))
    for change in ({}, {"entropy": "warn"}, {"entropy_below": 0.0001}):
        other = watching(**(vars(monitors.settings) | change))
        other.load_state_dict(state)
        assert other.reason_to_stop() == (None if change else monitors.reason_to_stop())
        assert other.state_dict()["history"] == monitors.state_dict()["history"]


def test_every_monitor_is_a_setting_and_names_causes():
    assert set(MODES) == {*MONITORS, "grader", "dominated"}
    rules = {*OF_MONITORS, *MONITORS} - {"nan"}
    assert [rule for rule in rules if not (RULES[rule]["causes"].endswith(".") and RULES[rule]["cure"])] == []


@pytest.mark.long
def test_a_stopped_run_goes_on_when_its_monitor_is_set_otherwise(tmp_path):
    stopped = rlreason(*words_of("monitors.entropy=stop", "monitors.entropy_below=20"), cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["rollout_step"], summary["alarm"]["step"]) == ("stopped:entropy", 1, 1)
    assert summary["alarm"]["numbers"]["entropy"] < 20
    assert "resume=run monitors.entropy=warn" in stopped.stdout
    again = rlreason("resume=run", cwd=tmp_path)
    assert (again.returncode, "stopped:entropy" in again.stderr) == (2, True)
    assert rlreason("resume=run", "monitors.entropy=warn", cwd=tmp_path).returncode == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["alarm"], summary["notices"]["entropy"]) == ("finished", {}, 3)


def test_a_rate_that_is_too_large_ends_as_diverged_with_exit_code_5(tmp_path):
    done = rlreason(*words_of("learning_rate=1e20", "weight_decay=1e20", "entropy_coef=0.1"), cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    told = json.loads((tmp_path / "run/status.json").read_text())
    assert told["status"].startswith("diverged:")
    assert "lower learning_rate" in told["reason"]


def test_an_evaluation_that_ends_the_run_is_followed_by_the_last_one(tmp_path):
    words = ("monitors.parity=stop", "monitors.parity_bound=1e-12", "eval_problems=null", "interim_eval_problems=4")
    _, summary = trained(tmp_path / "run", *words)
    assert (summary["status"], summary["rollout_step"], summary["eval_problems"]) == ("stopped:parity", 0, 24)
    names = [path.name for path in sorted((tmp_path / "run/evals").iterdir())]
    assert names == ["step_00000.jsonl.gz", "step_00000_update_00000.jsonl.gz"]
