"""`rlreason inspect`: cases of every category with a guess at why, and rewards compared with those of now."""

import json
from pathlib import Path

import pytest

from rlreason.config.groups import GradingConfig
from rlreason.evaluation.cases import reasons
from rlreason.grading import Grader
from rlreason.grading.grader import RunGrading
from rlreason.records.files import response_files
from rlreason.records.reader import RunFolder
from rlreason.records.resume import drop_later
from rlreason.records.rows import response_row
from rlreason.types import Problem, Response, Sample

CONFIG = "data: {name: gsm8k}\nprompt: {reward: r1_zero}\ngrading: {extract: strict, timeout_s: 5.0, workers: 1}\n"
VERIFIER = "rlreason.grading.verifiers.countdown"

#: response -> the first words of the guess, for the ground truth 18
GUESSES = {
    "so 18": "no </think>",
    "so </think> 18": "no <answer> tag",
    "so </think>\n<answer>18</answer>": "not exactly one space between </think> and <answer>: '\\n'",
    "so </think> <answer>18": "no </answer>",
    "so </think> <answer>18</answer> or 19": "no answer can be read: text behind </answer>",
    "so </think> <answer> </answer>": "the answer is empty",
    "so </think> <answer>It makes 18 dollars.</answer>": "a unit or a sentence around the right answer",
    "so </think> <answer>19</answer>": "another answer: '19' instead of '18'",
    "so </think> <answer>18</answer>": "right",
}


def rows_of(responses, reward="r1_zero"):
    with Grader(reward=reward, symbolic=False) as grader:
        grades = grader.grade_batch(list(responses), ["18"] * len(responses))
    rows = []
    for i, (response, grade) in enumerate(zip(responses, grades, strict=True)):
        sampled = Response(f"p{i}", [1], [1], [-0.5], response, "stop" if i else "length")
        rows.append(response_row(0, Sample(sampled, grade), Problem(f"p{i}", "How many eggs?", "18")))
    return rows


EXTRA = [1, "ü\u2028"]  # a line's end for splitlines, and none of JSON Lines


def saved_as(response: str, gold: str, reward: float, outcome: str | None = None) -> dict:
    """A row with the grade that a run saved, right or wrong."""
    grade = {"reward": reward, "answer_reward": reward, "outcome": outcome or ("correct" if reward else "wrong")}
    return {"response": response, "gold": gold, "extra": EXTRA} | grade


def save(folder: Path, config: str, files: dict[str, list[dict]] | None = None) -> Path:
    """A run folder with such rows in its files."""
    for name, rows in (files or {}).items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def run(tmp_path):
    return save(tmp_path, CONFIG, {"responses": rows_of(GUESSES)})


def test_the_guess_names_what_is_wrong():
    plain, boxed, mine = Grader(), Grader(reward="question_only"), Grader(reward="mine:reward")

    def guesses(response: str, outcome: str, grader: Grader = plain, gold: str = "18", cut: bool = False) -> list[str]:
        row = {"response": response, "gold": gold, "outcome": outcome, "finish_reason": "length" if cut else "stop"}
        return reasons(row, grader)

    for row, expected in zip(rows_of(GUESSES), GUESSES.values(), strict=True):
        assert guesses(row["response"], row["outcome"])[0].startswith(expected), row["response"]
    cut = guesses("I think 18", "unformatted", cut=True)
    assert (cut[::2], cut[1].endswith(" 18")) == (["no </think>", "cut at the token limit"], True)
    assert guesses("It is 18.", "unformatted", boxed)[0] == "no \\boxed{}"
    assert guesses("It is \\boxed{18", "unformatted", boxed)[0] == "\\boxed is never closed"
    assert all("timeout" in guesses("</think> <answer>x^y</answer>", "timeout", judge)[0] for judge in (plain, mine))
    assert "mine:reward" in guesses("x", "wrong", mine)[0]
    for grading, answer, gold, expected in (
        ({}, "38\\%", "38", "right by the grader's rules of now"),
        ({"percent": False}, "38\\%", "38", "right but for a percent sign (grading.percent=false)"),
        ({}, "0.333", "1/3", "rounded further than grading.rel_tol=1e-06 allows"),
        ({"rel_tol": 1e-2}, "0.3", "1/3", "another answer"),
    ):
        judge = Grader(GradingConfig(**grading))
        assert guesses(f"</think> <answer>{answer}</answer>", "wrong", judge, gold)[0].startswith(expected)


