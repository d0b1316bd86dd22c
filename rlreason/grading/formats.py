"""Extract the answer that a response states: from tags, from a box and, optionally, from a sentence.

The table `FORMATS` has the two formats of the handout's prompts. Whether an answer is right is decided elsewhere.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

THINK_TO_ANSWER = "</think> <answer>"
OPEN, CLOSE = "<answer>", "</answer>"

_NUMBER = re.compile(
    r"(?<![\w.])(?:-|\u2013|\u2212\s*)?(?:\\?\$)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?(?![\w])"
)
_FORMULA = re.compile(  # more than its only number
    r"\\(?!text|math|mbox)[a-z]|[\^\u221a\u2264\u2265]|\d!|(?:^|\w )[<>] ?-?\d"
    r"|\d,? (?:hundred|thousand|(?:m|b|tr)illion|dozen)s?\b",
    re.I,
)
_HEDGE = re.compile(r"\b(?:or|not|maybe|perhaps|possibly|either|neither|wrong|incorrect|unknown|unsure)\b|n't\b", re.I)
_STATED = re.compile(r"(?:\b(?:is|are|equals|be)\b|[=:])\s*", re.I)


_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_UNBRACED = re.compile(
    r"(?:\s*(?=[-+]?(?:\\\$)?(?:\.?\d|\\[A-Za-z]|\())|\s+(?=[A-Za-z](?![A-Za-z])))"  # the beginning of its content
    rf"((?:\\[^)\]]|{_BRACES}|[^\s$\\{{}}])+)"
)
_SIGN = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character is no bracket
SHOWN_CHARS = 60
UNREAD = "no answer can be read"


class Extracted(NamedTuple):
    """The answer of a response. `answer` is None where the format is wrong, or without an answer.

    `reason` is then the mistake, always in the same words, and `detail` the text found instead.
    """

    formatted: bool
    answer: str | None
    reason: str = ""
    detail: str = ""
    candidates: tuple[str, ...] = ()  # the texts that may state the answer, by the grader's settings


class Format(NamedTuple):
    """`read` extracts the answer of a response; `written` is the template of a response with an answer."""

    read: Callable[[str], Extracted]
    written: str


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None when there is none or it never closes.

    Printed braces `\{` and `\}` are not brackets. Without braces, as in `\boxed 5`, it is the number, letter or
    command that follows, up to white space or the end of the formula.

    >>> boxed(r"so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> boxed(r"$\boxed 38$"), boxed(r"\boxed{1"), boxed(r"the \boxed environment")
    ('38', None, None)
    """
    _, found, rest = text.rpartition("\\boxed")
    if not found:
        return None
    if not rest.lstrip().startswith("{"):
        unbraced = _UNBRACED.match(rest)
        return unbraced and unbraced[1]
    depth = 0
    for sign in _SIGN.finditer(rest):
        depth += (sign[0] == "{") - (sign[0] == "}")
        if not depth:
            return rest[: sign.start()].lstrip()[1:]
    return None


def r1_zero(response: str) -> Extracted:
    """Read an answer after `</think> <answer>`, with exactly one space, up to a `</answer>` that ends the response.

    >>> r1_zero("so 4 </think> It is <answer>4</answer>")[2:4]
    ('not exactly one space between </think> and <answer>', "' It is '")
    """
    _, opening, behind = response.partition(THINK_TO_ANSWER)
    if CLOSE not in behind:
        reason, detail = "no </answer>", ""
        if "</think>" not in response:
            reason = "no </think>"
        elif "<answer" not in response:
            reason = "no <answer> tag"
        elif not opening:
            reason = "not exactly one space between </think> and <answer>"
            between = response.partition("</think>")[2].partition("<answer")[0]
            detail = repr(between[:SHOWN_CHARS])
        return Extracted(False, None, reason, detail)
    answer, closing, rest = response.rpartition(OPEN)[2].partition(CLOSE)
    if not closing or rest.replace(CLOSE, "").strip():
        return Extracted(True, None, UNREAD, "text behind </answer>")
    if "\\boxed" not in answer:
        return Extracted(True, answer)
    inner = boxed(answer)
    return Extracted(True, inner) if inner is not None else Extracted(True, None, UNREAD, "\\boxed is never closed")


def question_only(response: str) -> Extracted:
    r"""Read the last `\boxed{...}`, anywhere in the response.

    >>> question_only("so it is 4").reason
    'no \\boxed{}'
    """
    answer = boxed(response)
    if answer is not None:
        return Extracted(True, answer)
    return Extracted(False, None, "\\boxed is never closed" if "\\boxed" in response else "no \\boxed{}")


FORMATS = {
    "r1_zero": Format(r1_zero, "</think> <answer>{}</answer>"),
    "question_only": Format(question_only, "\\boxed{{{}}}"),
}


def candidates(answer: str, extract: str) -> list[str]:
    """Return the texts that may state the answer, the whole text first; more than one only beyond `strict`.

    These are its only number, where it is no formula; with `sentence` also its only formula between dollars, or the
    text after its last `is`, `=` or `:`.
    """
    if extract == "strict" or _HEDGE.search(answer):
        return [answer]
    texts = [answer]
    numbers = set(_NUMBER.findall(answer))
    if len(numbers) == 1 and not _FORMULA.search(answer):
        texts += numbers
    if extract == "sentence":
        formulas = re.findall(r"\$([^$]+)\$", answer)
        if len(formulas) == 1:
            return texts + formulas
        *before, last = _STATED.split(answer)
        if before:
            texts.append(last.strip().rstrip("."))
    return texts
