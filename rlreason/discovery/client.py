"""Ask an OpenAI-compatible server: requests within limits, pauses between them, and errors with their cures.

httpx sends, within one deadline that asyncio holds over the whole request. When to ask again is decided in `asking`,
which writes each request into the journal first.
"""

import asyncio
import json
import random
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from rlreason.discovery.answer import Attempt, one_line, read_answer
from rlreason.errors import ConfigError
from rlreason.runtime.text import few

LARGEST_BODY = 32 * 2**20  # bytes of an answer
LARGEST_ERROR = 2**16  # bytes that are read of one with an error
CONNECT_S = 20.0  # a server that takes no connection within this time is not there
LONGEST_PAUSE_S = 60.0
LONGEST_HEEDED_S = 120.0  # of what a server asks for
REQUEST_ID = "X-Client-Request-Id"
PATH = "/chat/completions"
Message = Mapping[str, Any]


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

    @property
    def setting(self) -> str:
        """Return the setting with its address, for messages."""
        return f"client.base_url={one_line(self.base_url, self.key)}"

    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.base_url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address or re.search(r"\s", self.base_url):
            raise ConfigError(f"{self.setting} is no address of a server: give one such as http://127.0.0.1:8000/v1")
        if parts.path.rstrip("/").endswith(PATH):
            raise ConfigError(f"{self.setting} names {PATH} itself: leave that away, it mostly ends in /v1")
        return parts


class Client:
    """Sends requests to one endpoint. `ConfigError` for an address or a key that no request can have.

    Each request has a connection of its own: a model thinks for longer than servers keep one open.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        import httpx  # slow to load, and needed here alone

        self._endpoint, self._url, self._key = endpoint, endpoint.url, (endpoint.key or "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError(
                f"the key in {endpoint.env_variable or 'the variable that client.env_variable names'} holds a "
                "character that no request can send: set it to the key alone"
            )
        self._tls = httpx.create_ssl_context()

    def ask(
        self,
        messages: Sequence[Message],
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
        body = self._body(messages, seed, self._endpoint.max_tokens if max_tokens is None else max_tokens)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", REQUEST_ID: request_id}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        limit = self._endpoint.timeout_s if timeout_s is None else timeout_s
        return asyncio.run_coroutine_threadsafe(self._post(body, headers, limit), _event_loop())

    async def _post(self, body: bytes, headers: dict[str, str], limit: float) -> Attempt:
        import httpx

        timeout, by_proxy = httpx.Timeout(None, connect=CONNECT_S), not self._endpoint.on_this_computer
        try:
            async with (
                asyncio.timeout(limit),
                httpx.AsyncClient(verify=self._tls, timeout=timeout, trust_env=by_proxy) as client,
                client.stream("POST", self._url, content=body, headers=headers) as response,
            ):
                return await self._read(response)
        except TimeoutError:
            return Attempt("timeout", detail=f"no whole answer within {limit:g} s")
        except Exception as error:  # of the connection, or of what a server sends instead of HTTP
            unsent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.LocalProtocolError)
            outcome = "connection" if isinstance(error, unsent) else "broken"  # the model may have been asked
            return Attempt(outcome, detail=one_line(f"{type(error).__name__}: {error}", self._key))

    async def _read(self, response: Any) -> Attempt:
        """Read an answer up to the limits on its size."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":  # a small body can become any size
            return Attempt("broken", detail=one_line(f"the answer is compressed ({encoding}), unasked", self._key))
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if not response.is_success and len(body) > LARGEST_ERROR:
                break
            if len(body) > LARGEST_BODY:
                return Attempt("broken", detail=f"the answer is larger than {LARGEST_BODY // 2**20} MB")
        return read_answer(response.status_code, response.headers, bytes(body), self._key)

    def _body(self, messages: Sequence[Message], seed: int | None, max_tokens: int) -> bytes:
        endpoint = self._endpoint
        body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages), "max_tokens": max_tokens}
        if endpoint.temperature is not None:
            body["temperature"] = endpoint.temperature
        if seed is not None:
            body["seed"] = seed
        if endpoint.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": endpoint.thinking}  # as vLLM and SGLang take it
        body = _merged(body, endpoint.extra)
        if body.get("max_completion_tokens") is not None:  # another name for the bound, which is ours to set
            body["max_completion_tokens"] = max_tokens
        return json.dumps(body).encode()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop that carries all requests, in a thread that no process waits for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="requests to the model").start()
    return loop