def test_the_reward_of_a_run_is_read_in_one_way(tmp_path):
    for reward, grades in (("r1_zero", f"{VERIFIER}:r1_zero"), ("mine:reward", "mine:reward")):
        config = {"prompt": {"reward": reward}, "data": {"verifier": VERIFIER}, "grading": {"percent": False}}
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        assert RunGrading.of(*RunFolder(tmp_path).grading()) == RunGrading(GradingConfig(percent=False), grades)
    for own, counted in (
        ("null", "r1_zero"),
        ("{reward: 'a:b', prompt: null, data: null}", "a:b"),
        ("{reward: null, prompt: {reward: question_only}, data: {verifier: v}}", "v:question_only"),
    ):
        (tmp_path / "config.yaml").write_text(f"prompt: {{reward: r1_zero}}\ngrading: {{}}\neval: {own}\n")
        assert RunGrading.of(*RunFolder(tmp_path).grading(evaluates=True)) == RunGrading(GradingConfig(), counted)


@pytest.fixture
def one_opinion(monkeypatch):
    """No second grader, which starts processes of its own that load the symbolic library."""
    monkeypatch.setattr("rlreason.cli.inspect.opinions", lambda rows, *_: [None] * len(rows))


@pytest.mark.usefixtures("one_opinion")
def test_every_category_is_shown_with_its_count_and_written(run, cli):
    for category, size in {"format0": 4, "format1_wrong": 4, "correct": 1, "truncated": 1}.items():
        out = cli.printed("inspect", run, "--category", category, "-n", "3")
        assert "9 responses: 1 correct, 4 format1_wrong, 4 format0" in out
        assert out.count("\n--- ") == min(3, size)
        assert f"over all {size} of {category}" in out
    assert "cut at the token limit" in out
    for category in ("format0", "correct"):  # each has its file
        assert f"of {category}" in (run / f"inspect/{category}.md").read_text()
    out = cli.printed("inspect", run, "--problem", "p3", "--markdown", run / "mine.md")
    assert out.count("\n--- ") == out.count("\n--- 1. p3") == 1
    assert (run / "mine.md").exists()


def test_a_second_grader_that_disagrees_makes_a_suspect(tmp_path, cli):
    rows = rows_of({"\\boxed{17}": "", "\\boxed{18}": "", "none": ""}, "question_only")
    rows[1] |= saved_as("\\boxed{18}", "18", 0.0)  # as a parser with a fault would have it
    run = save(tmp_path, CONFIG.replace("r1_zero", "question_only"), {"responses": rows})
    out = cli.printed("inspect", run, "--category", "disagree")
    assert ("parser suspect" in out, out.count("\n--- ")) == (True, 1)


@pytest.mark.usefixtures("one_opinion")
def test_training_runs_show_their_newest_evaluation_or_the_step_asked_for(tmp_path, cli):
    """The third file is of an evaluation between two updates."""
    files = ("evals/step_00000", "evals/step_00010", "evals/step_00004_update_00009", "rollouts/step_00003")
    run = save(tmp_path / "run", CONFIG, dict.fromkeys(files, rows_of(GUESSES)))
    for words, file in (("", 1), ("--step 0", 0), ("--rollouts", 3), ("--step 3", 3)):
        assert f"{files[file]}.jsonl" in cli.printed("inspect", run, *words.split(), "-n", "1")
    assert "saved the steps" in cli.refused("inspect", run, "--step", "7")
    unfinished = {"responses.unfinished": [{"identity": "x"}, *rows_of(GUESSES)[:4]]}
    new = save(tmp_path / "new", CONFIG, unfinished)
    with (new / "responses.unfinished.jsonl").open("a") as file:
        file.write('{"problem_id": "p9", "resp')
    assert "4 responses" in cli.printed("inspect", new, "-n", "2")


