"""Settings and plug-ins of the grader: extraction, tolerance, ranges, and rewards of the user's own."""

import json
import math
import os

import pytest
from verdicts import EXTRACTED, TOLERATED, tagged

from rlreason.config.groups import GradingConfig
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.grading.formats import FORMATS
from rlreason.grading.grader import grading_metrics, grading_warnings
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.types import Grade
from tests.waiting import patient

CASES = [({"extract": extract}, answer, "38", right) for extract, answer, right in EXTRACTED] + list(TOLERATED)


@pytest.mark.parametrize(("settings", "answer", "gold", "right"), CASES)
def test_extraction_percent_and_tolerance_are_settings(settings, answer, gold, right):
    with Grader(GradingConfig(**settings), symbolic=False) as fresh:
        assert fresh.grade_batch([tagged(answer)], [gold])[0].reward == right


@pytest.mark.parametrize("wrong", [{"extract": "loose"}, {"correct_at": 0}])  # ranges: tests/test_ranges.py
def test_a_setting_out_of_range_is_named(wrong):
    with pytest.raises(ConfigError, match=rf"^grading\.{next(iter(wrong))}="):
        Grader(GradingConfig(**wrong))


def test_a_reward_that_is_neither_a_format_nor_a_function_is_named():
    for reward in ("r1", ":f", "mine:"):
        with pytest.raises(ConfigError, match=f"^reward={reward} "):
            Grader(reward=reward)
    assert tuple(FORMATS) == NAMED_REWARDS  # one table here, its names in the settings


def by_length(response, gold):
    """A reward plug-in: named tests.test_grading_settings:by_length in the tests below."""
    if response == "hang":
        while True:
            pass
    if response == "raise":
        raise RuntimeError("no")
    if response == "exit":
        os._exit(3)
    if response == "memory":
        return len(bytearray(10**10))
    return {"None": None, "nan": math.nan, "text": "1.0", "dict": {"reward": 0.5}}.get(
        response, len(response) == len(gold)
    )


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
    with Grader(patient(timeout_s=5.0), "tests.test_grading_settings:by_length", log) as fresh:
        grades = fresh.grade_batch([response for response, *_ in PLUGGED_IN], ["12"] * len(PLUGGED_IN))
        assert [(grade.outcome, grade.path, grade.reward) for grade in grades] == [case[1:] for case in PLUGGED_IN]
        metrics = grading_metrics(grades)
        assert (metrics["grading/timeouts"], metrics["grading/kills"], metrics["grading/errors"]) == (1, 2, 4)
        assert len(grading_warnings(grades)) == 3
    statuses = [json.loads(line)["status"] for line in log.read_text().splitlines()]
    assert sorted(statuses) == ["error"] * 4 + ["killed", "killed", "timeout"]


def test_a_plug_in_that_does_not_exist_is_an_error_in_words():
    with Grader(patient(), "tests.test_grading_settings:no_such_function") as fresh:
        assert fresh.grade_batch(["a"], ["b"])[0].outcome == "error"
        assert "no_such_function" in (fresh.broken or "")


def bonus_and_length(response: str, gold: str) -> dict[str, float]:
    """0.1 for writing anything, 1 for the right length, and both for a right one."""
    right = float(len(response) == len(gold))
    return {"format_reward": 1.0, "answer_reward": right, "reward": 0.1 + right}


def halves(response: str, gold: str) -> float:
    return len(response) / 2 if len(response) != 2 else sum([0.7, 0.2, 0.1])  # which is a little less than 1


def test_partial_credit_is_a_reward_and_no_right_answer():
    with Grader(patient(), f"{__name__}:bonus_and_length") as fresh:
        grades = fresh.grade_batch(["a", "ab"], ["12", "12"])
    assert [(g.outcome, g.reward) for g in grades] == [("wrong", 0.1), ("correct", 1.1)]
    assert grading_metrics(grades)["grading/answer_rate"] == 0.5
    with (
        Grader(patient(), f"{__name__}:halves") as whole,
        Grader(patient(correct_at=0.5), f"{__name__}:halves") as half,
    ):
        outcomes = [[g.outcome for g in it.grade_batch(["", "a", "ab", "abc"], ["1"] * 4)] for it in (whole, half)]
    assert "gives up to 1.5" in whole.warnings([Grade(1.0, 1.5, 1.5, "correct", "plugin")])[0]
    assert half.warnings([Grade(1.0, 1.5, 1.5, "correct", "plugin")]) == []
    assert "grading.correct_at" in half.warnings([Grade(1.0, 0.4, 0.4, "wrong", "plugin")])[0]
    assert outcomes == [["wrong", "wrong", "correct", "correct"], ["wrong", "correct", "correct", "correct"]]
