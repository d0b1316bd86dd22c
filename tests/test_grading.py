"""The grader as its callers see it: formats, ground truths, settings, batches, metrics, and rewards of one's own."""

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from importlib import metadata
from pathlib import Path

import pytest
import verdicts
from verdicts import FORMS, R1_ZERO_FORMAT, labelled_pairs, tagged

from rlreason.config.groups import GradingConfig
from rlreason.errors import ConfigError
from rlreason.evaluation import protocol
from rlreason.grading import Grader, question_only_reward_fn, r1_zero_reward_fn
from rlreason.grading.answers.evaluate import Calculator
from rlreason.grading.answers.lexer import tokens
from rlreason.grading.answers.parser import Node, parse
from rlreason.grading.formats import FORMATS, boxed
from rlreason.grading.grader import GRADER_VERSION, grading_metrics, grading_warnings
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.types import Grade
from tests.waiting import patient


@pytest.fixture(scope="module")
def grader():
    with Grader(patient()) as shared:
        yield shared


def test_every_labelled_pair_is_graded_as_labelled(grader):
    rows = labelled_pairs()
    assert len({row[2:] for row in rows}) == len(rows) >= 400
    for section in {row[0] for row in rows}:
        assert {label for name, label, *_ in rows if name == section} == {True, False}, section
    grades = grader.grade_batch([tagged(row[2]) for row in rows], [row[3] for row in rows])
    failed = [
        (row, grade)
        for row, grade in zip(rows, grades, strict=True)
        if (grade.answer == 1.0) != row[1] or grade.outcome in ("error", "timeout")
    ]
    assert not failed
    different = [row for row in rows if not row[1]]
    swapped = grader.grade_batch([tagged(row[3]) for row in different], [row[2] for row in different])
    assert [row[2:] for row, grade in zip(different, swapped, strict=True) if grade.answer] == []


def test_the_recorded_verdicts_are_those_of_this_version_of_the_grader(grader):
    cases, recorded = verdicts.all_cases(), verdicts.read_record()
    now = verdicts.judge(cases, grader)
    assert verdicts.complaints(recorded, now, cases) == []
    assert now.version == recorded.version, "a new version: run python tests/verdicts.py"
    new = verdicts.unrecorded(recorded, cases)
    assert new == [], "cases without a verdict, which need no new version: run python tests/verdicts.py"
    assert protocol.grader_version() == f"{GRADER_VERSION}, math-verify {metadata.version('math-verify')}"


def test_a_changed_verdict_demands_a_new_version_and_a_new_case_does_not(tmp_path):
    old, new = verdicts.Case("r1_zero", tagged("38"), "38"), verdicts.Case("r1_zero", tagged("39"), "38")
    verdicts.write_record(verdicts.Record(3, {old.key: "+"}), tmp_path / "verdicts.txt")
    recorded = verdicts.read_record(tmp_path / "verdicts.txt")
    for version, verdict, complains in ((3, "+", False), (3, "-", True), (4, "-", False), (2, "+", True)):
        now = verdicts.Record(version, {old.key: verdict, new.key: "-"})
        assert bool(verdicts.complaints(recorded, now, [old, new])) == complains
    assert verdicts.unrecorded(recorded, [old, new]) == [new]


def test_rewards_are_format_answer_and_both():
    for response, formatted, right in R1_ZERO_FORMAT:
        expected = {"format_reward": formatted, "answer_reward": right, "reward": right}
        assert r1_zero_reward_fn(response, "38") == expected, response
    assert question_only_reward_fn(r"so \boxed{38}", "38")["reward"] == 1.0
    assert boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"  # printed braces close no box
    assert boxed(r"\boxed{\left\{ x \right.}") == r"\left\{ x \right."


