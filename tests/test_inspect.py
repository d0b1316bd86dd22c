"""Cases of every category with a guess at why, from evaluations and training runs."""

import json
from pathlib import Path

import pytest

from rlreason.evaluation.cases import reasons_for
from rlreason.grading import Grader
from rlreason.grading.grader import RunGrading
from rlreason.records.reader import RunFolder
from tests.test_subcommands import subcommand

CONFIG = "data: {name: gsm8k}\nprompt: {reward: REWARD}\ngrading: {extract: strict, timeout_s: 5.0, workers: 1}\n"

#: response -> the first words of the guess, for the ground truth 18
R1_ZERO = {
    "so 18": "no </think>",
    "so <answer>18</answer>": "no </think>: it answers without ending its thinking",
    "so </think> 18": "no <answer> tag",
    "so </think> Hence <answer>18</answer>": "text between </think> and <answer>: Hence",
    "so </think>\n<answer>18</answer>": "not exactly one space between </think> and <answer>: '\\n'",
    "<answer>18</answer> </think>": "<answer> comes before </think>",
    'so </think> <answer value="18">': 'the answer tag has attributes: <answer value="18">',
    "so </think> <answer>18": "no </answer>",
    "so </think> <answer>18</answer> or 19": "no answer can be read: text behind </answer>",
    "so </think> <answer> </answer>": "the answer is empty",
    "so </think> <answer>It makes 18 dollars.</answer>": "a unit or a sentence around the right answer",
    "so </think> <answer>9 + 9, which is not 19 but 18</answer>": "the right number is one of several",
    "so </think> <answer>many</answer>": "no number in the answer",
    "so </think> <answer>19</answer>": "another answer: '19' instead of '18'",
    "so </think> <answer>18</answer>": "right",
}
QUESTION_ONLY = {
    "It is 18.": "no \\boxed{}",
    "It is \\boxed{18": "\\boxed is never closed",
    "It is \\boxed{Janet makes 18}": "a unit or a sentence around the right answer",
    "It is \\boxed{17}": "another answer: '17' instead of '18'",
}


def rows_of(responses, reward, step=0):
    with Grader(reward=reward, symbolic=False) as grader:
        grades = grader.grade_batch(list(responses), ["18"] * len(responses))
    return [
        {
            "step": step, "problem_id": f"p{i}", "question": "How many eggs?", "gold": "18", "response": response,
            "reward": g.reward, "format_reward": g.format, "answer_reward": g.answer, "outcome": g.outcome,
            "path": g.path, "length": 9, "finish_reason": "length" if i == 0 else "stop",
        }
        for i, (response, g) in enumerate(zip(responses, grades, strict=True))
    ]  # fmt: skip


def save(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("REWARD", "r1_zero"))
    save(tmp_path / "responses.jsonl", rows_of(R1_ZERO, "r1_zero"))
    return tmp_path


@pytest.mark.parametrize(("reward", "told"), [("r1_zero", R1_ZERO), ("question_only", QUESTION_ONLY)])
def test_the_guess_names_what_is_wrong(reward, told):
    for row, expected in zip(rows_of(told, reward), told.values(), strict=True):
        found = reasons_for(row["response"], row["gold"], Grader(reward=reward), row["outcome"], truncated=False)
        assert str(found[0]).startswith(expected), row["response"]


@pytest.mark.parametrize(
    ("grading", "answer", "gold", "told"),
    [
        ({}, "38\\%", "38", "right by the grader's rules of now"),
        ({"percent": False}, "38\\%", "38", "right but for a percent sign (grading.percent=false)"),
        ({}, "0.333", "1/3", "rounded further than grading.rel_tol=1e-06 allows"),
        ({"rel_tol": 1e-2}, "0.333", "1/3", "right by the grader's rules of now"),
        ({"rel_tol": 1e-2}, "0.3", "1/3", "another answer"),
        ({}, "It makes 38.", "38", "a unit or a sentence around the right answer"),
        ({"extract": "sentence"}, "It makes 38.", "38", "right by the grader's rules of now"),
        ({"extract": "last_number"}, "It makes $\\frac{76}{2}$.", "38", "a unit or a sentence around the right answer"),
    ],
)
def test_the_guess_follows_the_settings_that_the_run_was_graded_with(tmp_path, capsys, grading, answer, gold, told):
    (tmp_path / "config.yaml").write_text(json.dumps({"prompt": {"reward": "r1_zero"}, "grading": grading}))
    (row, *_) = rows_of({f"</think> <answer>{answer}</answer>": ""}, "r1_zero")
    save(tmp_path / "responses.jsonl", [row | {"gold": gold, "outcome": "wrong", "reward": 0.0, "answer_reward": 0.0}])
    assert subcommand("inspect", tmp_path) == 0
    out = capsys.readouterr().out
    assert f"      1  {told}" in out


