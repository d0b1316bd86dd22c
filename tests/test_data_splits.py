"""What a run trains on and is measured on: held out, without overlap, filtered, checked, drawn, and said."""

import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from test_data_files import BOX, lines, parse, read, sums

from rlreason.config.data import DataConfig, FileDataConfig
from rlreason.config.leaves import render, resource_dir, template_of
from rlreason.data.ground_truth import check_ground_truths
from rlreason.data.prepare import (
    by_pass_rate,
    hold_out,
    load_data,
    note_repetitions,
    read_pass_rates,
    subset,
    without_overlap,
)
from rlreason.data.prompts import check_template, filter_correct, trace_text, with_traces
from rlreason.data.sources import fingerprint, question_hash
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.runtime.text import question_key
from rlreason.types import Problem
from tests.run_settings import settings
from tests.waiting import patient

GSM8K = Path(os.environ.get("RLREASON_GSM8K", Path(__file__).parents[2] / "shared/data/gsm8k"))
CONF = resource_dir("conf")
R1_ZERO = template_of("r1_zero.prompt")
TRACE = " {solution} </think> <answer>{answer}</answer>"


@pytest.fixture(scope="module")
def grader():
    with Grader(patient()) as grader:
        yield grader


@pytest.fixture
def load(tmp_path, grader):
    """Write two files; return train, validation and what was said, through the real options."""

    def of(train, *overrides: str, validation=()):
        lines(tmp_path / "train.jsonl", train)
        lines(tmp_path / "test.jsonl", validation or sums(2, start=90))
        run = settings("model=smollm2_135m", "data=jsonl", f"data.path={tmp_path}", *overrides)
        said: list[str] = []
        train, validation, _ = load_data(run, grader=grader, say=said.append)
        return train, validation, said

    return of


def fill(question: str) -> str:
    return render(R1_ZERO, question)


def problems_of(n: int) -> list[Problem]:
    return [Problem(f"p{i}", f"{i} + {i}?", str(2 * i), solution=f"it is {2 * i}") for i in range(n)]


def test_what_is_held_out_is_nested_and_never_trained_on():
    problems = problems_of(50)
    small, large = hold_out(problems, 5, seed=0), hold_out(problems, 20, seed=0)
    assert set(small[1]) < set(large[1])
    assert set(small[0]).isdisjoint(small[1])
    assert hold_out(problems, 5, seed=1)[1] != small[1]
    with pytest.raises(ConfigError, match=r"data\.n_validation=50"):
        hold_out(problems, 50, seed=0)


def test_overlap_is_refused_dropped_or_allowed():
    train, validation = problems_of(10), [Problem("v0", "3  +\n3?", "6"), Problem("v1", "new?", "1")]
    with pytest.raises(ConfigError, match=r"data\.overlap=refuse: 1 training questions .* \(p3 is v0\)"):
        without_overlap(train, validation, "refuse", fill, print)
    notes: list[str] = []
    rest = without_overlap(train, validation, "drop", fill, notes.append)
    assert [p.id for p in rest] == [f"p{i}" for i in range(10) if i != 3]
    assert without_overlap(train, validation, "allow", fill, notes.append) == train
    assert ["dropped" in note for note in notes] == [True, False]
    assert without_overlap(train, validation[1:], "refuse", fill, notes.append) == train
    assert len(notes) == 2


@pytest.mark.parametrize("prompted", ["train", "validation"])
def test_overlap_is_seen_whichever_side_brings_its_whole_prompt(prompted):
    fill = "User: {}\nAssistant:".format
    bare, whole = Problem("b", "1 + 1?", "2"), Problem("w", fill("1 + 1?"), "2", prompt=fill("1 + 1?"))
    train, validation = ([whole], [bare]) if prompted == "train" else ([bare], [whole])
    with pytest.raises(ConfigError, match="1 training questions"):
        without_overlap(train, validation, "refuse", fill, print)


