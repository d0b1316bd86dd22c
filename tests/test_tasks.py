"""The built-in tasks: exact answers, halves apart, habits in their shares, prompts and worked traces that fit."""

import random
import re
from collections.abc import Callable, Iterator

import pytest
from starts import SMALL, rlreason

from rlreason.config.data import HabitsConfig
from rlreason.data.prepare import read_splits
from rlreason.data.tasks import LOSSES, habit_trace, make_stories, taught
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.model.policy import Policy
from rlreason.training.build import lessons_of, make_policy
from rlreason.training.warm_start import SHARED, Lessons, format_of
from rlreason.types import Problem
from tests.run_settings import settings
from tests.some import some
from tests.waiting import patient

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
    make_stories.cache_clear()
    assert halves == read_splits(run.data, print)
    for problem in train + validation:
        assert int(problem.answer) == said_by(problem.question) <= run.data.max_value
        assert run.data.min_events <= len(EVENT.findall(problem.question)) <= run.data.max_events
        assert all(eval(left) == int(right) for left, right in (s.split("=") for s in problem.solution.split(" ")))
    assert not {p.solution for p in train} & {p.solution for p in validation}  # no chain of numbers is in both


def test_a_space_of_stories_that_runs_out_does_not_hang(monkeypatch):
    monkeypatch.setattr("rlreason.data.tasks.NAMES", ("Mia",))
    monkeypatch.setattr("rlreason.data.tasks.THINGS", ("pens",))
    with pytest.raises(ConfigError, match=r"max_value|no stories"):
        make_stories(200, seed=0, min_events=1, max_events=1, max_value=2)


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


def share(found: list[str], test: Callable[[str], bool]) -> float:
    return sum(map(test, found)) / len(found)


FOUR = Problem("x", "Mia has 1 pens, buys 1, buys 1, buys 1, buys 1. How many?", "5", "1+1=2 2+1=3 3+1=4 4+1=5")


def test_habits_have_their_shares():
    def traces(problem: Problem = FOUR, **shares) -> list[str]:
        habits, rng = HabitsConfig(**{"hasty_share": 0.0, "slip_share": 0.0} | shares), random.Random(0)
        given = habits.hasty_share, habits.slip_share, "{solution}", habits
        return [habit_trace(problem, rng, *given) for _ in range(4000)]

    assert share(traces(hasty_share=0.3), lambda text: text == "1+1=2") == pytest.approx(0.3, abs=0.03)
    stopping = traces(stop_share=0.4)
    shares = [share(stopping, lambda text, n=n: len(text.split(" ")) == n) for n in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.4, 0.6 * 0.4, 0.36 * 0.4, 0.216], abs=0.03)
    rambling = traces(slip_share=0.5, ramble_share=0.6, ramble_steps=3)
    wrong = [text for text in rambling if not text.split(" ")[3].endswith("=5")]
    assert len(wrong) / len(rambling) == pytest.approx(0.5, abs=0.03)
    assert share(wrong, lambda text: "+0=" in text) == pytest.approx(0.6, abs=0.04)
    assert {len(text.split(" ")) for text in wrong} == {4, 5, 6, 7}
    assert all(len(text.split(" ")) == 4 for text in rambling if text not in wrong)  # a right answer never rambles
    told = Problem("y", FOUR.question.replace("How", "A friend guesses 17. How"), FOUR.answer, FOUR.solution)
    assert share(traces(told, guess_share=0.2), lambda text: text == "17") == pytest.approx(0.2, abs=0.03)
    rngs = random.Random(1), random.Random(1)  # habits that are off draw no random number
    plain = [habit_trace(FOUR, rngs[0], 0.72, 0.05) for _ in range(200)]
    assert plain == [habit_trace(FOUR, rngs[1], 0.72, 0.05, more=HabitsConfig()) for _ in range(200)]
    with Grader(patient()) as grader:
        grades = grader.grade_batch([habit_trace(FOUR, rngs[0], hasty, 0.0) for hasty in (1.0, 0.0)], ["5", "5"])
    assert [(g.format, g.outcome) for g in grades] == [(1.0, "wrong"), (1.0, "correct")]


def test_lessons_take_the_models_own_shares_and_no_story_that_is_too_long():
    run = settings("data=stories_rambling")
    train = read_splits(run.data, print)[0]
    assert lessons_of(run, run.model, train).effective_habits == run.data.habits
    own = settings("data=stories_rambling", "model.warm_start.hasty_share=0.9", "model.warm_start.slip_share=0")
    habits = lessons_of(own, own.model, train).effective_habits
    assert (habits.hasty_share, habits.slip_share, habits.ramble_share) == (0.9, 0.0, run.data.habits.ramble_share)
    run = settings("data=stories_long", *FEW)
    train = read_splits(run.data, print)[0]
    lengths = {len(p.solution.split(" ")) for p in lessons_of(run, run.model, train).problems}
    assert max(lengths) == run.data.habits.taught_max_events < run.data.max_events
    long = [p for p in train if len(p.solution.split(" ")) > run.data.habits.taught_max_events]
    with pytest.raises(ConfigError, match=r"so short"):
        taught(long, run.data.habits, run.data.max_value)


def sizes(policy: Policy, lessons: Lessons, problems: list[Problem], template: str) -> Iterator[int]:
    """Tokens of what is taught, idle tails left out, and of the problems worked to their end."""
    for batch in lessons.batches(8):
        yield from (len(policy.encode_response(trace)) for _, trace in batch if "+0=" not in trace)
    for problem in problems:
        yield len(policy.encode_response(template.format(solution=problem.solution, answer=problem.answer)))


@pytest.mark.parametrize(
    ("task", "prompts"),
    [*some([(task, ["r1_zero_short"]) for task in TASKS]), ("stories_long", list(dict.fromkeys(SHARED)))],
)
def test_prompts_and_worked_answers_fit_and_prompts_of_an_ablation_share_their_lessons(task, prompts):
    found = []
    for name in prompts:
        run = settings(f"data={task}", f"prompt={name}", "data.n_validation=200", "model.width=16")
        train, validation = read_splits(run.data, print)
        policy, lessons, form = make_policy(run, train), lessons_of(run, run.model, train), format_of(run.prompt)
        room = run.sampling.max_tokens
        assert max(sizes(policy, lessons, train + validation, form.trace)) <= room
        longest = max(len(policy.encode_prompt(form.prompt(p.question))) for p in train + validation)
        assert longest + room <= policy.max_context
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


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS[1:])
def test_a_small_run_of_each_task_ends_with_an_accuracy(task, tmp_path):
    done = rlreason(f"data={task}", *SMALL, "hydra.run.dir=x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