def test_golds_of_every_kind():
    for gold in ("38", 38, 38.0, ["37", "38"], ["37", 38], [None, "38"], r"\boxed{38}"):
        assert r1_zero_reward_fn(tagged("38"), gold)["reward"] == 1.0, gold
    for gold in (None, (38,), {"a": 38}, [], [None], True, object(), "", "  ", b"38", math.nan, 10**5000):
        for answer in ("38", "", str(gold) if gold != 10**5000 else "1"):
            assert r1_zero_reward_fn(tagged(answer), gold)["reward"] == 0.0, gold
    assert [r1_zero_reward_fn(tagged(text), math.inf)["reward"] for text in (r"\infty", r"-\infty")] == [1.0, 0.0]
    golds = ["38", r"\frac{1}{2}", "", None, "east", ["38", "39"], "  "]
    assert Grader(symbolic=False).unearnable(golds) == [2, 3, 6]


def test_batches_keep_order_count_repeats_and_unequal_lengths_are_the_callers_mistake():
    with Grader(patient()) as fresh:
        answers = [str(index % 7) for index in range(70)]
        grades = fresh.grade_batch([tagged(answer) for answer in answers], ["3"] * 70)
        assert [grade.reward for grade in grades] == [float(answer == "3") for answer in answers]
        assert grading_metrics(grades)["grading/cache_hit_rate"] == pytest.approx(63 / 70)
        assert grading_metrics(fresh.grade_batch([tagged("3")], ["3"]))["grading/cache_hit_rate"] == 1.0
        with pytest.raises(ValueError, match="2 responses and 1 ground truths"):
            fresh.grade_batch(["a", "b"], ["1"])


def test_metrics_count_what_happened():
    with Grader(patient()) as fresh:
        grades = fresh.grade_batch([tagged("38"), tagged("39"), "no tags", tagged("9^9^9^9")], ["38"] * 4)
        grades += fresh.grade_batch([tagged("38"), None], [None, "38"])
        metrics = grading_metrics(grades)
    assert (grades[3].outcome, grades[3].reward, grades[3].format) == ("refused", 0.0, 1.0)  # not plain wrong
    counted = {"responses": 6, "format_rate": 4 / 6, "answer_rate": 1 / 6, "answer_given_format": 1 / 4, "refusals": 1}
    for name, value in (counted | {"bad_golds": 1, "bad_responses": 1, "path/text": 1 / 6}).items():
        assert metrics[f"grading/{name}"] == pytest.approx(value), name
    assert sum(value for name, value in metrics.items() if "/path/" in name) == pytest.approx(1)
    assert any("no usable ground truth" in warning for warning in grading_warnings(grades))
    assert (grading_metrics([]), grading_warnings([])) == ({}, [])


def test_gsm8k_golds_grade_themselves_right_and_each_other_wrong():
    folder = Path(os.environ.get("RLREASON_GSM8K", Path(__file__).parents[2] / "shared/data/gsm8k"))
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    if not all(file.is_file() for file in files):
        pytest.skip("no GSM8K here: set RLREASON_GSM8K to a folder with train.jsonl and test.jsonl")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    golds = [json.loads(line)["answer"].split("####")[1].strip() for line in lines]
    with Grader(symbolic=False) as fresh:
        assert fresh.unearnable(golds) == []
        others = golds[1:] + golds[:1]
        grades = fresh.grade_batch([tagged(other) for other in others], golds)
    equal = [float(a.replace(",", "")) == float(b.replace(",", "")) for a, b in zip(golds, others, strict=True)]
    assert [grade.reward == 1.0 for grade in grades] == equal


def test_surface_forms_of_numbers_are_graded_without_the_symbolic_library():
    program = "import sys, rlreason.grading; print({'sympy', 'math_verify', 'torch', 'mpmath'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
    numbers = [str(17 * index % 1009) for index in range(2000)]
    responses = [tagged(FORMS[index % len(FORMS)].format(number)) for index, number in enumerate(numbers)]
    with Grader(patient()) as fresh:
        grades = fresh.grade_batch(responses, numbers)
    assert all(grade.reward == 1.0 for grade in grades)
    assert {grade.path for grade in grades} <= {"text", "number", "structure"}  # no worker was asked


