"""Stories, Countdown, reasoning-gym: problems that are what they say, and verifiers that take right answers only."""

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreason.config.data import CountdownConfig, GymConfig
from rlreason.config.leaves import render, template_of
from rlreason.data.tasks import (
    Story,
    habit_trace,
    is_validation,
    load_countdown,
    make_countdown,
    make_gym,
    make_stories,
)
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.grading.verifiers import countdown as verifier
from rlreason.grading.verifiers import gym as gym_verifier
from tests.waiting import patient

COUNTDOWN = "rlreason.grading.verifiers.countdown"
GYM = "rlreason.grading.verifiers.gym"


# Stories and prompts


def story_of(problem) -> Story:
    """The numbers and signs, read back from the worked steps, each of which is right."""
    steps = [re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", step) for step in problem.solution.split(" ")]
    assert all(int(m[1]) + int(m[2]) == int(m[3]) for m in steps)
    return Story(int(steps[0][1]), tuple(int(m[2]) for m in steps))


def test_every_story_is_told_and_solved_right_and_the_same_for_a_seed():
    problems = make_stories(300, seed=1, min_events=1, max_events=6, max_value=30)
    for p in problems:
        totals = story_of(p).totals
        assert all(0 <= total <= 30 for total in totals)
        assert p.answer == str(totals[-1])
        assert len(re.findall(r"\d+", p.question)) == len(totals)
    assert make_stories.__wrapped__(300, 1, 1, 6, 30) == problems != make_stories(300, 2, 1, 6, 30)
    assert len({p.question for p in problems}) == len({p.id for p in problems}) == 300
    assert Story(7, (3, -4)).totals == [7, 10, 6]


def test_validation_stories_cannot_occur_in_training_and_a_space_that_runs_out_does_not_hang(monkeypatch):
    """In a story space so small that both halves are nearly used up, they still never meet."""
    small = {"seed": 0, "min_events": 2, "max_events": 2, "max_value": 9}
    train = {story_of(p) for p in make_stories(3000, **small)}
    validation = {story_of(p) for p in make_stories(1000, **small, validation=True)}
    assert train.isdisjoint(validation)
    assert (len(train) > 400, len(validation) > 60) == (True, True)
    assert not any(is_validation(*story) for story in train)
    monkeypatch.setattr("rlreason.data.tasks.NAMES", ("Mia",))
    monkeypatch.setattr("rlreason.data.tasks.THINGS", ("pens",))
    with pytest.raises(ConfigError, match=r"max_value|no stories"):
        make_stories(200, seed=0, min_events=1, max_events=1, max_value=2)


def test_a_guess_is_right_in_training_and_wrong_in_validation():
    for validation in (False, True):
        for p in make_stories(50, seed=0, validation=validation, guessed=True):
            assert (f" A friend guesses {p.answer}. " in p.question) != validation


def test_warm_start_traces_have_the_two_habits():
    (problem,), rng = make_stories(1, seed=0, min_events=3, max_events=3), random.Random(0)
    hasty, careful = (habit_trace(problem, rng, share, 0.0) for share in (1.0, 0.0))
    assert (hasty.count("="), careful.count("=")) == (1, 3)
    with Grader(patient()) as grader:
        grades = grader.grade_batch([hasty, careful], [problem.answer] * 2)
    assert (grades[0].format, grades[1].outcome) == (1.0, "correct")
    assert careful not in [habit_trace(problem, rng, 0.0, 1.0) for _ in range(20)]


def test_prompts_render_with_format_semantics_and_a_broken_template_is_one_line(tmp_path):
    assert render(template_of("question_only.prompt"), "What is {x}?") == "What is {x}?"
    assert "\nPlease" in (boxed := render(template_of("question_boxed.prompt"), "What is {x}?"))
    assert boxed.endswith("within \\boxed{}.")
    assert render(template_of("r1_zero.prompt"), "1+1?").endswith("User: 1+1?\nAssistant: <think>")
    for text, complaint in (
        ("no question", "never uses the question"),
        (r"{question} \boxed{}", "double literal braces"),
    ):
        (tmp_path / "x.prompt").write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            template_of(str(tmp_path / "x.prompt"))
    with pytest.raises(ConfigError, match=r"prompt\.file=nowhere\.prompt"):
        template_of("nowhere.prompt")


# Countdown: the verifier


def numbers_and_target(problem):
    """Read from the question, as a model must."""
    numbers, target = problem.question.removeprefix("Use the numbers ").split(". ")[0].split(" to make ")
    return sorted(map(int, numbers.split(", "))), int(target)


def trees(numbers: list[int]) -> list[tuple[str, Fraction | None]]:
    """Every bracketed expression over the numbers in this order, with its value (None: divides by zero)."""
    if len(numbers) == 1:
        return [(str(numbers[0]), Fraction(numbers[0]))]
    found = []
    for cut in range(1, len(numbers)):
        for left, a in trees(numbers[:cut]):
            for right, b in trees(numbers[cut:]):
                bad = a is None or b is None
                found += [
                    (f"({left}+{right})", None if bad else a + b),
                    (f"({left} - {right})", None if bad else a - b),
                    (f"({left}*{right})", None if bad else a * b),
                    (f"({left} / {right})", None if bad or b == 0 else a / b),
                ]
    return found


def test_the_verifier_agrees_with_brute_force():
    rng = random.Random(0)
    right = 0
    for count in (1, 2, 3, 3, 3, 4, 4, 4):
        numbers = [rng.randint(0, 6) for _ in range(count)]
        target = rng.randint(0, 8)
        gold = f"{' '.join(map(str, numbers))} -> {target}"
        for text, value in trees(rng.sample(numbers, len(numbers))):
            assert verifier.solves(text, gold) == (value == target), (text, gold)
            right += value == target
            assert not verifier.solves(f"{text} + 0", gold)
    assert right > 20


@given(st.recursive(st.integers(0, 99).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner)))
def test_any_expression_solves_itself_and_no_other_numbers(tree):
    def text(node):
        return node if isinstance(node, str) else f"({text(node[0])} {node[1]} {text(node[2])})"

    gold = text(tree)
    if verifier.value(gold) is not None and len(gold) <= verifier.LONGEST:
        assert verifier.solves(gold[1:-1] if gold[0] == "(" else gold, gold)
        assert not verifier.solves(f"{gold} * 1", gold)


