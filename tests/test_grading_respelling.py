"""Any respelling of a value is accepted, any other value refused: both are drawn from a grammar."""

from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlreason.grading.answers.compare import ComparisonSettings, decide_pair

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
GOLDS = st.text(max_size=20) | st.sampled_from(["38", r"\sqrt2", "x+1", "(1,2)", "[0,1)"])


@settings(max_examples=800)
@given(st.text(max_size=40) | st.lists(ALPHABET, max_size=30).map("".join), GOLDS)
def test_no_text_is_an_error_and_every_text_is_itself(answer, gold):
    assert right(answer, gold) in (True, False)
    assert right(gold, gold) == bool(gold.strip())
