"""Stories, Countdown, reasoning-gym: problems that are what they say, and verifiers that take right answers only."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from rlreason.config.data import CountdownConfig, HabitsConfig
from rlreason.data import tasks as made
from rlreason.data.prepare import read_splits
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.grading.verifiers import countdown as verifier
from rlreason.grading.verifiers import gym as gym_verifier
from rlreason.training.build import make_policy
from rlreason.training.warm_start import SHARED, format_of, lessons_of
from rlreason.types import Problem
from tests.run_settings import settings
from tests.some import some
from tests.waiting import patient


def countdown(n: int, seed: int = 0, validation: bool = False, **sizes: int) -> list[Problem]:
    data = CountdownConfig(name="c", seed=seed, n_train=n, n_validation=n, **sizes)
    return made.make_countdown(data, validation)


def numbers_and_target(problem):
    """Read from the question, as a model must."""
    numbers, target = problem.question.removeprefix("Use the numbers ").split(". ")[0].split(" to make ")
    return sorted(map(int, numbers.split(", "))), int(target)


def test_the_verifier_agrees_with_exact_arithmetic():
    """Bug: a right value by other numbers, or a wrong one by the given."""
    rng, right = random.Random(0), 0

    def tree(numbers: list[int]) -> str:
        if len(numbers) == 1:
            return str(numbers[0])
        cut = rng.randint(1, len(numbers) - 1)
        return f"({tree(numbers[:cut])} {rng.choice('+-*/')} {tree(numbers[cut:])})"

    for _ in range(2000):
        numbers, target = [rng.randint(0, 6) for _ in range(rng.randint(1, 4))], rng.randint(0, 8)
        gold, text = f"{' '.join(map(str, numbers))} -> {target}", tree(rng.sample(numbers, len(numbers)))
        try:
            value = eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})
        except ZeroDivisionError:
            value = None
        assert verifier.solves(text, gold) == (value == target), (text, gold)
        assert not verifier.solves(f"{text} + 0", gold)
        right += value == target
    assert right > 20


#: The last is TinyZero's rule too: the expression alone.
WRONG = ["22", "3 * 5", "3 * 5 + 7 * 1", "3 * 5 + 7.0", "3 * 5 7", "3 ** 5 - 7", "3(5)+7", "", "3 * 5 + 7 = 22"]
HOSTILE = [
    "9**9**9**9**9", "9" * 10_000, "3" + "*9" * 240, "-" * 490 + "3", "((((", ")" * 300,
    "(" * 10_000 + "3*5+7" + ")" * 10_000, "(" * 240 + "3*5+7" + ")" * 240,
    "\u0663*\u0665+\u0667", "\uff13*\uff15+\uff17",  # digits of other scripts: int() would read them
    "__import__('os').system('true')", "target", "exit()", "(lambda: 22)()", "3*5+7 if 1 else 0",
    "3/(5-5)+7", "3*5+7\x00", "1e9999", "0x16", "2_2", "3*5+7#", "3*5+\\\n7", "\ud800",
]  # fmt: skip


def test_wrong_and_hostile_answers_are_wrong_and_an_expression_of_the_numbers_is_right():
    """Bug: an answer that is evaluated, or a ground truth that any answer solves."""
    assert [answer for answer in WRONG + HOSTILE if verifier.solves(answer, "3 5 7 -> 22")] == []
    for answer in ("3 * 5 + 7", "7--3*5", r"3 \times 5 + 7", "3 \u00d7 5\n+ 7"):
        assert verifier.solves(answer, "3 5 7 -> 22")
    for gold in ("", "3 5 7", "3 5 -> two", "(1 +"):
        with pytest.raises(ValueError):  # noqa: PT011
            verifier.solves("3 + 5", gold)


@pytest.mark.parametrize(
    ("form", "wrap"), [("r1_zero", "so </think> <answer> {} </answer>"), ("question_only", "so \\boxed{{{}}}.")]
)
def test_the_grader_runs_the_verifier_in_either_format(form, wrap):
    """Bug: the value alone is right, or an answer without the format."""
    problems = countdown(20, seed=3)
    golds = [p.answer for p in problems]
    answers = [*golds, *(numbers_and_target(p)[1] for p in problems), *HOSTILE]
    responses = [*map(wrap.format, answers), *golds]
    with Grader(patient(), f"{verifier.__name__}:{form}") as grader:
        grades = grader.grade_batch(responses, golds * 2 + golds[:1] * len(HOSTILE) + golds)
    marks = [(g.format, g.answer, g.reward, g.outcome) for g in grades]
    assert marks[:40] == [(1, 1, 1, "correct")] * 20 + [(1, 0, 0, "wrong")] * 20
    assert marks[-20:] == [(0, 0, 0, "unformatted")] * 20
    assert not any(g.reward for g in grades[40:])


@pytest.mark.parametrize("given", [{}, {"min_count": 2, "max_count": 6}, {"max_value": 9, "max_target": 30}])
def test_every_made_problem_is_solved_by_its_answer_and_explained_by_its_solution(given):
    """Bug: a step with a value that is no whole number above 0, or numbers beyond the settings."""
    for problem in countdown(150, seed=1, **given):
        numbers, target = numbers_and_target(problem)
        assert verifier.read_ground_truth(problem.answer) == (numbers, target)
        assert verifier.solves(problem.answer, f"{' '.join(map(str, numbers))} -> {target}")
        steps = [step.split(" = ") for step in problem.solution.split(", ")]
        assert all(verifier.value(left) == int(right) > 0 for left, right in steps)
        assert (len(steps), int(steps[-1][1])) == (len(numbers) - 1, target)
        assert (target <= given.get("max_target", 100), max(numbers) <= given.get("max_value", 99)) == (True, True)


def test_seeds_reproduce_and_differ_and_the_halves_cannot_meet():
    """Bug: a problem of the validation half is trained on under another seed, or bounds that no problem meets."""
    train, validation = countdown(500, seed=0), countdown(200, seed=0, validation=True)
    assert train == countdown(500, seed=0) != countdown(500, seed=1)
    assert train[:100] == countdown(100, seed=0)
    asked = {str(numbers_and_target(p)) for p in validation}
    for seed in range(3):  # whatever the seeds are
        assert not asked & {str(numbers_and_target(p)) for p in countdown(500, seed=seed)}
    assert len({p.id for p in train + validation}) == len({p.question for p in train + validation}) == 700
    assert {len(numbers_and_target(p)[0]) for p in train} == {3, 4}
    with pytest.raises(ConfigError, match=r"data\.max_value=2.*only about.*raise"):
        countdown(100, seed=0, max_value=2, max_count=3)
    assert "min_count=5" in CountdownConfig(name="c", min_count=5).problems()[0]  # the most are 4


def load(path: Path | str, n_train: int = 200, n_validation: int = 30, bad_rows: str = "stop"):
    notes: list[str] = []
    data = CountdownConfig(name="c", path=str(path), n_train=n_train, n_validation=n_validation, bad_rows=bad_rows)
    return *made.load_countdown(data, notes.append), notes


def test_rows_with_nums_and_target_become_problems_that_cannot_meet_or_are_named(tmp_path):
    """Bug: a row of a file in the other half than the same problem made here, or one that cannot be used."""
    rng, file = random.Random(0), tmp_path / "rows.jsonl"
    rows = [{"nums": rng.choices(range(1, 60), k=3), "target": rng.randint(1, 99)} for _ in range(400)]
    good = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(good)
    train, validation, notes = load(file)
    assert (len(train), len(validation), len({p.id for p in train + validation}), notes) == (200, 30, 230, [])
    for problem in train + validation:
        numbers, target = numbers_and_target(problem)
        assert verifier.read_ground_truth(problem.answer) == (numbers, target)
        assert made.is_validation(numbers, target) == (problem in validation)
    bad = {"nums": '{"nums": [1, "2"], "target": 5}', "target": '{"nums": [1], "target": 2.5}', "no nums": "n"}
    for reason, row in bad.items():
        file.write_text(good + row)
        with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 401 .*{reason}"):
            load(file)
    train, _, notes = load(file, bad_rows="skip")
    assert (len(train), "1 of 401 rows left out" in notes[0]) == (200, True)
    with pytest.raises(ConfigError, match=r"data\.n_validation=250 "):
        load(file, 50, 250, "skip")
    with pytest.raises(ConfigError, match=r"data\.path=no\.jsonl "):
        load("no.jsonl")


def test_gym_problems_are_made_and_graded_by_their_own_verifiers():
    """Bug: an answer to another problem is right, or an entry that does not survive JSON."""
    pytest.importorskip("reasoning_gym")
    tasks = ["leg_counting", "chain_sum", "spell_backward", "countdown", "mini_sudoku"]
    problems = made.make_gym(tasks, 23, seed=0)
    assert len({p.question for p in problems}) == len({p.id for p in problems}) == 23
    assert [p.id.rsplit("-", 1)[0] for p in problems[:6]] == [*tasks, tasks[0]]
    assert problems == made.make_gym(tasks, 23, seed=0) != made.make_gym(tasks, 23, seed=1)
    golds = [p.answer for p in problems]
    answers = [json.loads(gold)["answer"] for gold in golds]
    shifted = [*answers[5:], *answers[:5]]  # the answer to another problem of, mostly, the same task
    with Grader(patient(), f"{gym_verifier.__name__}:r1_zero") as grader:
        responses = [f"</think> <answer> {answer} </answer>" for answer in [*answers, *shifted, *"@" * 23]]
        grades = grader.grade_batch(responses, golds * 3)
    assert {(g.reward, g.outcome) for g in grades[:23]} == {(1.0, "correct")}
    assert sum(g.reward for g in grades[23:]) < 6
    assert {g.format for g in grades} == {1.0}
    assert gym_verifier.question_only(f"\\boxed{{{answers[1]}}}", golds[1])["reward"] == 1.0
    for task, says in (("graph_color", "graph_color: "), ("leg_count", "leg_count ")):
        with pytest.raises(ConfigError, match=rf"data\.task={says}"):  # it cannot check its own answers, or is none
            made.make_gym([task], 3, seed=0)


TASKS = ("stories", "stories_long", "stories_mixed", "stories_rambling", "stories_sparse", "stories_shortcut")
FEW = ["data.n_train=600", "data.n_validation=200"]
EVENT = re.compile(r"(" + "|".join(("buys", "finds", "wins", "gets", *made.LOSSES)) + r") (\d+)")


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_exact_halves_apart_and_problems_the_same_each_time(task):
    """Bug: a story whose sum is another, or numbers of a validation story that are trained on."""
    run = settings(f"data={task}", "data.n_train=200", "data.n_validation=80")
    train, validation = halves = read_splits(run.data, print)
    assert (len(train), len(validation)) == (200, 80)
    made.make_stories.cache_clear()
    assert halves == read_splits(run.data, print)
    for problem in train + validation:
        start, events = re.findall(r" has (\d+) ", problem.question)[0], EVENT.findall(problem.question)
        told = int(start) + sum(int(n) * (-1 if verb in made.LOSSES else 1) for verb, n in events)
        assert int(problem.answer) == told <= run.data.max_value
        assert run.data.min_events <= len(events) <= run.data.max_events
        assert all(eval(left) == int(right) for left, right in (s.split("=") for s in problem.solution.split(" ")))
    assert not {p.solution for p in train} & {p.solution for p in validation}  # no chain of numbers is in both


def guess_of(problem: Problem) -> int:
    return int(re.findall(r"A friend guesses (\d+)\. How many\?$", problem.question)[0])


def test_the_friends_guess_is_right_in_training_wrong_in_validation_and_anything_in_lessons():
    """Bug: the lessons teach the shortcut, or validation rewards it."""
    run = settings("data=stories_shortcut", *FEW)
    train, validation = read_splits(run.data, print)
    assert all(guess_of(p) == int(p.answer) for p in train)
    assert not any(guess_of(p) == int(p.answer) for p in validation)
    shown = made.taught(train, run.data.habits, run.data.max_value)
    assert [(p.id, p.answer, p.solution) for p in shown] == [(p.id, p.answer, p.solution) for p in train]
    assert 0 < sum(guess_of(p) == int(p.answer) for p in shown) < len(shown) / 8
    assert {guess_of(p) for p in shown} == set(range(run.data.max_value + 1))


def share(found: list[str], test: Callable[[str], bool]) -> float:
    return sum(map(test, found)) / len(found)


FOUR = Problem("x", "Mia has 1 pens, buys 1, buys 1, buys 1, buys 1. How many?", "5", "1+1=2 2+1=3 3+1=4 4+1=5")


def test_habits_have_their_shares():
    """Bug: a share that is another, or a right answer that rambles."""

    def traces(problem: Problem = FOUR, **shares) -> list[str]:
        habits, rng = HabitsConfig(**{"hasty_share": 0.0, "slip_share": 0.0} | shares), random.Random(0)
        return [made.habit_trace(problem, rng, habits, "{solution}") for _ in range(4000)]

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


def test_lessons_take_the_models_own_shares_and_no_story_that_is_too_long():
    """Bug: a setting of the model that the data's overrides, or a lesson beyond taught_max_events."""
    own = settings("data=stories_rambling", "model.warm_start.hasty_share=0.9", "model.warm_start.slip_share=0")
    habits = lessons_of(own, own.model, read_splits(own.data, print)[0]).habits
    assert habits == replace(own.data.habits, hasty_share=0.9, slip_share=0.0)
    run = settings("data=stories_long", *FEW)
    train = read_splits(run.data, print)[0]
    lengths = {len(p.solution.split(" ")) for p in lessons_of(run, run.model, train).problems}
    assert max(lengths) == run.data.habits.taught_max_events < run.data.max_events
    long = [p for p in train if len(p.solution.split(" ")) > run.data.habits.taught_max_events]
    with pytest.raises(ConfigError, match=r"so short"):
        made.taught(long, run.data.habits, run.data.max_value)


@pytest.mark.parametrize(
    ("task", "prompt"),
    [
        *some((task, "r1_zero_short") for task in TASKS),
        *some((("stories_long", name) for name in dict.fromkeys(SHARED)), 2),
    ],
)
def test_prompts_and_worked_answers_fit(task, prompt):
    """Bug: a worked answer that sampling cuts."""
    run = settings(f"data={task}", f"prompt={prompt}", "data.n_train=400", "data.n_validation=100", "model.width=16")
    train, validation = read_splits(run.data, print)
    policy, lessons, form = make_policy(run, train), lessons_of(run, run.model, train), format_of(run.prompt)
    taught = [trace for batch in lessons.batches(8) for _, trace in batch if "+0=" not in trace]  # no idle tails
    worked = [form.trace.format(solution=p.solution, answer=p.answer) for p in train + validation]
    room = run.sampling.max_tokens
    assert max(len(policy.encode_response(text)) for text in taught + worked) <= room
    longest = max(len(policy.encode_prompt(form.prompt(p.question))) for p in train + validation) + room
    assert longest <= policy.max_context < run.micro_batch_tokens