def test_the_reward_of_a_run_is_read_in_one_way(tmp_path):
    verifier = "rlreason.grading.verifiers.countdown"
    for reward, grades in (("r1_zero", f"{verifier}:r1_zero"), ("mine:reward", "mine:reward")):
        config = {"prompt": {"reward": reward}, "data": {"verifier": verifier}, "grading": {"percent": False}}
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        assert RunGrading.of(*RunFolder(tmp_path).grading()) == RunGrading(grades, {"percent": False})


def test_what_else_is_worth_knowing_comes_behind():
    plain = Grader()
    found = list(map(str, reasons_for("I think 18", "18", plain, "unformatted", truncated=True)))
    assert found[:2] == ["no </think>", "cut at the token limit"]
    assert found[2].endswith(" 18")
    assert str(reasons_for("</think> <answer>x^y</answer>", "18", plain, "timeout", False)[0]).endswith("timeout")
    assert "rules of its own" in str(reasons_for("x", "18", Grader(reward="mine:reward"), "wrong", False)[0])
    assert "raised" in str(reasons_for("x", "18", Grader(reward="mine:reward"), "error", False)[0])


def test_every_category_is_shown_with_its_count_and_written(run, capsys):
    sizes = {"format0": 8, "format1_wrong": 6, "correct": 1, "truncated": 1}
    for category, size in sizes.items():
        assert subcommand("inspect", run, "--category", category, "-n", "3") == 0
        out = capsys.readouterr().out
        assert "15 responses: 1 correct, 6 format1_wrong, 8 format0" in out
        assert out.count("\n--- ") == min(3, size)
        assert f"over all {size} of {category}" in out
    assert subcommand("inspect", run, "--problem", "p3") == 0
    out = capsys.readouterr().out
    assert out.count("\n--- ") == out.count("\n--- 1. p3") == 1
    subcommand("inspect", run, "--category", "truncated")
    out = capsys.readouterr().out
    assert "cut at the token limit" in out
    text = (run / "inspect.md").read_text()
    assert "| `no </think>` | 1 |" in text
    assert subcommand("inspect", run, "--markdown", run / "mine.md") == 0
    assert (run / "mine.md").read_text().count("\n## ") == 10


def test_a_second_grader_that_disagrees_makes_a_suspect(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("REWARD", "question_only"))
    rows = rows_of({"\\boxed{17}": "", "\\boxed{18}": "", "none": ""}, "question_only")
    rows[1] |= {"outcome": "wrong", "reward": 0.0, "answer_reward": 0.0}  # as a parser with a fault would have it
    save(tmp_path / "responses.jsonl", rows)
    assert subcommand("inspect", tmp_path, "--category", "disagree") == 0
    out = capsys.readouterr().out
    assert "parser suspect" in out
    assert out.count("\n--- ") == 1


def test_training_runs_show_their_newest_evaluation_or_the_step_asked_for(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("REWARD", "r1_zero"))
    for step in (0, 10):
        save(tmp_path / f"evals/step_{step:05d}.jsonl", rows_of(R1_ZERO, "r1_zero", step))
    save(tmp_path / "evals/step_00004_update_00009.jsonl", rows_of(R1_ZERO, "r1_zero", 4))  # between two updates
    save(tmp_path / "rollouts/step_00003.jsonl", rows_of(R1_ZERO, "r1_zero", 3))
    for words, file in (
        ([], "evals/step_00010.jsonl"),
        (["--step", "0"], "evals/step_00000.jsonl"),
        (["--rollouts"], "rollouts/step_00003.jsonl"),
        (["--step", "3"], "rollouts/step_00003.jsonl"),
    ):
        assert subcommand("inspect", tmp_path, *words, "-n", "1") == 0
        assert file in capsys.readouterr().out
    assert subcommand("inspect", tmp_path, "--step", "7") == 2
    assert "saved the steps" in capsys.readouterr().err


def test_an_unfinished_evaluation_is_readable(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("REWARD", "r1_zero"))
    save(tmp_path / "responses.unfinished.jsonl", [{"identity": "x"}, *rows_of(R1_ZERO, "r1_zero")[:4]])
    with (tmp_path / "responses.unfinished.jsonl").open("a") as file:
        file.write('{"problem_id": "p9", "resp')
    assert subcommand("inspect", tmp_path, "-n", "2") == 0
    assert "4 responses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["."], "responses.jsonl"),
        (["RUN", "-n", "0"], "-n: 0 must be"),
        (["RUN", "--problem", "p99"], "--problem p99"),
        (["RUN", "--step", "7"], "is an evaluation, which has no steps"),
        (["RUN", "--write"], "--write"),
        (["RUN", "--other", "mine:f"], "--regrade"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, says, run, capsys, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    given = {"RUN": str(run), ".": str(empty), "nowhere": str(empty / "nowhere")}
    assert subcommand("inspect", *(given.get(word, word) for word in words)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.strip().splitlines()) == 1