def _merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the fields of both; `extra` takes precedence, mappings are merged, None removes a field.

    >>> _merged({"a": {"b": 1}, "c": 2, "d": 3}, {"a": {"e": 4}, "c": None, "d": 5})
    {'a': {'b': 1, 'e': 4}, 'd': 5}
    """
    merged = dict(body)
    for name, value in extra.items():
        if isinstance(value, Mapping):
            before = merged.get(name)
            merged[name] = _merged(before if isinstance(before, Mapping) else {}, value)
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def only_model(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with the only model that it lists; `ConfigError` if it lists none, or several."""
    import httpx

    url = endpoint.url.replace(PATH, "/models")
    headers = {"Authorization": f"Bearer {endpoint.key.strip()}"} if endpoint.key else {}
    try:
        with httpx.Client(timeout=CONNECT_S, trust_env=not endpoint.on_this_computer) as client:
            models = client.get(url, headers=headers).json()
        names = [str(row["id"]) for row in models["data"]]
    except httpx.HTTPError as error:
        cause = one_line(f"{type(error).__name__}: {error}", endpoint.key)
        raise ConfigError(
            f"nothing answers at {endpoint.setting} ({cause}): start the server, or correct the address"
        ) from error
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"client.model=null, and {endpoint.setting} does not list its models: give client.model=NAME"
        ) from None
    if len(names) != 1:
        raise ConfigError(
            f"client.model=null, and {endpoint.setting} lists {len(names)} models ({few(names) or 'none'}): give "
            "client.model=NAME"
        )
    return replace(endpoint, model=names[0])


def pause_s(attempt_number: int, retry_after_s: float | None, seed: int) -> float:
    """Return the seconds to wait after the `attempt_number`-th request for one reply (from 1) has failed.

    A server's own wish is heeded, up to `LONGEST_HEEDED_S`. Otherwise the wait doubles from 1 s up to
    `LONGEST_PAUSE_S`; it is between half of that and all of it, drawn by `seed`, so that requests which failed
    together do not come back together. The same arguments give the same wait.

    >>> [round(pause_s(n, None, seed=0), 2) for n in (1, 2, 3, 9)], pause_s(1, 0.0, 0), pause_s(1, 1e9, 0)
    ([0.57, 1.18, 3.49, 30.13], 0.0, 120.0)
    """
    if retry_after_s is not None:
        return min(retry_after_s, LONGEST_HEEDED_S)
    longest = min(LONGEST_PAUSE_S, 2.0 ** min(attempt_number - 1, 10))
    return longest * random.Random(f"{seed} {attempt_number}").uniform(0.5, 1.0)


def worth_retrying(outcome: str) -> bool:
    """Return whether the same question may be answered if it is asked again.

    `outcome`: of an `Attempt`, or no_code (a reply without a program) or truncated (it ended amid its program).

    >>> [worth_retrying(outcome) for outcome in ("http_429", "http_503", "empty", "http_401", "http_302", "ok")]
    [True, True, True, False, False, False]
    """
    passing = {"http_408", "http_409", "http_429", "timeout", "connection", "empty", "broken", "no_code", "truncated"}
    return outcome in passing or outcome.startswith("http_5")


