"""What a run watches itself for: each monitor on histories of metrics, in runs that it ends, and in health."""

import gzip
import io
import json
import math
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rlreason.config.groups import MODES, MonitorsConfig
from rlreason.config.groups import RULES as OF_MONITORS
from rlreason.health import watch
from rlreason.health.monitors import MONITORS, RULES
from rlreason.health.watch import Monitors, monitored
from rlreason.records.reader import exit_code_of_status
from tests.small_runs import words_of
from tests.starts import ROOT, rlreason, subcommand
from tests.sweep_folders import ended
from tests.test_trainer import trained

NAN = float("nan")
USUAL = {"train/grad_norm": 1.0, "train/approx_kl": 0.01, "train/loss": 0.1, "rollout/entropy": 0.5}
MOVED = {"train/learning_rate": 1e-6}
COURSE = {"train/learning_rate": 1e-6, "rollout/mismatch_mean": 1e-7, "rollout/length": 20.0}
DEAD = {"reward/frac_reward_zero_std": 1.0, "reward/mean": 0.0}


def watching(**settings) -> Monitors:
    """Monitors of groups of 4 that print nothing."""
    return Monitors(4, lambda line: None, MonitorsConfig(**settings))


def stopping() -> Monitors:
    """Monitors every one of which stops the run, after 10 usual steps."""
    monitors = watching(zero_reward_steps=1, still_weights_steps=1, **dict.fromkeys((*MONITORS, "grader"), "stop"))
    for step in range(1, 11):
        monitors.check(step, USUAL | COURSE | {"reward/mean": 0.05 * step})
    assert not monitors.counts
    return monitors


#: Metrics of the step after ten usual ones, and how they end the run; "": not at all.
CASES = [
    ({"train/loss": NAN}, "diverged:loss"), ({"train/skipped_updates": 1}, "diverged:gradient"),
    ({"train/ratio": float("inf")}, "diverged:metric"), (USUAL | {"train/moments_not_finite": 2}, "diverged:optimizer"),
    (USUAL | {"train/grad_norm": 21.0}, "diverged:gradient_norm"), (USUAL | {"train/grad_norm": 19.0}, ""),
    (USUAL | {"train/approx_kl": 0.3}, "diverged:kl"),
    (USUAL | {"train/approx_kl": 0.09}, ""),  # 9 times the median, and small
    ({"rollout/entropy": 0.004}, "stopped:entropy"), ({"rollout/distinct": 0.25}, "stopped:identical_samples"),
    ({"rollout/truncated": 0.6}, "stopped:truncated"), ({"rollout/round_trip": 0.25}, "stopped:round_trip"),
    ({"rollout/improbable_copies": 0.1}, "stopped:identical_samples"),
    ({"eval/same_answer": 0.9, "eval/same_answer_right": 0.1, "eval/problems": 40}, "stopped:same_answer"),
    ({"eval/same_answer": 0.9, "eval/same_answer_right": 0.8, "eval/problems": 40}, ""),  # which is mostly right
    ({"eval/same_answer": 1.0, "eval/same_answer_right": 0.0, "eval/problems": 4}, ""),
    ({"eval/mismatch_mean": 0.2}, "stopped:parity"), ({"rollout/mismatch_mean": 0.2, "rollout/staleness": 1.0}, ""),
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
    ({"rollout/same_answer": 0.9, "rollout/same_answer_right": 0.1}, "stopped:reward_hacking"),
]  # fmt: skip


@pytest.mark.parametrize(("metrics", "status"), CASES)
def test_each_monitor(metrics, status):
    """Bug: a monitor does not see its fault, sees one in usual numbers, or ends the run by another rule."""
    monitors = stopping()
    monitors.check(11, metrics)
    found, reason = monitors.reason_to_stop() or ("", "step 11: ")
    assert (found, reason[:9]) == (status, "step 11: ")
    if status:
        assert (monitors.stopped["alarm"]["step"], monitors.stopped["alarm"]["rule"]) == (11, status.partition(":")[2])
        assert exit_code_of_status(status) == (5 if status.startswith("diverged") else 0)


def test_one_update_of_many():
    """Bug: one exploding update is averaged away, or steps without a gradient make the next one explode."""
    monitors = stopping()
    monitors.check(11, USUAL | {"train/grad_norm": 6.0}, [USUAL, USUAL, USUAL | {"train/grad_norm": 50.0}])
    assert monitors.reason_to_stop()[0] == "diverged:gradient_norm"
    assert monitors.stopped["alarm"]["numbers"] == {"gradient_norm": 50.0, "median": 1.0}
    monitors = watching(gradient_norm="stop")
    for step in range(1, 41):  # nine of which had one before the last
        monitors.check(step, {"train/grad_norm": 30.0 if step == 40 else 0.0 if step % 4 else 1.0})
    assert monitors.reason_to_stop() is None


