"""The grader as its callers see it: formats, golds, batches, metrics."""

import json
import math
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import verdicts
from verdicts import FORMS, QUESTION_ONLY_FORMAT, R1_ZERO_FORMAT, labelled_pairs, tagged

from rlreason.evaluation import protocol
from rlreason.grading import Grader, question_only_reward_fn, r1_zero_reward_fn
from rlreason.grading.formats import boxed
from rlreason.grading.grader import GRADER_VERSION, grading_metrics, grading_warnings
from tests.waiting import patient


@pytest.fixture(scope="module")
def grader():
    with Grader(patient()) as shared:
        yield shared


def test_there_are_enough_labelled_pairs_of_both_kinds_in_every_class():
    rows = labelled_pairs()
    assert len(rows) >= 400
    assert len({(answer, gold) for _, _, answer, gold in rows}) == len(rows)
    for section in {row[0] for row in rows}:
        assert {label for name, label, *_ in rows if name == section} == {True, False}, section


@pytest.mark.parametrize("section", sorted({row[0] for row in labelled_pairs()}))
def test_every_labelled_pair_is_graded_as_labelled(grader, section):
    rows = [row for row in labelled_pairs() if row[0] == section]
    grades = grader.grade_batch([tagged(row[2]) for row in rows], [row[3] for row in rows])
    failed = [
        (answer, gold, label, grade)
        for (_, label, answer, gold), grade in zip(rows, grades, strict=True)
        if (grade.answer == 1.0) != label or grade.outcome in ("error", "timeout")
    ]
    assert not failed


def test_the_recorded_verdicts_are_those_of_this_version_of_the_grader(grader):
    cases, recorded = verdicts.all_cases(), verdicts.read_record()
    now = verdicts.judge(cases, grader)
    assert verdicts.complaints(recorded, now, cases) == []
    assert now.version == recorded.version, "a new version: run python tests/verdicts.py"
    new = verdicts.unrecorded(recorded, cases)
    assert new == [], "cases without a verdict, which need no new version: run python tests/verdicts.py"


def test_a_changed_verdict_demands_a_new_version_and_a_new_case_does_not(tmp_path):
    old, new = verdicts.Case("r1_zero", tagged("38"), "38"), verdicts.Case("r1_zero", tagged("39"), "38")
    verdicts.write_record(verdicts.Record(3, {old.key: "+"}), tmp_path / "verdicts.txt")
    recorded = verdicts.read_record(tmp_path / "verdicts.txt")
    assert verdicts.complaints(recorded, verdicts.Record(3, {old.key: "+", new.key: "-"}), [old, new]) == []
    assert verdicts.unrecorded(recorded, [old, new]) == [new]
    (told,) = verdicts.complaints(recorded, verdicts.Record(3, {old.key: "-", new.key: "-"}), [old, new])
    assert "GRADER_VERSION = 4" in told
    assert told.splitlines()[1:] == ["  + is now -: 'so it is </think> <answer> 38 </answer>', gold '38'"]
    assert verdicts.complaints(recorded, verdicts.Record(4, {old.key: "-"}), [old]) == []
    assert verdicts.complaints(recorded, verdicts.Record(2, {old.key: "+"}), [old]) != []


