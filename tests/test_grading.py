"""The grader as its callers see it: formats, ground truths, settings, batches, metrics, and rewards of one's own."""

import json
import math
import subprocess
import sys
from importlib import metadata

import pytest
import verdicts
from verdicts import FORMS, R1_ZERO_FORMAT, labelled_pairs, tagged

from rlreason.config.groups import GradingConfig
from rlreason.errors import ConfigError
from rlreason.evaluation import protocol
from rlreason.grading import Grader, question_only_reward_fn, r1_zero_reward_fn
from rlreason.grading.formats import FORMATS, boxed
from rlreason.grading.grader import GRADER_VERSION, grading_metrics
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.types import Grade
from tests.waiting import patient


@pytest.fixture(scope="module")
def grader():
    with Grader(patient(workers=2)) as shared:  # whose replies come in any order
        yield shared


def test_every_labelled_pair_is_graded_as_labelled(grader):
    """Bug: a wrong twin (without its sign, unit, bracket or digits) is right, or an answer's other spelling wrong."""
    rows = labelled_pairs()
    assert len({row[2:] for row in rows}) == len(rows) >= 400
    grades = grader.grade_batch([tagged(row[2]) for row in rows], [row[3] for row in rows])
    failed = [row for row, grade in zip(rows, grades, strict=True) if (grade.answer == 1.0) != row[1]]
    failed += [row for row, grade in zip(rows, grades, strict=True) if grade.outcome in ("error", "timeout")]
    different = [row for row in rows if not row[1]]
    swapped = grader.grade_batch([tagged(row[3]) for row in different], [row[2] for row in different])
    assert failed + [row for row, grade in zip(different, swapped, strict=True) if grade.answer] == []


def test_the_recorded_verdicts_are_those_of_this_version_of_the_grader(grader):
    """Bug: accuracies of two graders are compared as if one had judged."""
    cases = verdicts.all_cases()
    now = verdicts.judge(cases, grader)
    assert verdicts.changed(now, cases) == [], "raise GRADER_VERSION, then run python tests/verdicts.py"
    assert verdicts.text_of(now) == verdicts.RECORD.read_text(), "other cases or version: run python tests/verdicts.py"
    assert protocol.grader_version() == f"{GRADER_VERSION}, math-verify {metadata.version('math-verify')}"


def test_rewards_are_format_answer_and_both():
    """Bug: the reward of a format that the handout's prompt does not ask for; a box that printed braces close."""
    for response, formatted, right in R1_ZERO_FORMAT:
        expected = {"format_reward": formatted, "answer_reward": right, "reward": right}
        assert r1_zero_reward_fn(response, "38") == expected, response
    assert question_only_reward_fn(r"so \boxed{38}", "38")["reward"] == 1.0
    assert boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"  # printed braces close no box
    assert boxed(r"\boxed{\left\{ x \right.}") == r"\left\{ x \right."


def test_golds_of_every_kind():
    """Bug: an answer equal to Python's text of a null, a list or an object is right."""
    for gold in ("38", 38, 38.0, ["37", "38"], ["37", 38], [None, "38"], r"\boxed{38}"):
        assert r1_zero_reward_fn(tagged("38"), gold)["reward"] == 1.0, gold
    for gold in (None, (38,), {"a": 38}, [], [None], True, object(), "", "  ", b"38", math.nan, 10**5000):
        for answer in ("38", "", str(gold) if gold != 10**5000 else "1"):
            assert r1_zero_reward_fn(tagged(answer), gold)["reward"] == 0.0, gold
    assert [r1_zero_reward_fn(tagged(text), math.inf)["reward"] for text in (r"\infty", r"-\infty")] == [1.0, 0.0]
    golds = ["38", r"\frac{1}{2}", "", None, "east", ["38", "39"], "  "]
    assert Grader(symbolic=False).unearnable(golds) == [2, 3, 6]


def test_batches_keep_order_count_repeats_and_unequal_lengths_are_the_callers_mistake(grader):
    """Bug: a cached grade goes to another response, or its repeat is not counted."""
    answers = [str(index % 7) for index in range(70)]
    grades = grader.grade_batch([tagged(answer) for answer in answers], ["3.5e0"] * 70)
    assert [grade.reward for grade in grades] == [0.0] * 70
    assert grading_metrics(grades)["grading/cache_hit_rate"] == pytest.approx(63 / 70)
    again = grader.grade_batch([tagged("3"), tagged("7/2")], ["3.5e0"] * 2)
    assert [(grade.reward, grade.remembered) for grade in again] == [(0.0, True), (1.0, False)]
    with pytest.raises(ValueError, match="2 responses and 1 ground truths"):
        grader.grade_batch(["a", "b"], ["1"])


