"""Rows become problems; what a run trains on and is measured on is held out, filtered, checked and drawn."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlreason.config.data import DataConfig, FieldsConfig, FileDataConfig, RowsDataConfig
from rlreason.config.leaves import prompt_renderer, resource_dir
from rlreason.config.rules import wrong_values
from rlreason.data import prepare
from rlreason.data.prompts import check_template, filter_correct, note_other_forms, trace_text, with_traces
from rlreason.data.sources import KNOWN, fingerprint, question_hash, to_problem
from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.runtime.text import question_key
from rlreason.types import Problem
from tests.run_settings import settings
from tests.waiting import patient

BOX = r"The probabilities add up to $1$, so the rest is $1-\frac13-\frac5{12}=\boxed{\frac{1}{4}}$."


def lines(file: Path, rows) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def sums(n: int, start: int = 0) -> list[dict[str, str]]:
    return [{"question": f"{i}+{i}?", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
            for i in range(start, start + n)]  # fmt: skip


def read(data: FileDataConfig) -> tuple[list[Problem], list[Problem], list[str]]:
    notes: list[str] = []
    return *prepare.read_files(data, notes.append), notes


def parse(row, gold="auto", wrap=False, **names) -> Problem:
    data = RowsDataConfig(name="x", gold=gold, fields=FieldsConfig(**names), max_chars=1000)
    return to_problem(row, "id", data, as_solution=wrap)[0]


CHAT = "#### Step 1\nAdd.\nFinal Answer: The final answer is $60$. I hope it is correct."
ANSWERED_PAIR = {"prompt": "User: Q <think>", "response": " 4 </think> <answer>4</answer>", "ground_truth": "4"}
TULU = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": CHAT}]
CHOSEN = {"prompt": "Q", "chosen": "so \\boxed{3}", "label": "4"}
ROWS = [  # row, the problem that it is, fields by name
    ({"question": " Q1 ", "answer": "half: 48/2 = <<48/2=24>>24\n#### 1,024"},
     Problem("id", "Q1", "1024", "half: 48/2 = <<48/2=24>>24", facts={"level": "1 step"}), {}),
    ({"question": "Q", "answer": 7}, Problem("id", "Q", "7"), {}),
    ({"problem": "P", "solution": BOX, "type": "Counting"}, Problem("id", "P", r"\frac{1}{4}", BOX), {}),
    ({"problem": "P", "solution": BOX, "answer": r"\frac14"}, Problem("id", "P", r"\frac14", BOX), {}),
    (ANSWERED_PAIR, Problem("id", "User: Q <think>", "4", None, "User: Q <think>", ANSWERED_PAIR["response"]), {}),
    ({"prompt": "P", "response": "R"}, Problem("id", "P", "", None, "P", "R"), {}),
    ({"prompt": "Q", "messages": TULU}, Problem("id", "Q", "60", None, None, CHAT), {}),
    ({"messages": TULU[:1], "ground_truth": "8"}, Problem("id", "Q", "8"), {}),
    ({"prompt": TULU[:1], "answer": "8"}, Problem("id", "Q", "8"), {"messages": "prompt"}),
    ({"messages": np.array(TULU[:1]), "answer": "8"}, Problem("id", "Q", "8"), {}),  # of pandas, from a parquet file
    ({"question": " ", "problem": "P", "answer": "8", "solution": "", "level": ""}, Problem("id", "P", "8"), {}),
    (CHOSEN, Problem("id", "Q", "4", None, "Q", "so \\boxed{3}"), {"response": "chosen", "answer": "label"}),
    (CHOSEN, Problem("id", "Q", "3", "so \\boxed{3}"), {"question": "prompt", "response": "chosen", "wrap": True}),
]  # fmt: skip


GOLDS = [  # rule, answer, solution, ground truth
    ("auto", None, r"\boxed{1} no, \boxed{\{2\}}", r"\{2\}"),
    ("auto", None, "nothing here", ""),
    ("auto", "-1,234,567.5", None, "-1234567.5"),
    ("boxed", "ignored", r"\boxed{5}", "5"),
    ("final", None, r"The final answer is $\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
    ("hash", "5*2=10\r\n#### 1,010\r\n# by hand\r\n<|endoftext|>", None, "1010"),
    ("auto", "#### 10\n\n#### Note\nchecked", None, "10"),
    ("auto", "#### Step 1\nAdd.\n#### 2. Multiply\nDone.", None, "#### Step 1\nAdd.\n#### 2. Multiply\nDone."),
]


def test_rows_of_every_known_shape_fields_by_name_and_the_gold_answer_by_rule():
    """Bug: a space of a prompt that is stripped, a solution or a heading taken for an answer, or the first box; a row
    is bad for a blank field that it could do without.
    """
    assert set(KNOWN) == set(vars(FieldsConfig()))
    assert [parse(row, **names) for row, _, names in ROWS] == [made for _, made, _ in ROWS]
    for rule, answer, solution, gold in GOLDS:
        assert parse({"question": "Q", "answer": answer, "solution": solution}, gold=rule).answer == gold


NO_QUESTION = "has no text under ('question', 'problem', 'prompt', 'messages'); "
BAD = {
    b"[" * 100_000: "is no JSON object",
    b'{"question": "caf\xe9", "answer": "1"}': "is no JSON object in UTF-8",
    b'{"question": "q"}': "has no text under ('ground_truth', 'answer'",
    b'{"input": "q", "answer": "1"}': NO_QUESTION
    + "its fields are input, answer: name yours with data.fields.question",
    b'{"question": " ", "answer": "1"}': NO_QUESTION + "question is empty",
    b'["q", "a"]': "is no JSON object",
    b'{"question": "q", "answer": "work ####  "}': "has an empty ground truth",
    b'{"question": "\\ud800", "answer": "1"}': "has half a surrogate pair",
    b'{"prompt": "p", "response": "' + b"x" * 1_000_000 + b'"}': "has more than data.max_chars=100000 characters",
    b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}': "has messages other",
    b'{"question": "q", "answer": NaN}': "has nan",
    b'{"question": "q", "answer": "-Infinity"}': "has the ground truth -Infinity",
    b'{"messages": "hello"}': "has messages other",
}


def test_a_bad_row_stops_with_file_line_and_cure_or_is_counted(tmp_path):
    """Bug: a row that cannot be used ends in a traceback, or is left out and nobody hears of it."""
    good = b'{"question": "q", "answer": "1"}\n'
    data = FileDataConfig(name="x", path=str(tmp_path))
    lines(tmp_path / "test.jsonl", sums(1))
    for line, reason in BAD.items():
        (tmp_path / "train.jsonl").write_bytes(good + b"\n" + line + b"\n" + good.replace(b'"q"', b'"r"'))
        with pytest.raises(ConfigError) as caught:
            read(data)
        (text,) = str(caught.value).splitlines()
        assert text.startswith(f"{tmp_path}/train.jsonl, line 3 {reason}")
        train, _, (note,) = read(replace(data, bad_rows="skip"))
        assert [p.id for p in train] == ["x-train-0", "x-train-2"]
        assert "1 of 3 rows left out; 1 because the row " + reason in note


def folder(path: Path, files: dict[str, list], **settings):
    """Write what a folder holds, and read it as data with these settings."""
    for name, rows in files.items():
        lines(path / name, rows)
    return read(FileDataConfig(name="x", path=str(path), **settings))


def test_rows_keep_ids_of_their_own_where_all_differ_and_files_without_rows_are_refused(tmp_path):
    """Bug: two problems of one id; a JSON object read as a list of rows."""
    rows = [{"unique_id": f"test/{i}.json", **row} for i, row in enumerate(sums(2))]
    others = [{"id": 100, **sums(1, start=9)[0]}]
    for test, ids in (
        (others, ["test/0.json", "test/1.json", "100"]),
        (rows[:1], ["x-train-0", "x-train-1", "x-test-0"]),
    ):
        train, validation, _ = folder(tmp_path, {"train.jsonl": rows, "test.jsonl": test})
        assert [p.id for p in train + validation] == ids
    a, b = (str(lines(tmp_path / f"{name}/x.jsonl", sums(1, start))) for start, name in enumerate("ab"))
    train, validation, _ = read(FileDataConfig(name="jsonl", train=a, validation=b))
    assert [p.id for p in train + validation] == ["jsonl-train-0", "jsonl-validation-0"]
    with pytest.raises(ConfigError, match=r"train\.jsonl .*line 1, line 2"):
        folder(tmp_path, {"train.jsonl": [[], []]}, bad_rows="skip")
    (tmp_path / "train.jsonl").unlink()
    assert [p.answer for p in folder(tmp_path, {"train.json": [sums(3)]})[0]] == ["0", "2", "4"]
    with pytest.raises(ConfigError, match=r"train\.json .* name it \.jsonl"):
        folder(tmp_path, {"train.json": [{"question": "q"}]})


def test_sources_that_are_not_there_or_of_another_format_are_named_before_anything_is_read(tmp_path, monkeypatch):
    """Bug: a file of another format is called no file, or a name on the hub; a held-out row is trained on."""
    monkeypatch.chdir(tmp_path)
    file = str(lines(tmp_path / "train.jsonl", sums(2)))
    lines(tmp_path / "rows/t.csv", [])
    for settings_, complaint in (
        ({"path": "/nowhere"}, "path=/nowhere "),
        ({"train": file, "validation": file, "n_validation": 1}, f"validation={file} and data.n_validation=1"),
        ({"train": file, "validation": "rows/t.csv"}, "validation=rows/t.csv.* no .jsonl or .json file"),
    ):
        data = FileDataConfig(name="x", **settings_)
        (line,) = [*wrong_values(data, "data."), *data.problems()]
        assert re.match(f"data.{complaint}", line), line
    with pytest.raises(ConfigError, match=r"data\.path=openai/gsm8k .*(pip install|give a folder)"):
        read(FileDataConfig(name="gsm8k", path="openai/gsm8k", hub_config="main"))
    with pytest.raises(ConfigError, match=r"data\.n_validation=200"):
        folder(tmp_path, {"train.jsonl": sums(20)})
    train, validation, _ = folder(tmp_path, {}, n_validation=4)
    assert sorted(p.question for p in train + validation) == sorted(r["question"] for r in sums(20))


def test_the_fingerprint_sees_every_text():
    """Bug: runs on different data are compared as if on the same."""
    problem = Problem("a", "q", "1", "s", "p", "r")
    changed = [replace(problem, **{key: "x"}) for key in ("id", "question", "answer", "solution", "prompt", "response")]
    moved = [replace(problem, solution=None, response="s"), replace(problem, response=None)]
    assert len({fingerprint([p]) for p in [problem, *changed, *moved]}) == 9
    assert len({fingerprint([p], asked_only=True) for p in [problem, *changed]}) == 5
    assert fingerprint([problem, *changed]) != fingerprint([*changed, problem])


GSM8K = Path(os.environ.get("RLREASON_GSM8K", Path(__file__).parents[2] / "shared/data/gsm8k"))
TRACE = " {solution} </think> <answer>{answer}</answer>"
ANSWERED = " so </think> <answer>{}</answer>"


@pytest.fixture(scope="module")
def grader():
    with Grader(patient()) as grader:
        yield grader


@pytest.fixture
def load(tmp_path, grader):
    """Write files and read them through the real options; return what was loaded and the notes."""

    def of(*overrides: str, data: str = "jsonl", **files):
        for name, rows in {"test": sums(2, start=90), **files}.items():
            lines(tmp_path / f"{name}.jsonl", rows)
        run = settings("model=smollm2_135m", f"data={data}", f"data.path={tmp_path}", *overrides)
        notes: list[str] = []
        return prepare.load_data(run, grader=grader, say=notes.append), notes

    return of


def fill(question: str) -> str:
    return prompt_renderer("r1_zero.prompt")(question)


def problems_of(n: int) -> list[Problem]:
    return [Problem(f"p{i}", f"{i} + {i}?", str(2 * i), solution=f"it is {2 * i}") for i in range(n)]


def test_what_is_held_out_or_drawn_is_nested_and_never_trained_on():
    """Bug: a larger limit that draws other problems; a held-out problem that is trained on."""
    problems = problems_of(50)
    small, large = prepare.hold_out(problems, 5, seed=0), prepare.hold_out(problems, 20, seed=0)
    few, many = prepare.subset(problems, 8, seed=1), prepare.subset(problems, 32, seed=1)
    assert (set(small[1]) < set(large[1]), set(few) < set(many), set(small[0]) & set(small[1])) == (True, True, set())
    assert prepare.hold_out(problems, 5, seed=1)[1] != small[1]


def test_overlap_is_refused_dropped_or_allowed():
    """Bug: a question in both halves that is written otherwise, or stands in a whole prompt."""
    train, validation = problems_of(10), [Problem("v0", "3  +\n3?", "6"), Problem("v1", "new?", "1")]
    bare, whole = Problem("b", "1 + 1?", "2"), Problem("w", fill("1 + 1?"), "2", prompt=fill("1 + 1?"))
    for ours, theirs, policy, says in (
        (train, validation, "refuse", r"data\.overlap=refuse: 1 training questions .* \(p3 is v0\)"),
        (train[3:4], validation, "drop", r"data\.overlap=drop"),
        ([whole], [bare], "refuse", "1 training questions"),  # whichever side brings its whole prompt
        ([bare], [whole], "refuse", "1 training questions"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepare.without_overlap(ours, theirs, policy, fill, print)
    notes: list[str] = []
    assert prepare.without_overlap(train, validation, "drop", fill, notes.append) == train[:3] + train[4:]
    assert prepare.without_overlap(train, validation, "allow", fill, notes.append) == train
    assert prepare.without_overlap(train, validation[1:], "refuse", fill, notes.append) == train
    assert ["dropped" in note for note in notes] == [True, False]


ALIKE = (
    ("What is 0 times 3,000?", "what IS 0 times 3000 ?", "**Question 7:** What is 0 times 3,000?",
     "\uff37hat is \uff10 times 3,000\uff1f", "\ufeffWhat is 0\u200b times\u00a03,000?"),
    ("Janet's ducks don't lay.", "Janet\N{RIGHT SINGLE QUOTATION MARK}s ducks don`t lay", "Janets ducks dont lay!"),
)  # fmt: skip
OTHER = (
    ("3-4", "3+4"), ("5!", "5?"), ("1.5", "15"), ("1.5", "1,5"), ("5\N{SUPERSCRIPT TWO}", "52"), (".5+1", "5+1"),
    ("(2+3)*4", "2+3*4"), ("1:30", "130"), ("-5+3", "5+3"), ("f'(2)", "f(2)"), ("10%", "10"), ("|x|", "x"),
    ("True & False", "True | False"), ("2 ** 3 ** 4", "2 3 4"),
)  # fmt: skip


def test_a_question_that_is_written_otherwise_is_the_same_and_another_sum_another():
    """Bug: punctuation that means something is ignored, so that other sums are dropped as repetitions."""
    assert [len(set(map(question_key, forms))) for forms in ALIKE] == [1, 1]
    for one, other in OTHER:
        assert question_key(f"What is {one}") != question_key(f"What is {other}")
    grids = ("?12\n2?1", "12?\n2?1", "12?\n21?")
    assert len({question_key(f"Solve the grid: {grid} What is the shortest way?") for grid in grids}) == 3


def test_a_run_says_what_its_data_repeats(load):
    """Bug: an interval over 32 problems that are 4; a question with two ground truths."""
    asked = [{"question": f"{i} times {i}?", "answer": f"#### {i * i}"} for i in range(4)] * 8
    loaded, notes = load(train=[*sums(6), sums(1)[0] | {"answer": "#### 99"}], test=asked)
    assert len(loaded.validation) == 32
    assert ["32 validation rows ask 4" in notes[0], "7 training rows ask 6" in notes[1]] == [True, True]
    assert notes[2].startswith("! 1 training rows have another ground truth")
    assert not [note for note in notes if note.startswith("! ") and "validation" in note]


def test_pass_rates_keep_what_can_be_learned_from(tmp_path, load):
    """Bug: samples of two files are not added up, a problem without a rate is kept, or more are right than sampled."""
    problems = problems_of(5)
    rows = [{"question_hash": question_hash(p.question + "\n"), "samples": 8, "correct": correct}
            for p, correct in zip(problems, (0, 1, 4, 8), strict=False)]  # fmt: skip
    rates, notes = lines(tmp_path / "r.jsonl", [*rows, {**rows[1], "correct": 3}]), list[str]()
    middle = DataConfig(min_pass_rate=0.25, max_pass_rate=0.9)
    assert [p.id for p in prepare.by_pass_rate(problems, middle, rates, notes.append)] == ["p1", "p2"]
    assert re.findall(r"\d \w+", notes[0].partition("dropped")[2]) == ["1 below", "1 above", "1 without"]
    with pytest.raises(ConfigError, match=r"widen data\.min_pass_rate"):
        prepare.by_pass_rate(problems, DataConfig(min_pass_rate=0.95, max_pass_rate=0.96), rates, print)
    wrong = ({"samples": 0, "correct": 0}, {"correct": 9}, {"correct": -3}, {"correct": 0.5}, {"question_hash": 5})
    for row in ({"samples": 1}, *({**rows[0], **change} for change in wrong)):
        with pytest.raises(ConfigError, match=r"line 2 is no pass rate"):
            prepare.by_pass_rate(problems, middle, lines(tmp_path / "broken.jsonl", [rows[0], row]), print)
    rows = [{"question_hash": question_hash(r["question"]), "samples": 4, "correct": i} for i, r in enumerate(sums(4))]
    words = (f"data.pass_rates={lines(tmp_path / 'rates.jsonl', rows)}", "data.min_pass_rate=0.3")
    assert [p.question for p in load(*words, train=sums(4))[0].train] == ["2+2?", "3+3?"]


def test_a_filled_trace_is_graded_correct_by_its_own_reward():
    """Bug: a prompt whose trace its reward does not read, or goes on behind its stop, of rows as GSM8K has them."""
    problems = [parse(row) for row in (*sums(3, start=4), {"problem": "P", "solution": BOX})]
    for option in sorted((resource_dir("conf") / "prompt").glob("*.yaml")):
        prompt = settings(f"prompt={option.stem}", "model=smollm2_135m").prompt
        if ":" in prompt.reward:
            continue
        check_template(prompt.trace)
        traces = [trace_text(p, prompt.trace) for p in problems]
        assert not any("<<" in trace for trace in traces)
        assert "4+4=8" in traces[0]
        assert all(trace.endswith(stop) for stop in prompt.stop for trace in traces)  # what is sampled ends there too
        with Grader(patient(), prompt.reward) as grader:
            assert {g.outcome for g in grader.grade_batch(traces, [p.answer for p in problems])} == {"correct"}, option


def test_a_given_response_is_imitated_word_for_word_and_problems_without_a_trace_are_refused_or_counted():
    """Bug: a response that is changed before it is imitated; a template that fails in the middle of a run."""
    for template in ("{solution} {question}", "done", "{solution", "{}"):
        with pytest.raises(ConfigError, match=r"^prompt\.trace="):
            check_template(template)
    assert trace_text(Problem("a", "q", "1", "s", response=" <<1>> "), TRACE) == " <<1>> "
    problems, notes = [*problems_of(3), Problem("bare", "q", "1"), Problem("goldless", "q", "", "s")], list[str]()
    with pytest.raises(ConfigError, match=r"^2 of 5 training problems .*bare, goldless.*bad_rows=skip"):
        with_traces(problems, TRACE, False, print)
    assert with_traces(problems, TRACE, True, notes.append) == problems[:3]
    assert with_traces(problems[:3], TRACE, False, notes.append) == problems[:3]
    assert ["2 of 5" in note for note in notes] == [True]


def test_the_filter_keeps_what_the_grader_accepts_and_says_how_many(grader):
    """Bug: a problem without a ground truth counts as right."""
    problems = [Problem(str(i), f"q{i}", "4", response=ANSWERED.format(4)) for i in range(3)]
    problems += [Problem("wrong", "q", "4", response=ANSWERED.format(5)), Problem("plain", "q", "4", response="4")]
    problems += [Problem("goldless", "q", "", response=ANSWERED.format(4))]
    notes: list[str] = []
    assert filter_correct(problems, TRACE, grader, notes.append) == problems[:3]
    assert re.findall(r"\d \w+", notes[0]) == ["3 of", "6 traces", "1 wrong", "1 unformatted", "1 without"]
    with pytest.raises(ConfigError, match=r"data\.response_as=solution"):
        filter_correct(problems[3:], TRACE, grader, print)


def test_traces_and_ground_truths_in_a_form_that_earns_nothing_are_said(grader):
    """Bug: hours of SFT on chats whose form the reward does not read, or sentences as ground truths, without a word."""
    notes = list[str]()
    problems = [Problem("a", "q", "4", response=r"so \boxed{4}"), Problem("b", "q", "4", response=ANSWERED.format(4))]
    note_other_forms(problems, TRACE, "r1_zero", notes.append)
    note_other_forms(problems[1:], TRACE, "r1_zero", notes.append)
    assert [note.startswith("! 1 of 2") for note in notes] == [True]
    said = [Problem("s", "q", "Therefore, after two more days, Tom has 74 pens now."), *problems_of(2)]
    said += [Problem("f", "q", r"\frac{\sqrt{2} + \sqrt{3} + \sqrt{5} + \sqrt{7}}{\sin 1 + \cos 2 + \tan 3}")]
    prepare.check_ground_truths(said, grader, DataConfig(), notes.append)
    assert [note for note in notes if "sentences (s)" in note]


def test_ground_truths_that_cannot_be_earned_are_counted_or_dropped(grader):
    """Bug: a reward that nothing can earn, in silence."""
    fine, bad, notes = problems_of(3), [Problem("bad", "q", r"\boxed{"), Problem("none", "q", "")], list[str]()
    for ours, config, kept in (
        ([*fine, *bad], DataConfig(), [*fine, *bad]),
        ([*fine, *bad], DataConfig(bad_gold="drop"), fine),
        (fine, DataConfig(), fine),
    ):
        assert prepare.check_ground_truths(ours, grader, config, notes.append) == kept
    assert [note.startswith("! 2 of 5") and note.endswith("bad, none") for note in notes] == [True, True]
    with pytest.raises(ConfigError, match="nothing can be earned"):
        prepare.check_ground_truths(bad, grader, DataConfig(), print)
    assert prepare.check_ground_truths(bad[1:], grader, DataConfig(), notes.append, needed=False) == bad[1:]


def known(n: int, start: int = 0) -> list[dict[str, str]]:
    return [{"problem": f"How many are {i} and {i}?", "answer": str(2 * i)} for i in range(start, start + n)]


def pairs(n: int) -> list[dict[str, str]]:
    """The handout's sft.jsonl: whole prompts, responses (every third one wrong), and nothing else."""
    return [{"prompt": fill(row["problem"]), "response": ANSWERED.format(int(row["answer"]) + (i % 3 == 0))}
            for i, row in enumerate(known(n))]  # fmt: skip


