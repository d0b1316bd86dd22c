"""The grader as its callers see it: formats, ground truths, settings, batches, metrics, and rewards of one's own."""

import json
import math
import subprocess
import sys
from fractions import Fraction
from importlib import metadata

import pytest
import verdicts
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from verdicts import FORMS, R1_ZERO_FORMAT, labelled_pairs, tagged

from rlreason.config.groups import GradingConfig
from rlreason.errors import ConfigError
from rlreason.evaluation import protocol
from rlreason.grading import Grader, question_only_reward_fn, r1_zero_reward_fn
from rlreason.grading.answers.compare import ComparisonSettings, decide_pair
from rlreason.grading.formats import FORMATS, boxed
from rlreason.grading.grader import GRADER_VERSION, grading_metrics, grading_warnings
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.types import Grade
from tests.waiting import patient


@pytest.fixture(scope="module")
def grader():
    with Grader(patient()) as shared:
        yield shared


def test_every_labelled_pair_is_graded_as_labelled(grader):
    rows = labelled_pairs()
    assert len({row[2:] for row in rows}) == len(rows) >= 400
    for section in {row[0] for row in rows}:
        assert {label for name, label, *_ in rows if name == section} == {True, False}, section
    grades = grader.grade_batch([tagged(row[2]) for row in rows], [row[3] for row in rows])
    failed = [
        (row, grade)
        for row, grade in zip(rows, grades, strict=True)
        if (grade.answer == 1.0) != row[1] or grade.outcome in ("error", "timeout")
    ]
    assert not failed
    different = [row for row in rows if not row[1]]
    swapped = grader.grade_batch([tagged(row[3]) for row in different], [row[2] for row in different])
    assert [row[2:] for row, grade in zip(different, swapped, strict=True) if grade.answer] == []


def test_the_recorded_verdicts_are_those_of_this_version_of_the_grader(grader):
    cases, recorded = verdicts.all_cases(), verdicts.read_record()
    now = verdicts.judge(cases, grader)
    assert verdicts.complaints(recorded, now, cases) == []
    assert now.version == recorded.version, "a new version: run python tests/verdicts.py"
    new = verdicts.unrecorded(recorded, cases)
    assert new == [], "cases without a verdict, which need no new version: run python tests/verdicts.py"
    assert protocol.grader_version() == f"{GRADER_VERSION}, math-verify {metadata.version('math-verify')}"


def test_rewards_are_format_answer_and_both():
    for response, formatted, right in R1_ZERO_FORMAT:
        expected = {"format_reward": formatted, "answer_reward": right, "reward": right}
        assert r1_zero_reward_fn(response, "38") == expected, response
    assert question_only_reward_fn(r"so \boxed{38}", "38")["reward"] == 1.0
    assert boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"  # printed braces close no box
    assert boxed(r"\boxed{\left\{ x \right.}") == r"\left\{ x \right."


def test_golds_of_every_kind():
    for gold in ("38", 38, 38.0, ["37", "38"], ["37", 38], [None, "38"], r"\boxed{38}"):
        assert r1_zero_reward_fn(tagged("38"), gold)["reward"] == 1.0, gold
    for gold in (None, (38,), {"a": 38}, [], [None], True, object(), "", "  ", b"38", math.nan, 10**5000):
        for answer in ("38", "", str(gold) if gold != 10**5000 else "1"):
            assert r1_zero_reward_fn(tagged(answer), gold)["reward"] == 0.0, gold
    assert [r1_zero_reward_fn(tagged(text), math.inf)["reward"] for text in (r"\infty", r"-\infty")] == [1.0, 0.0]
    golds = ["38", r"\frac{1}{2}", "", None, "east", ["38", "39"], "  "]
    assert Grader(symbolic=False).unearnable(golds) == [2, 3, 6]


def test_batches_keep_order_count_repeats_and_unequal_lengths_are_the_callers_mistake():
    with Grader(patient()) as fresh:
        answers = [str(index % 7) for index in range(70)]
        grades = fresh.grade_batch([tagged(answer) for answer in answers], ["3"] * 70)
        assert [grade.reward for grade in grades] == [float(answer == "3") for answer in answers]
        assert grading_metrics(grades)["grading/cache_hit_rate"] == pytest.approx(63 / 70)
        assert grading_metrics(fresh.grade_batch([tagged("3")], ["3"]))["grading/cache_hit_rate"] == 1.0
        with pytest.raises(ValueError, match="2 responses and 1 ground truths"):
            fresh.grade_batch(["a", "b"], ["1"])


