"""Rows without ground truth find it by their question, whatever template their prompt was written with, or say so."""

import random
import re

import pytest
from test_data_files import lines
from test_data_splits import fill

from rlreason.config.data import FileDataConfig
from rlreason.data.ground_truth import with_ground_truth
from rlreason.data.prepare import Loaded, load_data
from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.types import Problem
from tests.run_settings import settings
from tests.waiting import patient

TEMPLATES = {
    "the run's own": fill,
    "another": "Solve this.\n\n### Question\n\n{}\n\n### Answer\n".format,
    "a chat": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format,
    "examples": "Q: How many are 1 and 1?\nA: 2\n\nQ: How many are 7 and 7?\nA: 14\n\nQ: {}\nA:".format,
    "alone": "{}".format,
}


@pytest.fixture(scope="module")
def grader():
    with Grader(patient()) as grader:
        yield grader


def question(i: int) -> str:
    return f"How many are {i} and {i}?"


def problems(n: int, start: int = 0) -> list[dict[str, str]]:
    return [{"problem": question(i), "answer": str(2 * i)} for i in range(start, start + n)]


def traces(n: int, template=fill) -> list[dict[str, str]]:
    """The handout's sft.jsonl: whole prompts, responses (every third one wrong), and nothing else."""
    response = " so </think> <answer>{}</answer>"
    return [{"prompt": template(question(i)), "response": response.format(2 * i + (i % 3 == 0))} for i in range(n)]


