"""Read a server's answer as plain data: the model's reply, its thinking, and what went wrong."""

import ast
import json
import math
import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from rlreason.runtime.text import HIDDEN, redacted, shorten, visible

LINE_CHARS = 300  # of a text about an answer


@dataclass(frozen=True)
class Attempt:
    """The outcome of one request.

    `outcome`: ok | http_NNN (the server's status) | timeout | connection | empty (a reply without content) | broken
    (no JSON, or not of the shape). `content`: the reply without its thinking; "" where there is none. `reasoning`: the
    thinking, where the server shows it. Tokens: as the server counts them, None where it does not say.
    `retry_after_s`: how long the server asks to wait, in seconds. `detail`: one line for a person, never with the key.
    """

    outcome: str
    content: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    retry_after_s: float | None = None
    detail: str = ""


def without_key(text: str, key: str | None) -> str:
    """Return the text with this key hidden; a very short key only as a whole word.

    >>> without_key("no such key: swordfish", "swordfish"), without_key("a bad key: a", "a")
    ('no such key: <redacted>', '<redacted> bad key: <redacted>')
    """
    key = (key or "").strip()
    if not key:
        return text
    return text.replace(key, HIDDEN) if len(key) > 5 else re.sub(rf"(?<!\w){re.escape(key)}(?!\w)", HIDDEN, text)


def one_line(text: str, key: str | None) -> str:
    """Return at most `LINE_CHARS` characters of a text on one line, without secrets and control characters.

    >>> one_line("Incorrect API key\\n  provided: swordfish\\x1b[2J", "swordfish")
    'Incorrect API key provided: <redacted>\\\\x1b[2J'
    """
    line = " ".join(without_key(text, key)[:20_000].split())
    return shorten(visible(redacted(line)), LINE_CHARS - len(" ..."))


class _Part(msgspec.Struct):
    """A part of a content that is a list. `thinking`: as Mistral's servers send it."""

    type: str = ""
    text: str | None = None
    thinking: "str | list[_Part] | None" = None

    def read(self) -> str:
        if isinstance(self.thinking, list):
            return "".join(part.text or "" for part in self.thinking)
        return self.text or self.thinking or ""