def test_no_live_group():
    """Bug: a mastered batch ends the run at once, or ten in a row never do."""
    monitors = watching(no_live_group="stop", no_live_group_steps=3)
    for step, share in enumerate([1.0, 1.0, 0.9, 1.0, 1.0, 1.0], 1):
        assert monitors.reason_to_stop() is None
        monitors.check(step, DEAD | {"reward/frac_reward_zero_std": share})
    assert (monitors.reason_to_stop()[0], monitors.counts["no_live_group"]) == ("stopped:no_live_group", 5)


def test_a_reward_that_pays_for_no_right_answer_is_named():
    """Bug: questions are called too hard where a reward of one's own compares text with numbers."""
    for right, paid in ((0.25, False), (0.0, True)):
        monitors = watching(no_live_group="stop", no_live_group_steps=1)
        monitors.check(1, DEAD | {"rollout/right": right})
        assert ("though 25% of the responses" in monitors.reason_to_stop()[1]) == (not paid)


def evaluations(right, n: int, **more) -> list[dict[str, float]]:
    return [{"eval/accuracy": k / n, "eval/problems": n, **more} for k in right]


@pytest.mark.parametrize(
    ("course", "found"),
    [
        (evaluations([3, 0, 0, 0], 32), False),  # bug: an accuracy of 5% has evaluations with 0 right of 32
        (evaluations([1, 0, 0], 256), False),  # one lucky answer is no evidence
        (evaluations([40, 0, 30], 64), False),  # it came back
        (evaluations([40, 30, 31], 64), False),  # worse, and no collapse
        (evaluations([40, 1, 0], 64), True),  # two lucky guesses do not hide it
        (evaluations([0] * 20 + [32, 32, 0, 0], 64), True),  # what was learned late can be lost
        (evaluations([64, 0, 0], 128, **{"eval/questions": 8}), False),  # repeated questions are no evidence
        ([{"eval/accuracy": 0.5, "eval/problems": 64}, *evaluations([math.nan, 0.0], 64)], False),
    ],
)
def test_collapse(course, found):
    """Bug: a lucky or unlucky evaluation ends a run, or a collapse does not."""
    monitors = watching()
    monitors.check(1, {}, evaluations=course)
    assert (monitors.reason_to_stop() is not None) is found


def test_off():
    """Bug: a monitor that is off warns, or lost weights go on because `nan` is off."""
    monitors = watching(**dict.fromkeys((*MONITORS, "grader"), "off"))
    monitors.check(1, DEAD | {"train/loss": NAN, "rollout/truncated": 1.0, "eval/mismatch_mean": 9.0})
    monitors.check_grades(1, ["a grader failed"])
    assert (monitors.counts, monitors.reason_to_stop()) == ({}, None)
    monitors.check(2, USUAL, finite_weights=False)
    assert monitors.reason_to_stop()[0] == "diverged:weights"
    monitors = stopping()
    monitors.check_grades(11, ["a grader failed"])
    assert monitors.reason_to_stop() == ("stopped:grader", "step 11: a grader failed")


def test_resume():
    """Bug: a resumed run forgets its history, or cannot go on after its monitor was set otherwise."""
    monitors = stopping()
    monitors.check(11, {"rollout/entropy": 0.001})
    state = json.loads(json.dumps(monitors.state_dict()))
    for change in ({}, {"entropy": "warn"}, {"entropy_below": 0.0001}):
        other = watching(**(vars(monitors.settings) | change))
        other.load_state_dict(state)
        assert other.reason_to_stop() == (None if change else monitors.reason_to_stop())
        assert other.state_dict()["history"] == (kept := monitors.state_dict()["history"])
    monitors.check(12, {"reward/mean": 0.5})
    assert kept == state["history"], "a checkpoint's state changes after it was taken"


def test_every_rule_has_words():
    """Bug: a monitor has no setting, or its rule no cause and cure."""
    assert set(MODES) == {*MONITORS, "grader", "dominated"}
    rules = {*OF_MONITORS, *MONITORS} - {"nan"}
    assert [rule for rule in rules if not (RULES[rule]["causes"].endswith(".") and RULES[rule]["cure"])] == []


