"""Stories whose two halves cannot meet, files whose bad rows are named, templates that render as the course's do."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from rlreason.config.store import resource_dir
from rlreason.data.files import fingerprint, load_folder_or_hub, subset
from rlreason.data.stories import Story, habit_trace, make_stories
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.prompts import load_template, render

GSM8K = Path(os.environ.get("RLREASON_GSM8K", Path(__file__).parents[2] / "shared/data/gsm8k"))


def numbers(problem):
    return [int(w) for w in problem.question.replace(",", " ").replace(".", " ").split() if w.isdigit()]


def test_every_story_is_told_and_solved_right():
    for p in make_stories(300, seed=1, min_events=1, max_events=6, max_value=30):
        assert p.solution is not None
        totals = []
        for step in p.solution.split(" "):
            left, right = step.split("=")
            assert eval(left) == int(right)
            assert 0 <= int(right) <= 30
            totals.append(int(right))
        assert p.answer == str(totals[-1])
        assert len(numbers(p)) == len(totals) + 1


def story_of(problem) -> Story:
    """The numbers and signs, read back from the worked steps."""
    steps = problem.solution.split(" ")
    signed = [re.fullmatch(r"(\d+)([+-]\d+)=\d+", step) for step in steps]
    return Story(int(signed[0][1]), tuple(int(m[2]) for m in signed))


def test_validation_stories_cannot_occur_in_training():
    """In a story space so small that both halves are nearly used up, they still never meet."""
    train = {story_of(p) for p in make_stories(3000, seed=0, min_events=2, max_events=2, max_value=9)}
    validation = {
        story_of(p) for p in make_stories(1000, seed=0, min_events=2, max_events=2, max_value=9, validation=True)
    }
    assert train.isdisjoint(validation)
    assert len(train) > 400
    assert len(validation) > 60
    assert not {s for s in train if s.is_validation}


def test_a_story_space_that_runs_out_is_said_and_does_not_hang():
    with pytest.raises(ConfigError, match=r"were asked for: raise max_value|leaves no stories"):
        make_stories(5000, seed=0, min_events=1, max_events=1, max_value=2)


def test_stories_are_the_same_for_a_seed_and_unique():
    a, b = make_stories(200, seed=3), make_stories(200, seed=3)
    assert a == b
    assert len({p.question for p in a}) == len({p.id for p in a}) == 200
    assert make_stories(200, seed=4) != a
    assert Story(7, (3, -4)).totals == [7, 10, 6]


def test_warm_start_traces_have_the_two_habits():
    problems, rng = make_stories(1, seed=0, min_events=3, max_events=3), random.Random(0)
    hasty, careful = (habit_trace(problems[0], rng, share, 0.0) for share in (1.0, 0.0))
    assert (hasty.count("="), careful.count("=")) == (1, 3)
    with Grader("r1_zero") as grader:
        grades = grader.grade_batch([hasty, careful], [problems[0].answer] * 2)
    assert grades[1].outcome == "correct"
    assert grades[0].format == 1.0
    slips = [habit_trace(problems[0], rng, 0.0, 1.0) for _ in range(20)]
    assert all(s != careful for s in slips)


def write_rows(folder: Path, *lines: str) -> Path:
    for half in ("train", "test"):
        (folder / f"{half}.jsonl").write_bytes("\n".join(lines).encode("latin-1") + b"\n")
    return folder


def test_gold_answers_are_read_once_and_ids_are_stable(tmp_path):
    rows = [{"question": " Q1 ", "answer": "work\n#### 1,234"}, {"question": "Q2", "answer": "(1,2)"}]
    train, test = load_folder_or_hub(str(write_rows(tmp_path, *map(json.dumps, rows))), "gsm8k")
    assert [(p.id, p.question, p.answer, p.solution) for p in train] == [
        ("gsm8k-train-0", "Q1", "1234", "work"),
        ("gsm8k-train-1", "Q2", "(1,2)", None),
    ]
    assert test[0].id == "gsm8k-test-0"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "line 2 is not JSON"),
        ('{"question": "q"}', "line 2 has no text under 'answer'"),
        ('{"question": "", "answer": "1"}', "line 2 has no text under 'question'"),
        ('["q", "a"]', "line 2 is no JSON object"),
        ('{"question": "q", "answer": "work ####  "}', "line 2 has nothing after '####'"),
        ("caf\xe9", "line 2 is not UTF-8"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, says):
    with pytest.raises(ConfigError, match=r"train\.jsonl, " + says):
        load_folder_or_hub(str(write_rows(tmp_path, '{"question": "q", "answer": "1"}', line)), "gsm8k")


def test_a_hub_name_without_the_hub_says_what_to_do():
    with pytest.raises(ConfigError, match=r"data\.path=openai/gsm8k .*(pip install|give a folder)"):
        load_folder_or_hub("openai/gsm8k", "gsm8k")


def test_subsets_are_nested():
    problems = make_stories(64, seed=0)
    small, large = subset(problems, 8, seed=1), subset(problems, 32, seed=1)
    assert set(small) < set(large)
    assert subset(problems, None, 1) is problems
    assert fingerprint(small) != fingerprint(large)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here; set RLREASON_GSM8K to its folder")
def test_the_real_gsm8k():
    train, test = load_folder_or_hub(str(GSM8K), "gsm8k")
    assert (len(train), len(test)) == (7473, 1319)
    assert all(p.answer.lstrip("-").replace(".", "").isdigit() for p in test)


def test_prompts_render_with_format_semantics():
    folder = resource_dir("prompts")
    text = render(load_template("question_only.prompt", folder), "What is {x}?")
    assert text.startswith("What is {x}?")
    assert r"\boxed{}" in text
    r1 = render(load_template("r1_zero.prompt", folder), "1+1?")
    assert r1.endswith("User: 1+1?\nAssistant: <think>")


@pytest.mark.parametrize(
    ("text", "says"), [("no question", "never uses the question"), (r"{question} \boxed{}", "double literal braces")]
)
def test_a_broken_template_is_one_line(tmp_path, text, says):
    (tmp_path / "x.prompt").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_template("x.prompt", tmp_path)
    with pytest.raises(ConfigError, match=r"prompt\.file=nowhere\.prompt is neither in"):
        load_template("nowhere.prompt", tmp_path)
