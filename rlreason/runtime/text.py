"""Shorten texts, hide secrets and control characters, and recognise equal questions."""

import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

#: Characters that control a terminal or a page: control characters except new line and tab, those that change the
#: direction of writing or break lines unexpectedly, invisible separators.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff]"
)


def visible(text: str) -> str:
    r"""Escape every character that controls a terminal or a page.

    >>> print(visible("a\x1b[2Jb\r\u202e"), visible("\u00e9\n"), end="")
    a\x1b[2Jb\x0d\u202e é
    """
    return _OBEYED.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else f"\\u{ord(found[0]):04x}", text
    )


def shorten(text: str, max_chars: int, keep: Literal["start", "end", "both"] = "start") -> str:
    """Cut a text to `max_chars` characters: its start or end on one line, or both ends; a mark shows the cut.

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
    """List the first `show` names, and the number of the others.

    >>> few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:show]) + (f" and {len(names) - show} more" if len(names) > show else "")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as columns, each as wide as its longest cell.

    >>> print(aligned([["lr", "accuracy"], ["1e-4", "0.5"]]))
    lr    accuracy
    1e-4  0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type's name where there is no message.

    >>> first_line(ValueError("no file\\n  details")), first_line(KeyError())
    ('no file', 'KeyError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def duration(seconds: float) -> str:
    """Format a time, rounded.

    >>> duration(42.2), duration(250), duration(7500)
    ('42 s', '4 min', '2.1 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def size(number: float) -> str:
    """Format bytes in binary units.

    >>> size(3 << 30), size(5 << 20), size(200), size(20 << 30)
    ('3.0 GiB', '5.0 MiB', '0.0 MiB', '20 GiB')
    """
    amount, unit = (number / 2**30, "GiB") if number >= 2**30 else (number / 2**20, "MiB")
    return f"{amount:.0f} {unit}" if amount >= 9.95 else f"{amount:.1f} {unit}"


#: Characters that Unicode's compatibility form does not unify: apostrophes, dashes, the Chinese full stop, times.
_ALIKE = str.maketrans(
    dict.fromkeys("\xb4`\u2018\u2019\u201b\u02bc\u2032", "'")
    | dict.fromkeys("\u201c\u201d\u201e\xab\xbb\u2033", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63", "-")
    | {"\u3002": ".", "\u3001": ",", "\xd7": "*", "\xb7": "*", "\u22c5": "*", "\u2217": "*", "\xf7": "/"}
)
_RAISED = {"<super>": "^", "<sub>": "_", "<fraction>": " "}  # a raised 2 does not make 52 of 5
_LABEL = re.compile(r"^(?:[\W_]*(?:question|problem|q)\s*\d*[*_\s]*[:.](?!\d)[*_\s]*)+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_IN_WORD = re.compile(r"(?<=[^\W\d_]{2})'(?=[^\W\d_]{1,2}\b)")  # Janet's, don't; not f'(x)
#: Punctuation of sentences: after a word or a number, and no cell of a grid, no 1.5, .5, 1:30 and 1,2, no 5! and n!.
_SENTENCE = re.compile(
    r"""(?<=[^\W_])(?:[.:?]|\.{3})(?=\s|$|[')\]])|(?<=[^\W\d_]{2})\s?[?:.]+(?=\s|$)|(?<=[)\]%$'?!])[.:?]+(?=\s|$)"""
    r"""|\s\.(?=\s[^\W\d_]{2})|(?<=\S)\s\?+$|(?<!\d)[,;]|[,;](?!\d)|(?<=[^\W\d_]{2})[!']+|(?<=\s)'"""
)
_HYPHEN = re.compile(r"(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")  # twenty-five; not a - b
_STRONG = re.compile(r"(?<!\S)(\*\*|__)(?=\S)(.+?)(?<=\S)\1(?![^\W_])")  # **words**; not 2 ** 3 ** 4


@lru_cache(1 << 16)  # evaluations repeat their questions
def question_key(question: str) -> str:
    r"""Return the key of a question, the same for all its spellings: words, numbers and the signs of formulas.

    Case, white space, width (NFKC), invisible characters, apostrophes, punctuation of sentences and a leading
    "Question:" do not count. Signs that may change the meaning do: two different sums have different keys.

    >>> question_key("Question: What is Janet\u2019s share\u200b of \uff045,000 ?")
    'what is janets share of $5000'
    >>> question_key("What is 3-4?") == question_key("What is 3+4?"), question_key("1.5!") == question_key("15")
    (False, False)
    """
    text = question.translate(_ALIKE)
    if not text.isascii():
        text = "".join(_RAISED.get(unicodedata.decomposition(c).partition(" ")[0], "") + c for c in text)
        text = unicodedata.normalize("NFKC", text).translate(_ALIKE)
        text = "".join(c for c in text if unicodedata.category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f")
    text = _IN_WORD.sub("", _THOUSANDS.sub("", _LABEL.sub("", " ".join(text.casefold().replace('"', "").split()))))
    text = _HYPHEN.sub(" ", _STRONG.sub(r"\2", _SENTENCE.sub(" ", text)))
    return " ".join(text.split()) or " ".join(question.split())


def question_keys(questions: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return id -> `question_key` of (id, question); the key of a row without a question is its id."""
    return {id: question_key(question) if question.strip() else f"\0{id}" for id, question in questions}


HIDDEN = "<redacted>"  # a plain word in YAML, JSON and a shell's quotes
ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # of the name of a setting or variable whose value is hidden
SHORTEST = 8  # characters of a secret: shorter values are words, numbers and switches

_NAME = r"(?<![\w.-])(?:[\w.-]+key|[\w.-]*(?:token|secret|password))"
#: `name=value`, `name="value"` and `name: value` anywhere, and the rest of a line of YAML.
_VALUE = rf"""(["'])(?:(?!\3).){{{SHORTEST},}}\3|[^\s"',;]{{{SHORTEST},}}"""
_SETTING = re.compile(rf"""(^[ -]*{_NAME}: )[^\n]{{{SHORTEST},}}|({_NAME}["']?(?:=|: ))(?:{_VALUE})""", re.I | re.M)
_ADDRESS = re.compile(r"(://[^\s/:@'\"]*:)[^\s/'\"]+(?=@)")

T = TypeVar("T")


def redacted(value: T) -> T:
    """Replace secrets by `HIDDEN`, in a text or in the texts of nested dicts and lists.

    Secrets are the values of environment variables and of settings whose names end in KEY, TOKEN, SECRET or PASSWORD,
    and passwords in addresses.

    >>> redacted("logger.token=swordfish sampling.max_tokens=10000000 https://me:pass@host/x")
    'logger.token=<redacted> sampling.max_tokens=10000000 https://me:<redacted>@host/x'
    >>> redacted({"api_key": "swordfish", "paths": ["s3://me:pass@host"], "seed": 1})
    {'api_key': '<redacted>', 'paths': ['s3://me:<redacted>@host'], 'seed': 1}
    """
    result: Any = value
    if isinstance(value, Mapping):
        result = {
            name: HIDDEN if isinstance(one, str) and str(name).upper().endswith(ENDINGS) else redacted(one)
            for name, one in value.items()
        }
    elif isinstance(value, list | tuple):
        result = [redacted(one) for one in value]
    elif isinstance(value, str):
        for name, secret in os.environ.items():
            if name.upper().endswith(ENDINGS) and len(secret) >= SHORTEST:
                result = result.replace(secret, HIDDEN)
        result = _ADDRESS.sub(rf"\1{HIDDEN}", _SETTING.sub(rf"\1\2\3{HIDDEN}\3", result))
    return cast("T", result)
