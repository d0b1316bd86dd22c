"""The compliance card: what passes, what fails, and that no name passes anything."""

import pytest

from rlreason.config.leaves import resource_dir
from rlreason.evaluation.protocol import (
    COURSE_REWARD,
    FAIL,
    OPEN,
    PARAMETERS,
    PASS,
    card_text,
    grader_version,
    leaderboard,
)
from tests.small_runs import words_of
from tests.starts import rlreason

SETTINGS = {"algorithm": "grpo", "data": {"name": "math", "path": "MATH"}, "eval": {"data": None}}
ORIGIN = {
    "model": {"name": "qwen2_5_math_1_5b", "parameters": PARAMETERS, "start_weights": "ab"},
    "device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3", "count": 2},
}


def summary_with(**protocol) -> dict:
    prompt = (resource_dir("prompts") / "r1_zero.prompt").read_text(encoding="utf-8")
    return {
        "accuracy": 0.55,
        "time/total": 3.5 * 3600,
        "data": "0123",
        "data_sizes": {"train": 7500, "validation": 5000},
        "protocol": {
            "prompt": prompt, "reward": COURSE_REWARD, "grader": grader_version(), "grading.extract": "strict",
            "sampling.temperature": 1.0, "sampling.max_tokens": 1024, "stop": ["</answer>"], "problems": 5000,
            "samples per problem": 1,
        } | protocol,
    }  # fmt: skip


def test_a_run_by_the_rules_passes_what_the_records_can_decide():
    rows = leaderboard(SETTINGS, summary_with(), ORIGIN)
    assert {row.rule: row.verdict for row in rows if row.verdict != PASS} == {"model": OPEN, "data": OPEN}
    assert "(model, data); accuracy 0.550" in card_text(rows, summary_with()).splitlines()[-1]


H100 = {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    ("changed", "rule", "verdict"),
    [
        ({"prompt": "{question}"}, "prompt", FAIL),
        ({"chat.template": "x"}, "prompt", FAIL),
        ({"reward": "r1_zero"}, "reward", OPEN),  # which decides 187 of 662 pairs otherwise than the course's
        ({"reward": "question_only"}, "reward", FAIL),
        ({"reward": "mine:r1_zero_reward_fn"}, "reward", OPEN),
        ({"sampling.temperature": 0.6}, "temperature", FAIL),
        ({"problems": 1024}, "problems at the end", FAIL),
        ({"model": {"name": "qwen2_5_math_1_5b", "parameters": 7}}, "model", FAIL),
        ({"device": H100 | {"count": 8}}, "GPUs", OPEN),
        ({"device": {"type": "cpu"}}, "GPUs", PASS),
        ({"earlier_parts": [{"device": H100 | {"count": 1}}]}, "hours", OPEN),
        ({"time/total": 4.1 * 3600}, "hours", FAIL),
        ({"time/total": None}, "hours", OPEN),
        ({"data": {"name": "math"}}, "data", FAIL),  # made up, whatever it is called
        ({"algorithm": "sft"}, "imitated traces", OPEN),
    ],
)
def test_each_rule_is_held_by_what_was_recorded(changed, rule, verdict):
    parts = [SETTINGS, ORIGIN | {"earlier_parts": []}, {"time/total": 0}]
    settings, origin, whole = ({k: v for k, v in changed.items() if k in part} for part in parts)
    protocol = {k: v for k, v in changed.items() if not any(k in part for part in parts)}
    found = leaderboard(SETTINGS | settings, summary_with(**protocol) | whole, ORIGIN | origin)
    assert {row.rule: row.verdict for row in found}[rule] == verdict


@pytest.mark.long
def test_a_run_measured_by_the_leaderboards_rule_ends_with_its_card(tmp_path):
    words = [word for word in words_of("n_steps=1", "eval.sampling.max_tokens=64") if "eval_problems" not in word]
    done = rlreason(*words, "eval=leaderboard", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, last = (tmp_path / "run/compliance.md").read_text().splitlines()
    assert last in " ".join(done.stdout.split())
    assert "FAIL (model, data, problems at the end" in last