@pytest.mark.parametrize(
    "forms",
    [
        [
            "What is 0 times 3,000?",
            "what IS 0 times 3,000?",
            "What is 0 times 3000 ?",
            "**Question 7:** What is 0 times 3,000?",
            "\uff37hat is \uff10 times 3,000\uff1f",
            "\ufeffWhat is 0\u200b times\u00a03,000?",
            "What is \N{LEFT DOUBLE QUOTATION MARK}0 times 3,000\N{RIGHT DOUBLE QUOTATION MARK}?",
        ],
        [
            "Janet's ducks don't lay.",
            "Janet\N{RIGHT SINGLE QUOTATION MARK}s ducks don`t lay",
            "Janets ducks dont lay!",
        ],
    ],
    ids=["numbers", "apostrophes"],
)
def test_a_question_that_is_written_otherwise_is_the_same(forms):
    assert len({question_key(form) for form in forms}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("3-4", "3+4"), ("5!", "5?"), ("1.5", "15"), ("1.5", "1,5"), ("5\N{SUPERSCRIPT TWO}", "52"), ("n!", "n"),
     ("3\N{VULGAR FRACTION ONE HALF}", "31/2"), (".5+1", "5+1"), ("(2+3)*4", "2+3*4"), ("1:30", "130"), ("-5+3", "5+3"),
     ("f'(2)", "f(2)"), ("10%", "10"), ("12,34", "1234"), ("|x|", "x"), ("-a", "a"), ("???", "!!!"),
     ("five - two", "five * two"), ("True & False", "True | False"), ("~True", "True"), ("|AB|", "(AB)"),
     ("2 ** 3 ** 4", "2 3 4")],
)  # fmt: skip
def test_what_changes_a_sum_makes_another_question(one, other):
    assert question_key(f"What is {one}") != question_key(f"What is {other}")


@pytest.mark.parametrize("cells", [".#", "?12", "_.", "| -", "AB."])
def test_puzzles_of_other_cells_are_other_questions(cells):
    draw = random.Random(1)
    grids = {"\n".join("".join(draw.choices(cells, k=6)) for _ in range(6)) for _ in range(300)}
    asked = {" ".join(f"Solve the grid:\n{grid}\nWhat is the shortest way?".split()) for grid in grids}
    assert len({question_key(question) for question in asked}) == len(asked)


def test_rows_that_repeat_a_question_and_disagree_are_counted(grader):
    rows = [("a", "1+1?", "2"), ("b", "1+1", "2.0"), ("c", "2+2?", "4"), ("d", "Question: 2+2?", "5"), ("e", "3?", "3")]
    notes: list[str] = []
    note_repetitions([Problem(*row) for row in rows], "training", grader, notes.append)
    note_repetitions(problems_of(5), "training", grader, notes.append)
    several, torn = notes
    assert several.startswith("5 training rows ask 3 ")
    assert "! 1 training" in torn
    assert "c says 4, d 5" in torn


def test_a_run_says_what_its_data_repeats(load):
    train = [*sums(6), {"question": sums(1)[0]["question"], "answer": "#### 99"}]
    asked = [{"question": f"{i} times {i}?", "answer": f"#### {i * i}"} for i in range(4)] * 8
    _, validation, said = load(train, validation=asked)
    assert len(validation) == 32
    text = "\n".join(said)
    assert "32 validation rows ask 4" in text
    assert "7 training rows ask 6" in text
    assert "! 1 training questions" in text


def test_pass_rates_keep_what_can_be_learned_from(tmp_path):
    problems = problems_of(5)
    counts = [(8, 0), (8, 1), (8, 4), (8, 8)]
    rows = [{"problem_id": p.id, "question_hash": question_hash(p.question + "\n"), "samples": n, "correct": c}
            for p, (n, c) in zip(problems, counts, strict=False)]  # fmt: skip
    rates = read_pass_rates(lines(tmp_path / "r.jsonl", [*rows, {**rows[1], "correct": 3}]))
    assert rates[question_hash(problems[1].question)] == 4 / 16
    notes: list[str] = []
    assert [p.id for p in by_pass_rate(problems, rates, 0.1, 0.9, notes.append)] == ["p1", "p2"]
    (said,) = notes
    assert re.findall(r"\d \w+", said.partition("dropped")[2]) == ["1 below", "1 above", "1 without"]
    with pytest.raises(ConfigError, match=r"widen data\.min_pass_rate"):
        by_pass_rate(problems, rates, 0.95, 0.96, print)
    with pytest.raises(ConfigError, match=r"4 without a pass rate"):
        by_pass_rate([replace(p, question=p.question + "!") for p in problems[:4]], rates, 0.0, 1.0, print)
    for broken in ({"question_hash": "x", "samples": 0, "correct": 0}, {"samples": 1}, ["x"]):
        with pytest.raises(ConfigError, match=r"line 2 is no pass rate"):
            read_pass_rates(lines(tmp_path / "broken.jsonl", [rows[0], broken]))


