"""Stories, Countdown, reasoning-gym: problems that are what they say, and verifiers that take right answers only."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreason.config.data import CountdownConfig, GymConfig
from rlreason.config.leaves import render, template_of
from rlreason.data.tasks import is_validation, load_countdown, make_countdown, make_gym
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.grading.verifiers import countdown as verifier
from rlreason.grading.verifiers import gym as gym_verifier
from tests.waiting import patient

COUNTDOWN = "rlreason.grading.verifiers.countdown"
GYM = "rlreason.grading.verifiers.gym"


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
    assert [answer for answer in WRONG + HOSTILE if verifier.solves(answer, "3 5 7 -> 22")] == []
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
    with pytest.raises(ConfigError, match=r"data\.max_value=2.*only about.*raise"):
        make_countdown(100, seed=0, max_value=2, max_count=3)


def load(path: str, n_train: int = 200, n_validation: int = 30, bad_rows: str = "stop"):
    notes: list[str] = []
    data = CountdownConfig(name="rows", path=path, n_train=n_train, n_validation=n_validation, bad_rows=bad_rows)
    return *load_countdown(data, notes.append), notes


def test_rows_with_nums_and_target_become_problems_that_cannot_meet_or_are_named(tmp_path):
    rng = random.Random(0)
    file = tmp_path / "rows.jsonl"
    rows = [{"nums": rng.choices(range(1, 60), k=3), "target": rng.randint(1, 99)} for _ in range(400)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, validation, notes = load(str(file))
    assert (len(train), len(validation), notes) == (200, 30, [])
    assert len({p.id for p in train + validation}) == 230
    for problem in train + validation:
        numbers, target = verifier.read_ground_truth(problem.answer)
        assert (numbers, target) == numbers_and_target(problem)
        assert is_validation(sorted(numbers), int(target)) == (problem in validation)
    assert train[:50] == load(str(file), 50, 1)[0]
    good = file.read_text()
    for row, reason in (
        ('{"nums": [1, "2"], "target": 5}', "nums"), ('{"nums": [1, 2], "target": 2.5}', "target"), ("nums", "JSON"),
    ):  # fmt: skip
        file.write_text(good + row)
        with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 401 .*{reason}"):
            load(str(file))
    train, _, notes = load(str(file), bad_rows="skip")
    assert (len(train), "1 of 401 rows left out" in notes[0]) == (200, True)
    with pytest.raises(ConfigError, match=r"data\.n_validation=250 "):
        load(str(file), 50, 250, bad_rows="skip")
    with pytest.raises(ConfigError, match=r"data\.path=nowhere\.jsonl "):
        load("nowhere.jsonl")


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


def test_a_task_that_cannot_be_used_is_refused():
    """One that cannot check its own answers, and one that is none: named with its neighbours."""
    pytest.importorskip("reasoning_gym")
    for task, says in (("graph_color", "graph_color: "), ("leg_count", "leg_count .*leg_counting")):
        with pytest.raises(ConfigError, match=rf"data\.task={says}"):
            make_gym([task], 3, seed=0)


def test_settings_out_of_range_are_named():
    assert CountdownConfig(name="countdown").problems() == []
    assert GymConfig(name="g", task="gcd").problems() == GymConfig(name="g", task=["gcd", "lcm"]).problems() == []
    assert "min_count=5" in CountdownConfig(name="c", min_count=5).problems()[0]
