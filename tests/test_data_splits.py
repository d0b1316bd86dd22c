"""What a run trains on and is measured on: held out, without overlap, with ground truths, filtered, checked, drawn."""

import os
import random
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from test_data_files import BOX, lines, parse, read, sums

from rlreason.config.data import DataConfig, FileDataConfig
from rlreason.config.leaves import render, resource_dir, template_of
from rlreason.data.prepare import (
    by_pass_rate,
    by_question,
    check_ground_truths,
    hold_out,
    load_data,
    read_pass_rates,
    subset,
    without_overlap,
)
from rlreason.data.prompts import check_template, filter_correct, trace_text, with_traces
from rlreason.data.sources import fingerprint, question_hash
from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.runtime.text import question_key
from rlreason.types import Problem
from tests.run_settings import settings
from tests.waiting import patient

GSM8K = Path(os.environ.get("RLREASON_GSM8K", Path(__file__).parents[2] / "shared/data/gsm8k"))
CONF = resource_dir("conf")
R1_ZERO = template_of("r1_zero.prompt")
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
        return load_data(run, grader=grader, say=notes.append), notes

    return of


def fill(question: str) -> str:
    return render(R1_ZERO, question)


def problems_of(n: int) -> list[Problem]:
    return [Problem(f"p{i}", f"{i} + {i}?", str(2 * i), solution=f"it is {2 * i}") for i in range(n)]


def test_what_is_held_out_or_drawn_is_nested_and_never_trained_on():
    problems = problems_of(50)
    small, large = hold_out(problems, 5, seed=0), hold_out(problems, 20, seed=0)
    assert set(small[1]) < set(large[1])
    assert set(small[0]).isdisjoint(small[1])
    assert hold_out(problems, 5, seed=1)[1] != small[1]
    with pytest.raises(ConfigError, match=r"data\.n_validation=50"):
        hold_out(problems, 50, seed=0)
    few, many = subset(problems, 8, seed=1), subset(problems, 32, seed=1)
    assert set(few) < set(many)
    assert subset(problems, None, 1) is problems
    assert fingerprint(few) != fingerprint(many)


def test_overlap_is_refused_dropped_or_allowed():
    train, validation = problems_of(10), [Problem("v0", "3  +\n3?", "6"), Problem("v1", "new?", "1")]
    bare, whole = Problem("b", "1 + 1?", "2"), Problem("w", fill("1 + 1?"), "2", prompt=fill("1 + 1?"))
    for ours, theirs, policy, says in (
        (train, validation, "refuse", r"data\.overlap=refuse: 1 training questions .* \(p3 is v0\)"),
        (train[3:4], validation, "drop", r"data\.overlap=drop"),
        ([whole], [bare], "refuse", "1 training questions"),  # whichever side brings its whole prompt
        ([bare], [whole], "refuse", "1 training questions"),
    ):
        with pytest.raises(ConfigError, match=says):
            without_overlap(ours, theirs, policy, fill, print)
    notes: list[str] = []
    assert without_overlap(train, validation, "drop", fill, notes.append) == train[:3] + train[4:]
    assert without_overlap(train, validation, "allow", fill, notes.append) == train
    assert without_overlap(train, validation[1:], "refuse", fill, notes.append) == train
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


def test_a_question_that_is_written_otherwise_is_the_same_and_another_sum_or_puzzle_another():
    assert [len(set(map(question_key, forms))) for forms in ALIKE] == [1, 1]
    for one, other in OTHER:
        assert question_key(f"What is {one}") != question_key(f"What is {other}")
    draw = random.Random(1)
    for cells in (".#", "?12", "| -"):
        grids = {"\n".join("".join(draw.choices(cells, k=6)) for _ in range(6)) for _ in range(300)}
        asked = {" ".join(f"Solve the grid:\n{grid}\nWhat is the shortest way?".split()) for grid in grids}
        assert len({question_key(question) for question in asked}) == len(asked)