def test_a_comment_in_the_grader_leaves_its_version_alone(tmp_path):
    package = Path(protocol.__file__).parents[1]
    shutil.copytree(package, tmp_path / "rlreason", ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    with (tmp_path / "rlreason/grading/answers/compare.py").open("a") as file:
        file.write("# another comment\n")
    program = "import rlreason.evaluation.protocol as p; print(p.__file__, p.grader_version(), sep='|')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    path, version = result.stdout.strip().split("|")
    assert path.startswith(str(tmp_path))
    assert version == protocol.grader_version() == f"{GRADER_VERSION}, math-verify {metadata.version('math-verify')}"


def test_no_gold_of_the_labelled_pairs_is_accepted_for_a_gold_labelled_different(grader):
    rows = [row for row in labelled_pairs() if not row[1]]
    swapped = grader.grade_batch([tagged(gold) for *_, gold in rows], [answer for _, _, answer, _ in rows])
    # A list of values may be right for one of them only as a whole, so a wrong pair stays wrong when swapped.
    assert [row[2:] for row, grade in zip(rows, swapped, strict=True) if grade.answer] == []


@pytest.mark.parametrize(("response", "formatted", "right"), R1_ZERO_FORMAT)
def test_r1_zero_format(response, formatted, right):
    rewards = r1_zero_reward_fn(response, "38")
    assert rewards == {"format_reward": formatted, "answer_reward": right, "reward": right}


@pytest.mark.parametrize(("response", "formatted", "right"), QUESTION_ONLY_FORMAT)
def test_question_only_format(response, formatted, right):
    rewards = question_only_reward_fn(response, "38")
    assert rewards == {"format_reward": formatted, "answer_reward": right, "reward": right}


def test_printed_braces_do_not_close_a_box():
    assert boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert boxed(r"\boxed{\left\{ x \right.}") == r"\left\{ x \right."


@pytest.mark.parametrize("gold", ["38", 38, 38.0, ["37", "38"], ["37", 38], [None, "38"], r"\boxed{38}"])
def test_golds_of_every_kind_match(gold):
    assert r1_zero_reward_fn(tagged("38"), gold)["reward"] == 1.0


@pytest.mark.parametrize("gold", [None, (38,), {"a": 38}, [], [None], True, object(), "", "  ", b"38"])
def test_odd_and_empty_golds_earn_nothing_and_raise_nothing(gold):
    for answer in ("38", "", str(gold)):
        assert r1_zero_reward_fn(tagged(answer), gold)["reward"] == 0.0


def test_nan_and_infinity_golds_match_only_themselves():
    assert r1_zero_reward_fn(tagged("38"), math.nan)["reward"] == 0.0
    assert r1_zero_reward_fn(tagged(r"\infty"), math.inf)["reward"] == 1.0
    assert r1_zero_reward_fn(tagged(r"-\infty"), math.inf)["reward"] == 0.0


def test_batches_keep_order_and_repeats_cost_nothing():
    with Grader(patient()) as fresh:
        answers = [str(index % 7) for index in range(70)]
        grades = fresh.grade_batch([tagged(answer) for answer in answers], ["3"] * 70)
        assert [grade.reward for grade in grades] == [float(answer == "3") for answer in answers]
        assert grading_metrics(grades)["grading/cache_hit_rate"] == pytest.approx(63 / 70)
        assert grading_metrics(fresh.grade_batch([tagged("3")], ["3"]))["grading/cache_hit_rate"] == 1.0


def test_a_batch_of_unequal_lengths_is_the_callers_mistake(grader):
    with pytest.raises(ValueError, match="2 responses and 1 ground truths"):
        grader.grade_batch(["a", "b"], ["1"])


def test_metrics_count_what_happened():
    with Grader(patient()) as fresh:
        grades = fresh.grade_batch([tagged("38"), tagged("39"), "no tags", tagged("9^9^9^9")], ["38"] * 4)
        grades += fresh.grade_batch([tagged("38"), None], [None, "38"])
        metrics = grading_metrics(grades)
        assert metrics["grading/responses"] == 6
        assert metrics["grading/format_rate"] == pytest.approx(4 / 6)
        assert metrics["grading/answer_rate"] == pytest.approx(1 / 6)
        assert metrics["grading/answer_given_format"] == pytest.approx(1 / 4)
        assert metrics["grading/refusals"] == 1
        assert metrics["grading/bad_golds"] == 1
        assert metrics["grading/bad_responses"] == 1
        assert metrics["grading/path/text"] == pytest.approx(1 / 6)
        assert sum(value for name, value in metrics.items() if "/path/" in name) == pytest.approx(1)
        assert any("no usable ground truth" in warning for warning in grading_warnings(grades))
        assert (grading_metrics([]), grading_warnings([])) == ({}, [])


def test_refusals_are_not_plain_wrong():
    with Grader(patient()) as fresh:
        (grade,) = fresh.grade_batch([tagged("9^{9^{9^9}}")], [r"\sqrt2"])
    assert (grade.outcome, grade.reward, grade.format) == ("refused", 0.0, 1.0)


def test_golds_that_do_not_grade_themselves_right_are_listed(grader):
    assert grader.unearnable(["38", r"\frac{1}{2}", "", None, "east", ["38", "39"], "  "]) == [2, 3, 6]


def gsm8k() -> list[str]:
    folder = Path(os.environ.get("RLREASON_GSM8K", Path(__file__).parents[2] / "shared/data/gsm8k"))
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    if not all(file.is_file() for file in files):
        pytest.skip("no GSM8K here: set RLREASON_GSM8K to a folder with train.jsonl and test.jsonl")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line)["answer"].split("####")[1].strip() for line in lines]


def test_gsm8k_golds_grade_themselves_right_and_each_other_wrong():
    golds = gsm8k()
    with Grader(symbolic=False) as fresh:
        assert fresh.unearnable(golds) == []
        others = golds[1:] + golds[:1]
        grades = fresh.grade_batch([tagged(other) for other in others], golds)
        equal = [float(a.replace(",", "")) == float(b.replace(",", "")) for a, b in zip(golds, others, strict=True)]
        assert [grade.reward == 1.0 for grade in grades] == equal


def test_surface_forms_of_numbers_are_graded_without_the_symbolic_library():
    numbers = [str(17 * index % 1009) for index in range(2000)]
    responses = [tagged(FORMS[index % len(FORMS)].format(number)) for index, number in enumerate(numbers)]
    with Grader(patient()) as fresh:
        grades = fresh.grade_batch(responses, numbers)
    assert all(grade.reward == 1.0 for grade in grades)
    assert {grade.path for grade in grades} <= {"text", "number", "structure"}  # no worker was asked


def test_importing_the_package_leaves_the_symbolic_library_out():
    heavy = "{'sympy', 'math_verify', 'torch', 'mpmath'}"
    program = f"import sys, rlreason.grading; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