def test_a_filled_trace_is_graded_correct_by_its_own_reward():
    """The trace of every prompt option, filled from rows as GSM8K and MATH have them."""
    rows = [*sums(3, start=4), {"problem": "P", "solution": BOX}]
    problems = [parse(row) for row in rows]
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


@pytest.mark.parametrize("template", ["{solution} {question}", "done", "{solution", "{}"])
def test_a_broken_trace_template_is_one_line(template):
    with pytest.raises(ConfigError, match=r"^prompt\.trace=.*\Z"):
        check_template(template)


def test_a_given_response_is_imitated_word_for_word():
    assert trace_text(Problem("a", "q", "1", "s", response=" <<1>> "), TRACE) == " <<1>> "


def test_problems_without_a_trace_are_refused_or_counted():
    problems = [*problems_of(3), Problem("bare", "q", "1"), Problem("goldless", "q", "", "s")]
    with pytest.raises(ConfigError, match=r"^2 of 5 training problems .*bare, goldless.*bad_rows=skip"):
        with_traces(problems, TRACE, False, print)
    notes: list[str] = []
    assert with_traces(problems, TRACE, True, notes.append) == problems[:3]
    assert with_traces(problems[:3], TRACE, False, notes.append) == problems[:3]
    assert "2 of 5" in notes.pop()
    assert not notes
    with pytest.raises(ConfigError, match="responses or solutions"):
        with_traces(problems[3:4], TRACE, True, print)
    with pytest.raises(ConfigError, match="problem bare"):
        trace_text(problems[3], TRACE)


def test_the_filter_keeps_what_the_grader_accepts_and_says_how_many(grader):
    response = " so </think> <answer>{}</answer>"
    problems = [Problem(str(i), f"q{i}", "4", response=response.format(4)) for i in range(3)]
    problems += [Problem("wrong", "q", "4", response=response.format(5)), Problem("plain", "q", "4", response="4")]
    problems += [Problem("goldless", "q", "", response=response.format(4))]
    notes: list[str] = []
    kept = filter_correct(problems, lambda p: trace_text(p, TRACE), grader.grade_batch, notes.append)
    assert kept == problems[:3]
    (said,) = notes
    assert re.findall(r"\d \w+", said) == ["3 of", "6 traces", "1 wrong", "1 unformatted", "1 without"]
    with pytest.raises(ConfigError, match=r"data\.response_as=solution"):
        filter_correct(problems[3:], lambda p: trace_text(p, TRACE), grader.grade_batch, print)


def test_ground_truths_that_cannot_be_earned_are_named(grader):
    problems = [*problems_of(3), Problem("bad", "q", r"\boxed{"), Problem("none", "q", "")]
    for on_bad, left in (("keep", 5), ("drop", 3)):
        notes: list[str] = []
        assert check_ground_truths(problems, grader, DataConfig(bad_gold=on_bad), notes.append) == problems[:left]
        none, bad = notes
        assert none.startswith("! 1 of 5 problems") and none.endswith(": none")  # noqa: PT018
        assert bad.startswith("! 1 of 5 ground truths") and bad.endswith(": bad")  # noqa: PT018
    assert check_ground_truths(problems[:3], grader, DataConfig(), notes.append) == problems[:3]
    assert len(notes) == 2
    with pytest.raises(ConfigError, match="nothing can be earned"):
        check_ground_truths(problems[4:], grader, DataConfig(), print)