def test_a_run_says_what_its_data_repeats(load):
    asked = [{"question": f"{i} times {i}?", "answer": f"#### {i * i}"} for i in range(4)] * 8
    loaded, notes = load(train=[*sums(6), sums(1)[0] | {"answer": "#### 99"}], test=asked)
    assert len(loaded.validation) == 32
    assert ["32 validation rows ask 4" in notes[0], "7 training rows ask 6" in notes[1]] == [True, True]
    assert notes[2].startswith("! 1 training rows have another ground truth")
    assert not [note for note in notes if note.startswith("! ") and "validation" in note]


def test_pass_rates_keep_what_can_be_learned_from(tmp_path, load):
    problems = problems_of(5)
    rows = [{"question_hash": question_hash(p.question + "\n"), "samples": 8, "correct": correct}
            for p, correct in zip(problems, (0, 1, 4, 8), strict=False)]  # fmt: skip
    rates = read_pass_rates(lines(tmp_path / "r.jsonl", [*rows, {**rows[1], "correct": 3}]))
    assert rates[question_hash(problems[1].question)] == 4 / 16
    notes: list[str] = []
    assert [p.id for p in by_pass_rate(problems, rates, 0.1, 0.9, notes.append)] == ["p1", "p2"]
    assert re.findall(r"\d \w+", notes[0].partition("dropped")[2]) == ["1 below", "1 above", "1 without"]
    with pytest.raises(ConfigError, match=r"widen data\.min_pass_rate"):
        by_pass_rate(problems, rates, 0.95, 0.96, print)
    for broken in ({"question_hash": "x", "samples": 0, "correct": 0}, {"samples": 1}, ["x"]):
        with pytest.raises(ConfigError, match=r"line 2 is no pass rate"):
            read_pass_rates(lines(tmp_path / "broken.jsonl", [rows[0], broken]))
    rows = [{"question_hash": question_hash(r["question"]), "samples": 4, "correct": i} for i, r in enumerate(sums(4))]
    words = (f"data.pass_rates={lines(tmp_path / 'rates.jsonl', rows)}", "data.min_pass_rate=0.3")
    loaded, _ = load(*words, train=sums(4))
    assert [p.question for p in loaded.train] == ["2+2?", "3+3?"]


def test_a_filled_trace_is_graded_correct_by_its_own_reward():
    """The trace of every prompt option, filled from rows as GSM8K and MATH have them."""
    problems = [parse(row) for row in (*sums(3, start=4), {"problem": "P", "solution": BOX})]
    for option in sorted((CONF / "prompt").glob("*.yaml")):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            prompt = compose("config", [f"prompt={option.stem}", "model=smollm2_135m"]).prompt
        if ":" in prompt.reward:
            continue
        check_template(prompt.trace)
        traces = [trace_text(p, prompt.trace) for p in problems]
        assert not any("<<" in trace for trace in traces)
        assert "4+4=8" in traces[0]
        with Grader(patient(), prompt.reward) as grader:
            assert {g.outcome for g in grader.grade_batch(traces, [p.answer for p in problems])} == {"correct"}, option


def test_a_given_response_is_imitated_word_for_word_and_problems_without_a_trace_are_refused_or_counted():
    for template in ("{solution} {question}", "done", "{solution", "{}"):
        with pytest.raises(ConfigError, match=r"^prompt\.trace=.*\Z"):
            check_template(template)
    assert trace_text(Problem("a", "q", "1", "s", response=" <<1>> "), TRACE) == " <<1>> "
    problems = [*problems_of(3), Problem("bare", "q", "1"), Problem("goldless", "q", "", "s")]
    with pytest.raises(ConfigError, match=r"^2 of 5 training problems .*bare, goldless.*bad_rows=skip"):
        with_traces(problems, TRACE, False, print)
    notes: list[str] = []
    assert with_traces(problems, TRACE, True, notes.append) == problems[:3]
    assert with_traces(problems[:3], TRACE, False, notes.append) == problems[:3]
    assert ["2 of 5" in note for note in notes] == [True]
    with pytest.raises(ConfigError, match="responses or solutions"):
        with_traces(problems[3:4], TRACE, True, print)
    with pytest.raises(ConfigError, match="problem bare"):
        trace_text(problems[3], TRACE)