def test_wrong_settings_and_rewards_are_named():
    for wrong in ({"extract": "loose"}, {"correct_at": 0}):  # ranges: tests/test_ranges.py
        with pytest.raises(ConfigError, match=rf"^grading\.{next(iter(wrong))}="):
            Grader(GradingConfig(**wrong))
    for reward in ("r1", ":f", "mine:"):
        with pytest.raises(ConfigError, match=f"^reward={reward} "):
            Grader(reward=reward)
    assert tuple(FORMATS) == NAMED_REWARDS  # one table here, its names in the settings


def test_one_answer_is_read_and_compared_by_the_settings_without_a_worker():
    sentences = Grader(GradingConfig(extract="last_number", percent=False))
    assert sentences.read("</think> <answer>She sold 38 clips</answer>").candidates == ("She sold 38 clips", "38")
    assert sentences.same("She sold 38 clips today", "38")
    assert [one.same("38%", "38") for one in (sentences, Grader())] == [False, True]
    assert not Grader().same(r"\int_0^1 x\,dx", "0.5")  # only the symbolic library could tell
    assert sentences._pool._server is None
    read = Grader().read("</think> <answer>1</answer> so")
    assert (read.formatted, read.answer, bool(read.reason)) == (True, None, True)
    with pytest.raises(ValueError, match="mine:reward"):
        Grader(reward="mine:reward").read("1")


def test_each_node_is_evaluated_once():
    """Bug: the exact evaluator was asked again at every node of the other one: 6,479 times for 80 terms."""
    visited = []

    class Counting(Calculator):
        def value(self, node: Node):
            visited.append(node)
            return super().value(node)

    for text in (r"\pi", "1/2", r"x^2"):
        visited.clear()
        Counting({"x": Fraction(7, 3)}, 512).value(parse(tokens("+".join([text] * 80))))
        assert len(visited) == len({id(node) for node in visited})


PLUGGED_IN = [  # response, outcome, path, reward
    ("ab", "correct", "plugin", 1.0),
    ("abc", "wrong", "plugin", 0.0),
    ("hang", "timeout", "plugin", 0.0),
    ("ab", "correct", "plugin", 1.0),
    ("raise", "error", "plugin", 0.0),
    ("exit", "error", "killed", 0.0),
    ("None", "error", "plugin_value", 0.0),
    ("nan", "error", "plugin_value", 0.0),
    ("text", "error", "plugin_value", 0.0),
    ("dict", "wrong", "plugin", 0.5),
    ("memory", "error", "killed", 0.0),
    ("xy", "correct", "plugin", 1.0),
]


def test_a_plug_in_runs_in_the_pool_and_its_failures_are_told_apart(tmp_path):
    log = tmp_path / "log" / "incidents.jsonl"
    with Grader(patient(timeout_s=5.0), "own_reward:by_length", log) as fresh:
        grades = fresh.grade_batch([response for response, *_ in PLUGGED_IN], ["12"] * len(PLUGGED_IN))
        assert [(grade.outcome, grade.path, grade.reward) for grade in grades] == [case[1:] for case in PLUGGED_IN]
        metrics = grading_metrics(grades)
        assert (metrics["grading/timeouts"], metrics["grading/kills"], metrics["grading/errors"]) == (1, 2, 4)
        assert len(fresh.warnings(grades)) == 3
    statuses = [json.loads(line)["status"] for line in log.read_text().splitlines()]
    assert sorted(statuses) == ["error"] * 4 + ["killed", "killed", "timeout"]
    with Grader(patient(), "own_reward:no_such_function") as fresh:
        assert fresh.grade_batch(["a"], ["b"])[0].outcome == "error"
        assert "no_such_function" in fresh.broken


def test_partial_credit_is_a_reward_and_no_right_answer():
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
