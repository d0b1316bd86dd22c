r"""Parse one row of a data set into a `Problem`: choose the fields to read, and find the ground truth.

Rows of these shapes are known, and others by naming their fields: `question`/`answer`, `problem`/`solution`,
`prompt`/`response`, and chat `messages` of one user message and its answer.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlreason.data.sources import BadRowError
from rlreason.grading import boxed
from rlreason.types import Problem

#: Parts of a problem, and the field names that are tried for each, in this order.
KNOWN: dict[str, tuple[str, ...]] = {
    "question": ("question", "problem"),
    "answer": ("ground_truth", "answer"),
    "solution": ("solution",),
    "prompt": ("prompt",),
    "response": ("response",),
    "messages": ("messages",),
    "id": ("id", "unique_id"),
}
#: Optional facts about a problem: the name of each, and the fields that it is read from.
FACTS: dict[str, tuple[str, ...]] = {
    "level": ("level", "difficulty"),
    "subject": ("subject", "type", "problem_type"),
    "source": ("source", "data_source", "dataset"),
}
MAX_FACT_CHARS = 80  # a longer text does not name a level or a source
Names = Mapping[str, tuple[str, ...]]

_HASH_LINE = re.compile(r"^(?:[ \t]*####(?!#)|.*####[ \t]*(?=[-+$\\]*\d))(.*)$", re.MULTILINE)
_HEADING = re.compile(r"\(?\w{1,3}[.):]+\s|[^\W\d]{2}")  # Step 1, 2. Add, (b) Divide
_NOT_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_FINAL = re.compile(r"[Tt]he final answer is:?\s*(.+?)\.?\s*I hope it is correct")


def field_names(own: Mapping[str, str | None]) -> Names:
    """Return the fields to read: `KNOWN`, with its names replaced by those in `own` (`data.fields`)."""
    names = {key: (name,) if (name := own.get(key)) else known for key, known in KNOWN.items()}
    if own.get("question") == "prompt":  # then it is a question to fill in, not a whole prompt
        names["prompt"] = ()
    return names


def to_problem(
    row: Any, id: str, names: Names, rule: str, max_chars: int, wrap: bool, truth_in_response: bool = True
) -> Problem:
    """Parse the row into a problem; `BadRowError` where it cannot be used.

    `names`: the fields to read (`field_names`); `rule`: `data.gold` (see `reference_answer`); `max_chars` of one
    field; `wrap`: treat a given response as a solution, to be filled into the trace's template. With
    `truth_in_response` the ground truth may be read from a given response, which must not happen where that response
    is graded against it.
    """
    if not isinstance(row, dict):
        raise BadRowError("is no JSON object")
    question, answer, solution, prompt, response = (
        _text(row, names[key], max_chars) for key in ("question", "answer", "solution", "prompt", "response")
    )
    if (chat := _value(row, names["messages"])) is not None:
        question, response, prompt = *_chat(chat, max_chars, response), None
    question = question or prompt
    if question is None:
        raise BadRowError(f"has no text under {_either(names, 'question', 'prompt', 'messages')}")
    if answer is None and solution is None and response is None:
        raise BadRowError(f"has no text under {_either(names, 'answer', 'solution', 'response')}")
    found = reference_answer(rule, answer, solution or (response if truth_in_response else None))
    if answer is not None and solution is None and found != without_thousands_commas(answer.strip()):
        before, mark, _ = answer.rpartition("####")
        solution = before if mark else answer
    if wrap and response is not None:
        solution, response = response, None
    return Problem(
        id, question.strip(), found, solution.strip() if solution else None, prompt, response, facts_of(row, names)
    )


def facts_of(row: Mapping[str, Any], names: Names) -> dict[str, str]:
    """Return level, subject and source of a problem, where the row gives them as a word or a number.

    >>> facts_of({"level": "Level 5", "type": "Algebra", "source": {"url": "x"}}, KNOWN)
    {'level': 'Level 5', 'subject': 'Algebra'}
    """
    taken = {name for given in names.values() for name in given}
    found: dict[str, str] = {}
    for fact, fields in FACTS.items():
        values = (row.get(name) for name in fields if name not in taken)
        for value in values:
            text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
            if 0 < len(text) <= MAX_FACT_CHARS and text.isprintable():
                found[fact] = text
                break
    return found


def own_id(row: Any, names: Names) -> str | None:
    """Return the row's id in the data, if it has one."""
    value = _value(row, names["id"]) if isinstance(row, dict) else None
    return str(value) if isinstance(value, str | int) and str(value).strip() and str(value).isprintable() else None


