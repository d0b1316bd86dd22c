"""What was made cheaper gives the same results as the plain way, which is written out here."""

import random

import pytest

from rlreason.config.groups import GradingConfig
from rlreason.evaluation.accuracy import answer_classes
from rlreason.grading import Grader
from rlreason.model.packing import within_budget


def first_fit(sizes: list[int], budget: int, max_rows: int | None, rows: list[int]) -> list[list[int]]:
    """First fit decreasing, looking at every bin."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for held in bins:
            fits = sum(sizes[i] for i in held) + sizes[index] <= budget
            if fits and (max_rows is None or sum(rows[i] for i in held) + rows[index] <= max_rows):
                held.append(index)
                break
        else:
            bins.append([index])
    return bins


@pytest.mark.parametrize("seed", range(20))
def test_bins_are_those_of_plain_first_fit(seed):
    source = random.Random(seed)
    count, most = source.choice((0, 1, 2, 17, 64, 65, 150)), source.choice((3, 50, 130))
    sizes = [source.randint(0, most) for _ in range(count)]
    rows = [source.randint(1, 4) for _ in sizes]
    for budget, max_rows in ((100, None), (source.randint(-5, 120), source.choice((0, 1, 2, 5)))):
        assert within_budget(sizes, budget, max_rows) == first_fit(sizes, budget, max_rows, [1] * count)
        assert within_budget(sizes, budget, max_rows, rows) == first_fit(sizes, budget, max_rows, rows)


def every_pair(texts: list[str], grader: Grader) -> list[int | None]:
    """The classes of answers, each compared with the first of every class by the grader's rules."""
    firsts: list[str] = []
    classes: list[int | None] = []
    for read in map(grader.read, texts):
        if read.answer is None or not read.answer.strip():
            classes.append(None)
            continue
        place = next((place for place, first in enumerate(firsts) if grader.same(read.answer, first)), len(firsts))
        if place == len(firsts):
            firsts.append(read.candidates[-1])
        classes.append(place)
    return classes


#: {a} and {b} are small numbers: some forms say the same, some nearly, some nothing that can be read.
FORMS = (
    "{a}", "{a}.0", "+{a}", "{a}.{b}", r"\frac{{{a}}}{{{b}}}", "{a}/{b}", r"{a}\sqrt{{{b}}}", "{a}^{b}",
    "x+{a}", "{a}+x", "x^2+{a}x", "x({a}+x)", "{a} cm", "{a}0 mm", "{a}%", "0.0{a}", r"\pm {a}", "{a}i", "b", "(B)",
    "({a},{b})", "[{a},{b})", r"\{{{b},{a}\}}", "x={a}", "x>{a}", "{a}:{b}", r"{a}\pi", "1{a}00", "{a} 1/{b}",
    "0.333", "0.33", "1/3", "10^{{-{a}0}}", "three", "no idea", "it is {a}.", r"\text{{{a}}}", r"\int_0^{a} x",
)  # fmt: skip


def answers(seed: int, count: int) -> list[str]:
    source = random.Random(seed)
    return [source.choice(FORMS).format(a=source.randint(1, 4), b=source.randint(1, 4)) for _ in range(count)]


@pytest.mark.parametrize("grading", [GradingConfig(), GradingConfig(extract="sentence", rel_tol=0.05)])
@pytest.mark.parametrize("seed", range(3))
def test_classes_of_answers_are_those_of_comparing_every_pair(seed, grading):
    grader = Grader(grading)
    texts = [f"</think> <answer>{answer}</answer>" for answer in answers(seed, 90)] + ["nothing"]
    classes = answer_classes(texts, grader)
    assert classes == every_pair(texts, grader)
    assert 20 < len(set(classes)) < 85
