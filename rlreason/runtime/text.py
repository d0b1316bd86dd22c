"""Short forms of texts for messages: a long text, a long list of names, an error's first line."""

from collections.abc import Sequence
from typing import Literal


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


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type's name where there is no message.

    >>> first_line(ValueError("no file\\n  details")), first_line(KeyError())
    ('no file', 'KeyError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
