"""Stories whose two halves cannot meet, subsets that are nested, templates that render as the course's do."""

import random
import re

import pytest

from rlreason.config.leaves import render, template_of
from rlreason.data.prepare import subset
from rlreason.data.sources import fingerprint
from rlreason.data.tasks import Story, habit_trace, make_stories
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from tests.waiting import patient


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
    with pytest.raises(ConfigError, match=r"max_value|no stories"):
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
    with Grader(patient()) as grader:
        grades = grader.grade_batch([hasty, careful], [problems[0].answer] * 2)
    assert grades[1].outcome == "correct"
    assert grades[0].format == 1.0
    slips = [habit_trace(problems[0], rng, 0.0, 1.0) for _ in range(20)]
    assert all(s != careful for s in slips)


def test_subsets_are_nested():
    problems = make_stories(64, seed=0)
    small, large = subset(problems, 8, seed=1), subset(problems, 32, seed=1)
    assert set(small) < set(large)
    assert subset(problems, None, 1) is problems
    assert fingerprint(small) != fingerprint(large)


def test_prompts_render_with_format_semantics():
    assert render(template_of("question_only.prompt"), "What is {x}?") == "What is {x}?"
    boxed = render(template_of("question_boxed.prompt"), "What is {x}?")
    assert boxed == "What is {x}?\nPlease reason step by step, and put your final answer within \\boxed{}."
    r1 = render(template_of("r1_zero.prompt"), "1+1?")
    assert r1.endswith("User: 1+1?\nAssistant: <think>")


@pytest.mark.parametrize(
    ("text", "says"), [("no question", "never uses the question"), (r"{question} \boxed{}", "double literal braces")]
)
def test_a_broken_template_is_one_line(tmp_path, text, says):
    (tmp_path / "x.prompt").write_text(text)
    with pytest.raises(ConfigError, match=says):
        template_of(str(tmp_path / "x.prompt"))
    with pytest.raises(ConfigError, match=r"prompt\.file=nowhere\.prompt"):
        template_of("nowhere.prompt")