def test_ground_truths_of_several_lines_or_sentences_are_counted_with_an_example(grader):
    """No answer repeats them, but they grade themselves right; a matrix in several lines and few words are answers."""
    matrix = "\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}"
    fine = [*problems_of(3), Problem("matrix", "q", matrix), Problem("words", "q", "the line through A and B")]
    texts = [Problem("lines", "q", "10\n\nNote"), Problem("prose", "q", "She sold all of her clips in May.")]
    for on_bad in ("keep", "drop"):
        notes: list[str] = []
        kept = check_ground_truths([*fine, *texts], grader, DataConfig(bad_gold=on_bad), notes.append)
        assert kept == [*fine, *texts]
        (note,) = notes
        assert "2 of 7" in note
        assert "lines: '10 Note'" in note


def test_the_limit_is_drawn_after_the_filters_and_is_nested(load):
    """Half of the traces are wrong; 8 and 16 of the other half are drawn."""
    rows = [{"question": r["question"], "response": f" </think> <answer>{2 * i + i % 2}</answer>", "answer": str(2 * i)}
            for i, r in enumerate(sums(40))]  # fmt: skip
    few, many = (load(rows, "data.filter=correct", f"data.limit={n}", "algorithm=sft") for n in (8, 16))
    assert (len(few[0]), len(many[0])) == (8, 16)
    assert set(few[0]) < set(many[0])
    assert all(int(p.answer) % 4 == 0 for p in many[0])
    assert few[2][0].startswith("kept 20 of 40 traces")
    other = load(rows, "data.filter=correct", "data.limit=8", "seed=1")
    assert set(other[0]) != set(few[0])
    assert other[1] == few[1]
    assert "data.limit=99" in load(rows, "data.limit=99")[2][-1]


def test_sft_needs_traces_and_grpo_ground_truths(load):
    bare = [{"question": "1+1?", "answer": "2"}]
    assert len(load(bare)[0]) == 1
    with pytest.raises(ConfigError, match="responses or solutions"):
        load(bare, "algorithm=sft")
    pairs = [{"prompt": "Q", "response": "R"}]
    train, _, said = load(pairs, "algorithm=sft")
    assert (train[0].prompt, train[0].response, said) == ("Q", "R", [])
    with pytest.raises(ConfigError, match="nothing can be earned"):
        load(pairs)


def test_pass_rates_through_the_options(load, tmp_path):
    rates = [{"question_hash": question_hash(r["question"]), "samples": 4, "correct": i} for i, r in enumerate(sums(4))]
    file = lines(tmp_path / "rates.jsonl", rates)
    train, _, said = load(sums(4), f"data.pass_rates={file}", "data.min_pass_rate=0.3")
    assert [p.question for p in train] == ["2+2?", "3+3?"]
    assert said[0].startswith("kept 2 of 4 problems")


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
    validation = map(make, range(90, 92))
    train, validation, said = load(map(make, range(8)), "algorithm=sft", f"data={option}", *held, validation=validation)
    assert said == []
    assert (len(train), len(validation)) == (6 if held else 8, 2)
    for p in train + validation:
        assert int(p.answer) == 2 * int(p.question.split("+")[0])
        assert p.solution
        assert p.prompt is p.response is None


def test_the_fingerprint_sees_every_text():
    problem = Problem("a", "q", "1", "s", "p", "r")
    changed = [replace(problem, **{key: "x"}) for key in ("id", "question", "answer", "solution", "prompt", "response")]
    assert len({fingerprint([p]) for p in [problem, *changed]}) == 7
    assert fingerprint([replace(problem, solution=None, response="s")]) != fingerprint(
        [replace(problem, response=None)]
    )
    order = problems_of(9)
    random.Random(0).shuffle(order)
    assert fingerprint(order) != fingerprint(problems_of(9))


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here; set RLREASON_GSM8K to its folder")
def test_the_real_gsm8k(grader):
    """No question in both halves, and every solution a correct trace."""
    train, test, notes = read(FileDataConfig(name="gsm8k", path=str(GSM8K), validation="test", gold="hash"))
    assert (len(train), len(test), notes) == (7473, 1319, [])
    assert all(p.answer.lstrip("-").replace(".", "").isdigit() for p in train + test)
    assert without_overlap(train, test, "refuse", str, notes.append) == train
    assert subset(train, 128, 0) == subset(train, 256, 0)[:128]
    assert filter_correct(train, lambda p: trace_text(p, TRACE), grader.grade_batch, notes.append) == train
    assert notes[0].startswith("kept 7473 of 7473 ")