SFT = ("algorithm=sft", "data.train=sft", "prompt=r1_zero")


def test_the_handouts_traces_are_filtered_by_the_ground_truth_of_their_problems(load):
    """Bug: a row without a ground truth trains; train.jsonl has the first 24 of 30, and no file has the last 6."""
    files = {"train": known(24), "test": known(5, start=90), "sft": pairs(30)}
    loaded, notes = load(*SFT, "data.filter=correct", "data.limit=10", data="math", **files)
    assert re.findall(r"\d+", notes[0])[:2] == ["30", "24"]
    assert loaded.sizes == {
        "train_read": 30, "train_before_filter": 30, "train_filtered": 16, "train": 10, "validation": 5,
    }  # fmt: skip
    for p in loaded.train:
        assert (p.question, p.prompt) == (known(40)[int(p.answer) // 2]["problem"], fill(p.question))
    with pytest.raises(DataError, match="2 training questions"):
        load(*SFT, "data.filter=correct", data="math", train=known(20), test=known(2, start=7), sft=pairs(20))


def test_ground_truth_is_asked_for_where_it_is_missing_and_read_from_a_file_of_its_own(load, tmp_path):
    """Bug: a broken file next to the data stops a run, or held-out rows get no ground truth."""
    (tmp_path / "train.jsonl").write_text("{broken")  # of no use, and not in the way
    with pytest.raises(DataError, match=r"data\.filter=correct: 20 rows .*as data\.ground_t"):
        load(*SFT, "data.filter=correct", data="math", test=known(5, start=90), sft=pairs(20))
    labelled = [{"q": r["problem"], "label": r["answer"]} for r in known(40)]
    elsewhere = lines(tmp_path / "known.jsonl", labelled)
    words = (*SFT, f"data.ground_truth={elsewhere}", "data.fields.question=q", "data.fields.answer=label")
    files = {"sft": pairs(20), "v": labelled[30:]}
    loaded, notes = load(*words, "data.filter=correct", "data.validation=v", data="math", **files)
    assert loaded.sizes["train_filtered"] == len(loaded.train) == 13
    assert f" 20 in {elsewhere}" in notes[0]
    words = (*SFT, "data.ground_truth=train", "data.n_validation=6")  # without a filter too, and by held-out rows
    loaded, _ = load(*words, data="math", train=known(30), sft=pairs(30))
    assert (len(loaded.train), len(loaded.validation)) == (24, 6)
    assert all(p.question == known(30)[int(p.answer) // 2]["problem"] for p in loaded.train + loaded.validation)


def test_nothing_but_the_question_that_is_asked_is_taken_for_it(tmp_path):
    """Bug: the answer to a part of a question, or to a longer one; of two problems alike the first counts."""
    answers = (("1?", None), ("1?", 2), (" 1? ", 3), ("2+1?", 4))
    known = [{"question": question, "solution": "s", "answer": answer} for question, answer in answers]
    data = FileDataConfig(name="x", ground_truth=str(lines(tmp_path / "known.jsonl", known)))
    for write in (fill, str):
        asked = [Problem("r", write(q), "", prompt=write(q)) for q in ("1?", "11?", "-1?", "2*1+1?", "2+1?", "\n 2+1?")]
        found, _ = prepare.with_ground_truths(data, asked, [], fill, print)
        assert [p.answer for p in found] == ["2", "", "", "", "4", "4"]
    bare, own = Problem("bare", "1?\n", ""), Problem("own", "1?", "9")
    assert prepare.with_ground_truths(data, [bare, own], [], fill, print)[0] == [replace(bare, answer="2"), own]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here; set RLREASON_GSM8K to its folder")
def test_the_real_gsm8k(grader):
    """Bug: a real question in both halves, a solution that is no correct trace."""
    train, test, notes = read(FileDataConfig(name="gsm8k", path=str(GSM8K), validation="test", gold="hash"))
    assert (len(train), len(test), notes) == (7473, 1319, [])
    assert prepare.without_overlap(train, test, "refuse", str, notes.append) == train
    assert filter_correct(train, TRACE, grader, notes.append) == train
    easy = read(FileDataConfig(name="gsm8k", path=str(GSM8K), validation="test", gold="hash", max_steps=2))
    assert list(map(len, easy)) == [2579, 422, 2]


def test_problems_of_more_steps_are_left_out_of_both_splits(tmp_path):
    """Bug: they stay in validation, or rows whose steps nobody counted pass for easy ones."""
    long = {"question": "a?", "answer": "<<1+1=2>>2 <<2+1=3>>3 <<3+1=4>>4\n#### 4"}
    for name, row in (("train", long), ("test", long | {"question": "b?"})):
        lines(tmp_path / f"{name}.jsonl", [*sums(3, start=len(name)), row, {"question": f"{name}?", "answer": "1"}])
    data = FileDataConfig(name="x", path=str(tmp_path), max_steps=2)
    train, test, notes = read(data)
    assert [[p.facts for p in half] for half in (train, test)] == [[{"level": "1 step"}] * 3] * 2
    assert [note.partition(": ")[2][:9] for note in notes] == ["kept 3 of"] * 2
    bare = [{"question": row["question"], "solution": row["answer"].partition("\n")[0]} for row in (*sums(2), long)]
    lines(tmp_path / "train.jsonl", bare)
    data.ground_truth = str(lines(tmp_path / "known.jsonl", [row | {"answer": "9", "solution": None} for row in bare]))
    found, _ = prepare.with_ground_truths(data, read(data)[0], [], str, str)  # answers alone have no steps
    assert [(p.question, p.answer) for p in found] == [("0+0?", "9"), ("1+1?", "9")]
    lines(tmp_path / "train.jsonl", [long])
    with pytest.raises(DataError, match=r"max_steps=2: kept 0 of 1 "):
        read(data)
