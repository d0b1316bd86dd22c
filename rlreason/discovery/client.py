"""Ask an OpenAI-compatible server, read its replies, and name what goes wrong with its cure.

httpx sends, within one deadline that asyncio holds over the whole request. When to ask again is decided in `asking`,
which writes each request into the journal first.
"""

import asyncio
import json
import math
import random
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx
import msgspec

from rlreason.discovery.journal import Attempt
from rlreason.errors import ConfigError
from rlreason.runtime.text import HIDDEN, few, redacted, shorten, visible

LINE_CHARS = 300  # of a text about an answer
CONNECT_S = 20.0  # a server that takes no connection within this time is not there
LONGEST_HEEDED_S = 120.0  # of what a server asks for
REQUEST_ID = "X-Client-Request-Id"
PATH = "/chat/completions"
LOOPBACK = r"localhost|::1|127(\.\d{1,3}){3}"  # hosts on this computer, which no proxy reaches
LARGEST_BODY = 32 * 2**20  # bytes of an answer
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.LocalProtocolError)


def one_line(text: str, key: str | None) -> str:
    """Return at most `LINE_CHARS` characters of a text on one line, without secrets and control characters.

    A key of at most five characters, such as those made up for a server of one's own, is hidden as a whole word only.

    >>> one_line("Incorrect API key\\n  provided: swordfish\\x1b[2J", "swordfish"), one_line("maximum: x", "x")
    ('Incorrect API key provided: <redacted>\\\\x1b[2J', 'maximum: <redacted>')
    """
    if key := (key or "").strip():
        text = text.replace(key, HIDDEN) if len(key) > 5 else re.sub(rf"(?<!\w){re.escape(key)}(?!\w)", HIDDEN, text)
    return shorten(visible(redacted(" ".join(text[:20_000].split()))), LINE_CHARS - len(" ..."))


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
    def setting(self) -> str:
        """Return the setting with its address, for messages."""
        return f"client.base_url={one_line(self.base_url, self.key)}"

    def url(self, path: str = PATH) -> httpx.URL:
        """Return the address of a path below the base; `ConfigError` if `base_url` is no web address.

        >>> str(Endpoint("https://host/v1/?version=1", "m").url())
        'https://host/v1/chat/completions?version=1'
        """
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host or re.search(r"\s", self.base_url):
            raise ConfigError(f"{self.setting} is no address of a server: give one such as http://127.0.0.1:8000/v1")
        if url.path.rstrip("/").endswith(PATH):
            raise ConfigError(f"{self.setting} names {PATH} itself: leave that away, it mostly ends in /v1")
        return url.copy_with(path=url.path.rstrip("/") + path)

    def headers(self) -> dict[str, str]:
        """Return the header with the key, if there is one; `ConfigError` if no request can have it."""
        key = (self.key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"the key in {self.env_variable or 'the variable that client.env_variable names'} holds a character "
                "that no request can send: set it to the key alone"
            )
        return {"Authorization": f"Bearer {key}"} if key else {}

    def body(self, messages: Sequence[Mapping[str, Any]], seed: int | None, max_tokens: int) -> dict[str, Any]:
        """Return what is sent to ask for a reply."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens}
        body |= {"temperature": self.temperature, "seed": seed}
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}  # as vLLM and SGLang take it
        for name, value in self.extra.items():
            is_merged = isinstance(value, Mapping) and isinstance(body.get(name), dict)
            body[name] = {**body[name], **value} if is_merged else value
        if body.get("max_completion_tokens") is not None:  # another name for the bound, which is ours to set
            body["max_completion_tokens"] = max_tokens
        return {name: value for name, value in body.items() if value is not None}


class Client:
    """Sends requests to one endpoint. `ConfigError` for an address, a key or a proxy that no request can use.

    Each request has a connection of its own: a model thinks for longer than servers keep one open.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._url, headers = endpoint, endpoint.url(), endpoint.headers()
        is_here = re.fullmatch(LOOPBACK, self._url.host) is not None
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        try:
            self._http = httpx.AsyncClient(headers=headers, trust_env=not is_here, timeout=timeout, limits=LIMITS)
        except Exception as error:
            cause = one_line(f"{type(error).__name__}: {error}", endpoint.key)
            raise ConfigError(
                f"{endpoint.setting} cannot be reached as the environment says ({cause}): correct or unset ALL_PROXY, "
                "HTTPS_PROXY, HTTP_PROXY and SSL_CERT_FILE"
            ) from error

    def models(self) -> list[str]:
        """Return the names of the models that the server lists; `ConfigError` if it does not answer."""
        request = self._http.get(self._endpoint.url("/models"), timeout=CONNECT_S)
        try:
            listed = asyncio.run_coroutine_threadsafe(request, _event_loop()).result().json()
            return [str(row["id"]) for row in listed["data"]]
        except httpx.HTTPError as error:
            cause = one_line(f"{type(error).__name__}: {error}", self._endpoint.key)
            raise ConfigError(refusal(Attempt("connection", detail=cause), self._endpoint)) from error
        except (ValueError, KeyError, TypeError):
            return []

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        request_id: str,
        seed: int | None,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Future[Attempt]:
        """Send one request; its attempt comes within `timeout_s` seconds, whatever the server does.

        `request_id`: goes along as `X-Client-Request-Id`. `max_tokens`, `timeout_s`: in place of the endpoint's.
        Cancelling the future closes the connection.
        """
        endpoint = self._endpoint
        body = endpoint.body(messages, seed, endpoint.max_tokens if max_tokens is None else max_tokens)
        limit = endpoint.timeout_s if timeout_s is None else timeout_s
        return asyncio.run_coroutine_threadsafe(self._post(body, {REQUEST_ID: request_id}, limit), _event_loop())

    async def _post(self, body: dict[str, Any], headers: dict[str, str], limit: float) -> Attempt:
        try:
            text = bytearray()
            async with (
                asyncio.timeout(limit),
                self._http.stream("POST", self._url, json=body, headers=headers) as response,
            ):
                async for piece in response.aiter_bytes():
                    text += piece
                    if len(text) > LARGEST_BODY:
                        return Attempt("broken", detail=f"the answer is larger than {LARGEST_BODY // 2**20} MB")
            response.headers.pop("content-encoding", None)  # the text is decoded
            whole = httpx.Response(response.status_code, headers=response.headers, content=bytes(text))
            return read_answer(whole, self._endpoint.key)
        except TimeoutError:
            return Attempt("timeout", detail=f"no whole answer within {limit:g} s")
        except Exception as error:  # of the connection, or of what a server sends instead of HTTP
            outcome = "connection" if isinstance(error, UNSENT) else "broken"  # the model may have been asked
            return Attempt(outcome, detail=one_line(f"{type(error).__name__}: {error}", self._endpoint.key))


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop that carries all requests, in a thread that no process waits for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="requests to the model").start()
    return loop