def test_the_filter_keeps_what_the_grader_accepts_and_says_how_many(grader):
    problems = [Problem(str(i), f"q{i}", "4", response=ANSWERED.format(4)) for i in range(3)]
    problems += [Problem("wrong", "q", "4", response=ANSWERED.format(5)), Problem("plain", "q", "4", response="4")]
    problems += [Problem("goldless", "q", "", response=ANSWERED.format(4))]
    notes: list[str] = []
    assert filter_correct(problems, lambda p: trace_text(p, TRACE), grader.grade_batch, notes.append) == problems[:3]
    assert re.findall(r"\d \w+", notes[0]) == ["3 of", "6 traces", "1 wrong", "1 unformatted", "1 without"]
    with pytest.raises(ConfigError, match=r"data\.response_as=solution"):
        filter_correct(problems[3:], lambda p: trace_text(p, TRACE), grader.grade_batch, print)


def test_ground_truths_that_cannot_be_earned_are_counted_or_dropped(grader):
    fine, bad = problems_of(3), [Problem("bad", "q", r"\boxed{"), Problem("none", "q", "")]
    notes: list[str] = []
    assert check_ground_truths([*fine, *bad], grader, DataConfig(), notes.append) == [*fine, *bad]
    assert check_ground_truths([*fine, *bad], grader, DataConfig(bad_gold="drop"), notes.append) == fine
    assert [note.startswith("! 2 of 5") and note.endswith("bad, none") for note in notes] == [True, True]
    assert check_ground_truths(fine, grader, DataConfig(), notes.append) == fine
    assert len(notes) == 2
    with pytest.raises(ConfigError, match="nothing can be earned"):
        check_ground_truths(bad, grader, DataConfig(), print)
    assert check_ground_truths(bad[1:], grader, DataConfig(), notes.append, needed=False) == bad[1:]


def test_the_limit_is_drawn_after_the_filters_and_is_nested(load):
    """Half of the traces are wrong; 8 and 16 of the other half are drawn."""
    rows = [{"question": r["question"], "response": f" </think> <answer>{2 * i + i % 2}</answer>", "answer": str(2 * i)}
            for i, r in enumerate(sums(40))]  # fmt: skip
    filtered = ("algorithm=sft", "data.filter=correct")
    (few, notes), (many, _) = (load(*filtered, f"data.limit={n}", train=rows) for n in (8, 16))
    assert (len(few.train), len(many.train)) == (8, 16)
    assert set(few.train) < set(many.train)
    assert all(int(p.answer) % 4 == 0 for p in many.train)
    assert notes[0].startswith("kept 20 of 40 traces")
    other, _ = load(*filtered, "data.limit=8", "seed=1", train=rows)
    assert set(other.train) != set(few.train)
    assert other.validation == few.validation