#: What the message of a 400 or 422 is about, as a pattern, and the cure.
_CURES = (
    (
        r"max_completion_tokens",
        "ask for it by that name: client.extra={{max_tokens: null, max_completion_tokens: {max_tokens}}}",
    ),
    (
        r"context.{0,20}(length|window|size)|maximum.{0,20}(context|tokens)|max_(model_len|tokens|new_tokens)"
        r"|too (long|many tokens)",
        "the prompt and the reply do not fit together: lower client.max_tokens={max_tokens}",
    ),
    (
        r"non-?stream|stream ?= ?.?false|only support.{0,20}stream",
        "this server thinks in streams alone: client.extra={{stream: true, stream_options: {{include_usage: true}}, "
        "enable_thinking: true}} and client.thinking=null, or client.extra={{enable_thinking: false}}",
    ),
    (
        r"chat_template_kwargs|enable_thinking|thinking",
        "it does not take client.thinking={thinking}: client.thinking=null sends nothing, and client.extra can send "
        "what this server takes",
    ),
    (
        r"temperature",
        "client.temperature={temperature} is not allowed: client.temperature=null leaves it to the server",
    ),
    (r"\bmodel\b", "it may not know client.model={model}: give a name that {base_url}/models lists"),
    (r"", "check client.model, client.temperature, client.max_tokens and client.extra against what it takes"),
)


def refusal(attempt: Attempt, endpoint: Endpoint) -> str:
    """Return one line on a request that is not worth retrying: the setting, its value, the error, the cure.

    >>> attempt = Attempt("http_401", detail="HTTP 401: no such key")
    >>> print(refusal(attempt, Endpoint("http://h/v1", "m")))  # doctest: +NORMALIZE_WHITESPACE
    client.base_url=http://h/v1 asks for a key and none was sent: put one into the environment variable that
    client.env_variable names (HTTP 401: no such key)
    """
    at = endpoint.setting
    model = f"client.model={one_line(endpoint.model, endpoint.key)}"
    variable = f"environment variable {endpoint.env_variable or 'that client.env_variable names'}"
    variable += " (client.env_variable)" if endpoint.env_variable else ""
    match attempt.outcome:
        case "http_401" if not endpoint.key:
            line = f"{at} asks for a key and none was sent: put one into the {variable}"
        case "http_401":
            line = f"{at} does not accept the key: put another one into the {variable}"
        case "http_402":
            line = f"{at} asks for payment: add credit, or use another key in the {variable}"
        case "http_403":
            line = f"{at} does not let this key use {model}: name another model, or use another key in the {variable}"
        case "http_404":
            line = (
                f"{at} does not know {model}, or has no /chat/completions below it: give a model that "
                "/models lists there, or the address before /chat/completions, which mostly ends in /v1"
            )
        case "http_413":
            line = f"{at} takes no prompt of this length: refine over fewer turns"
        case "http_429":
            line = f"{at} takes no more requests for now: go on later, or ask for fewer at a time"
        case "connection":
            line = f"nothing answers as a model's server at {at}: start the server, or correct the address"
        case "timeout":
            line = f"{at} did not answer within client.timeout_s={endpoint.timeout_s:g}: raise it, or ask for less"
        case outcome if outcome.startswith("http_3"):
            line = f"{at} sends requests elsewhere, which are not followed: give the address that it names"
        case outcome if outcome.startswith("http_4"):
            cure = next(cure for pattern, cure in _CURES if re.search(pattern, attempt.detail, re.IGNORECASE))
            values = {
                "max_tokens": endpoint.max_tokens,
                "temperature": endpoint.temperature,
                "thinking": "null" if endpoint.thinking is None else str(endpoint.thinking).lower(),
                "model": one_line(endpoint.model, endpoint.key),
                "base_url": one_line(endpoint.base_url, endpoint.key),
            }
            line = f"{at} refuses the request: {cure.format(**values)}"
        case _:
            line = f"{at} gave no reply that can be used: look at its log, or try another {model}"
    return f"{line} ({attempt.detail})" if attempt.detail else line
