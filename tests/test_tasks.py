"""The built-in tasks: exact answers, halves apart, habits in their shares, prompts and worked traces that fit."""

import random
import re
from collections.abc import Callable, Iterator

import pytest
from starts import SMALL, rlreason

from rlreason.config.data import HabitsConfig
from rlreason.data.prepare import read_splits
from rlreason.data.tasks import LOSSES, habit_trace, taught
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.training.build import lessons_of, make_policy
from rlreason.training.warm_start import SHARED, Lessons, format_of
from rlreason.types import Problem
from tests.run_settings import settings
from tests.some import some

TASKS = ("stories", "stories_long", "stories_mixed", "stories_rambling", "stories_sparse", "stories_shortcut")
FEW = ["data.n_train=600", "data.n_validation=200"]
EVENT = re.compile(r"(" + "|".join(("buys", "finds", "wins", "gets", *LOSSES)) + r") (\d+)")


def said_by(question: str) -> int:
    """The answer, read from the text alone."""
    start = re.search(r" has (\d+) ", question)
    assert start
    return int(start[1]) + sum(int(n) * (-1 if verb in LOSSES else 1) for verb, n in EVENT.findall(question))


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_exact_halves_apart_and_problems_the_same_each_time(task):
    run = settings(f"data={task}", *FEW)
    train, validation = halves = read_splits(run.data, print)
    assert (len(train), len(validation)) == (600, 200)
    assert halves == read_splits(run.data, print)
    for problem in train + validation:
        assert int(problem.answer) == said_by(problem.question) <= run.data.max_value
        assert run.data.min_events <= len(EVENT.findall(problem.question)) <= run.data.max_events
        assert problem.solution is not None
        assert all(eval(left) == int(right) for left, right in (s.split("=") for s in problem.solution.split(" ")))
    assert not {p.solution for p in train} & {p.solution for p in validation}  # no chain of numbers is in both


def test_the_friends_guess_is_right_in_training_wrong_in_validation_and_anything_in_lessons():
    run = settings("data=stories_shortcut", *FEW)
    train, validation = read_splits(run.data, print)
    assert all(guess_of(p) == int(p.answer) for p in train)
    assert not any(guess_of(p) == int(p.answer) for p in validation)
    shown = taught(train, run.data.habits, run.data.max_value)
    assert [(p.id, p.answer, p.solution) for p in shown] == [(p.id, p.answer, p.solution) for p in train]
    assert 0 < sum(guess_of(p) == int(p.answer) for p in shown) < len(shown) / 8
    assert {guess_of(p) for p in shown} == set(range(run.data.max_value + 1))


def guess_of(problem: Problem) -> int:
    guess = re.search(r"A friend guesses (\d+)\. How many\?$", problem.question)
    assert guess
    return int(guess[1])


def traces(problem: Problem, habits: HabitsConfig, count: int = 4000) -> list[str]:
    """The solutions of many lessons on one problem."""
    rng = random.Random(0)
    return [
        habit_trace(problem, rng, habits.hasty_share, habits.slip_share, "{solution}", habits) for _ in range(count)
    ]


def share(found: list[str], test: Callable[[str], bool]) -> float:
    return sum(map(test, found)) / len(found)


FOUR = Problem("x", "Mia has 1 pens, buys 1, buys 1, buys 1, buys 1. How many?", "5", "1+1=2 2+1=3 3+1=4 4+1=5")


def test_habits_have_their_shares():
    hasty = traces(FOUR, HabitsConfig(hasty_share=0.3, slip_share=0.0))
    assert share(hasty, lambda text: text == "1+1=2") == pytest.approx(0.3, abs=0.03)
    stopping = traces(FOUR, HabitsConfig(hasty_share=0.0, slip_share=0.0, stop_share=0.4))
    shares = [share(stopping, lambda text, n=n: len(text.split(" ")) == n) for n in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.4, 0.6 * 0.4, 0.36 * 0.4, 0.216], abs=0.03)
    rambling = traces(FOUR, HabitsConfig(hasty_share=0.0, slip_share=0.5, ramble_share=0.6, ramble_steps=3))
    wrong = [text for text in rambling if not text.split(" ")[3].endswith("=5")]
    assert len(wrong) / len(rambling) == pytest.approx(0.5, abs=0.03)
    assert share(wrong, lambda text: "+0=" in text) == pytest.approx(0.6, abs=0.04)
    assert {len(text.split(" ")) for text in wrong} == {4, 5, 6, 7}
    assert all(len(text.split(" ")) == 4 for text in rambling if text not in wrong)  # a right answer never rambles
    told = Problem("y", FOUR.question.replace("How", "A friend guesses 17. How"), FOUR.answer, FOUR.solution)
    guessing = traces(told, HabitsConfig(guess_share=0.2))
    assert share(guessing, lambda text: text == "17") == pytest.approx(0.2, abs=0.03)