def load(folder, grader, *overrides: str) -> tuple[Loaded, list[str]]:
    words = ["algorithm=sft", "model=smollm2_135m", "data=math", f"data.path={folder}", "data.train=sft"]
    run = settings(*words, "prompt=r1_zero", "data.filter=correct", *overrides)
    said: list[str] = []
    return load_data(run, grader=grader, say=said.append), said


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_handouts_traces_are_filtered_by_the_ground_truth_of_their_problems(tmp_path, grader, template):
    """train.jsonl has the first 24 of 30, test.jsonl none of them, and nobody has the last 6."""
    lines(tmp_path / "train.jsonl", problems(24)), lines(tmp_path / "test.jsonl", problems(5, start=90))
    lines(tmp_path / "sft.jsonl", traces(30, TEMPLATES[template]))
    loaded, said = load(tmp_path, grader, "data.limit=10")
    assert [re.findall(r"\b\d+\b", line.replace(str(tmp_path), "")) for line in said] == [
        ["30", "24", "6"], ["16", "30", "8", "6"],
    ]  # fmt: skip
    assert loaded.sizes == {
        "train_read": 30, "train_before_filter": 30, "train_filtered": 16, "train": 10, "validation": 5,
    }  # fmt: skip
    for p in loaded.train:
        assert (p.question, p.prompt) == (question(int(p.answer) // 2), TEMPLATES[template](p.question))


def test_ground_truth_that_is_not_at_hand_is_asked_for_in_one_line(tmp_path, grader):
    lines(tmp_path / "sft.jsonl", traces(20)), lines(tmp_path / "test.jsonl", problems(5, start=90))
    (tmp_path / "train.jsonl").write_text("{broken")  # of no use, and not in the way
    with pytest.raises(DataError, match=r"data\.filter=correct: 20 training rows .*as data\.ground_t"):
        load(tmp_path, grader)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    named = [{"q": row["problem"], "label": row["answer"]} for row in problems(40)]
    file = lines(elsewhere / "known.jsonl", named)
    fields = ("data.fields.question=q", "data.fields.answer=label")
    validation = f"data.validation={lines(elsewhere / 'v.jsonl', named[30:])}"
    loaded, said = load(tmp_path, grader, f"data.ground_truth={file}", *fields, validation)
    assert loaded.sizes["train_filtered"] == len(loaded.train) == 13
    assert f" 20 in {file}" in said[0]
    with pytest.raises(DataError, match=r"known\.jsonl: 20 training rows"):
        load(tmp_path, grader, f"data.ground_truth={lines(file, problems(5, start=70))}", "data.filter=none")
    file.write_text("{broken\n")
    with pytest.raises(DataError, match=r"known\.jsonl, line 1"):
        load(tmp_path, grader, f"data.ground_truth={file}")


def test_a_file_of_ground_truth_is_read_without_a_filter_too_and_by_held_out_rows(tmp_path, grader):
    lines(tmp_path / "train.jsonl", problems(30)), lines(tmp_path / "sft.jsonl", traces(30))
    loaded, _ = load(tmp_path, grader, "data.ground_truth=train", "data.filter=none", "data.n_validation=6")
    assert (len(loaded.train), len(loaded.validation)) == (24, 6)
    assert all(p.question == question(int(p.answer) // 2) for p in loaded.train + loaded.validation)
    lines(tmp_path / "own.jsonl", [{**row, "ground_truth": "7"} for row in traces(9)])
    held_out = ("data.train=own", "data.n_validation=2", "data.filter=none")
    loaded, said = load(tmp_path, grader, *held_out, "data.ground_truth=train")
    assert {p.answer for p in loaded.train} == {"7"}
    assert said[0].startswith("! data.ground_truth=train ")


def test_a_file_that_is_not_there_is_another_mistake_than_one_that_is_of_no_use(tmp_path):
    file = str(lines(tmp_path / "sft.jsonl", traces(3)))
    (line,) = FileDataConfig(name="x", train=file, n_validation=1, ground_truth="/nowhere.jsonl").problems()
    assert line.startswith("data.ground_truth=/nowhere.jsonl")
    (line,) = FileDataConfig(name="x", path=str(tmp_path), train="sft", n_validation=1, ground_truth="train").problems()
    assert line.startswith(f"data.path={tmp_path} holds no train.jsonl")
    assert (ConfigError.exit_code, DataError.exit_code) == (2, 3)


def test_a_trace_of_a_validation_question_is_seen_through_any_template(tmp_path, grader):
    lines(tmp_path / "train.jsonl", problems(20)), lines(tmp_path / "test.jsonl", problems(2, start=7))
    lines(tmp_path / "sft.jsonl", traces(20, TEMPLATES["another"]))
    with pytest.raises(DataError, match="2 training questions"):
        load(tmp_path, grader)


def rows(template, *questions: str) -> list[Problem]:
    return [Problem(f"r{i}", p, "", prompt=p, response="r") for i, p in enumerate(map(template, questions))]


def joined(template, questions, known) -> list[str]:
    problems = [Problem(f"k{i}", q, f"answer to {q}") for i, q in enumerate(known)]
    return [
        p.answer.removeprefix("answer to ") for p in with_ground_truth(rows(template, *questions), problems, fill)[0]
    ]


@pytest.mark.parametrize("template", TEMPLATES)
def test_nothing_but_the_question_that_is_asked_is_taken_for_it(template):
    """Not a part of it, not a longer one next to it, not an example in the prompt: rather none than a wrong one."""
    whole = [f"Tom has {i} cards. {question(i)}" for i in range(8)]
    known = [question(i) for i in range(8)]
    assert joined(TEMPLATES[template], [*known, *whole], known) == [*known, *[""] * 8]
    assert joined(TEMPLATES[template], [*known, *whole], [*known, *whole]) == [*known, *whole]
    assert joined(TEMPLATES[template], ["1+1?", "11+1?", "-1+1?", "2*1+1?", "2+1?"], ["1+1?", "2+1?"]) == [
        "1+1?", "", "", "", "2+1?",
    ]  # fmt: skip
    assert joined(TEMPLATES[template], ["What is\n 1+1 ?", "And?"], [" What is 1+1  ?"]) == [" What is 1+1  ?", ""]


def test_of_two_problems_alike_the_first_is_taken_and_an_empty_answer_is_none():
    known = [Problem("a", "1?", ""), Problem("b", "1?", "2"), Problem("c", " 1? ", "3")]
    ((row,), found) = with_ground_truth(rows(fill, "1?"), known, fill)
    assert (row.answer, found) == ("2", 1)
    bare = [Problem("bare", "1?\n", "")]
    assert with_ground_truth(bare, known, fill)[0] == [Problem("bare", "1?\n", "2")]
    assert with_ground_truth([Problem("own", "1?", "9")], known, fill) == ([Problem("own", "1?", "9")], 0)


def test_ten_thousand_rows_find_their_questions_among_twelve_thousand_that_begin_alike():
    numbers = random.Random(0).sample(range(10**6), 12_000)
    known = [f"What is the smallest number that is larger than the square of {n} and its double?" for n in numbers]
    asked = known[:10_000]
    assert joined(TEMPLATES["a chat"], asked, known) == asked