def test_a_diverging_run(tmp_path):
    """Bug: a diverged run ends with exit code 0."""
    done = rlreason(*words_of("learning_rate=1e20", "weight_decay=1e20", "entropy_coef=0.1"), cwd=tmp_path)
    told = json.loads((tmp_path / "run/status.json").read_text())
    assert (done.returncode, told["status"][:9], "lower learning_rate" in told["reason"]) == (5, "diverged:", True)


def test_a_run_that_is_stopped_keeps_the_checkpoints_before(tmp_path):
    """Bug: the newest checkpoint, which may be the broken one, is the only one left to go on from."""
    words = ("monitors.no_live_group=stop", "monitors.no_live_group_steps=3", "checkpoint.every=1", "checkpoint.keep=3")
    _, summary = trained(tmp_path / "run", *words, "n_steps=9", "eval_every=0", "prompt.reward=own_reward:all_right")
    assert (summary["status"], summary["rollout_step"]) == ("stopped:no_live_group", 3)
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 3


def test_a_final_evaluation_follows(tmp_path):
    """Bug: a run that a monitor ends at an evaluation has no final accuracy."""
    words = ("monitors.parity=stop", "monitors.parity_bound=1e-12", "eval_problems=null", "interim_eval_problems=4")
    _, summary = trained(tmp_path / "run", *words)
    assert (summary["status"], summary["rollout_step"], summary["eval_problems"]) == ("stopped:parity", 0, 24)
    names = [path.name for path in sorted((tmp_path / "run/evals").iterdir())]
    assert names == ["step_00000.jsonl.gz", "step_00000_update_00000.jsonl.gz"]


#: What the rehearsal breaks on purpose: too large a learning rate, and many updates without a clip.
BROKEN = ("grpo_learning_rate/learning_rate=0.01,", "grpo_off_policy_clip_ablation/loss=grpo_no_clip,")


@pytest.mark.parametrize("one_in", [3, pytest.param(1, marks=pytest.mark.long)])
def test_the_rehearsal(one_in):
    """Bug: a monitor fires on sound runs."""
    fired, runs = Counter(), 0
    for archive in sorted((ROOT / "docs/rehearsal/metrics").glob("*.tar.gz"))[::one_in]:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as tar:
            for member in tar.getmembers():
                runs += 1
                rows = [json.loads(line) for line in tar.extractfile(member)]
                fired.update((member.name.startswith(BROKEN), one.rule) for one in monitored(rows, {"group_size": 8}))
    found = (runs, fired[True, "accuracy"], fired[True, "gradient_norm"] >= 3)
    assert (runs > 0, one_in > 1 or found == (228, 5, True)) == (True, True)
    assert not [rule for (broken, rule) in fired if not broken]


def test_notes():
    """Bug: what sound runs show now and then makes them unhealthy, or the replay has thresholds of its own."""
    cut = [{"rollout_step": step, "rollout/truncated": 0.6, "train/loss": 0.1} for step in (1, 2)]
    (one,) = monitored(cut, {"monitors": {"truncated": "off"}})  # which is looked at
    assert (one.rule, "in 2 steps" in one.evidence[0]) == ("truncated", True)
    assert monitored(cut, {"monitors": {"truncated_above": 0.7}}) == []
    sft = [{"rollout_step": 1, "train/loss": 0.1}, {"rollout_step": 1, "eval/accuracy": 0.0, "eval/truncated": 1.0}]
    assert [one.rule for one in monitored(sft, {})] == ["truncated_evaluation"]  # though it samples nothing else
    rows = [{"rollout_step": k, "reward/frac_reward_zero_std": 0.9, "rollout/truncated": 0.2} for k in range(8)]
    first = {"rollout_step": 0, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    fell = first | {"eval/accuracy": 0.1, "eval/accuracy_low": 0.0, "eval/accuracy_high": 0.2}
    few, lower = [("few_live_groups", False), ("many_cut", False)], [("accuracy_fell", True)]
    for of, found in ((rows, few), ([first, fell], lower), ([first, first], [])):
        assert [(note.rule, note.problem) for note in watch.findings_of(of, {})] == found
    live = {"reward/frac_reward_zero_std": 0.5}
    for steps, is_problem in (((3, 9), False), (range(8, 20), True)):
        rows = [{"rollout_step": k} | (DEAD | {"reward/mean": 1.0} if k in steps else live) for k in range(1, 20)]
        (found,) = monitored(rows, {"group_size": 8})
        assert (found.rule, found.problem) == ("no_live_group", is_problem)


def test_lost_grades():
    """Bug: responses without a grade count as wrong in silence."""
    rows = [{"rollout_step": k, "grading/responses": 100, "grading/timeouts": 2 * (k > 2)} for k in range(1, 5)]
    rows.append({"rollout_step": 4, "eval/accuracy": 0.5, "eval/samples": 10, "eval/grading_failures": 1})
    found = {one.rule: one for one in watch.findings_of(rows, {}, [{"error": "TimeoutError: slow"}])}
    assert found["grader_timeouts"].what.startswith("4 of 400 responses (1.0%)")
    assert (found["grader_timeouts"].step, found["grader_eval"].figures) == (3, {"lost": 1})
    assert "1 times: TimeoutError: slow" in found["grader_eval"].evidence[1]


def test_exit_codes(tmp_path, capsys):
    """Bug: one ill run of a sweep ends with exit code 0."""
    for name, truncated in (("fine", 0.0), ("ill", 0.9)):
        ended(tmp_path / name, [True])
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"rollout_step": 1, "rollout/truncated": {truncated}}}\n')
    for words, code in (((tmp_path / "fine",), 0), ((tmp_path,), 1)):
        assert subcommand("health", *words, "--json") == code
        told = json.loads(capsys.readouterr().out)
        assert (told["healthy"], len(told["runs"])) == (code == 0, 1 + code)
    for none in ("nothing", "fine/evals"):
        assert subcommand("health", tmp_path / none) == 2
        assert capsys.readouterr().err.count("\n") == 1