def test_the_evaluation_after_update_0_is_the_later_one_of_its_step(tmp_path):
    """Bug: two evaluations of step 0 come in any order, or the one that ended a run stays where the run goes on."""
    own, ending = ([f"step_{k:05d}{end}" for k in range(8)] for end in ("", "_update_00000"))
    written = [*own[:4], *ending, *own[4:]]  # some before and some behind their like
    run = save(tmp_path, CONFIG, {f"evals/{name}": [] for name in written})
    in_order = [name for names in zip(own, ending, strict=True) for name in names]
    assert [file.path.stem for file in response_files(run, "evals")] == in_order
    drop_later(run, {"step": 8, "lines": {}, "parts": {"validation": [{"step": k} for k in range(8)]}})
    assert [file.path.stem for file in response_files(run, "evals")] == own


CASES = [  # response, ground truth, reward as saved
    ("</think> <answer>38</answer>", "38", 1.0),
    ("</think> <answer>0.5</answer>", r"\frac12", 0.0),  # the saved reward is wrong
    ("</think> <answer>9 am</answer>", "9 pm", 1.0),  # and here
    ("no tags", "38", 0.0),
    (r"</think> <answer>\int_0^1 x\,dx</answer>", "0.5", 1.0),
]


def saved(run: Path) -> list[dict]:
    paths = sorted((run / "rollouts").iterdir())
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").split("\n")]
    return [json.loads(line) for line in lines if line.endswith("}")]


def test_regrading_counts_disagreements_and_writes_where_asked_and_leaves_what_is_no_row(tmp_path, cli, monkeypatch):
    rows = [saved_as(*case) | {"path": "of old"} for case in CASES]
    run = save(tmp_path, CONFIG, {"rollouts/step_00001": rows[:2], "rollouts/step_00002": rows[2:]})
    torn = run / "rollouts/step_00002.jsonl"
    torn.write_bytes(b'{"broken\n\0\0\n' + torn.read_bytes() + b'{"half')
    before = saved(run)
    printed = cli.printed("inspect", run, "--regrade", "--other", "own_reward:all_right")
    table = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "%" in line}
    assert table["saved"] == ["60.0%", "60.0%", "1", "1"]
    assert table["now"] == ["60.0%", "100.0%", "0", "0"]
    assert table["math-verify"][2:] == ["1", "0"]  # it takes 9 am for 9 pm
    assert table["own_reward:all_right"] == ["100.0%", "60.0%", "2", "0"]
    assert "wrong only for saved" in printed
    assert saved(run) == before
    monkeypatch.setattr("rlreason.cli.inspect.NAMED_REWARDS", ())  # without math-verify, which has been shown
    for _ in range(2):
        assert "previous_grade" in cli.printed("inspect", run, "--regrade", "--write")
        rows = saved(run)
        assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0, 1.0]
        assert [row["outcome"] for row in rows] == ["correct", "correct", "wrong", "unformatted", "correct"]
        assert [row["previous_grade"]["reward"] for row in rows] == [reward for *_, reward in CASES]
        assert {row["previous_grade"]["path"] for row in rows} == {"of old"} != {row["path"] for row in rows}
        assert all(row["extra"] == EXTRA for row in rows)
    assert len(list((run / "rollouts").iterdir())) == 2
    assert cli.figures("inspect", run, "--regrade", "--step", "1")["responses"] == 2
    assert "--category" in cli.refused("inspect", run, "--regrade", "--category", "correct", "--write")
    lines = torn.read_bytes().split(b"\n")
    assert (lines[:2], lines[-1]) == ([b'{"broken', b"\0\0"], b'{"half')


def test_a_reward_that_cannot_be_had_overwrites_no_grades(tmp_path, cli):
    for gone, cure in (("no.such:reward", "No module named"), ("python:f-12345678", "name it module:function")):
        run = save(tmp_path, f"prompt: {{reward: '{gone}'}}\n", {"rollouts/step_00001": [saved_as("38", "38", 1.0)]})
        before = saved(run)
        assert cure in cli.refused("inspect", run, "--regrade", "--write")
        assert saved(run) == before