def reference_answer(rule: str, answer: str | None, trace: str | None) -> str:
    r"""Return the ground truth by `rule` (`data.gold`); "" where `auto` finds none.

    `hash` is the text after `####` in its line, `boxed` the last `\boxed{}`, `final` the answer of Minerva's closing
    sentence, `tag` the last `<answer>`, `field` the unchanged answer field. `auto` takes the first of these that
    matches, in the answer field and then in the trace. Any other rule that finds none raises `BadRowError`.

    >>> reference_answer("auto", "2+2=4\n#### 1,004", None)
    '1004'
    >>> reference_answer("auto", None, r"so $x=\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    >>> reference_answer("auto", None, "The final answer is $7$. I hope it is correct.")
    '7'
    """
    readers: dict[str, Callable[[str], str | None]] = {
        "hash": _after_hash,
        "boxed": boxed,
        "final": _final,
        "tag": _last_tag,
    }
    readers["hash line"] = partial(_hash_line, headings=rule == "hash")
    for text in (answer, trace):
        for name, read in readers.items():
            if text is not None and rule in (name, name.split()[0], "auto") and (found := read(text)) is not None:
                return _usable(found)
        if text is not None and text is answer and rule in ("field", "auto"):
            return without_thousands_commas(_usable(text))
    if rule == "auto":
        return ""
    raise BadRowError(f"has no ground truth for data.gold={rule}")


def without_thousands_commas(answer: str) -> str:
    """Remove the thousands commas of a plain number; return anything else unchanged.

    >>> without_thousands_commas("-1,234,567.5"), without_thousands_commas("(1,2)"), without_thousands_commas("1,2,3")
    ('-1234567.5', '(1,2)', '1,2,3')
    """
    return answer.replace(",", "") if re.fullmatch(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?", answer) else answer


def _after_hash(text: str) -> str | None:
    """Return the text after the last `####` if it is on the last line; elsewhere `####` may begin a heading."""
    _, mark, rest = text.rpartition("####")
    if not mark or "\n" in rest.strip():
        return None
    if not rest.strip():
        raise BadRowError("has nothing after '####'")
    return without_thousands_commas(rest.strip())


def _hash_line(text: str, headings: bool = False) -> str | None:
    r"""Return the answer of the last line `#### N`, also with lines after it; a heading is not an answer.

    >>> _hash_line("5*2=10\n#### 10\n\nNote: checked."), _hash_line("#### Step 1\nAdd."), _hash_line("#### 1. Add\n5")
    ('10', None, None)
    """
    lines = [line.strip("*_ \t\r") for line in _HASH_LINE.findall(text)]
    found = [line for line in lines if line and (headings or not _HEADING.match(line))]
    return without_thousands_commas(found[-1]) if found else None


def _final(text: str) -> str | None:
    found = _FINAL.findall(text)
    return found[-1].strip("$* ").rstrip(".$* ") if found else None


def _last_tag(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _usable(answer: str) -> str:
    if not (answer := answer.strip()):
        raise BadRowError("has an empty ground truth")
    if _NOT_FINITE.fullmatch(answer):
        raise BadRowError(f"has the ground truth {answer}, which is no number (infinity is written \\infty)")
    return answer


def _chat(chat: Any, max_chars: int, response: str | None) -> tuple[str | None, str | None]:
    """Return (question, response) of one user message and its answer; a longer conversation would lose its context."""
    if not isinstance(chat, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in chat):
        raise BadRowError("has messages that are no list of role and content")
    roles = [m["role"] for m in chat]
    if roles not in (["user"], ["user", "assistant"]):
        raise BadRowError("has messages other than one from the user and at most one answer")
    question, *answers = (_text(m, ("content",), max_chars) for m in chat)
    return question, answers[0] if answers else response


def _text(row: Mapping[str, Any], names: Sequence[str], max_chars: int) -> str | None:
    """Return the text of the first of these fields that the row has; a number as text."""
    value = _value(row, names)
    if value is None:
        return None
    name = next(name for name in names if row.get(name) is not None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise BadRowError(f"has {value}, which is no number, under {name!r}")
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"has no text under {name!r}")
    if len(value) > max_chars:
        raise BadRowError(f"has more than data.max_chars={max_chars} characters under {name!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRowError(f"has half a surrogate pair, which is no character, under {name!r}") from None
    return value


def _value(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _either(names: Names, *keys: str) -> str:
    first, *others = (repr(name) for key in keys for name in names[key])
    return " or ".join([", ".join([first, *others[:-1]]), *others[-1:]])
