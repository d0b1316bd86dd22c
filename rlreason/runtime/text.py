"""Texts for people: what a terminal would obey is shown; a long text, a long list of names, an error's first line."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

#: What a terminal obeys instead of showing it: control characters but for new line and tab, and what turns the
#: direction of writing, or breaks lines where nobody expects it.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with every character that a terminal would obey as an escape: what others wrote is shown as it is.

    >>> print(visible("a\x1b[2Jb\r\u202e"), visible("\u00e9\n"), end="")
    a\x1b[2Jb\x0d\u202e é
    """
    return _OBEYED.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shorten(text: str, max_chars: int, keep: Literal["start", "end", "both"] = "start") -> str:
    """At most `max_chars` characters of a text: its start or end on one line, or both ends; a mark says what is cut.

    >>> shorten("one\\n  two three", 7), shorten("one two three", 5, "end"), shorten("one", 7)
    ('one two ...', '... three', 'one')
    >>> shorten("abcdefgh", 4, "both")
    'ab [... 4 characters ...] gh'
    """
    if keep == "both":
        half, left_out = max_chars // 2, len(text) - max_chars
        return text if left_out <= 0 else f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"
    line = " ".join(text.split())
    if len(line) <= max_chars:
        return line
    return f"{line[:max_chars]} ..." if keep == "start" else f"... {line[-max_chars:]}"


def few(names: Sequence[str], show: int = 5) -> str:
    """The first `show` names, and the number of the others.

    >>> few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:show]) + (f" and {len(names) - show} more" if len(names) > show else "")


def spans(numbers: Sequence[int]) -> list[str]:
    """Rising numbers, those in a row as one.

    >>> spans([1, 2, 3, 10, 20])
    ['1-3', '10', '20']
    """
    rows = [list(row) for _, row in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ends = [(row[0][1], row[-1][1]) for row in rows]
    return [str(a) if a == b else f"{a}-{b}" for a, b in ends]


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type's name where there is no message.

    >>> first_line(ValueError("no file\\n  details")), first_line(KeyError())
    ('no file', 'KeyError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def duration(seconds: float) -> str:
    """A time as a person says it, rounded.

    >>> duration(42.2), duration(250), duration(7500)
    ('42 s', '4 min', '2.1 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
