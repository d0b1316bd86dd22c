"""Best of N: every closed form against enumeration of all subsets; ties; one picture of one protocol only."""

import random
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest

from rlreason.cli.check import check_command_line
from rlreason.config.groups import GradingConfig
from rlreason.errors import ConfigError
from rlreason.evaluation.accuracy import answer_classes, best_at, majority_at, pass_at, subsets_of
from rlreason.grading import Grader
from rlreason.runtime.statistics import wilson_interval
from rlreason.training.jobs import first_alone, load_scorer, with_intervals
from rlreason.types import Grade, Response, Sample


def enumerated(n, k, win):
    """The mean of `win(subset)` over every subset of k of n."""
    return fmean(float(win(subset)) for subset in combinations(range(n), k))


def majority_wins(subset, answers, right):
    """By counting: the one most frequent answer, by the share of right responses that give it."""
    votes = {}
    for i in subset:
        if answers[i] is not None:
            votes.setdefault(answers[i], []).append(right[i])
    most = max(map(len, votes.values()), default=0)
    leaders = [v for v in votes.values() if len(v) == most]
    return fmean(leaders[0]) if len(leaders) == 1 else 0.0


def cases(count=12):
    for seed in range(count):
        rng = random.Random(seed)
        n = rng.randint(1, 9)
        right = [rng.random() < 0.4 for _ in range(n)]
        scores = [rng.choice([0.1, 0.2, rng.random()]) for _ in range(n)]  # with ties
        answers = [rng.choice([0, 1, 2, None]) for _ in range(n)]
        yield n, right, scores, answers


def test_pass_at_is_the_share_of_subsets_with_a_right_response():
    for n in range(1, 8):
        for c, k in product(range(n + 1), range(1, n + 1)):
            assert pass_at(n, c, k) == pytest.approx(enumerated(n, k, lambda s, c=c: min(s) < c), abs=1e-12)
    assert 0 < pass_at(10_000, 1, 3) < 1e-3  # large counts stay exact
    assert pass_at(10_000, 9_999, 2) == 1.0


def best_wins(subset, scores, right):
    """The share of right responses among those of the highest score: ties are broken at random."""
    top = max(scores[i] for i in subset)
    return fmean(right[i] for i in subset if scores[i] == top)


def test_best_at_and_majority_at_are_expectations_over_subsets():
    for n, right, scores, answers in cases():
        for k in range(1, n + 1):
            best = enumerated(n, k, lambda s, scores=scores, right=right: best_wins(s, scores, right))
            votes = enumerated(n, k, lambda s, a=answers, r=right: majority_wins(s, a, r))
            assert best_at(scores, right, k) == pytest.approx(best, abs=1e-12)
            assert majority_at(answers, right, subsets_of(n, k)) == pytest.approx(votes, abs=1e-12)
        assert best_at(scores, right, 1) == pytest.approx(sum(right) / n)


def test_a_tie_between_answers_is_no_win_whatever_their_order():
    for answers in ([0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1]):
        right = [a == 0 for a in answers]
        assert majority_at(answers, right, subsets_of(4, 4)) == 0.0
    assert majority_at([0, 0, 1, None], [True, True, False, False], subsets_of(4, 4)) == 1.0  # no answer has no vote
    assert majority_at([None, None], [False, False], subsets_of(2, 2)) == 0.0


def test_random_subsets_come_near_all_of_them():
    right = [i % 3 == 0 for i in range(12)]
    answers = [0 if r else 1 + i % 4 for i, r in enumerate(right)]
    exact = majority_at(answers, right, subsets_of(12, 5))
    some = subsets_of(12, 5, seed=1, most=1)
    assert all(len(set(row)) == 5 for row in some[:200].tolist())
    assert majority_at(answers, right, some) == pytest.approx(exact, abs=0.03)
    assert np.array_equal(some, subsets_of(12, 5, seed=1, most=1))


def test_votes_are_equal_by_the_graders_rules_right_or_wrong():
    told = ["\\boxed{0.5}", "\\boxed{\\frac12}", "it is 7", "\\boxed{7}", "\\boxed{7.0}", "\\boxed{}"]
    assert answer_classes(told, Grader(reward="question_only")) == [0, 0, None, 1, 1, None]
    said = [f"</think> <answer>{text}</answer>" for text in ("It costs 18 dollars", "18", "19")]
    assert answer_classes(said, Grader(GradingConfig(extract="sentence"))) == [0, 0, 1]  # as they are graded
    assert answer_classes(said, Grader()) == [0, 1, 2]


def test_intervals_hold_their_values_and_problems_are_drawn_together():
    values = np.random.default_rng(0).random((40, 2))
    curves = with_intervals({"a": values, "b": values}, seed=0)
    assert curves["a"] == curves["b"]
    assert all(low < value < high for value, low, high in curves["a"])
    never = with_intervals({"a": np.zeros((40, 1)), "b": values[:, :1]}, seed=0)
    assert never["a"] == [(0.0, *wilson_interval(0, 40))]  # 40 failures are no proof that it cannot succeed


def test_the_first_samples_alone_are_an_evaluation_of_one_response_each():
    def sample(problem, right):
        grade = Grade(float(right), 1.0, float(right), "correct" if right else "wrong")
        return Sample(Response(f"p{problem}", [5], [1], [-0.1], "text", "stop"), grade)

    first, rest = [i < 3 for i in range(10)], [True, False]  # 3 of 10, though 13 of 30 in all
    samples = [sample(problem, right) for problem, one in enumerate(first) for right in (one, *rest)]
    alone = first_alone(samples, 3)
    assert alone["accuracy"] == 0.3
    assert alone["interval"] == pytest.approx(list(wilson_interval(3, 10)), abs=0.05)
    assert alone == first_alone(samples[::3], 1)


def test_nonsense_is_said_before_anything_is_sampled():
    for words, says in (
        (["n_list=[1,32]", "samples=16"], "samples=16"),
        (["n_list=[4,1]"], "rising order"),
        (["sampling.temperature=0"], "sampling.temperature=1"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_command_line(["algorithm=best_of_n", *words])
    assert load_scorer("operator:eq") is not None
    for name in ("nowhere:score", "operator:concat"):
        with pytest.raises(ConfigError, match=f"scorer={name}(: | fails on)"):
            load_scorer(name)
