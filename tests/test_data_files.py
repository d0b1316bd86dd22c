"""Rows of every shape become problems; a row that is no use is named with its line, or counted and said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlreason.config.data import CountdownConfig, DataConfig, FieldsConfig, FileDataConfig
from rlreason.config.rules import wrong_values
from rlreason.data.prepare import read_files
from rlreason.data.sources import (
    BadRowError,
    RowRules,
    field_names,
    file_rows,
    fingerprint,
    own_id,
    read_table,
    to_problem,
)
from rlreason.errors import ConfigError
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


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (  # GSM8K
            {"question": " Q1 ", "answer": "half: 48/2 = <<48/2=24>>24\n#### 1,024"},
            Problem("id", "Q1", "1024", "half: 48/2 = <<48/2=24>>24"),
        ),
        ({"question": "Q", "answer": 7}, Problem("id", "Q", "7")),
        (  # MATH
            {"problem": "P", "level": "Level 1", "solution": BOX, "type": "Counting & Probability"},
            Problem("id", "P", r"\frac{1}{4}", BOX),
        ),
        (  # MATH-500: the answer field is the gold, as it is
            {"problem": "P", "solution": BOX, "answer": r"\frac14", "level": 3, "unique_id": "test/1.json"},
            Problem("id", "P", r"\frac14", BOX),
        ),
        (  # the handout's sft.jsonl: both texts are kept to the last space
            {"prompt": "User: Q\nAI: <think>", "response": " so 4 </think> <answer>4</answer>", "ground_truth": "4"},
            Problem("id", "User: Q\nAI: <think>", "4", None, "User: Q\nAI: <think>",
                    " so 4 </think> <answer>4</answer>"),
        ),
        ({"prompt": "P", "response": "R"}, Problem("id", "P", "", None, "P", "R")),
        (  # Tulu: a chat next to the question; its last sentence states the answer
            {"id": "personahub_1", "prompt": "Q", "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "#### Step 1\nAdd.\nFinal Answer: The final answer is $60$. "
                                                 "I hope it is correct."}]},
            Problem("id", "Q", "60", None, None,
                    "#### Step 1\nAdd.\nFinal Answer: The final answer is $60$. I hope it is correct."),
        ),
        (  # RLVR: the question as a chat
            {"messages": [{"role": "user", "content": "Q"}], "ground_truth": "8", "dataset": "MATH"},
            Problem("id", "Q", "8"),
        ),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{not json", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"question": "q"}', "has no text under 'ground_truth', 'answer'"),
        (b'{"answer": "1"}', "has no text under 'question', 'problem'"),
        (b'{"prompt": "p", "response": ""}', "has no text under 'response'"),
        (b'["q", "a"]', "is no JSON object"),
        (b'{"question": "q", "answer": "work ####  "}', "has nothing after '####'"),
        (b'{"problem": "q", "solution": "\\\\boxed{ }"}', "has an empty ground truth"),
        (b'{"question": "caf\xe9", "answer": "1"}', "is not UTF-8"),
        (b'{"question": "\\ud800", "answer": "1"}', "has half a surrogate pair"),
        (b'{"prompt": "p", "response": "' + b"x" * 1_000_000 + b'"}', "has more than data.max_chars=100000 characters"),
        (b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}', "has messages other"),
        (b'{"question": "q", "answer": NaN}', "has nan"),
        (b'{"question": "q", "answer": "-Infinity"}', "has the ground truth -Infinity"),
        (b'{"messages": "hello"}', "has messages that are no list"),
    ],
)
def test_a_bad_row_stops_with_file_line_and_cure_or_is_counted(tmp_path, line, says):
    good = b'{"question": "q", "answer": "1"}\n'
    (tmp_path / "train.jsonl").write_bytes(good + b"\n" + line + b"\n" + good.replace(b'"q"', b'"r"'))
    lines(tmp_path / "test.jsonl", sums(1))
    data = FileDataConfig(name="x", path=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        read(data)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/train.jsonl, line 3 {says}")
    assert text.endswith("data.bad_rows=skip to leave such rows out")
    assert len(text.splitlines()) == 1
    train, _, notes = read(replace(data, bad_rows="skip"))
    assert [p.id for p in train] == ["x-train-0", "x-train-2"]
    (note,) = notes
    assert "1 of 3 rows left out; 1 because the row " + says in note
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


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.binary(max_size=12) | st.sampled_from([b'{"question":"q","answer":"1"}', b"", b"[]"])))
def test_every_line_is_a_problem_or_counted(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("lines") / "x.jsonl"
    text = b"\n".join([b'{"question":"q","answer":"1"}', *rows])
    file.write_bytes(text)
    there = sum(1 for line in text.split(b"\n") if line.strip())
    rules = RowRules(field_names({}), max_chars=99)
    notes: list[str] = []
    table = read_table(
        file_rows(file), "x", "x", lambda row, id: (to_problem(row, id, rules), None), True, notes.append
    )
    left_out = there - len(table)
    assert bool(notes) == bool(left_out)
    assert all(f"{left_out} of {there} rows left out" in note for note in notes)


@pytest.fixture
def folder(tmp_path):
    """Write what a folder holds, and read it as data with these settings."""

    def of(files: dict[str, list], **settings):
        for name, rows in files.items():
            lines(tmp_path / name, rows)
        return read(FileDataConfig(name="x", path=str(tmp_path), **settings))

    return of


def ids_of(loaded) -> list[str]:
    return [p.id for p in loaded[0] + loaded[1]]


def test_a_file_without_a_single_problem_is_refused(folder):
    with pytest.raises(ConfigError, match=r"train\.jsonl .*line 1, line 2"):
        folder({"train.jsonl": [[], []], "test.jsonl": sums(1)}, bad_rows="skip")
    with pytest.raises(ConfigError, match=r"train\.jsonl .*: give"):
        folder({"train.jsonl": []})


def test_a_json_file_holds_a_list(folder):
    loaded = folder({"train.json": [sums(3)], "validation.jsonl": sums(2, start=9)})
    assert [p.answer for p in loaded[0]] == ["0", "2", "4"]
    assert ids_of(loaded)[3:] == ["x-validation-0", "x-validation-1"]
    with pytest.raises(ConfigError, match=r"train\.json .* name it \.jsonl"):
        folder({"train.json": [{"question": "q"}]})


def test_the_rows_own_ids_are_kept_where_each_is_one_of_its_own(folder):
    rows = [{"unique_id": f"test/{i}.json", **row} for i, row in enumerate(sums(3))]
    others = [{"id": 100 + i, **row} for i, row in enumerate(sums(2, start=9))]
    own = ["test/0.json", "test/1.json", "test/2.json", "100", "101"]
    assert ids_of(folder({"train.jsonl": rows, "test.jsonl": others})) == own
    twice = [{**others[0], "id": "test/0.json"}]
    assert ids_of(folder({"test.jsonl": twice})) == ["x-train-0", "x-train-1", "x-train-2", "x-test-0"]


def test_files_of_one_name_get_different_ids(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a, b = (str(lines(tmp_path / f"{name}/x.jsonl", sums(1, start))) for start, name in enumerate("ab"))
    loaded = read(FileDataConfig(name="jsonl", train=a, validation=b))
    assert ids_of(loaded) == ["jsonl-train-0", "jsonl-validation-0"]


def test_sources_that_are_not_there_are_named_before_anything_is_read(tmp_path):
    file = str(lines(tmp_path / "train.jsonl", sums(2)))
    for data, says in (
        (FileDataConfig(name="x", path="/nowhere"), "path=/nowhere "),
        (FileDataConfig(name="x", path=str(tmp_path), validation="test"), f"path={tmp_path} holds no test.jsonl"),
        (FileDataConfig(name="x"), "train=train "),
        (FileDataConfig(name="x", path="a/hub", train="/nowhere/x.jsonl"), "train=/nowhere/x.jsonl "),
        (FileDataConfig(name="x", train=file), "validation has no value"),
        (
            FileDataConfig(name="x", train=file, validation=file, n_validation=1),
            f"validation={file} and data.n_validation=1",
        ),
        (DataConfig(name="x", pass_rates="/nowhere"), "pass_rates=/nowhere "),
    ):
        (line,) = [*wrong_values(data, "data."), *data.problems()]
        assert line.startswith(f"data.{says}")
    assert FileDataConfig(name="x", train=file, n_validation=1).problems() == []
    assert FileDataConfig(name="x", path="openai/gsm8k").problems() == []


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl.gz", "t.CSV", "t.tar.gz"])
def test_a_file_of_a_format_that_is_not_read_is_called_that(tmp_path, name, monkeypatch):
    """Not "is no file", nor a name on the hub: one slash and a suffix."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows" / name
    file.parent.mkdir()
    file.write_bytes(b"PAR1")
    own = lines(tmp_path / "own.jsonl", sums(2))
    for data, key in (
        (FileDataConfig(name="x", train=str(file), n_validation=1), "train"),
        (FileDataConfig(name="x", train=str(own), validation=f"rows/{name}"), "validation"),
        (FileDataConfig(name="x", path=f"rows/{name}", train=str(own)), "path"),
        (FileDataConfig(name="x", path="rows", train=name, n_validation=1), "train"),
        (FileDataConfig(name="x", path="rows", train="t", n_validation=1), "train"),
        (CountdownConfig(name="x", n_train=1, n_validation=1, path=f"rows/{name}"), "path"),
    ):
        (line,) = data.problems()
        assert line.startswith(f"data.{key}=")
        assert ".jsonl or .json file" in line
        assert "no file" not in line


def test_a_hub_name_without_the_hub_says_what_to_do():
    with pytest.raises(ConfigError, match=r"data\.path=openai/gsm8k .*(pip install|give a folder)"):
        read(FileDataConfig(name="gsm8k", path="openai/gsm8k", hub_config="main"))


def test_a_folder_without_validation_says_how_to_hold_some_out(folder):
    with pytest.raises(ConfigError, match=r"data\.n_validation=200"):
        folder({"train.jsonl": sums(20)})
    train, validation, _ = folder({}, n_validation=4)
    assert (len(train), len(validation)) == (16, 4)
    assert sorted(p.question for p in train + validation) == sorted(r["question"] for r in sums(20))


def test_the_fields_of_the_config_are_the_fields_of_a_row():
    assert set(field_names({})) == set(vars(FieldsConfig()))
