"""Define requests to a server and its answers as plain data, and find the program in a reply."""

import ast
import json
import math
import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit, urlunsplit

from rlreason.errors import ConfigError
from rlreason.runtime.text import HIDDEN, redacted, shorten, visible

LINE_CHARS = 300  # of a text about an answer
PATH = "/chat/completions"
_LOOKED_AT = 20_000  # characters of a text of which one line is made
_CUT = " ..."


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server, one of its models, and how the model is asked.

    `base_url` ends before /chat/completions. `temperature`, `thinking`: None sends nothing, so that the server's own
    default holds. `max_tokens`: of one reply, its thinking included. `timeout_s`: of one request, from connecting to
    the last byte. `extra`: fields of the body that are put in last: a mapping goes into the one that is there, and
    None takes a field out. `env_variable`: the environment variable that held `key`, for messages.
    """

    base_url: str
    model: str
    key: str | None = field(default=None, repr=False)
    temperature: float | None = None
    max_tokens: int = 8192
    thinking: bool | None = None
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    env_variable: str = ""

    @property
    def url(self) -> str:
        """Return where requests are posted; `ConfigError` if `base_url` is no web address.

        >>> Endpoint("http://127.0.0.1:8000/v1/", "m").url, Endpoint("https://host/v1?version=1", "m").url
        ('http://127.0.0.1:8000/v1/chat/completions', 'https://host/v1/chat/completions?version=1')
        """
        parts = self._parts()
        return urlunsplit(parts._replace(path=parts.path.rstrip("/") + PATH, fragment=""))

    @property
    def on_this_computer(self) -> bool:
        """Return whether the server runs on this computer's loopback address, which no proxy reaches.

        >>> [Endpoint(f"http://{host}/v1", "m").on_this_computer for host in ("127.0.0.1:80", "[::1]", "host")]
        [True, True, False]
        """
        host = self._parts().hostname or ""
        return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None

    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"\s", self.base_url):
            raise ConfigError(f"{self._named()} is no address of a server: give one such as http://127.0.0.1:8000/v1")
        if parts.path.rstrip("/").endswith(PATH):
            raise ConfigError(f"{self._named()} names {PATH} itself: leave that away, it mostly ends in /v1")
        return parts

    def _named(self) -> str:
        return f"client.base_url={one_line(self.base_url, self.key)}"


@dataclass(frozen=True)
class Attempt:
    """What came of one request.

    `outcome`: ok | http_NNN (the server's status) | timeout | connection | empty (a reply without content) | broken
    (no JSON, or not of the shape) | interrupted (the client was stopped). `content`: the reply without its thinking;
    "" where there is none. `reasoning`: the thinking, where the server shows it. Tokens: as the server counts them,
    None where it does not say. `retry_after_s`: how long the server asks to wait, in seconds. `detail`: one line for a
    person, never with the key.
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
    short = " ".join(without_key(text, key)[:_LOOKED_AT].split())
    return shorten(visible(redacted(short)), LINE_CHARS - len(_CUT))


LARGEST_COUNT = 10**12  # of tokens: a larger one is none
_DECIMAL = re.compile(r"\d{1,12}(\.\d{1,12})?")
_THINKING_KINDS = ("thinking", "reasoning")
_OPEN, _CLOSE = "<think>", "</think>"


def read_answer(status: int, headers: Mapping[str, str], body: bytes, key: str | None) -> Attempt:
    """Return the attempt of a server's answer. `headers`: by lower-case names. `key`: hidden in its `detail`.

    A status other than 2xx is http_NNN, and so is a reply of status 200 that holds an error with a code of its own.

    >>> read_answer(200, {}, b'{"choices": [{"message": {"content": "<think>2?</think>3"}}]}', None).content
    '3'
    >>> read_answer(503, {"retry-after": "2"}, b"busy", None).detail
    'HTTP 503: busy'
    """
    try:
        return _read(status, headers, body, key)
    except (RecursionError, MemoryError) as error:
        return Attempt("broken", detail=f"an answer too deep or too large to read ({type(error).__name__})")


def _read(status: int, headers: Mapping[str, str], body: bytes, key: str | None) -> Attempt:
    answer, wish = _parsed(headers, body), _wait_of(headers)
    if not 200 <= status < 300:
        elsewhere = headers.get("location", "") if 300 <= status < 400 else ""
        said = f"it redirects to {elsewhere}" if elsewhere else _error_of(answer) or body.decode("utf-8", "replace")
        return Attempt(f"http_{status}", retry_after_s=wish, detail=one_line(f"HTTP {status}: {said}", key))
    if answer is None:
        shown = body[:1000].decode("utf-8", "replace")
        return Attempt("broken", retry_after_s=wish, detail=one_line(f"no JSON: {shown}" if shown else "no text", key))
    prompt_tokens, completion_tokens = _usage_of(answer)
    counted: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    choice = _first_choice(answer)
    if choice is None:
        code = _code_of(answer)
        said = _error_of(answer) or f"no choices[0].message in {body[:1000].decode('utf-8', 'replace')}"
        outcome = "broken" if code is None else f"http_{code}"
        return Attempt(outcome, retry_after_s=wish, detail=one_line(said, key), **counted)
    message, finish_reason = choice
    texts = _texts_of(message)
    if texts is None:
        return Attempt(
            "broken", detail=one_line(f"content of another type: {message['content']!r:.200}", key), **counted
        )
    content, reasoning = texts
    if not content.strip():
        said = _why_empty(message, reasoning, finish_reason)
        return Attempt("empty", "", reasoning, finish_reason, detail=one_line(said, key), **counted)
    return Attempt("ok", content, reasoning, finish_reason, **counted)


def without_thinking(content: str) -> tuple[str, str | None]:
    """Return a reply's content and the thinking in front of it; unfinished thinking leaves no content.

    Some servers put the first mark into the prompt, so that the reply has only the last one.

    >>> without_thinking("<think>\\nA square?\\n</think>\\n\\nYes."), without_thinking("<think>A square"), \
    without_thinking("A square?</think>Yes.")
    (('Yes.', 'A square?'), ('', 'A square'), ('Yes.', 'A square?'))
    """
    begin = content.find(_OPEN)
    if begin >= 0 and not content[:begin].strip():
        thinking, closed, rest = content[begin + len(_OPEN) :].partition(_CLOSE)
    elif begin < 0 and _CLOSE in content:
        thinking, closed, rest = content.partition(_CLOSE)
    else:
        return content, None
    return (rest.lstrip() if closed else ""), thinking.strip() or None


def _parsed(headers: Mapping[str, str], body: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body, or the sum of a stream of events; None if it is neither."""
    try:
        if "text/event-stream" in headers.get("content-type", ""):
            return _added_up(body.decode("utf-8"))
        answer = json.loads(body)
    except (ValueError, RecursionError, MemoryError):
        return None
    return answer if isinstance(answer, dict) else None


def _added_up(text: str) -> dict[str, Any] | None:
    """Join the pieces of a streamed reply; None if the stream has no end."""
    content, reasoning = list[str](), list[str]()
    finish_reason, usage, ended = None, None, False
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            ended = True
            break
        event = json.loads(value)
        if not isinstance(event, dict) or event.get("error"):
            return event if isinstance(event, dict) else None
        usage = event.get("usage") or usage
        piece, reason = _first_choice(event, "delta") or ({}, None)
        finish_reason = reason or finish_reason
        content += [found] if isinstance(found := piece.get("content"), str) else []
        thought = piece.get("reasoning_content") or piece.get("reasoning")
        reasoning += [thought] if isinstance(thought, str) else []
    if not ended and finish_reason is None:
        return None
    message = {"content": "".join(content), "reasoning_content": "".join(reasoning)}
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


def _first_choice(answer: Mapping[str, Any], name: str = "message") -> tuple[dict[str, Any], str | None] | None:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get(name) if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        return None
    reason = choice.get("finish_reason")
    return message, _plain(reason)[:100] if isinstance(reason, str) else None


def _texts_of(message: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Return content and thinking of a message; None if the content is of another type."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ["" if content is None else content]
    said, thought = list[str](), list[str]()
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else ""
        text = _text_in(part)
        if text is None and not isinstance(part, dict):
            return None
        (thought if kind in _THINKING_KINDS else said).append(text or "")
    told = [text for name in ("reasoning_content", "reasoning") if isinstance(text := message.get(name), str)]
    whole, reasoning = _plain("".join(said)), _plain(next(filter(str.strip, told), "".join(thought)))
    if reasoning and not whole.lstrip().startswith(_OPEN):
        return whole, reasoning
    inside, before = without_thinking(whole)
    return inside, reasoning or before


def _text_in(part: Any) -> str | None:
    """Return the text of a part of a content: a text, or a mapping with `text` or `thinking`, also in a list."""
    if isinstance(part, dict):
        part = part.get("text", part.get("thinking"))
        if isinstance(part, list):
            texts = [one.get("text") if isinstance(one, dict) else one for one in part]
            return "".join(text for text in texts if isinstance(text, str))
    return part if isinstance(part, str) else None


def _plain(text: str) -> str:
    """Return a text that can be encoded: half a character, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _usage_of(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = answer.get("usage")
    told = usage if isinstance(usage, dict) else {}
    prompt, completion = told.get("prompt_tokens"), told.get("completion_tokens")
    return _count(prompt), _count(completion)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < LARGEST_COUNT else None


def _error_of(answer: Mapping[str, Any] | None) -> str:
    """Return the message of an error, in the shapes that servers use; "" if there is none."""
    error = (answer or {}).get("error") or (answer or {}).get("detail") or (answer or {}).get("message")
    if isinstance(error, dict):
        error = error.get("message") or error
    return error if isinstance(error, str) else json.dumps(error)[:2000] if error else ""


def _code_of(answer: Mapping[str, Any]) -> int | None:
    """Return the status of an error that came with status 200, as gateways send it."""
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 600 else None


def _why_empty(message: Mapping[str, Any], reasoning: str | None, finish_reason: str | None) -> str:
    if isinstance(refused := message.get("refusal"), str) and refused:
        return f"the model declined: {refused}"
    ended = f", finish_reason={finish_reason}" if finish_reason else ""
    return f"thinking without an answer{ended}" if reasoning else f"a reply without content{ended}"


def _wait_of(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`, as a number or as a date; None if it is missing or unreadable."""
    text = headers.get("retry-after", "").strip()
    if _DECIMAL.fullmatch(text):
        return float(text)
    try:
        wait = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return max(0.0, wait) if math.isfinite(wait) else None


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
        found = _LANGUAGE.match(self.info)
        return found[1].lower() if found else ""

    def opens(self) -> bool:
        return not (self.mark[0] == "`" and "`" in self.info)  # which is code within a line

    def may_end(self, opening: "_Fence") -> bool:
        """Whether it ends a block or begins another of the same kind, as seen from a block's beginning."""
        same = self.mark[0] == opening.mark[0] and len(self.mark) >= len(opening.mark)
        return same and self.indent <= opening.indent + 3


def program_in(content: str) -> str | None:
    """The program in a reply, as it stands there; None where there is none.

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
            yield _dedented(text[opening.end + 1 : fences[end].start], opening.indent)
        n = end if begins else end + 1


def _end(text: str, fences: list[_Fence], n: int) -> tuple[int | None, bool]:
    """Which fence ends the block that begins at the `n`-th, and whether that one begins another: its end was forgotten.

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


def _dedented(text: str, indent: int) -> str:
    """Remove from a block's lines as much white space as its fence has in front of it."""
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", text, flags=re.MULTILINE) if indent else text


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