def only_model(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with the only model that it lists; `ConfigError` if it lists none, or several."""
    names = Client(endpoint).models()
    if len(names) != 1:
        raise ConfigError(
            f"client.model=null, and {endpoint.setting} lists {len(names)} models ({few(names) or 'none'}): give "
            "client.model=NAME"
        )
    return replace(endpoint, model=names[0])


class _Part(msgspec.Struct):
    """A part of a content that is a list. `thinking`: as Mistral's servers send it, or as a text."""

    type: str = ""
    text: str | None = None
    thinking: "str | list[_Part] | None" = None


class _Message(msgspec.Struct):
    content: str | list[str | _Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    def texts(self) -> tuple[str, str | None]:
        """Return content and thinking, which servers send apart, in parts, or as one text.

        Some servers put the first mark of thinking into the prompt, so that the reply has only the last one. Unfinished
        thinking leaves no content.
        """
        content, thinking = "", ""
        for part in self.content if isinstance(self.content, list) else [self.content or ""]:
            if isinstance(part, str):
                content += part
            elif isinstance(part.thinking, list):
                thinking += "".join(inner.text or "" for inner in part.thinking)
            elif part.thinking or part.type in ("thinking", "reasoning"):
                thinking += part.thinking or part.text or ""
            else:
                content += part.text or ""
        for text in (self.reasoning, self.reasoning_content):
            if text and text.strip():
                thinking = text
        opens = content.lstrip().startswith("<think>")
        if opens or (not thinking and "</think>" in content and "<think>" not in content):
            before, _, content = content.partition("</think>")
            content, thinking = content.lstrip(), thinking or before.lstrip().removeprefix("<think>").strip()
        return content, thinking or None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None  # of a stream
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


def read_answer(response: httpx.Response, key: str | None) -> Attempt:
    """Return the attempt of a server's answer. `key`: hidden in its `detail`.

    A status other than 2xx is http_NNN, and so is a reply of status 200 that holds an error with a code of its own.

    >>> reply = httpx.Response(200, text='{"choices": [{"message": {"content": "<think>2?</think>3"}}]}')
    >>> read_answer(reply, None).content, read_answer(httpx.Response(503, text="busy"), None).detail
    ('3', 'HTTP 503: busy')
    """
    text, answer, trouble = response.text, _Answer(), ""
    try:
        is_stream = "text/event-stream" in response.headers.get("content-type", "")
        answer = _joined(text) if is_stream else msgspec.convert(json.loads(response.content), _Answer)
    except (ValueError, RecursionError) as wrong:
        trouble = str(wrong) if isinstance(wrong, msgspec.ValidationError) else "no JSON"
        trouble = f"{trouble}: {text[:1000]}" if text else "no text"
    usage = answer.usage if isinstance(answer.usage, dict) else {}
    attempt = Attempt("broken")
    for name in ("prompt_tokens", "completion_tokens"):
        if type(count := usage.get(name)) is int and count >= 0:
            setattr(attempt, name, count)
    with suppress(ValueError):
        seconds = float(response.headers.get("retry-after", ""))
        attempt.retry_after_s = seconds if 0 <= seconds < math.inf else None
    choice = answer.choices[0] if answer.choices else _Choice()
    if not response.is_success:
        attempt.outcome, elsewhere = f"http_{response.status_code}", response.headers.get("location")
        detail = f"it redirects to {elsewhere}" if elsewhere else answer.error_text() or text
        detail = f"HTTP {response.status_code}: {detail}"
    elif trouble or choice.message is None:
        code = answer.error.get("code") if isinstance(answer.error, dict) else None  # as gateways send it
        attempt.outcome = f"http_{code}" if type(code) is int and 400 <= code < 600 else "broken"
        detail = trouble or answer.error_text() or f"no choices[0].message in {text[:1000]}"
    else:
        content, reasoning = choice.message.texts()
        attempt.reasoning = reasoning and _encodable(reasoning)
        attempt.finish_reason = choice.finish_reason and _encodable(choice.finish_reason)[:100]
        if content.strip():
            attempt.outcome, attempt.content = "ok", _encodable(content)
            return attempt
        attempt.outcome = "empty"
        detail = "thinking without an answer" if reasoning else "a reply without content"
        detail += f", finish_reason={attempt.finish_reason}" if attempt.finish_reason else ""
        if choice.message.refusal:
            detail = f"the model declined: {choice.message.refusal}"
    attempt.detail = one_line(detail, key)
    return attempt


def _joined(text: str) -> _Answer:
    """Join the events of a streamed reply; `ValueError` if the stream has no end."""
    whole, content, thinking = _Choice(), "", ""
    answer = _Answer([whole])
    events, *end = re.split(r"^data: *\[DONE\]", text, maxsplit=1, flags=re.MULTILINE)
    for value in re.findall(r"^data:(.*)", events, re.MULTILINE):
        event = msgspec.convert(json.loads(value), _Answer)
        if event.error:
            return event
        answer.usage = event.usage or answer.usage
        for choice in event.choices or []:
            whole.finish_reason = choice.finish_reason or whole.finish_reason
            if choice.delta is not None:
                content += choice.delta.content if isinstance(choice.delta.content, str) else ""
                thinking += choice.delta.reasoning_content or choice.delta.reasoning or ""
    if not end and whole.finish_reason is None:
        raise ValueError("the stream has no end")
    whole.message = _Message(content, thinking)
    return answer


def _encodable(text: str) -> str:
    """Return a text that can be encoded: half a character, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def pause_s(attempt_number: int, retry_after_s: float | None, first_s: float) -> float:
    """Return the seconds to wait after the `attempt_number`-th request for one reply (from 1) has failed.

    A server's own wish is heeded, up to `LONGEST_HEEDED_S`. Otherwise the wait doubles from `first_s` up to 60 times
    that; it is between half of it and all, so that requests which failed together come back apart.

    >>> pause_s(1, 0.0, 2.0), pause_s(1, 1e9, 2.0)
    (0.0, 120.0)
    """
    if retry_after_s is not None:
        return min(retry_after_s, LONGEST_HEEDED_S)
    return first_s * min(60.0, 2.0 ** min(attempt_number - 1, 10)) * random.uniform(0.5, 1.0)


def worth_retrying(outcome: str) -> bool:
    """Return whether the same question may be answered if it is asked again. `outcome`: of an `Attempt`.

    >>> [worth_retrying(outcome) for outcome in ("http_429", "http_503", "empty", "http_401", "http_302", "ok")]
    [True, True, True, False, False, False]
    """
    passing = {"http_408", "http_409", "http_429", "timeout", "connection", "empty", "broken", "no_code", "truncated"}
    return outcome in passing or outcome.startswith("http_5")


#: Outcome, pattern in its detail -> what it means, and the cure. The first that matches.
_CURES = (
    ("http_401", "", "got no key, or does not accept it: put one into the {variable}"),
    ("http_40[23]", "", "does not let this key use {model}: add credit, name another model, or change the {variable}"),
    (
        "http_404",
        "",
        "does not know {model}, or has no /chat/completions below it: give a model that /models lists there, or the "
        "address before /chat/completions, which mostly ends in /v1",
    ),
    ("http_413", "", "takes no prompt of this length: lower history"),
    ("http_429", "", "takes no more requests for now: go on later, or ask for fewer at a time"),
    ("http_3", "", "sends requests elsewhere, which are not followed: give the address that it names"),
    ("connection", "", "does not answer: start the server, or correct the address"),
    ("timeout", "", "did not answer within client.timeout_s={timeout_s:g}: raise it, or ask for less"),
    (
        "http_4",
        "max_completion_tokens",
        "asks for another name of the bound: client.extra={{max_tokens: null, max_completion_tokens: {max_tokens}}}",
    ),
    (
        "http_4",
        r"context.{0,20}(length|window|size)|maximum.{0,20}(context|tokens)|max_(model_len|tokens|new_tokens)"
        r"|too (long|many tokens)",
        "has no room for the prompt and the reply together: lower client.max_tokens={max_tokens}",
    ),
    (
        "http_4",
        r"non-?stream|stream ?= ?.?false|only support.{0,20}stream",
        "thinks in streams alone: client.extra={{stream: true, stream_options: {{include_usage: true}}, "
        "enable_thinking: true}} and client.thinking=null, or client.extra={{enable_thinking: false}}",
    ),
    (
        "http_4",
        "chat_template_kwargs|thinking",
        "does not take client.thinking={thinking}: client.thinking=null sends nothing, and client.extra can send what "
        "this server takes",
    ),
    ("http_4", "temperature", "does not allow client.temperature={temperature}: client.temperature=null leaves it out"),
    ("http_4", "", "refuses the request: check client.model, client.max_tokens and client.extra against what it takes"),
    ("", "", "gave no reply that can be used: look at its log, or try another {model}"),
)


def refusal(attempt: Attempt, endpoint: Endpoint) -> str:
    """Return one line on a request that is not worth retrying: the setting, its value, the error, the cure."""
    detail_with_key = attempt.detail.replace(HIDDEN, (endpoint.key or "").strip())  # a short key can be a usual word
    cure = next(
        cure
        for outcome, detail, cure in _CURES
        if re.match(outcome, attempt.outcome) and re.search(detail, detail_with_key, re.IGNORECASE)
    )
    line = cure.format(
        max_tokens=endpoint.max_tokens,
        temperature=endpoint.temperature,
        timeout_s=endpoint.timeout_s,
        thinking=json.dumps(endpoint.thinking),
        model=f"client.model={one_line(endpoint.model, endpoint.key)}",
        variable=f"environment variable {endpoint.env_variable} (client.env_variable)",
    )
    return f"{endpoint.setting} {line}" + (f" ({attempt.detail})" if attempt.detail else "")
