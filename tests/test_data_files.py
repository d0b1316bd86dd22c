"""Rows of every shape become problems; a row that cannot be used is named with its line, or counted."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlreason.config.data import DataConfig, FieldsConfig, FileDataConfig, FunctionDataConfig
from rlreason.config.rules import wrong_values
from rlreason.data.prepare import read_files, read_function
from rlreason.data.sources import BadRowError, RowRules, field_names, fingerprint, own_id, to_problem
from rlreason.errors import ConfigError, DataError
from rlreason.types import Problem

BOX = r"The probabilities add up to $1$, so the rest is $1-\frac13-\frac5{12}=\boxed{\frac{1}{4}}$."


def lines(file: Path, rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def sums(n: int, start: int = 0) -> list[dict[str, str]]:
    return [{"question": f"{i}+{i}?", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
            for i in range(start, start + n)]  # fmt: skip


def read(data: FileDataConfig) -> tuple[list[Problem], list[Problem], list[str]]:
    notes: list[str] = []
    return *read_files(data, notes.append), notes


def parse(row, gold="auto", wrap=False, max_chars=1000, **names) -> Problem:
    return to_problem(row, "id", RowRules(field_names(names), gold, max_chars, wrap))


CHAT = "#### Step 1\nAdd.\nFinal Answer: The final answer is $60$. I hope it is correct."
ROWS = {
    "GSM8K": (
        {"question": " Q1 ", "answer": "half: 48/2 = <<48/2=24>>24\n#### 1,024"},
        Problem("id", "Q1", "1024", "half: 48/2 = <<48/2=24>>24"),
    ),
    "a number": ({"question": "Q", "answer": 7}, Problem("id", "Q", "7")),
    "MATH": ({"problem": "P", "solution": BOX, "type": "Counting"}, Problem("id", "P", r"\frac{1}{4}", BOX)),
    "MATH-500": ({"problem": "P", "solution": BOX, "answer": r"\frac14"}, Problem("id", "P", r"\frac14", BOX)),
    "sft.jsonl, kept to the last space": (
        {"prompt": "User: Q <think>", "response": " 4 </think> <answer>4</answer>", "ground_truth": "4"},
        Problem("id", "User: Q <think>", "4", None, "User: Q <think>", " 4 </think> <answer>4</answer>"),
    ),
    "a pair": ({"prompt": "P", "response": "R"}, Problem("id", "P", "", None, "P", "R")),
    "Tulu": (
        {"prompt": "Q", "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": CHAT}]},
        Problem("id", "Q", "60", None, None, CHAT),
    ),
    "RLVR": ({"messages": [{"role": "user", "content": "Q"}], "ground_truth": "8"}, Problem("id", "Q", "8")),
}


@pytest.mark.parametrize(("row", "expected"), ROWS.values(), ids=ROWS)
def test_rows_of_every_known_shape(row, expected):
    assert parse(row) == expected


def test_fields_can_be_named_and_a_prompt_can_be_a_question():
    row = {"prompt": "Q", "chosen": "so \\boxed{3}", "label": "4"}
    assert parse(row, response="chosen", answer="label") == Problem("id", "Q", "4", None, "Q", "so \\boxed{3}")
    assert parse(row, question="prompt", solution="chosen") == Problem("id", "Q", "3", "so \\boxed{3}")
    assert parse(row, question="prompt", response="chosen", wrap=True) == Problem("id", "Q", "3", "so \\boxed{3}")


@pytest.mark.parametrize(
    ("rule", "answer", "solution", "gold"),
    [
        ("auto", None, r"\boxed{1} no, \boxed{\{2\}}", r"\{2\}"),
        ("auto", None, "nothing here", ""),
        ("auto", "-1,234,567.5", None, "-1234567.5"),
        ("auto", "a #### b\nc", None, "a #### b\nc"),
        ("boxed", "ignored", r"\boxed{5}", "5"),
        ("final", None, r"The final answer is $\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
        ("auto", "5*2=10\n#### 10\n\nNote: checked by hand.", None, "10"),
        ("hash", "5*2=10\r\n#### 1,010\r\n# by hand\r\n<|endoftext|>", None, "1010"),
        ("auto", "5*2=10 #### $10\nchecked", None, "$10"),
        ("auto", "#### 10\n\n#### Note\nchecked", None, "10"),
        ("hash", "#### Monday\n\nNote: checked.", None, "Monday"),
        ("auto", "#### Step 1\nAdd.\n#### 2. Multiply\nDone.", None, "#### Step 1\nAdd.\n#### 2. Multiply\nDone."),
    ],
)
def test_the_gold_answer_by_rule(rule, answer, solution, gold):
    row = {"question": "Q", "answer": answer, "solution": solution}
    assert parse(row, gold=rule).answer == gold


BAD = {
    b"[" * 100_000: "is not JSON",
    b'{"question": "q", "answer": ' + b"9" * 5000 + b"}": "is not JSON",
    b'{"question": "caf\xe9", "answer": "1"}': "is not JSON in UTF-8",
    b'{"question": "q"}': "has no text under 'ground_truth', 'answer'",
    b'{"answer": "1"}': "has no text under 'question', 'problem'",
    b'["q", "a"]': "is no JSON object",
    b'{"question": "q", "answer": "work ####  "}': "has an empty ground truth",
    b'{"question": "\\ud800", "answer": "1"}': "has half a surrogate pair",
    b'{"prompt": "p", "response": "' + b"x" * 1_000_000 + b'"}': "has more than data.max_chars=100000 characters",
    b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}': "has messages other",
    b'{"question": "q", "answer": NaN}': "has nan",
    b'{"question": "q", "answer": "-Infinity"}': "has the ground truth -Infinity",
    b'{"messages": "hello"}': "has messages that are no list",
}


def test_a_bad_row_stops_with_file_line_and_cure_or_is_counted(tmp_path):
    good = b'{"question": "q", "answer": "1"}\n'
    data = FileDataConfig(name="x", path=str(tmp_path))
    lines(tmp_path / "test.jsonl", sums(1))
    for line, reason in BAD.items():
        (tmp_path / "train.jsonl").write_bytes(good + b"\n" + line + b"\n" + good.replace(b'"q"', b'"r"'))
        with pytest.raises(ConfigError) as caught:
            read(data)
        (text,) = str(caught.value).splitlines()
        assert text.startswith(f"{tmp_path}/train.jsonl, line 3 {reason}")
        assert "data.bad_rows=skip" in text
        train, _, (note,) = read(replace(data, bad_rows="skip"))
        assert [p.id for p in train] == ["x-train-0", "x-train-2"]
        assert "1 of 3 rows left out; 1 because the row " + reason in note
        assert "(line 3)" in note


KEYS = ["question", "answer", "solution", "prompt", "response", "messages", "role", "content", "id"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(row=JSON, gold=st.sampled_from(["auto", "hash", "boxed", "final", "field"]))
def test_no_row_whatsoever_breaks_the_reading(row, gold):
    """A problem that can be stored, hashed and asked, or a reason in words."""
    try:
        outcome = parse(row, gold=gold)
    except BadRowError as reason:
        outcome = reason
    name = own_id(row, field_names({})) or "none"
    if isinstance(outcome, BadRowError):
        assert str(outcome).startswith(("has ", "is "))
    else:
        assert outcome.question.strip()
        assert len(fingerprint([replace(outcome, id=name)])) == 12
        assert outcome.prompt is None or outcome.prompt.strip()
        assert outcome.answer == outcome.answer.strip()


@pytest.fixture
def folder(tmp_path):
    """Write what a folder holds, and read it as data with these settings."""

    def of(files: dict[str, list], **settings):
        for name, rows in files.items():
            lines(tmp_path / name, rows)
        return read(FileDataConfig(name="x", path=str(tmp_path), **settings))

    return of


def test_files_without_a_problem_or_a_list_are_refused_and_rows_keep_ids_of_their_own(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.jsonl .*line 1, line 2"):
        folder({"train.jsonl": [[], []], "test.jsonl": sums(1)}, bad_rows="skip")
    rows = [{"unique_id": f"test/{i}.json", **row} for i, row in enumerate(sums(2))]
    others = [{"id": 100, **sums(1, start=9)[0]}]
    for test, ids in (
        (others, ["test/0.json", "test/1.json", "100"]),
        (rows[:1], ["x-train-0", "x-train-1", "x-test-0"]),
    ):
        train, validation, _ = folder({"train.jsonl": rows, "test.jsonl": test})
        assert [p.id for p in train + validation] == ids
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a, b = (str(lines(tmp_path / f"{name}/x.jsonl", sums(1, start))) for start, name in enumerate("ab"))
    train, validation, _ = read(FileDataConfig(name="jsonl", train=a, validation=b))
    assert [p.id for p in train + validation] == ["jsonl-train-0", "jsonl-validation-0"]
    (tmp_path / "train.jsonl").unlink()
    assert [p.answer for p in folder({"train.json": [sums(3)]})[0]] == ["0", "2", "4"]
    with pytest.raises(ConfigError, match=r"train\.json .* name it \.jsonl"):
        folder({"train.json": [{"question": "q"}]})


def test_sources_that_are_not_there_or_of_another_format_are_named_before_anything_is_read(tmp_path, monkeypatch):
    """A file of another format is not called "no file", nor a name on the hub: one slash and a suffix."""
    monkeypatch.chdir(tmp_path)
    file = str(lines(tmp_path / "train.jsonl", sums(2)))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/t.csv").write_bytes(b"PAR1")
    for settings_, complaint in (
        ({"path": "/nowhere"}, "path=/nowhere "),
        ({"path": str(tmp_path), "validation": "test"}, f"path={tmp_path} holds no test.jsonl"),
        ({}, "train=train "),
        ({"path": "a/hub", "train": "/nowhere/x.jsonl"}, "train=/nowhere/x.jsonl "),
        ({"train": file}, "validation has no value"),
        ({"train": file, "validation": file, "n_validation": 1}, f"validation={file} and data.n_validation=1"),
        ({"train": "rows/t.csv", "n_validation": 1}, "train=rows/t.csv.* no .jsonl or .json file"),
        ({"train": file, "validation": "rows/t.csv"}, "validation=rows/t.csv.* no .jsonl or .json file"),
        ({"path": "rows/t.csv", "train": file}, "path=rows/t.csv is a file"),
        ({"path": "rows", "train": "t", "n_validation": 1}, "path=rows holds no t.jsonl"),
    ):
        data = FileDataConfig(name="x", **settings_)
        (line,) = [*wrong_values(data, "data."), *data.problems()]
        assert re.match(f"data.{complaint}", line), line
    assert DataConfig(name="x", pass_rates="/nowhere").problems()[0].startswith("data.pass_rates=/nowhere ")
    assert FileDataConfig(name="x", train=file, n_validation=1).problems() == []
    assert FileDataConfig(name="x", path="openai/gsm8k").problems() == []


def test_a_hub_name_without_the_hub_and_a_folder_without_validation_say_what_to_do(folder):
    with pytest.raises(ConfigError, match=r"data\.path=openai/gsm8k .*(pip install|give a folder)"):
        read(FileDataConfig(name="gsm8k", path="openai/gsm8k", hub_config="main"))
    with pytest.raises(ConfigError, match=r"data\.n_validation=200"):
        folder({"train.jsonl": sums(20)})
    train, validation, _ = folder({}, n_validation=4)
    assert (len(train), len(validation)) == (16, 4)
    assert sorted(p.question for p in train + validation) == sorted(r["question"] for r in sums(20))


def test_a_function_returns_rows_problems_or_splits_and_what_else_it_does_is_one_line(monkeypatch):
    """Numbers of numpy are those of rows; without validation rows a tenth is held out."""
    assert set(field_names({})) == set(vars(FieldsConfig()))
    returned: Any = None
    monkeypatch.setattr("rlreason.data.sources.load", lambda name: lambda: returned)
    data = FunctionDataConfig(name="own", function="own:rows", options={})
    notes: list[str] = []
    returned = [{"question": f"{i}?", "answer": numpy.int64(i), "level": i} for i in range(20)]
    train, validation = read_function(data, notes.append)
    assert (len(train), len(validation), "2 of the 20" in notes[0]) == (18, 2, True)
    assert {(p.question, p.answer, p.facts["level"]) for p in train + validation} == {
        (f"{i}?", str(i), str(i)) for i in range(20)
    }
    returned = {"validation": [Problem("v", "1?", "1")], "train": (p for p in [Problem("t", "2?", "2", "s")])}
    assert read_function(data, print) == ([Problem("t", "2?", "2", "s")], [Problem("v", "1?", "1")])
    with pytest.raises(ConfigError, match="validation rows of its own"):
        read_function(replace(data, n_validation=1), print)
    returned = {"question": "q"}
    with pytest.raises(DataError, match=r"^data\.function=own:rows .*question.*\Z"):
        read_function(data, print)


def test_the_fingerprint_sees_every_text():
    problem = Problem("a", "q", "1", "s", "p", "r")
    changed = [replace(problem, **{key: "x"}) for key in ("id", "question", "answer", "solution", "prompt", "response")]
    moved = [replace(problem, solution=None, response="s"), replace(problem, response=None)]
    assert len({fingerprint([p]) for p in [problem, *changed, *moved]}) == 9
    assert len({fingerprint([p], asked_only=True) for p in [problem, *changed]}) == 5
    assert fingerprint([problem, *changed]) != fingerprint([*changed, problem])
