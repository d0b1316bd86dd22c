"""Which questions are one: texts that differ in case, width, punctuation or a label in front ask the same thing."""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

#: Characters that Unicode's compatibility form leaves apart: apostrophes, dashes, the full stop of Chinese, times.
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
#: Punctuation of sentences: behind a word or a number, and no cell of a grid, no 1.5, .5, 1:30 and 1,2, no 5! and n!.
_SENTENCE = re.compile(
    r"""(?<=[^\W_])(?:[.:?]|\.{3})(?=\s|$|[')\]])|(?<=[^\W\d_]{2})\s?[?:.]+(?=\s|$)|(?<=[)\]%$'?!])[.:?]+(?=\s|$)"""
    r"""|\s\.(?=\s[^\W\d_]{2})|(?<=\S)\s\?+$|(?<!\d)[,;]|[,;](?!\d)|(?<=[^\W\d_]{2})[!']+|(?<=\s)'"""
)
_HYPHEN = re.compile(r"(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")  # twenty-five; not a - b
_STRONG = re.compile(r"(?<!\S)(\*\*|__)(?=\S)(.+?)(?<=\S)\1(?![^\W_])")  # **words**; not 2 ** 3 ** 4


@lru_cache(1 << 16)  # evaluations ask the same ones again and again
def question_key(question: str) -> str:
    r"""What a question is recognised by, whoever wrote it down: words, numbers and the signs of formulas.

    Case, white space, width (NFKC), invisible characters, apostrophes, punctuation of sentences and a leading
    "Question:" do not count. Signs that may change what is asked do: no two sums become one.

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
    """Id -> `question_key`, of (id, question); rows without a question are recognised by their id alone."""
    return {id: question_key(question) if question.strip() else f"\0{id}" for id, question in questions}
