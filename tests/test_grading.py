"""The grader as its callers see it: formats, ground truths, settings, batches, metrics, and rewards of one's own."""

import json
import math
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
from rlreason.grading.answers.compare import decide_pair
from rlreason.grading.formats import FORMATS, boxed
from rlreason.grading.grader import GRADER_VERSION, grading_metrics
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.types import Grade
from tests.waiting import patient


@pytest.fixture(scope="module")
def grader():
    with Grader(patient(workers=2)) as shared:  # whose replies come in any order
        yield shared


def is_slow(text: str) -> bool:
    """Whether the symbolic library takes long to tell what is the same."""
    return "\\int" in text or "\\infty" in text


@pytest.mark.parametrize("one_in", [4, pytest.param(1, marks=pytest.mark.long)])
def test_every_labelled_pair_is_graded_as_labelled(grader, one_in):
    """Bug: a wrong twin (without its sign, unit, bracket or digits) is right, or an answer's other spelling wrong."""
    rows = labelled_pairs()
    assert len({row[2:] for row in rows}) == len(rows) >= 400
    slow = [row for row in rows if is_slow(row[2])]
    rows = [row for row in rows if row not in slow] + slow[::one_in]
    grades = grader.grade_batch([tagged(row[2]) for row in rows], [row[3] for row in rows])
    failed = [row for row, grade in zip(rows, grades, strict=True) if (grade.answer == 1.0) != row[1]]
    failed += [row for row, grade in zip(rows, grades, strict=True) if grade.outcome in ("error", "timeout")]
    different = [row for row in rows if not row[1]][::one_in]
    swapped = grader.grade_batch([tagged(row[3]) for row in different], [row[2] for row in different])
    assert failed + [row for row, grade in zip(different, swapped, strict=True) if grade.answer] == []


@pytest.mark.parametrize("one_in", [8, pytest.param(1, marks=pytest.mark.long)])
def test_the_recorded_verdicts_are_those_of_this_version_of_the_grader(grader, one_in):
    """Bug: accuracies of two graders are compared as if one had judged."""
    cases = verdicts.all_cases()
    slow = [case for case in cases if is_slow(case.response + case.gold)]
    some = [case for case in cases if case not in slow] + slow[::one_in]
    changed = verdicts.changed(verdicts.judge(some, grader), some)
    assert changed == [], "raise GRADER_VERSION, then run python tests/verdicts.py"
    version, *lines = verdicts.RECORD.read_text().splitlines()
    assert version == f"version {GRADER_VERSION}"
    assert [line[:10] for line in lines] == sorted(case.key for case in cases), "run python tests/verdicts.py"
    assert protocol.grader_version() == f"{GRADER_VERSION}, math-verify {metadata.version('math-verify')}"


def test_rewards_are_format_answer_and_both():
    """Bug: the reward of a format that the handout's prompt does not ask for; a box that printed braces close."""
    for response, formatted, right in R1_ZERO_FORMAT:
        expected = {"format_reward": formatted, "answer_reward": right, "reward": right}
        assert r1_zero_reward_fn(response, "38") == expected, response
    assert question_only_reward_fn(r"so \boxed{38}", "38")["reward"] == 1.0
    assert boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"  # printed braces close no box
    assert boxed(r"\boxed{\left\{ x \right.}") == r"\left\{ x \right."


def test_golds_of_every_kind():
    """Bug: an answer equal to Python's text of a null, a list or an object is right."""
    for gold in ("38", 38, 38.0, ["37", "38"], ["37", 38], [None, "38"], r"\boxed{38}"):
        assert r1_zero_reward_fn(tagged("38"), gold)["reward"] == 1.0, gold
    for gold in (None, (38,), {"a": 38}, [], [None], True, object(), "", "  ", b"38", math.nan, 10**5000):
        for answer in ("38", "", "" if gold == 10**5000 else str(gold)):
            assert r1_zero_reward_fn(tagged(answer), gold)["reward"] == 0.0, gold
    assert [r1_zero_reward_fn(tagged(text), math.inf)["reward"] for text in (r"\infty", r"-\infty")] == [1.0, 0.0]


def test_batches_keep_order_count_repeats_and_unequal_lengths_are_the_callers_mistake(grader):
    """Bug: a cached grade goes to another response, or its repeat is not counted."""
    answers = [str(index % 7) for index in range(70)]
    grades = grader.grade_batch([tagged(answer) for answer in answers], ["3.5e0"] * 70)
    assert [grade.reward for grade in grades] == [0.0] * 70
    assert grading_metrics(grades)["grading/cache_hit_rate"] == pytest.approx(63 / 70)
    again = grader.grade_batch([tagged("3"), tagged("7/2")], ["3.5e0"] * 2)
    assert [(grade.reward, grade.remembered) for grade in again] == [(0.0, True), (1.0, False)]
    with pytest.raises(ValueError, match="2 responses and 1 ground truths"):
        grader.grade_batch(["a", "b"], ["1"])