def test_without_the_new_habits_no_random_number_is_drawn_for_them():
    rngs = random.Random(1), random.Random(1)
    plain = [habit_trace(FOUR, rngs[0], 0.72, 0.05) for _ in range(200)]
    assert plain == [habit_trace(FOUR, rngs[1], 0.72, 0.05, more=HabitsConfig()) for _ in range(200)]


def test_the_models_own_shares_go_before_those_of_the_task():
    def shown(*words: str) -> HabitsConfig:
        run = settings("data=stories_rambling", *words)
        return lessons_of(run, run.model, read_splits(run.data, print)[0]).effective_habits

    habits = settings("data=stories_rambling").data.habits
    assert shown() == habits
    own = shown("model.warm_start.hasty_share=0.9", "model.warm_start.slip_share=0")
    assert (own.hasty_share, own.slip_share, own.ramble_share) == (0.9, 0.0, habits.ramble_share)


def test_long_stories_are_longer_than_any_that_was_taught():
    run = settings("data=stories_long", *FEW)
    train = read_splits(run.data, print)[0]
    lengths = {len(p.solution.split(" ")) for p in lessons_of(run, run.model, train).problems}
    assert max(lengths) == run.data.habits.taught_max_events < run.data.max_events


def sizes(policy: Policy, lessons: Lessons, problems: list[Problem], template: str) -> Iterator[int]:
    """Tokens of what is taught, idle tails left out, and of the problems worked to their end."""
    for batch in lessons.batches(8):
        yield from (len(policy.encode_response(trace)) for _, trace in batch if "+0=" not in trace)
    for problem in problems:
        yield len(policy.encode_response(template.format(solution=problem.solution, answer=problem.answer)))


@pytest.mark.parametrize("task", some(TASKS))
def test_prompts_and_worked_answers_fit(task):
    run = settings(f"data={task}", "data.n_validation=200", "model.width=16")
    train, validation = read_splits(run.data, print)
    policy, lessons = make_policy(run, train), lessons_of(run, run.model, train)
    room = run.sampling.max_tokens
    assert max(sizes(policy, lessons, train + validation, format_of(run.prompt).trace)) <= room
    longest = max(len(policy.encode_prompt(lessons.formats[0].prompt(p.question))) for p in train + validation)
    assert longest + room <= policy.max_context


def test_the_prompts_of_an_ablation_fit_and_share_their_lessons_on_long_stories():
    found = []
    for name in dict.fromkeys(SHARED):
        run = settings("data=stories_long", f"prompt={name}", *FEW, "model.width=16")
        train = read_splits(run.data, print)[0]
        policy, lessons, form = make_policy(run, train), lessons_of(run, run.model, train), format_of(run.prompt)
        longest = max(len(policy.encode_prompt(form.prompt(p.question))) for p in train)
        assert longest + run.sampling.max_tokens <= policy.max_context
        assert max(sizes(policy, lessons, train, form.trace)) <= run.sampling.max_tokens
        found.append(next(lessons.batches(1)))
    assert all(batch == found[0] for batch in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=stories", "data.habits.ramble_share=2"], "data.habits.ramble_share=2"),
    ],
)
def test_habits_that_no_story_can_have_are_refused(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        settings(*words)
    assert len(str(error.value).splitlines()) == 1


def test_a_warm_start_with_no_story_to_show_is_refused():
    run = settings("data=stories_long", "data.n_train=5", "data.min_events=5", "data.max_events=6")
    long = [p for p in read_splits(run.data, print)[0] if len((p.solution or "").split(" ")) == 6]
    with pytest.raises(ConfigError, match=r"so short"):
        taught(long, run.data.habits, run.data.max_value)


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS[1:])
def test_a_small_run_of_each_task_ends_with_an_accuracy(task, tmp_path):
    done = rlreason(f"data={task}", *SMALL, "hydra.run.dir=x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