class _Reply(msgspec.Struct):
    content: str | list[str | _Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Reply | None = None
    delta: _Reply | None = None  # of a stream
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    detail: Any = None  # of an error, as FastAPI names it
    message: Any = None

    def error_text(self) -> str:
        """Return the message of an error, in the shapes that servers use; "" if there is none."""
        error = self.error or self.detail or self.message or ""
        if isinstance(error, dict):
            error = error.get("message") or error
        return error if isinstance(error, str) else json.dumps(error)


def read_answer(status: int, headers: Mapping[str, str], body: bytes, key: str | None) -> Attempt:
    """Return the attempt of a server's answer. `headers`: by lower-case names. `key`: hidden in its `detail`.

    A status other than 2xx is http_NNN, and so is a reply of status 200 that holds an error with a code of its own.

    >>> read_answer(200, {}, b'{"choices": [{"message": {"content": "<think>2?</think>3"}}]}', None).content
    '3'
    >>> read_answer(503, {"retry-after": "2"}, b"busy", None).detail
    'HTTP 503: busy'
    """
    text, wait = body.decode("utf-8", "replace"), _retry_after_s(headers.get("retry-after", ""))
    answer, trouble = _Answer(), ""
    try:
        is_stream = "text/event-stream" in headers.get("content-type", "")
        answer = _joined(text) if is_stream else msgspec.convert(json.loads(body), _Answer)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        trouble = str(error) if isinstance(error, msgspec.ValidationError) else "no JSON"
        trouble = f"{trouble}: {text[:1000]}" if text else "no text"
    if not 200 <= status < 300:
        elsewhere = headers.get("location", "") if 300 <= status < 400 else ""
        detail = f"it redirects to {elsewhere}" if elsewhere else answer.error_text() or text
        return Attempt(f"http_{status}", retry_after_s=wait, detail=one_line(f"HTTP {status}: {detail}", key))
    if trouble:
        return Attempt("broken", retry_after_s=wait, detail=one_line(trouble, key))
    usage = answer.usage if isinstance(answer.usage, dict) else {}
    counts: dict[str, Any] = {name: _count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")}
    choice = answer.choices[0] if answer.choices else _Choice()
    if choice.message is None:
        code = answer.error.get("code") if isinstance(answer.error, dict) else None  # as gateways send it
        outcome = f"http_{code}" if type(code) is int and 400 <= code < 600 else "broken"
        detail = answer.error_text() or f"no choices[0].message in {text[:1000]}"
        return Attempt(outcome, retry_after_s=wait, detail=one_line(detail, key), **counts)
    content, reasoning = _texts(choice.message)
    reason = choice.finish_reason and _encodable(choice.finish_reason)[:100]
    if content.strip():
        return Attempt("ok", content, reasoning, reason, **counts)
    detail = "thinking without an answer" if reasoning else "a reply without content"
    detail += f", finish_reason={reason}" if reason else ""
    if choice.message.refusal:
        detail = f"the model declined: {choice.message.refusal}"
    return Attempt("empty", "", reasoning, reason, detail=one_line(detail, key), **counts)


def _joined(text: str) -> _Answer:
    """Join the events of a streamed reply; `ValueError` if the stream has no end."""
    content, reasoning, finish_reason, usage = "", "", None, None
    ended = False
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        if name != "data" or ended:
            continue
        if value.strip() == "[DONE]":
            ended = True
            continue
        event = msgspec.convert(json.loads(value), _Answer)
        if event.error:
            return event
        usage = event.usage or usage
        choice = event.choices[0] if event.choices else _Choice()
        finish_reason = choice.finish_reason or finish_reason
        if choice.delta is not None:
            content += choice.delta.content if isinstance(choice.delta.content, str) else ""
            reasoning += choice.delta.reasoning_content or choice.delta.reasoning or ""
    if not ended and finish_reason is None:
        raise ValueError("the stream has no end")
    return _Answer([_Choice(_Reply(content, reasoning), finish_reason=finish_reason)], usage)


def _texts(reply: _Reply) -> tuple[str, str | None]:
    """Return content and thinking of a reply, which servers send apart, in parts, or as one text."""
    content, thinking = "", ""
    for part in reply.content if isinstance(reply.content, list) else [reply.content or ""]:
        if isinstance(part, str):
            content += part
        elif part.type in ("thinking", "reasoning"):
            thinking += part.read()
        else:
            content += part.read()
    content = _encodable(content)
    for text in (reply.reasoning, reply.reasoning_content):
        if text and text.strip():
            thinking = text
    thinking = _encodable(thinking)
    if thinking and not content.lstrip().startswith("<think>"):
        return content, thinking
    rest, before = without_thinking(content)
    return rest, thinking or before


def without_thinking(content: str) -> tuple[str, str | None]:
    """Return a reply's content and the thinking in front of it; unfinished thinking leaves no content.

    Some servers put the first mark into the prompt, so that the reply has only the last one.

    >>> without_thinking("<think>\\nA square?\\n</think>\\n\\nYes."), without_thinking("<think>A square"), \
    without_thinking("A square?</think>Yes.")
    (('Yes.', 'A square?'), ('', 'A square'), ('Yes.', 'A square?'))
    """
    opened = content.lstrip().startswith("<think>")
    if not opened and ("</think>" not in content or "<think>" in content):
        return content, None
    thinking, _, rest = content.partition("</think>")
    return rest.lstrip(), thinking.lstrip().removeprefix("<think>").strip() or None


def _encodable(text: str) -> str:
    """Return a text that can be encoded: half a character, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _retry_after_s(header: str) -> float | None:
    """Return the seconds of `Retry-After`, a number or a date; None if it is missing or unreadable.

    >>> _retry_after_s("2.5"), _retry_after_s("soon"), _retry_after_s("nan"), _retry_after_s("-1")
    (2.5, None, None, None)
    """
    try:
        seconds = float(header)
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


#: What a program gives its set by, under the names of the interface.
NAMES = ("run_code", "get_centers", "points")
#: Characters of a block whose syntax is looked at: its tree takes up to 1,000 times the memory.
PARSED_CHARS = 300_000
FENCES = 20_000  # of a reply that are looked at: one with more repeats itself without end
PARSED_BLOCKS = 100  # that are tried, from the last one back
SKIPPED, LOOKED_AT = 8, 100  # ends of a block, and fences, at most that may stand within a text of its program

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
_PYTHON = ("python", "py", "python3")
_MARKDOWN = ("markdown", "md")
_MENTIONED = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")
#: For blocks that are no Python: an error in a program is for the model to hear of, not for this module.
_DEFINED = re.compile(
    r"^(?:[ \t]*(?:async[ \t]+)?def[ \t]+(?:run_code|get_centers)\b"
    r"|(?:run_code|get_centers|points)[ \t]*(?::[^=\n]*)?=(?!=))",
    re.MULTILINE,
)
_TEXT_QUOTES = re.compile(r'"""|\'\'\'')
_WARNINGS = threading.Lock()  # the filters belong to the whole process


class _Fence(NamedTuple):
    start: int  # of its line
    end: int  # of its line, without the line's end
    indent: int
    mark: str
    info: str

    @property
    def language(self) -> str:
        name = _LANGUAGE.match(self.info)
        return name[1].lower() if name else ""

    def opens(self) -> bool:
        return not (self.mark[0] == "`" and "`" in self.info)  # which is code within a line

    def may_end(self, opening: "_Fence") -> bool:
        """Return whether it ends the block of `opening`, or begins another of the same kind."""
        same = self.mark[0] == opening.mark[0] and len(self.mark) >= len(opening.mark)
        return same and self.indent <= opening.indent + 3


def program_in(content: str) -> str | None:
    """Return the program in a reply, as it stands there; None where there is none.

    It is the last fenced block, marked as Python or not at all, that defines run_code, get_centers or points, else the
    last one that is Python. A block that uses run_code without defining it shows how the program is called, and is no
    program. A block without an end is none either: the reply was cut off. Takes time in proportion to the text.

    >>> program_in("First:\\n```python\\npoints = [[2]]\\n```\\nIt is called so:\\n```\\npoints = run_code()\\n```\\n")
    'points = [[2]]\\n'
    >>> program_in("```python\\npoints = [[2],") is None
    True
    """
    blocks = [text for text in _blocks(content.replace("\r\n", "\n")) if text.strip()]
    trees: dict[int, ast.Module | None] = {}
    latest = range(len(blocks) - 1, max(-1, len(blocks) - 1 - PARSED_BLOCKS), -1)
    for n in latest:
        if _MENTIONED.search(blocks[n]):
            tree = trees[n] = _tree(blocks[n])
            if _defines(tree) if tree else _DEFINED.search(blocks[n]):
                return blocks[n]
    for n in latest:
        tree = trees[n] if n in trees else _tree(blocks[n])
        if tree is not None and tree.body:
            return blocks[n]
    return None


def _blocks(text: str) -> Iterator[str]:
    """Return the blocks of Python and of no stated language, in order, without the indentation of their fences."""
    fences = [
        _Fence(m.start(), m.end(), len(m["indent"].expandtabs(4)), m["fence"], m["info"].strip())
        for m in islice(_FENCE.finditer(text), FENCES)
    ]
    n = 0
    while n < len(fences):
        opening = fences[n]
        if not opening.opens() or opening.language in _MARKDOWN:  # a reply that is fenced as a whole has blocks inside
            n += 1
            continue
        end, begins = _end(text, fences, n)
        if end is None:
            return
        if not begins and (not opening.info or opening.language in _PYTHON):
            block = text[opening.end + 1 : fences[end].start]
            yield re.sub(rf"^[ \t]{{1,{opening.indent}}}", "", block, flags=re.MULTILINE) if opening.indent else block
        n = end if begins else end + 1


def _end(text: str, fences: list[_Fence], n: int) -> tuple[int | None, bool]:
    """Return the fence that ends the block of the `n`-th, and whether it begins another block: an end was forgotten.

    A fence within a text of the program, in three quotes that are still open, ends nothing, unless no other one does.
    """
    opening, quotes, at, skipped = fences[n], 0, fences[n].end, list[int]()
    may_quote = not opening.info or opening.language in _PYTHON
    for k in range(n + 1, len(fences)):
        fence = fences[k]
        if skipped and k - skipped[0] > LOOKED_AT:
            break
        if not fence.may_end(opening) or (fence.info and fence.language not in _PYTHON):
            continue
        if may_quote:
            quotes += len(_TEXT_QUOTES.findall(text, at, fence.start))
            at = fence.end
        if quotes % 2 == 0:
            return k, bool(fence.info)
        if not fence.info:
            skipped.append(k)
        if len(skipped) >= SKIPPED:
            break
    return (skipped[0] if skipped else None), False


def _tree(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None if it is no Python, or too large or deep."""
    if len(text) > PARSED_CHARS:
        return None
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about texts of others: invalid escapes and the like
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _defines(tree: ast.Module) -> bool:
    """Return whether a program defines a name of the interface and uses none of its functions without defining it."""
    defined = set(_bound(tree.body))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return not defined.isdisjoint(NAMES) and not (used & {"run_code", "get_centers"}) - defined


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Return names that statements define at the top of a module, also under `if`, `try`, `with` and in loops."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            waiting.extend(ast.iter_child_nodes(node))