#: Status, and the reason of a failure -> the rule of the finding.
ENDS = {key: "failed" for key in RULES if key.startswith("failed: ")}
ENDS |= {"running": "killed", "interrupted": "interrupted", "diverged:kl": "ended:kl", "finished": "lost_metrics"}


@pytest.mark.parametrize("end", ENDS)
def test_endings(end: str, tmp_path: Path):
    """Bug: a killed, failed or interrupted run is said to be healthy, or gets the cure of another failure."""
    status, _, reason = end.partition(": ")
    (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
    (tmp_path / "metrics.jsonl").write_text('{"rollout_step": 2}\n{half')
    (tmp_path / "stacks.txt").write_text("in a grader\n")
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "rollout_step": 9}))
    ending = {"status": status, "reason": f"Of {reason.upper()}", "time": "x"}
    (tmp_path / "status.json").write_text(json.dumps(ending))
    _, findings = watch.examine(tmp_path)
    found, rule = {one.rule: one for one in findings}, ENDS[end]
    assert found.keys() == {rule, "hung", "broken_files"}
    assert found[rule].problem is (rule != "interrupted")
    if rule == "failed":
        assert found[rule].cure == RULES[end]["cure"]


def history(evaluations: Callable[[float], float] | None = None, **metrics: Callable | float) -> list[dict[str, float]]:
    """Rows of 20 steps; each metric and the accuracy a function of the share of the run, from 0 to 1."""
    rows = []
    for k in range(20):
        x = k / 19
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
FORMAT = {"reward__format": line(0.2, 0.8), "rollout__right": line(0.08, 0.02)}
TENS = {"reward__max": 10, "rollout__right": line(0.3, 0.6)}
HACKED = {
    "right answers become fewer": history(reward__mean=line(0.2, 0.7), **RARER),
    "right answers stay as rare": history(reward__mean=line(0.2, 0.7), rollout__right=0.03),
    "rewards of -1 to 1": history(reward__mean=line(-0.9, 1.8), reward__min=-1, reward__max=1, **RARER),
    "one answer": history(reward__mean=line(0.3, 0.5), **ONE),
    "evaluations get worse": history(line(0.5, -0.45), reward__mean=line(0.5, 0.5)),
    "shorter and worse": history(line(0.6, -0.4), reward__mean=line(0.5, 0.2), **SHORTER),
}
SOUND = {
    "points up to 10": history(line(0.3, 0.6), reward__mean=line(3, 6), **TENS),
    "a format that is learned first": history(reward__mean=line(0.1, 0.45), **FORMAT),
    "shorter and as good": history(line(0.95, 0), reward__mean=line(0.7, 0.2), rollout__right=0.95, **SHORTER),
    "one evaluation by chance": history(lambda x: 0.5 - 0.2 * (x > 0.8), **RISES),
    "one right answer to everything": history(**SAME, **RISES),
}


@pytest.mark.parametrize("name", [*HACKED, *SOUND])
def test_reward_hacking(name):
    """Bug: a hacked reward is not seen, or learning is called hacking."""
    rules = {one.rule for one in monitored(HACKED.get(name) or SOUND[name], {}) if one.problem}
    assert "reward_hacking" in rules if name in HACKED else not rules