@pytest.mark.parametrize("option", ["gsm8k", "math", "tulu_math"])
def test_the_named_sets_read_their_own_kind_of_rows(load, option):
    """As the hub and the course have them; the hub itself is out of reach here."""
    chat = lambda i: [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": f"\\boxed{{{2 * i}}}"}]  # noqa: E731
    make = {
        "gsm8k": lambda i: sums(1, start=i)[0],
        "math": lambda i: {"problem": f"{i}+{i}?", "solution": f"It is $\\boxed{{{2 * i}}}$.", "level": "Level 1"},
        "tulu_math": lambda i: {"id": f"personahub_{i}", "prompt": f"{i}+{i}?", "messages": chat(i)},
    }[option]
    held = ["data.n_validation=2"] if option == "tulu_math" else []
    files = {"train": map(make, range(8)), "test": map(make, range(90, 92))}
    (train, validation, _), notes = load("algorithm=sft", *held, data=option, **files)
    assert notes == []
    assert (len(train), len(validation)) == (6 if held else 8, 2)
    for p in train + validation:
        assert int(p.answer) == 2 * int(p.question.split("+")[0])
        assert p.solution
        assert p.prompt is p.response is None


# Ground truths, by question


def known(n: int, start: int = 0) -> list[dict[str, str]]:
    return [{"problem": f"How many are {i} and {i}?", "answer": str(2 * i)} for i in range(start, start + n)]


def pairs(n: int) -> list[dict[str, str]]:
    """The handout's sft.jsonl: whole prompts, responses (every third one wrong), and nothing else."""
    return [{"prompt": fill(row["problem"]), "response": ANSWERED.format(int(row["answer"]) + (i % 3 == 0))}
            for i, row in enumerate(known(n))]  # fmt: skip


SFT = ("algorithm=sft", "data.train=sft", "prompt=r1_zero")


def test_the_handouts_traces_are_filtered_by_the_ground_truth_of_their_problems(load):
    """train.jsonl has the first 24 of 30, test.jsonl none of them, and no file has the last 6."""
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


def test_ground_truth_that_is_not_at_hand_is_asked_for_in_one_line(load, tmp_path):
    (tmp_path / "train.jsonl").write_text("{broken")  # of no use, and not in the way
    files = {"test": known(5, start=90), "sft": pairs(20)}
    with pytest.raises(DataError, match=r"data\.filter=correct: 20 rows .*as data\.ground_t"):
        load(*SFT, "data.filter=correct", data="math", **files)
    elsewhere = lines(tmp_path / "known.jsonl", [{"q": r["problem"], "label": r["answer"]} for r in known(40)])
    words = (*SFT, f"data.ground_truth={elsewhere}", "data.fields.question=q", "data.fields.answer=label")
    files = {"sft": pairs(20), "v": [{"q": r["problem"], "label": r["answer"]} for r in known(10, start=30)]}
    loaded, notes = load(*words, "data.filter=correct", "data.validation=v", data="math", **files)
    assert loaded.sizes["train_filtered"] == len(loaded.train) == 13
    assert f" 20 in {elsewhere}" in notes[0]
    lines(elsewhere, known(5, start=70))
    with pytest.raises(DataError, match=r"known\.jsonl: 20 rows"):
        load(*SFT, f"data.ground_truth={elsewhere}", data="math", sft=pairs(20))


def test_a_file_of_ground_truth_is_read_without_a_filter_too_and_by_held_out_rows(load, tmp_path):
    words = (*SFT, "data.ground_truth=train", "data.n_validation=6")
    loaded, _ = load(*words, data="math", train=known(30), sft=pairs(30))
    assert (len(loaded.train), len(loaded.validation)) == (24, 6)
    assert all(p.question == known(30)[int(p.answer) // 2]["problem"] for p in loaded.train + loaded.validation)
    loaded, _ = load(*words, data="math", sft=[{**row, "ground_truth": "7"} for row in pairs(9)])
    assert {p.answer for p in loaded.train} == {"7"}
    gone = {"train": str(tmp_path / "sft.jsonl"), "ground_truth": "/nowhere.jsonl"}
    (line,) = FileDataConfig(name="x", n_validation=1, **gone).problems()
    assert line.startswith("data.ground_truth=/nowhere.jsonl")


def test_nothing_but_the_question_that_is_asked_is_taken_for_it():
    """Not a part of it, nor a longer one; of two problems alike the first counts, and an empty answer is none."""
    known = [Problem("a", "1?", ""), Problem("b", "1?", "2"), Problem("c", " 1? ", "3"), Problem("d", "2+1?", "4")]
    for write in (fill, str):
        asked = [Problem("r", write(q), "", prompt=write(q)) for q in ("1?", "11?", "-1?", "2*1+1?", "2+1?", "\n 2+1?")]
        assert [p.answer for p in by_question(asked, known, fill)[0]] == ["2", "", "", "", "4", "4"]
    assert by_question([Problem("bare", "1?\n", "")], known, fill) == ([Problem("bare", "1?\n", "2")], 1)
    assert by_question([Problem("own", "1?", "9")], known, fill) == ([Problem("own", "1?", "9")], 0)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here; set RLREASON_GSM8K to its folder")
def test_the_real_gsm8k(grader):
    """No question in both halves, and every solution a correct trace."""
    train, test, notes = read(FileDataConfig(name="gsm8k", path=str(GSM8K), validation="test", gold="hash"))
    assert (len(train), len(test), notes) == (7473, 1319, [])
    assert all(p.answer.lstrip("-").replace(".", "").isdigit() for p in train + test)
    assert without_overlap(train, test, "refuse", str, notes.append) == train
    assert filter_correct(train, lambda p: trace_text(p, TRACE), grader.grade_batch, notes.append) == train
    assert notes[0].startswith("kept 7473 of 7473 ")