def test_metrics_count_what_happened(grader):
    """Bug: a failure of the grader counts as a wrong answer, and nobody hears of it."""
    grades = grader.grade_batch([tagged("38"), tagged("39"), "no tags", tagged("9^9^9^9")], ["38"] * 4)
    grades += grader.grade_batch([tagged("38"), None], [None, "38"])
    metrics = grading_metrics(grades)
    assert (grades[3].outcome, grades[3].reward, grades[3].format) == ("refused", 0.0, 1.0)  # not plain wrong
    counted = {"responses": 6, "format_rate": 4 / 6, "answer_rate": 1 / 6, "answer_given_format": 1 / 4, "refusals": 1}
    for name, value in (counted | {"bad_golds": 1, "bad_responses": 1, "path/text": 1 / 6}).items():
        assert metrics[f"grading/{name}"] == pytest.approx(value), name
    assert sum(value for name, value in metrics.items() if "/path/" in name) == pytest.approx(1)
    assert any("no usable ground truth" in warning for warning in grader.warnings(grades))
    assert (grading_metrics([]), grader.warnings([])) == ({}, [])


def test_surface_forms_of_numbers_are_graded_without_the_symbolic_library(grader):
    """Bug: common answers that wait for a worker."""
    numbers = [str(17 * index % 1009) for index in range(2000)]
    responses = [tagged(FORMS[index % len(FORMS)].format(number)) for index, number in enumerate(numbers)]
    grades = grader.grade_batch(responses, numbers)
    assert {(grade.reward, grade.path) for grade in grades} <= {(1.0, path) for path in ("text", "number", "structure")}


def test_wrong_settings_and_rewards_are_named():
    """Bug: a misspelled reward is found when the first response is graded."""
    for wrong in ({"extract": "loose"}, {"correct_at": 0}):
        with pytest.raises(ConfigError, match=rf"^grading\.{next(iter(wrong))}="):
            Grader(GradingConfig(**wrong))
    for reward in ("r1", ":f", "mine:"):
        with pytest.raises(ConfigError, match=f"^reward={reward} "):
            Grader(reward=reward)
    assert tuple(FORMATS) == NAMED_REWARDS  # one table here, its names in the settings


def test_one_answer_is_read_and_compared_by_the_settings_without_a_worker():
    """Bug: `same` ignores `grading.percent`, or starts processes."""
    sentences = Grader(GradingConfig(extract="last_number", percent=False))
    assert sentences.read("</think> <answer>She sold 38 clips</answer>").candidates == ("She sold 38 clips", "38")
    assert sentences.same("She sold 38 clips today", "38")
    for answer in ("it is \u221238 degrees", r"-\$38", r"38\pi", r"\sqrt{38}", "x > 38", "38!", "38 thousand"):
        assert not sentences.same(answer, "38"), answer
    for answer in ("She sold 38 clips!", "<b>38</b> clips", "the answer - 38 clips", "38 (a dozen less than Bob)"):
        assert sentences.same(answer, "38"), answer
    assert [one.same("38%", "38") for one in (sentences, Grader())] == [False, True]
    assert not Grader().same(r"\int_0^1 x\,dx", "0.5")  # only the symbolic library could tell
    assert sentences._pool._server is None
    read = Grader().read("</think> <answer>1</answer> so")
    assert (read.formatted, read.answer, bool(read.reason)) == (True, None, True)
    with pytest.raises(ValueError, match="mine:reward"):
        Grader(reward="mine:reward").read("1")


PLUGGED_IN = """
    ab correct plugin 1.0, abc wrong plugin 0.0, hang timeout plugin 0.0, ab correct plugin 1.0, raise error plugin 0.0,
    exit error killed 0.0, None error plugin_value 0.0, nan error plugin_value 0.0, text error plugin_value 0.0,
    dict wrong plugin 0.5, memory error killed 0.0, xy correct plugin 1.0
"""  # response, outcome, path, reward


def test_a_plug_in_runs_in_the_pool_and_its_failures_are_told_apart(tmp_path):
    """Bug: a reward that hangs, ends its process or returns no number takes the run or its neighbours along."""
    log = tmp_path / "log" / "incidents.jsonl"
    with Grader(patient(timeout_s=3.0), "own_reward:by_length", log) as fresh:
        cases = [case.split() for case in PLUGGED_IN.split(",")]
        grades = fresh.grade_batch([response for response, *_ in cases], ["12"] * len(cases))
        assert [[grade.outcome, grade.path, str(grade.reward)] for grade in grades] == [case[1:] for case in cases]
        metrics = grading_metrics(grades)
        assert (metrics["grading/timeouts"], metrics["grading/kills"], metrics["grading/errors"]) == (1, 2, 4)
        assert len(fresh.warnings(grades)) == 3
    statuses = [json.loads(line)["status"] for line in log.read_text().splitlines()]
    assert sorted(statuses) == ["error"] * 4 + ["killed", "killed", "timeout"]
    with Grader(patient(), "own_reward:no_such_function") as fresh:
        assert fresh.grade_batch(["a"], ["b"])[0].outcome == "error"
        assert "no_such_function" in fresh.wait()