def test_metrics_count_what_happened(grader):
    """Bug: a failure of the grader counts as a wrong answer, and nobody hears of it."""
    grades = grader.grade_batch([tagged("38"), tagged("39"), "no tags", tagged("9^9^9^9")], ["38"] * 4)
    grades += grader.grade_batch([tagged("38"), None], [None, "38"])
    metrics = grading_metrics(grades)
    assert (grades[3].outcome, grades[3].reward, grades[3].format) == ("refused", 0.0, 1.0)  # not plain wrong
    counted = {"responses": 6, "format_rate": 4 / 6, "answer_rate": 1 / 6, "answer_given_format": 1 / 4, "refusals": 1}
    for name, value in (counted | {"bad_golds": 1, "bad_responses": 1, "path/text": 1 / 6}).items():
        assert metrics[f"grading/{name}"] == pytest.approx(value), name
    assert sum(value for name, value in metrics.items() if "/path/" in name) == pytest.approx(1)
    assert any("no usable ground truth" in warning for warning in grader.warnings(grades))
    assert (grading_metrics([]), grader.warnings([])) == ({}, [])


def test_surface_forms_of_numbers_are_graded_without_the_symbolic_library(grader):
    """Bug: an import that loads it for every command, or common answers that wait for a worker."""
    program = "import sys, rlreason.grading; print({'sympy', 'math_verify', 'torch', 'mpmath'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
    numbers = [str(17 * index % 1009) for index in range(2000)]
    responses = [tagged(FORMS[index % len(FORMS)].format(number)) for index, number in enumerate(numbers)]
    grades = grader.grade_batch(responses, numbers)
    assert {(grade.reward, grade.path) for grade in grades} <= {(1.0, path) for path in ("text", "number", "structure")}


def test_wrong_settings_and_rewards_are_named():
    """Bug: a misspelled reward is found when the first response is graded."""
    for wrong in ({"extract": "loose"}, {"correct_at": 0}):  # ranges: tests/test_ranges.py
        with pytest.raises(ConfigError, match=rf"^grading\.{next(iter(wrong))}="):
            Grader(GradingConfig(**wrong))
    for reward in ("r1", ":f", "mine:"):
        with pytest.raises(ConfigError, match=f"^reward={reward} "):
            Grader(reward=reward)
    assert tuple(FORMATS) == NAMED_REWARDS  # one table here, its names in the settings


PLUGGED_IN = """
    ab correct plugin 1.0, abc wrong plugin 0.0, hang timeout plugin 0.0, ab correct plugin 1.0, raise error plugin 0.0,
    exit error killed 0.0, None error plugin_value 0.0, nan error plugin_value 0.0, text error plugin_value 0.0,
    dict wrong plugin 0.5, memory error killed 0.0, xy correct plugin 1.0
"""  # response, outcome, path, reward


def test_a_plug_in_runs_in_the_pool_and_its_failures_are_told_apart(tmp_path):
    """Bug: a reward that hangs, ends its process or returns no number takes the run or its neighbours along."""
    log = tmp_path / "log" / "incidents.jsonl"
    with Grader(patient(timeout_s=5.0), "own_reward:by_length", log) as fresh:
        cases = [case.split() for case in PLUGGED_IN.split(",")]
        grades = fresh.grade_batch([response for response, *_ in cases], ["12"] * len(cases))
        assert [[grade.outcome, grade.path, str(grade.reward)] for grade in grades] == [case[1:] for case in cases]
        metrics = grading_metrics(grades)
        assert (metrics["grading/timeouts"], metrics["grading/kills"], metrics["grading/errors"]) == (1, 2, 4)
        assert len(fresh.warnings(grades)) == 3
    statuses = [json.loads(line)["status"] for line in log.read_text().splitlines()]
    assert sorted(statuses) == ["error"] * 4 + ["killed", "killed", "timeout"]
    with Grader(patient(), "own_reward:no_such_function") as fresh:
        assert fresh.grade_batch(["a"], ["b"])[0].outcome == "error"
        assert "no_such_function" in fresh.wait()


def test_partial_credit_is_a_reward_and_no_right_answer():
    """Bug: an accuracy that counts partial credit, or no warning where nothing or all can be right."""

    def pays(response: str, gold: str) -> dict[str, float]:
        return {"reward": float(response), "format_reward": 1.0}

    with Grader(patient(), pays) as whole, Grader(patient(correct_at=0.5), pays) as half:
        outcomes = [
            [g.outcome for g in one.grade_batch(["0.1", "0.5", "0.9999999999"], [""] * 3)] for one in (whole, half)
        ]
    assert outcomes == [["wrong", "wrong", "correct"], ["wrong", "correct", "correct"]]
    assert "gives up to 1.5" in whole.warnings([Grade(1.0, 1.5, 1.5, "correct", "plugin")])[0]
    assert half.warnings([Grade(1.0, 1.5, 1.5, "correct", "plugin")]) == []
    assert "grading.correct_at" in half.warnings([Grade(1.0, 0.4, 0.4, "wrong", "plugin")])[0]
