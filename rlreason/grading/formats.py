"""From a raw response to the answer it states: tags, boxes and the optional extraction from a sentence.

The two formats of the handout's prompts, in one table. What is read is text; whether it is right is decided elsewhere.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from rlreason.runtime.text import shorten

THINK_TO_ANSWER = "</think> <answer>"
OPEN, CLOSE = "<answer>", "</answer>"

_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?(?![\w])")
_HEDGE = re.compile(r"\b(?:or|not|maybe|perhaps|possibly|either|neither|wrong|incorrect|unknown|unsure)\b|n't\b", re.I)
_STATED = re.compile(r"(?:\b(?:is|are|equals|be)\b|[=:])\s*", re.I)


_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_UNBRACED = re.compile(
    r"(?:\s*(?=[-+]?(?:\\\$)?(?:\.?\d|\\[A-Za-z]|\())|\s+(?=[A-Za-z](?![A-Za-z])))"  # what a box may begin with
    rf"((?:\\[^)\]]|{_BRACES}|[^\s$\\{{}}])+)"
)
_ATTRIBUTE = re.compile(r"<answer\s[^>]*>")
SHOWN_CHARS = 60
UNREAD = "no answer can be read"


class Extracted(NamedTuple):
    """What was read out of a response. `answer` is None where the format was not kept, or holds no answer.

    `reason` then says why, in the same words for the same mistake, and `detail` what stands there instead.
    """

    formatted: bool
    answer: str | None
    reason: str = ""
    detail: str = ""
    candidates: tuple[str, ...] = ()  # the texts that may state the answer, under a grader's settings


class Format(NamedTuple):
    """How an answer is read out of a response, and how a response states one: a template with one place."""

    read: Callable[[str], Extracted]
    written: str


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or None when there is none or it never closes.

    Braces are counted; the printed braces `\{` and `\}` do not count. Without braces, as in `\boxed 5`, it is the
    number, letter or command that follows, up to white space or the end of the formula.

    >>> boxed(r"so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> boxed(r"$\boxed 38$"), boxed(r"\boxed{1"), boxed(r"the \boxed environment")
    ('38', None, None)
    """
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    start += len("\\boxed")
    bare = len(text[start:]) - len(text[start:].lstrip())
    if text[start + bare : start + bare + 1] != "{":
        unbraced = _UNBRACED.match(text, start)
        return unbraced and unbraced.group(1)
    start += bare
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1  # whatever is escaped, this is no bracket
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None


def r1_zero(response: str) -> Extracted:
    """`</think> <answer>` with exactly one space, and a later `</answer>` with no other text behind it."""
    first = response.find(THINK_TO_ANSWER)
    if first < 0 or response.find(CLOSE, first + len(THINK_TO_ANSWER)) < 0:
        return Extracted(False, None, *_what_r1_zero_misses(response))
    start = response.rfind(OPEN) + len(OPEN)
    end = response.find(CLOSE, start)
    if end < 0 or response[end:].replace(CLOSE, "").strip():
        return Extracted(True, None, UNREAD, "text behind </answer>")
    answer = response[start:end]
    if "\\boxed" not in answer:
        return Extracted(True, answer)
    inner = boxed(answer)
    return Extracted(True, inner) if inner is not None else Extracted(True, None, UNREAD, "\\boxed is never closed")


def _what_r1_zero_misses(response: str) -> tuple[str, str]:
    """(reason, detail) for a response without the format.

    >>> _what_r1_zero_misses("so 4 </think> It is <answer>4</answer>")
    ('text between </think> and <answer>', 'It is')
    """
    if attribute := _ATTRIBUTE.search(response):
        return "the answer tag has attributes", shorten(attribute.group(), SHOWN_CHARS)
    if "</think>" not in response:
        return "no </think>", "it answers without ending its thinking" if OPEN in response else ""
    if OPEN not in response:
        return "no <answer> tag", ""
    if THINK_TO_ANSWER in response:
        return "no </answer>", ""
    before, _, _ = response.partition(OPEN)
    _, thought, between = before.rpartition("</think>")
    if not thought:
        return "<answer> comes before </think>", ""
    if between.strip():
        return "text between </think> and <answer>", shorten(between, SHOWN_CHARS)
    return "not exactly one space between </think> and <answer>", repr(between)


def question_only(response: str) -> Extracted:
    r"""A closed last `\boxed{...}`, wherever it stands.

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
    """The texts that may state the answer, the whole text first; more than one only beyond `strict`."""
    if extract == "strict" or _HEDGE.search(answer):
        return [answer]
    found = [answer]
    numbers = {match.group() for match in _NUMBER.finditer(answer)}
    if len(numbers) == 1:
        found.append(numbers.pop())
    if extract == "sentence":
        found += _stated(answer)
    return found


def _stated(answer: str) -> list[str]:
    """What a sentence states: its one formula between dollars, or what follows its last `is`, `=` or `:`."""
    formulas = re.findall(r"\$([^$]+)\$", answer)
    if len(formulas) == 1:
        return formulas
    stops = list(_STATED.finditer(answer))
    return [answer[stops[-1].end() :].strip().rstrip(".")] if stops else []
