"""Short forms of texts for messages: a long text, a long list of names, an error's first line."""

from collections.abc import Sequence


def shorten(text: str, max_chars: int) -> str:
    """The text on one line, cut after `max_chars` characters.

    >>> shorten("one\\n  two three", 7), shorten("one", 7)
    ('one two ...', 'one')
    """
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[:max_chars] + " ..."


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