def test_metrics_count_what_happened():
    with Grader(patient()) as fresh:
        grades = fresh.grade_batch([tagged("38"), tagged("39"), "no tags", tagged("9^9^9^9")], ["38"] * 4)
        grades += fresh.grade_batch([tagged("38"), None], [None, "38"])
        metrics = grading_metrics(grades)
    assert (grades[3].outcome, grades[3].reward, grades[3].format) == ("refused", 0.0, 1.0)  # not plain wrong
    counted = {"responses": 6, "format_rate": 4 / 6, "answer_rate": 1 / 6, "answer_given_format": 1 / 4, "refusals": 1}
    for name, value in (counted | {"bad_golds": 1, "bad_responses": 1, "path/text": 1 / 6}).items():
        assert metrics[f"grading/{name}"] == pytest.approx(value), name
    assert sum(value for name, value in metrics.items() if "/path/" in name) == pytest.approx(1)
    assert any("no usable ground truth" in warning for warning in grading_warnings(grades))
    assert (grading_metrics([]), grading_warnings([])) == ({}, [])


def test_surface_forms_of_numbers_are_graded_without_the_symbolic_library():
    program = "import sys, rlreason.grading; print({'sympy', 'math_verify', 'torch', 'mpmath'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
    numbers = [str(17 * index % 1009) for index in range(2000)]
    responses = [tagged(FORMS[index % len(FORMS)].format(number)) for index, number in enumerate(numbers)]
    with Grader(patient()) as fresh:
        grades = fresh.grade_batch(responses, numbers)
    assert all(grade.reward == 1.0 for grade in grades)
    assert {grade.path for grade in grades} <= {"text", "number", "structure"}  # no worker was asked


def test_wrong_settings_and_rewards_are_named():
    for wrong in ({"extract": "loose"}, {"correct_at": 0}):  # ranges: tests/test_ranges.py
        with pytest.raises(ConfigError, match=rf"^grading\.{next(iter(wrong))}="):
            Grader(GradingConfig(**wrong))
    for reward in ("r1", ":f", "mine:"):
        with pytest.raises(ConfigError, match=f"^reward={reward} "):
            Grader(reward=reward)
    assert tuple(FORMATS) == NAMED_REWARDS  # one table here, its names in the settings


def test_one_answer_is_read_and_compared_by_the_settings_without_a_worker():
    sentences = Grader(GradingConfig(extract="last_number", percent=False))
    assert sentences.read("</think> <answer>She sold 38 clips</answer>").candidates == ("She sold 38 clips", "38")
    assert sentences.same("She sold 38 clips today", "38")
    assert [one.same("38%", "38") for one in (sentences, Grader())] == [False, True]
    assert not Grader().same(r"\int_0^1 x\,dx", "0.5")  # only the symbolic library could tell
    assert sentences._pool._server is None
    read = Grader().read("</think> <answer>1</answer> so")
    assert (read.formatted, read.answer, bool(read.reason)) == (True, None, True)
    with pytest.raises(ValueError, match="mine:reward"):
        Grader(reward="mine:reward").read("1")


PLUGGED_IN = [  # response, outcome, path, reward
    ("ab", "correct", "plugin", 1.0),
    ("abc", "wrong", "plugin", 0.0),
    ("hang", "timeout", "plugin", 0.0),
    ("ab", "correct", "plugin", 1.0),
    ("raise", "error", "plugin", 0.0),
    ("exit", "error", "killed", 0.0),
    ("None", "error", "plugin_value", 0.0),
    ("nan", "error", "plugin_value", 0.0),
    ("text", "error", "plugin_value", 0.0),
    ("dict", "wrong", "plugin", 0.5),
    ("memory", "error", "killed", 0.0),
    ("xy", "correct", "plugin", 1.0),
]


def test_a_plug_in_runs_in_the_pool_and_its_failures_are_told_apart(tmp_path):
    log = tmp_path / "log" / "incidents.jsonl"
    with Grader(patient(timeout_s=5.0), "own_reward:by_length", log) as fresh:
        grades = fresh.grade_batch([response for response, *_ in PLUGGED_IN], ["12"] * len(PLUGGED_IN))
        assert [(grade.outcome, grade.path, grade.reward) for grade in grades] == [case[1:] for case in PLUGGED_IN]
        metrics = grading_metrics(grades)
        assert (metrics["grading/timeouts"], metrics["grading/kills"], metrics["grading/errors"]) == (1, 2, 4)
        assert len(fresh.warnings(grades)) == 3
    statuses = [json.loads(line)["status"] for line in log.read_text().splitlines()]
    assert sorted(statuses) == ["error"] * 4 + ["killed", "killed", "timeout"]
    with Grader(patient(), "own_reward:no_such_function") as fresh:
        assert fresh.grade_batch(["a"], ["b"])[0].outcome == "error"
        assert "no_such_function" in fresh.broken


