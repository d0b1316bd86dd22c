"""Texts that others wrote, as a page and its pictures show them: what a browser would obey is written out."""

import re
from typing import Any

#: Controls but for tab and new line, what turns the direction of writing, invisible separators, halves of characters.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)


def written_out(text: str) -> str:
    r"""The text with such characters as their code points.

    >>> written_out("a\u202eb\x1b[2J"), written_out("two\n\tlines")
    ('a⟨U+202E⟩b⟨U+001B⟩[2J', 'two\n\tlines')
    """
    return _OBEYED.sub(
        lambda found: f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{ord(found[0]):04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}",
        text,
    )


def all_written_out(value: Any) -> Any:
    r"""The same for every text in lists and dicts.

    >>> all_written_out({"a": ["\u202e", 1]})
    {'a': ['⟨U+202E⟩', 1]}
    """
    if isinstance(value, str):
        return written_out(value)
    if isinstance(value, dict):
        return {written_out(str(key)): all_written_out(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [all_written_out(of) for of in value]
    return value
