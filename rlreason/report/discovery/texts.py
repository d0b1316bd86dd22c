"""Texts of models, programs and users in a Markdown report: cut, on one line or in a fence, and never obeyed."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from rlreason.report.markdown import fenced, text
from rlreason.runtime.text import shorten

_LINKED = re.compile(r"(?<=[:])//|(?<=\bwww)\.|[@$]", re.IGNORECASE)


def said(given: str, most: int = 160) -> str:
    r"""A text of others within a line: cut, all of Markdown and HTML written out, and nothing made a link or formula.

    >>> said("<b>*a*</b> $x$ https://evil.test @all")
    '&lt;b&gt;\\*a\\*&lt;/b&gt; \\$x\\$ https:\\/\\/evil.test \\@all'
    """
    return _LINKED.sub(lambda found: "".join(f"\\{one}" for one in found[0]), text(shorten(given, most)))


def quoted(given: str, most: int, lines: int = 24) -> list[str]:
    """A text of others in a fence that it cannot end: its beginning and its end where it is long."""
    every = given.splitlines()
    if len(every) > lines:
        half = lines // 2
        left_out = counted(len(every) - 2 * half, "line")
        given = "\n".join([*every[:half], f"[... {left_out} ...]", *every[-half:]])
    return fenced(shorten(given, most, "both"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> list[str]:
    """A table of cells that are Markdown already; columns in `numbers` stand right."""
    marks = ["--:" if k in numbers else "---" for k in range(len(head))]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *rows)]


def name_in(path: str) -> str:
    """The last part of a path that somebody gave: where it lay is nobody's business.

    >>> name_in("/home/me/mine.py"), name_in("kissing_11")
    ('mine.py', 'kissing_11')
    """
    return PurePosixPath(path).name or path


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "seed"), counted(2000, "call")
    ('1 seed', '2,000 calls')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def times_word(number: int) -> str:
    """How often.

    >>> times_word(1), times_word(2), times_word(3)
    ('once', 'twice', '3 times')
    """
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def figure(value: float) -> str:
    """A score or a mean of scores: whole where it is, else with one digit.

    >>> figure(438.0), figure(153.33), figure(1234)
    ('438', '153.3', '1,234')
    """
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def whole(value: int) -> str:
    """A whole number of any size, cut in its middle where it is long.

    >>> whole(10**50)
    '100000000000...000000000000 (51 digits)'
    """
    try:
        digits = str(value)
    except ValueError:
        return "a number of thousands of digits"
    return digits if len(digits) <= 40 else f"{digits[:12]}...{digits[-12:]} ({len(digits)} digits)"