def test_partial_credit_is_a_reward_and_no_right_answer():
    def pays(response: str, gold: str) -> dict[str, float]:
        return {"reward": float(response), "format_reward": 1.0}

    with Grader(patient(), pays) as whole, Grader(patient(correct_at=0.5), pays) as half:
        outcomes = [
            [g.outcome for g in one.grade_batch(["0.1", "0.5", "0.9999999999"], [""] * 3)] for one in (whole, half)
        ]
    assert outcomes == [["wrong", "wrong", "correct"], ["wrong", "correct", "correct"]]
    assert "gives up to 1.5" in whole.warnings([Grade(1.0, 1.5, 1.5, "correct", "plugin")])[0]
    assert half.warnings([Grade(1.0, 1.5, 1.5, "correct", "plugin")]) == []
    assert "grading.correct_at" in half.warnings([Grade(1.0, 0.4, 0.4, "wrong", "plugin")])[0]


DEFAULT = ComparisonSettings()
numbers = st.fractions(min_value=-2000, max_value=2000, max_denominator=60)
wholes = st.integers(min_value=-(10**7), max_value=10**7)


def right(answer: str, gold: str) -> bool:
    verdict = decide_pair(answer, gold, DEFAULT)
    assert verdict is None or verdict.outcome != "error", (answer, gold, verdict)
    return verdict is not None and verdict.outcome == "correct"


@st.composite
def spelled_fraction(draw, value: Fraction) -> str:
    """One way to write a fraction: reduced or not, plain or LaTeX, mixed, or as a decimal where it ends."""
    factor = draw(st.integers(min_value=1, max_value=6))
    top, bottom = abs(value.numerator) * factor, value.denominator * factor
    forms = [f"\\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", f"\\dfrac{{ {top} }}{{ {bottom} }}"]
    if top < 10 and bottom < 10:
        forms.append(f"\\frac{top}{bottom}")
    if value.denominator > 1 and abs(value) > 1:
        whole, rest = divmod(abs(value.numerator), value.denominator)
        forms += [f"{whole}\\frac{{{rest}}}{{{value.denominator}}}", f"{whole} {rest}/{value.denominator}"]
    scaled = abs(value) * 10**6
    if scaled.denominator == 1:
        forms += [f"{int(scaled) // 10**6}.{int(scaled) % 10**6:06d}", f"{int(scaled)}e-6"]
    return ("-" if value < 0 else "") + draw(st.sampled_from(forms))


@st.composite
def dressed(draw, text: str) -> str:
    """The same text in the wrappers, fonts and spaces that models use, each at most once."""
    forms = ["\\left({}\\right)", "{} \\,", "x = {}", "\\({}\\)", " {} ", "\\boxed{{{}}}", "${}$", "**{}**", "{}."]
    chosen = draw(st.sets(st.integers(0, len(forms) - 1), max_size=2))
    for index in sorted(chosen):  # from the inside out
        text = forms[index].format(text)
    return text.replace("-", draw(st.sampled_from(["-", "-", "\u2212"])))


WHOLE = ["{0}", "{0:,}", "{0}.00", "{0}~clips", "{0}\\text{{~kg}}", "\\${0}", "${0:,}", "{0}~dollars", "\\$~{0}"]


def spelled_whole(value: int) -> st.SearchStrategy[str]:
    """Thousands groups, money, units, trailing zeros."""
    size, sign = abs(value), "-" if value < 0 else ""
    grouped = f"{size:,}"
    forms = [form.format(size).replace("~", " ") for form in WHOLE]
    return st.sampled_from([sign + form for form in [*forms, grouped.replace(",", "{,}"), grouped.replace(",", " ")]])


@settings(max_examples=300)
@given(st.data(), numbers, numbers)
def test_fractions(data, value, other):
    assume(value != other)
    answer = data.draw(spelled_fraction(value).flatmap(dressed))
    assert right(answer, data.draw(spelled_fraction(value)))
    assert not right(answer, data.draw(spelled_fraction(other)))


