r"""Normalize Unicode signs, dollar and markdown wrappers, spacing and font commands to one spelling.

Every rewrite keeps the meaning. Words, units, signs and digits, which may carry meaning, are never dropped here.
"""

import re
import unicodedata

# ruff: noqa: RUF001, RUF002 (a table of look-alikes)


_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ", "0123456789+-()nx", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5"}
_VULGAR |= {"⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho _ sigma tau "
_GREEK += "upsilon phi chi psi omega"
_SIGNS = {
    "−–—﹣－‐‑‒": "-", "＋": "+", "×✕✖": "\\times ", "·⋅∙•": "\\cdot ", "÷": "/", "⁄∕／": "/", "√": "\\sqrt ",
    "∛": "\\sqrt[3] ", "∞": "\\infty ", 
    "≤⩽≦": "\\le ", "≥⩾≧": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "°º˚": "^\\circ ", "±": "\\pm ", "∓": "\\mp ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}",
    "≈": "\\approx ", "，": ",", "（": "(", "）": ")", "［": "[", "］": "]", "｛": "\\{", 
    "｝": "\\}", "％": "%",
    "＝": "=", "＜": "<", "＞": ">", "＄": "\\$", "：": ":", "．": ".", "’‘′": "'", "“”": '"',
    "\u00a0\u2009\u202f\u2007\u2002\u2003\u3000\t\r\n": " ", 
    "\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062": "",
    "…": "\\ldots ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "∖": "\\setminus ",
    "⟨": "\\langle ", "⟩": "\\rangle ", "∗": "*", "ⅈ": "i", "ℯ": "e",
    "Δ": "\\Delta ", "Ω": "\\Omega ", "Σ": "\\Sigma ", "Γ": "\\Gamma ", "ϕ": "\\phi ",
}  # fmt: skip
_TABLE: dict[int, str] = {ord(char): out for chars, out in _SIGNS.items() for char in chars}
_TABLE |= {ord(char): f" {out} " for char, out in _VULGAR.items()}
_TABLE |= {0x3B1 + index: f"\\{name} " for index, name in enumerate(_GREEK.split()) if name not in ("_", "omicron")}

_RAISED = re.compile(f"[{re.escape(''.join(_SUPERSCRIPTS))}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_SIZES = re.compile(r"\\(?:left|right|[bB]ig{1,2}[lr]?|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])\.?")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:> ]|(?:q?quad|enspace|(?:thin|med|thick)space)(?![a-zA-Z])|hspace\{[^{}]*\})|~")
_SQUEEZE = re.compile(r"\\neg(?:thin|med|thick)space(?![a-zA-Z])")  # the space is taken away, as \! does
#: A comma without its space is a thousands sign; with one (`\,` or a blank alone) it separates two numbers.
_GROUP = r"(?=\d{3}(?!\d))"
_SQUEEZED_COMMA = re.compile(rf"(?<=\d)(?:\s|\\!)*,\s*\\!(?:\s|\\!)*{_GROUP}|(?<=\d)\s*\\!\s*,\s*{_GROUP}")
_EMPTY_BRACES = re.compile(r"(?<=\d) ?\{ ?\} ?(?=\d)")
_THOUSANDS = re.compile(rf"(?<=\d) ?\{{,\}} ?{_GROUP}")
_FONT = r"(?:text(?:[bsi][fct]|rm|tt|normal)?|math(?:rm|[bsi][ft])|[mhf]box|underline|operatorname\*?|boldsymbol)"
_WHOLE_FONT = re.compile(rf"\\{_FONT}\s*\{{([^{{}}]*)\}}")
_SPELLINGS = {"\\%": "%", "\\#": "#", "\\lbrace": "\\{", "\\rbrace": "\\}"}
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_TIMES = re.compile(r"(?<=\d) ?[xX] ?10\^")
_DOTS = re.compile(r"\\(?:[cl]|hel)?dots[cbmi]?(?![a-zA-Z])|(?<!\.)\.\.\.(?!\.)")
_ROW_GAP = re.compile(r"(\\\\)\s*\[[^\[\]]*(?:e[mx]|pt|[cm]m|in)\]")
_UPRIGHT = re.compile(r"\\(gcd|max|min|deg|det|dim|ker|Pr)(?![a-zA-Z])")
_MINUS_SET = re.compile(r"(\\mathbb ?\{?R\}?) ?- ?(?=\\\{)")
_ANNOUNCED = re.compile(r"\A(?:the )?(?:final )?answer(?: is)?\s*:\s*", re.I)
_CLOSING_STOP = re.compile(r"[^.]\.\Z|[^\\,;][,;]\Z")  # `\,` is a space
_WRAPPERS = (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("`", "`"), ("$$", "$$"), ('"', '"'))