def test_partial_credit_is_a_reward_and_no_right_answer():
    """Bug: an accuracy that counts partial credit, or no warning where nothing or all can be right."""

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


DEFAULT = GradingConfig()
numbers = st.fractions(min_value=-2000, max_value=2000, max_denominator=60)


def right(answer: str, gold: str) -> bool:
    verdict = decide_pair(answer, gold, DEFAULT)
    assert verdict is None or verdict.outcome != "error", (answer, gold, verdict)
    return verdict is not None and verdict.outcome == "correct"


@st.composite
def spelled(draw, value: Fraction) -> str:
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


WRAPPERS = ["\\left({}\\right)", "{} \\,", "x = {}", "\\({}\\)", " {} ", "\\boxed{{{}}}", "${}$", "**{}**", "{}."]


@st.composite
def dressed(draw, text: str) -> str:
    """The same text in the wrappers, fonts and spaces that models use, each at most once, from the inside out."""
    for index in sorted(draw(st.sets(st.integers(0, len(WRAPPERS) - 1), max_size=2))):
        text = WRAPPERS[index].format(text)
    return text.replace("-", draw(st.sampled_from("-\u2212")))


@settings(max_examples=100)
@given(st.data(), numbers, numbers)
def test_fractions(data, value, other):
    """Bug: a spelling or wrapper that changes a number, or makes two of them equal."""
    assume(value != other)
    answer = data.draw(spelled(value).flatmap(dressed))
    assert right(answer, data.draw(spelled(value)))
    assert not right(answer, data.draw(spelled(other)))


@settings(max_examples=50)
@given(st.data(), st.lists(numbers, min_size=2, max_size=4, unique=True), numbers)
def test_lists_sets_and_tuples(data, values, other):
    """Bug: an order that counts in a set or not in a tuple; a member that is left over."""
    assume(other not in values)
    texts = [data.draw(spelled(value)) for value in values]
    shuffled = data.draw(st.permutations(values))
    respelled = [data.draw(spelled(value)) for value in shuffled]
    changed = [data.draw(spelled(value)) for value in [other, *values[1:]]]
    for form in ("{}", "\\{{{}\\}}"):
        gold = form.format(", ".join(texts))
        assert right(", ".join(respelled), gold)
        assert right("\\{" + ", ".join(respelled) + "\\}", gold)
        assert not right(", ".join(changed), gold)
        assert not right(", ".join(respelled[1:]), gold)
    pair = f"({', '.join(texts)})"
    again = f"\\left({','.join(data.draw(spelled(value)) for value in values)}\\right)"
    assert right(again, pair)
    assert right(f"({', '.join(respelled)})", pair) == (shuffled == values)
    assert not right(f"({', '.join(changed)})", pair)


TERMS = st.lists(st.tuples(st.integers(-9, 9).filter(bool), st.integers(0, 4)), min_size=1, max_size=4)


def polynomial(terms: list[tuple[int, int]]) -> str:
    return "+".join(f"({factor})x^{{{power}}}" if power else f"({factor})" for factor, power in terms)


@settings(max_examples=50)
@given(TERMS, TERMS, st.randoms(use_true_random=False))
def test_polynomials(terms, others, source):
    """Bug: terms that are compared as texts, or powers as factors."""
    shuffled = source.sample(terms, len(terms))
    assert right(polynomial(shuffled), polynomial(terms))
    assert right(f"({polynomial(shuffled)})/2", f"\\frac{{{polynomial(terms)}}}{{2}}")
    sums = [[sum(factor for factor, own in side if own == power) for power in range(5)] for side in (terms, others)]
    assert right(polynomial(others), polynomial(terms)) == (sums[0] == sums[1])


BOUNDS = st.tuples(numbers, numbers).filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=50)
@given(st.data(), BOUNDS, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_intervals_and_inequalities(data, bounds, left, right_closed, left2, right2):
    """Bug: an open end that is a closed one."""
    low, high = (data.draw(spelled(bound)) for bound in bounds)
    low2, high2 = (data.draw(spelled(bound)) for bound in bounds)
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


@settings(max_examples=250)
@given(st.text(max_size=40) | st.lists(ALPHABET, max_size=30).map("".join), ANY_GOLD)
def test_no_text_is_an_error_and_every_text_is_itself(answer, gold):
    """Bug: an exception of a rule, which would count as an error of the grader."""
    assert right(answer, gold) in (True, False)
    assert right(gold, gold) == bool(gold.strip())