@settings(max_examples=200)
@given(st.data(), wholes, st.integers(min_value=-1000, max_value=1000).filter(bool))
def test_whole_numbers(data, value, change):
    answer = data.draw(spelled_whole(value))
    assert right(answer, str(value))
    assert not right(answer, str(value + change))
    assert not right(answer, data.draw(spelled_whole(-value - (value == 0))))


@settings(max_examples=150)
@given(st.data(), st.lists(numbers, min_size=2, max_size=4, unique=True), numbers)
def test_lists_sets_and_tuples(data, values, other):
    assume(other not in values)
    texts = [data.draw(spelled_fraction(value)) for value in values]
    shuffled = data.draw(st.permutations(values))
    respelled = [data.draw(spelled_fraction(value)) for value in shuffled]
    changed = [data.draw(spelled_fraction(value)) for value in [other, *values[1:]]]
    for form in ("{}", "\\{{{}\\}}"):
        gold = form.format(", ".join(texts))
        assert right(", ".join(respelled), gold)
        assert right("\\{" + ", ".join(respelled) + "\\}", gold)
        assert not right(", ".join(changed), gold)
        assert not right(", ".join(respelled[1:]), gold)
    pair = f"({', '.join(texts)})"
    again = f"\\left({','.join(data.draw(spelled_fraction(value)) for value in values)}\\right)"
    assert right(again, pair)
    assert right(f"({', '.join(respelled)})", pair) == (shuffled == values)
    assert not right(f"({', '.join(changed)})", pair)


TERMS = st.lists(st.tuples(st.integers(-9, 9).filter(bool), st.integers(0, 4)), min_size=1, max_size=4)


def polynomial(terms: list[tuple[int, int]]) -> str:
    return "+".join(f"({factor})x^{{{power}}}" if power else f"({factor})" for factor, power in terms)


def collected(terms: list[tuple[int, int]]) -> dict[int, int]:
    sums = {power: sum(factor for factor, own in terms if own == power) for _, power in terms}
    return {power: total for power, total in sums.items() if total}


@settings(max_examples=150)
@given(TERMS, TERMS, st.randoms(use_true_random=False))
def test_polynomials(terms, others, source):
    shuffled = source.sample(terms, len(terms))
    assert right(polynomial(shuffled), polynomial(terms))
    assert right(f"({polynomial(shuffled)})/2", f"\\frac{{{polynomial(terms)}}}{{2}}")
    assert right(polynomial(others), polynomial(terms)) == (collected(others) == collected(terms))


@settings(max_examples=150)
@given(st.integers(1, 30), st.integers(2, 30), st.integers(1, 30), st.integers(2, 30), st.integers(-9, 9))
def test_radicals(outer, inner, outer2, inner2, added):
    first = f"{added}+{outer}\\sqrt{{{inner}}}"
    assert right(f"\\sqrt{{{outer * outer * inner}}}+{added}", first)
    assert right(f"{added}+\\frac{{{outer * inner}}}{{\\sqrt{{{inner}}}}}", first)
    equal = outer * outer * inner == outer2 * outer2 * inner2
    assert right(f"{added}+{outer2}\\sqrt{{{inner2}}}", first) == equal


BOUNDS = st.tuples(numbers, numbers).filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=150)
@given(st.data(), BOUNDS, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_intervals_and_inequalities(data, bounds, left, right_closed, left2, right2):
    low, high = (data.draw(spelled_fraction(bound)) for bound in bounds)
    low2, high2 = (data.draw(spelled_fraction(bound)) for bound in bounds)
    opening, closing = "[" if left else "(", "]" if right_closed else ")"
    signs = ["\\le" if closed else "<" for closed in (left2, right2)]
    interval = f"{opening}{low},{high}{closing}"
    inequality = f"{low2} {signs[0]} x {signs[1]} {high2}"
    same_ends = (left, right_closed) == (left2, right2)
    assert right(inequality, interval) == same_ends
    assert right(interval, inequality) == same_ends
    assert right(f"x\\in {interval}", interval)


ALPHABET = st.sampled_from([*"0123456789xyei+-*/^_(){}[],.:;|!%$=<>' \\", "\\frac", "\\sqrt", "\\pm", "\\le", "\\pi"])
ANY_GOLD = st.text(max_size=20) | st.sampled_from(["38", r"\sqrt2", "x+1", "(1,2)", "[0,1)"])


@settings(max_examples=800)
@given(st.text(max_size=40) | st.lists(ALPHABET, max_size=30).map("".join), ANY_GOLD)
def test_no_text_is_an_error_and_every_text_is_itself(answer, gold):
    assert right(answer, gold) in (True, False)
    assert right(gold, gold) == bool(gold.strip())