def clean(text: str) -> str:
    r"""Rewrite an answer in plain LaTeX spelling.

    >>> clean("**$−½$**"), clean(r"\[ \dfrac{1}{2} \]"), clean("x² ≥ 1\u202f000")
    ('- 1/2', '\\frac{1}{2}', 'x^{2} \\ge 1 000')
    """
    if not text.isascii():
        text = _RAISED.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[char] for char in run.group()) + "}", text)
        text = _LOWERED.sub(lambda run: "_{" + "".join(_SUBSCRIPTS[char] for char in run.group()) + "}", text)
        text = "".join(map(_ascii, text)).translate(_TABLE)
    text = _unwrap(_ANNOUNCED.sub("", _unwrap(text.strip())))
    text = _DOTS.sub(r"\\ldots ", text)
    text = _TIMES.sub(r"\\times 10^", text.replace("~", " "))
    if "\\" in text:
        text = _SQUEEZED_COMMA.sub("{,}", _SQUEEZE.sub(r"\\!", text))
        text = text.replace("\\!", "").replace("{:}", ":")
        text = _ROW_GAP.sub(r"\1", text)
        text = _DELIMITERS.sub(" ", _SIZES.sub("", text))
        text = _EMPTY_BRACES.sub(" ", _SPACES.sub(" ", text))
        text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
        for spelling, sign in _SPELLINGS.items():
            text = text.replace(spelling, sign)
        text = _MINUS_SET.sub(r"\1\\setminus ", text)
    return _THOUSANDS.sub("{,}", re.sub(r"\s+", " ", text)).strip()


def plain(text: str) -> str:
    r"""Remove fonts, spacing and the closing stop, so that equal words or formulas become equal texts.

    Spaces stay between two letters or digits, so `3 8` is not `38`.

    >>> plain(r"\text{(A)}."), plain("x = 3 8")
    ('(A)', 'x=3 8')
    """
    text = _UPRIGHT.sub(r" \1 ", _WHOLE_FONT.sub(r" \1 ", text)).replace("\\$", "$").strip().rstrip(".").strip()
    text = re.sub(r"\{(\w)\}", r" \1 ", text)  # x_{1} is x_1, but x^{2}5 is not x^{25}
    text = re.sub(r"(?<=\d)([.,]) (?=\d{3}(?!\d)|(?<=\. )\d)", r"\1  ", re.sub(r"\s+", " ", text))
    return re.sub(r"(?<![a-zA-Z0-9 ]) (?! )|(?<! ) (?![a-zA-Z0-9 ])", "", text)


def whole_text(text: str) -> str | None:
    r"""Return the content of a font command around the whole text, as in `\text{east}`; else None."""
    match = _WHOLE_FONT.fullmatch(text)
    return match.group(1).strip() if match else None


def _ascii(char: str) -> str:
    """Replace digits of every script, and letters of the mathematical alphabets, by their plain forms."""
    if char < "\x80":
        return char
    if "\U0001d400" <= char <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", char)
    digit = unicodedata.decimal(char, None)
    return char if digit is None else str(digit)


def _unwrap(text: str) -> str:
    before = None
    while before != text:
        before = text
        for left, right in _WRAPPERS:
            inner = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and left not in inner and inner.strip():
                text = inner.strip()
        text = _undollar(text)
        if _CLOSING_STOP.search(text):
            text = text[:-1].rstrip()
        if text.startswith("\\boxed{") and text.endswith("}") and _closes_last(text, 6):
            text = text[7:-1].strip()
    return text


def _undollar(text: str) -> str:
    r"""Remove `$` where pairs of them mark mathematics; a single `$` is money and stays.

    >>> _undollar("$38$"), _undollar("$38"), _undollar("$x=1$ or $x=2$"), _undollar("$5 and $6")
    ('38', '$38', 'x=1 or x=2', '$5 and $6')
    """
    marks = [match.start() for match in re.finditer(r"(?<!\\)\$", text)]
    if len(marks) < 2 or len(marks) % 2:
        return text
    for opening, closing in zip(marks[::2], marks[1::2], strict=True):
        outside = text[closing + 1 : closing + 2]
        if outside.isalnum() or closing == opening + 1:
            return text
    return re.sub(r"(?<!\\)\$", "", text).strip()


def _closes_last(text: str, opening: int) -> bool:
    """Whether the brace at `opening` is closed by the last character."""
    depth = 0
    for position in range(opening, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position == len(text) - 1
    return False
