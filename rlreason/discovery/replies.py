"""What a server's answer says, whatever it is: a reply as JSON or as a stream of events, an error, or none of these."""

import json
import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from rlreason.discovery.exchange import Attempt, one_line

LARGEST_COUNT = 10**12  # of tokens: a larger one is none
_DECIMAL = re.compile(r"\d{1,12}(\.\d{1,12})?")
_THINKING_KINDS = ("thinking", "reasoning")
_OPEN, _CLOSE = "<think>", "</think>"


def read_answer(status: int, headers: Mapping[str, str], body: bytes, key: str | None) -> Attempt:
    """The attempt that a server's answer makes. `headers`: by lower-case names. `key`: hidden in its `detail`.

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
    """A reply's content and the thinking in front of it; thinking that never ends leaves no content.

    Some servers leave the first mark in the prompt, so that the reply has the last one alone.

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
    """The object of JSON in a body, or the one that a stream of events adds up to; None where it is neither."""
    try:
        if "text/event-stream" in headers.get("content-type", ""):
            return _added_up(body.decode("utf-8"))
        answer = json.loads(body)
    except (ValueError, RecursionError, MemoryError):
        return None
    return answer if isinstance(answer, dict) else None


def _added_up(text: str) -> dict[str, Any] | None:
    """The pieces of a streamed reply as a whole one; None where the stream has no end."""
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
    """Content and thinking of a message; None where the content is of another type."""
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
    """The text of a part of a content: a text, or a mapping with one under `text` or `thinking`, also in a list."""
    if isinstance(part, dict):
        part = part.get("text", part.get("thinking"))
        if isinstance(part, list):
            texts = [one.get("text") if isinstance(one, dict) else one for one in part]
            return "".join(text for text in texts if isinstance(text, str))
    return part if isinstance(part, str) else None


def _plain(text: str) -> str:
    """The text as one that can be written: half a character, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _usage_of(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = answer.get("usage")
    told = usage if isinstance(usage, dict) else {}
    prompt, completion = told.get("prompt_tokens"), told.get("completion_tokens")
    return _count(prompt), _count(completion)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < LARGEST_COUNT else None


def _error_of(answer: Mapping[str, Any] | None) -> str:
    """The message of an error, in the shapes that servers give it; "" where there is none."""
    error = (answer or {}).get("error") or (answer or {}).get("detail") or (answer or {}).get("message")
    if isinstance(error, dict):
        error = error.get("message") or error
    return error if isinstance(error, str) else json.dumps(error)[:2000] if error else ""


def _code_of(answer: Mapping[str, Any]) -> int | None:
    """The status within an error that came with status 200, as gateways send it."""
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 600 else None


def _why_empty(message: Mapping[str, Any], reasoning: str | None, finish_reason: str | None) -> str:
    if isinstance(refused := message.get("refusal"), str) and refused:
        return f"the model declined: {refused}"
    ended = f", finish_reason={finish_reason}" if finish_reason else ""
    return f"thinking without an answer{ended}" if reasoning else f"a reply without content{ended}"


def _wait_of(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date; None where it says nothing that can be read."""
    text = headers.get("retry-after", "").strip()
    if _DECIMAL.fullmatch(text):
        return float(text)
    try:
        wait = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return max(0.0, wait) if math.isfinite(wait) else None
