"""From a raw response to the answer it states: tags, boxes and the optional extraction from a sentence.

Knows the two prompt formats of the handout and nothing about mathematics: what it returns is text,
and whether that text is right is decided elsewhere.
"""

import re
from typing import Literal, NamedTuple

Extract = Literal["strict", "last_number", "sentence"]

THINK_TO_ANSWER = "</think> <answer>"
OPEN, CLOSE = "<answer>", "</answer>"

_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?(?![\w])")
_HEDGE = re.compile(r"\b(?:or|not|maybe|perhaps|possibly|either|neither|wrong|incorrect|unknown|unsure)\b|n't\b", re.I)
_STATED = re.compile(r"(?:\b(?:is|are|equals|be)\b|[=:])\s*", re.I)


class Extracted(NamedTuple):
    """`answer` is None when a format was kept but no answer can be read from it."""

    formatted: bool
    answer: str | None


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or None when there is none or it never closes.

    Braces are counted; the printed braces `\{` and `\}` do not count.

    >>> boxed(r"so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> boxed(r"\boxed{1") is None
    True
    """
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    start += len("\\boxed")
    if text[start : start + 1] != "{":
        return None
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1  # whatever is escaped, it is no bracket
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
        return Extracted(False, None)
    start = response.rfind(OPEN) + len(OPEN)
    end = response.find(CLOSE, start)
    if end < 0 or response[end:].replace(CLOSE, "").strip():
        return Extracted(True, None)
    answer = response[start:end]
    return Extracted(True, boxed(answer) if "\\boxed" in answer else answer)


def question_only(response: str) -> Extracted:
    r"""A closed last `\boxed{...}`, wherever it stands."""
    answer = boxed(response)
    return Extracted(answer is not None, answer)


def candidates(answer: str, extract: Extract) -> list[str]:
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