#: The last is TinyZero's rule too: the expression alone.
WRONG = ["22", "3 * 5", "3 * 5 + 7 * 1", "3 * 5 + 7.0", "3 * 5 7", "3 ** 5 - 7", "3(5)+7", "", "3 * 5 + 7 = 22"]
HOSTILE = [
    "9**9**9**9**9", "9" * 10_000, "3" + "*9" * 240, "-" * 490 + "3", "((((", ")" * 300,
    "(" * 10_000 + "3*5+7" + ")" * 10_000, "(" * 240 + "3*5+7" + ")" * 240,
    "\u0663*\u0665+\u0667", "\uff13*\uff15+\uff17",  # digits of other scripts: int() would read them
    "__import__('os').system('true')", "target", "exit()", "(lambda: 22)()", "3*5+7 if 1 else 0",
    "3/(5-5)+7", "3*5+7\x00", "1e9999", "0x16", "2_2", "3*5+7#", "3*5+\\\n7", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("answer", WRONG + HOSTILE)
def test_a_wrong_or_hostile_answer_is_wrong_at_once(answer):
    assert verifier.solves(answer, "3 5 7 -> 22") is False


def test_an_expression_of_the_numbers_is_right_and_a_gold_without_a_target_an_error():
    for answer in ("3 * 5 + 7", "7--3*5", r"3 \times 5 + 7", "3 \u00d7 5\n+ 7"):
        assert verifier.solves(answer, "3 5 7 -> 22")
    for gold in ("", "3 5 7", "3 5 -> two", "(1 +"):
        with pytest.raises(ValueError):  # noqa: PT011
            verifier.solves("3 + 5", gold)


@given(st.text(alphabet="0123456789+-*/() .=\\\n[]{}", max_size=60))
def test_no_text_raises(text):
    assert verifier.solves(text, "3 5 7 -> 22") in (True, False)


@pytest.mark.parametrize(
    ("form", "wrap"),
    [("r1_zero", " steps </think> <answer> {} </answer>"), ("question_only", "steps, so \\boxed{{{}}}.")],
)
def test_the_grader_runs_the_verifier_in_either_format(form, wrap):
    problems = make_countdown(20, seed=3)
    with Grader(patient(), f"{COUNTDOWN}:{form}") as grader:
        golds = [p.answer for p in problems]
        right = grader.grade_batch([wrap.format(p.answer) for p in problems], golds)
        wrong = grader.grade_batch([wrap.format(numbers_and_target(p)[1]) for p in problems], golds)
        bare = grader.grade_batch(golds, golds)
        hostile = grader.grade_batch([wrap.format(text) for text in HOSTILE], golds[:1] * len(HOSTILE))
    for grades, *expected in ((right, 1, 1, 1, "correct"), (wrong, 1, 0, 0, "wrong"), (bare, 0, 0, 0, "unformatted")):
        assert all([g.format, g.answer, g.reward, g.outcome] == expected for g in grades)
    assert {g.outcome for g in hostile} <= {"wrong", "unformatted"}


# Countdown: the problems


@pytest.mark.parametrize("settings", [{}, {"min_count": 2, "max_count": 6}, {"max_value": 9, "max_target": 30}])
def test_every_made_problem_is_solved_by_its_answer_and_explained_by_its_solution(settings):
    for problem in make_countdown(300, seed=1, **settings):
        numbers, target = numbers_and_target(problem)
        assert verifier.read_ground_truth(problem.answer) == (numbers, target)
        assert verifier.solves(problem.answer, f"{' '.join(map(str, numbers))} -> {target}")
        steps = [step.split(" = ") for step in problem.solution.split(", ")]
        assert len(steps) == len(numbers) - 1
        assert all(verifier.value(left) == int(right) > 0 for left, right in steps)
        assert int(steps[-1][1]) == target <= settings.get("max_target", 100)
        assert max(numbers) <= settings.get("max_value", 99)


def test_seeds_reproduce_and_differ_and_the_halves_cannot_meet():
    train, validation = make_countdown(500, seed=0), make_countdown(200, seed=0, validation=True)
    assert train == make_countdown(500, seed=0)
    assert train[:100] == make_countdown(100, seed=0)
    assert train != make_countdown(500, seed=1)
    for seed in range(3):  # whatever the seeds are
        others = {str(numbers_and_target(p)) for p in make_countdown(500, seed=seed)}
        assert not others & {str(numbers_and_target(p)) for p in validation}
    assert len({p.id for p in train + validation}) == len({str(numbers_and_target(p)) for p in train + validation})
    assert {len(numbers_and_target(p)[0]) for p in train} == {3, 4}


def test_too_small_a_space_is_said():
    with pytest.raises(ConfigError, match=r"data\.max_value=2.*only about.*raise"):
        make_countdown(100, seed=0, max_value=2, max_count=3)


def load(path: str, n_train: int = 200, n_validation: int = 30, bad_rows: str = "stop"):
    notes: list[str] = []
    data = CountdownConfig(name="rows", path=path, n_train=n_train, n_validation=n_validation, bad_rows=bad_rows)
    return *load_countdown(data, notes.append), notes


@pytest.fixture
def rows(tmp_path) -> str:
    """A file of 400 problems of three numbers."""
    rng = random.Random(0)
    rows = [{"nums": rng.choices(range(1, 60), k=3), "target": rng.randint(1, 99)} for _ in range(400)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_with_nums_and_target_become_problems_that_cannot_meet(rows):
    train, validation, notes = load(rows)
    assert (len(train), len(validation), notes) == (200, 30, [])
    assert len({p.id for p in train + validation}) == 230
    for problem in train + validation:
        numbers, target = verifier.read_ground_truth(problem.answer)
        assert (numbers, target) == numbers_and_target(problem)
        assert is_validation(sorted(numbers), int(target)) == (problem in validation)
    assert train[:50] == load(rows, 50, 1)[0]


def test_a_bad_row_is_named_or_skipped_and_counted_and_too_few_rows_are_said(rows):
    good = Path(rows).read_text()
    for row, reason in (
        ('{"nums": [1, "2"], "target": 5}', "nums"),
        ('{"nums": [], "target": 5}', "nums"),
        ('{"nums": [1, 2], "target": 2.5}', "target"),
        ("[1, 2]", "nums"),
        ("nums", "JSON"),
    ):
        Path(rows).write_text(good + row)
        with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 401 .*{reason}"):
            load(rows)
    train, _, notes = load(rows, bad_rows="skip")
    assert (len(train), "1 of 401 rows left out" in notes[0]) == (200, True)
    for words, setting in (((rows, 500, 5), "n_train=500"), ((rows, 50, 250), "n_validation=250")):
        with pytest.raises(ConfigError, match=rf"data\.{setting} "):
            load(*words, bad_rows="skip")
    with pytest.raises(ConfigError, match=r"data\.path=nowhere\.jsonl "):
        load("nowhere.jsonl")


# reasoning-gym


def test_gym_problems_are_made_and_graded_by_their_own_verifiers():
    pytest.importorskip("reasoning_gym")
    tasks = ["leg_counting", "chain_sum", "spell_backward", "countdown", "mini_sudoku"]
    problems = make_gym(tasks, 23, seed=0)
    assert len({p.question for p in problems}) == len({p.id for p in problems}) == 23
    assert [p.id.rsplit("-", 1)[0] for p in problems[:6]] == [*tasks, tasks[0]]
    assert problems == make_gym(tasks, 23, seed=0) != make_gym(tasks, 23, seed=1)
    golds = [p.answer for p in problems]
    with Grader(patient(), f"{GYM}:r1_zero") as grader:
        right = grader.grade_batch([f"</think> <answer> {json.loads(g)['answer']} </answer>" for g in golds], golds)
        shifted = [*golds[5:], *golds[:5]]  # the answer to another problem of, mostly, the same task
        wrong = grader.grade_batch([f"</think> <answer>{json.loads(g)['answer']}</answer>" for g in shifted], golds)
        nonsense = grader.grade_batch(["</think> <answer>@</answer>"] * 23, golds)
    assert {(g.reward, g.outcome) for g in right} == {(1.0, "correct")}
    assert sum(g.reward for g in wrong) < 6
    assert {(g.format, g.reward) for g in nonsense} == {(1.0, 0.0)}
    assert gym_verifier.question_only(f"\\boxed{{{json.loads(golds[1])['answer']}}}", golds[1])["reward"] == 1.0


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("graph_color", "graph_color: "),  # cannot check its own answers
        ("rearc", "rearc: "),
        ("leg_count", "leg_count .*leg_counting"),  # is none: named with its neighbours
    ],
)
def test_a_task_that_cannot_be_used_is_refused(task, says):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=rf"data\.task={says}"):
        make_gym([task], 3, seed=0)


# Settings


def test_settings_out_of_range_are_named():
    assert CountdownConfig(name="countdown").problems() == []
    assert GymConfig(name="g", task="gcd").problems() == GymConfig(name="g", task=["gcd", "lcm"]).problems() == []
    assert "min_count=5" in CountdownConfig(name="c", min_count=5).problems()[0]
