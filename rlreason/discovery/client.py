"""One client for any OpenAI-compatible server: requests, retries, and which models it has."""

import json
import random
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlreason.discovery.exchange import Attempt, Endpoint, one_line, program_in, read_answer
from rlreason.errors import ConfigError
from rlreason.runtime.text import few

if TYPE_CHECKING:
    import httpx


LONGEST_PAUSE_S = 60.0
LONGEST_HEEDED_S = 120.0  # of what a server asks for
_WORTH = {"http_408", "http_409", "http_429", "timeout", "connection", "empty", "broken", "no_code", "truncated"}
#: What the message of a 400 or 422 is about, by its words, and the cure.
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
)


def worth_retrying(outcome: str) -> bool:
    """Return whether the same question may be answered if it is asked again.

    `outcome`: of an `Attempt`, or no_code (a reply without a program) or truncated (it ended amid its program).

    >>> [worth_retrying(outcome) for outcome in ("http_429", "http_503", "empty", "http_401", "http_302", "ok")]
    [True, True, True, False, False, False]
    """
    return outcome in _WORTH or re.fullmatch(r"http_5\d\d", outcome) is not None


def pause_s(attempt_number: int, retry_after_s: float | None, seed: int) -> float:
    """Seconds to wait after the `attempt_number`-th request for one reply (from 1) has failed.

    A server's own wish is heeded, up to `LONGEST_HEEDED_S`. Otherwise the wait doubles from 1 s up to
    `LONGEST_PAUSE_S`; it is between half of that and all of it, drawn by `seed`, so that requests which failed
    together do not come back together. The same arguments give the same wait.

    >>> [round(pause_s(n, None, seed=0), 2) for n in (1, 2, 3, 9)], pause_s(1, 0.0, 0), pause_s(1, 1e9, 0)
    ([0.57, 1.18, 3.49, 30.13], 0.0, 120.0)
    """
    if retry_after_s is not None and retry_after_s >= 0:
        return min(retry_after_s, LONGEST_HEEDED_S)
    whole = min(LONGEST_PAUSE_S, 2.0 ** min(max(attempt_number, 1) - 1, 10))
    return whole * random.Random(f"{seed} {attempt_number}").uniform(0.5, 1.0)


def refusal(attempt: Attempt, endpoint: Endpoint) -> str:
    """Return one line on a request that is not worth retrying: the setting, its value, the error, the cure.

    >>> attempt = Attempt("http_401", detail="HTTP 401: no such key")
    >>> print(refusal(attempt, Endpoint("http://h/v1", "m")))  # doctest: +NORMALIZE_WHITESPACE
    client.base_url=http://h/v1 asks for a key and none was sent: put one into the environment variable that
    client.env_variable names (HTTP 401: no such key)
    """
    at = f"client.base_url={one_line(endpoint.base_url, endpoint.key)}"
    model = f"client.model={one_line(endpoint.model, endpoint.key)}"
    where = f"environment variable {endpoint.env_variable or 'that client.env_variable names'}"
    where += " (client.env_variable)" if endpoint.env_variable else ""
    match attempt.outcome:
        case "http_401" if not endpoint.key:
            said = f"{at} asks for a key and none was sent: put one into the {where}"
        case "http_401":
            said = f"{at} does not accept the key: put another one into the {where}"
        case "http_402":
            said = f"{at} asks for payment: add credit, or use another key in the {where}"
        case "http_403":
            said = f"{at} does not let this key use {model}: name another model, or use another key in the {where}"
        case "http_404":
            said = (
                f"{at} does not know {model}, or has no /chat/completions below it: give a model that "
                "/models lists there, or the address before /chat/completions, which mostly ends in /v1"
            )
        case "http_413":
            said = f"{at} takes no prompt of this length: refine over fewer turns"
        case "http_429":
            said = f"{at} takes no more requests for now: go on later, or ask for fewer at a time"
        case "connection":
            said = f"nothing answers as a model's server at {at}: start the server, or correct the address"
        case "timeout":
            said = f"{at} did not answer within client.timeout_s={endpoint.timeout_s:g}: raise it, or ask for less"
        case outcome if outcome.startswith("http_3"):
            said = f"{at} sends requests elsewhere, which are not followed: give the address that it names"
        case outcome if outcome.startswith("http_4"):
            said = f"{at} refuses the request: {_cure(attempt.detail, endpoint)}"
        case _:
            said = f"{at} gave no reply that can be used: look at its log, or try another {model}"
    return f"{said} ({attempt.detail})" if attempt.detail else said


def _cure(detail: str, endpoint: Endpoint) -> str:
    values = {
        "max_tokens": endpoint.max_tokens,
        "temperature": endpoint.temperature,
        "thinking": "null" if endpoint.thinking is None else str(endpoint.thinking).lower(),
        "model": one_line(endpoint.model, endpoint.key),
        "base_url": one_line(endpoint.base_url, endpoint.key),
    }
    for words, cure in _CURES:
        if re.search(words, detail, re.IGNORECASE):
            return cure.format(**values)
    return "check client.model, client.temperature, client.max_tokens and client.extra against what it takes"


__all__ = ["Attempt", "Client", "Endpoint", "Message", "pause_s", "program_in", "refusal", "worth_retrying"]

LARGEST_BODY = 32 * 2**20  # bytes of an answer
LARGEST_ERROR = 2**16  # bytes that are read of one with an error
CONNECT_S = 20.0  # a server that takes no connection within this time is not there
AFTER_CUT_S = 0.2  # for a request to end after its connection was closed
REQUEST_ID = "X-Client-Request-Id"

Message = Mapping[str, Any]


class Client:
    """Sends requests to one endpoint; threads may share it. `ConfigError` for an address or key that is invalid in a
    request.

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
        self._running, self._stopped = set[_Request](), threading.Event()

    def ask(
        self,
        messages: Sequence[Message],
        *,
        request_id: str,
        seed: int | None,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Attempt:
        """Send one request and wait for its answer, `timeout_s` seconds at most, however slowly it comes.

        `request_id`: goes along as `X-Client-Request-Id`. `max_tokens`, `timeout_s`: in place of the endpoint's.
        Whatever the server does, it is told in the attempt and nothing is raised.
        """
        body = self._body(messages, seed, self._endpoint.max_tokens if max_tokens is None else max_tokens)
        limit = self._endpoint.timeout_s if timeout_s is None else timeout_s
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", REQUEST_ID: request_id}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = _Request(self._url, headers, body, limit, self._tls, not self._endpoint.on_this_computer)
        if self._stopped.is_set():
            return Attempt("interrupted", detail="not sent: the run ends")
        self._running.add(request)
        try:
            request.start()
            if self._stopped.is_set():  # just now
                request.cut()
            request.join(limit)
        finally:  # at the limit, and when a signal ends the wait
            over = request.is_alive()
            request.cut()
            request.join(AFTER_CUT_S)
            self._running.discard(request)
        if self._stopped.is_set():  # the answer may have been whole all the same
            attempt = self._attempt(request)
            return attempt if attempt.outcome == "ok" else Attempt("interrupted", detail="the run ends")
        if over or request.late:
            return Attempt("timeout", detail=f"no whole answer within {limit:g} s")
        return self._attempt(request)

    def stop(self) -> None:
        """End the requests of other threads, now and later; without an answer yet, their outcome is interrupted."""
        self._stopped.set()
        for request in self._running.copy():
            request.cut()

    def _attempt(self, request: "_Request") -> Attempt:
        if request.error is not None:
            said = f"{type(request.error).__name__}: {request.error}"
            outcome = "broken" if request.connected else "connection"  # the model may have been asked
            return Attempt(outcome, detail=one_line(said, self._key))
        if request.refused:
            return Attempt("broken", detail=one_line(request.refused, self._key))
        return read_answer(request.status, request.headers, bytes(request.body), self._key)

    def _body(self, messages: Sequence[Message], seed: int | None, max_tokens: int) -> bytes:
        endpoint = self._endpoint
        body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages), "max_tokens": max_tokens}
        if endpoint.temperature is not None:
            body["temperature"] = endpoint.temperature
        if seed is not None:
            body["seed"] = seed
        if endpoint.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": endpoint.thinking}  # as vLLM and SGLang take it
        whole = _merged(body, endpoint.extra)
        if whole.get("max_completion_tokens") is not None:  # another name for the bound, which is ours to set
            whole["max_completion_tokens"] = max_tokens
        return json.dumps(whole).encode()


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


class _Request(threading.Thread):
    """One request in a thread of its own: looking up a name and waiting for headers know no limit on the whole.

    `cut` closes the connection under it. What it leaves: `status`, `headers` and `body`, or an `error`, or what was
    `refused` about the answer, or that it was `late`.
    """

    def __init__(self, url: str, headers: dict[str, str], body: bytes, limit: float, tls: Any, by_proxy: bool) -> None:
        super().__init__(name="request to the model", daemon=True)  # a process ends without waiting for it
        self._url, self._sent_headers, self._sent, self._limit = url, headers, body, limit
        self._tls, self._by_proxy, self._stream = tls, by_proxy, None
        self._end = time.monotonic() + limit
        self._was_cut = threading.Event()
        self.status, self.headers, self.body = 0, dict[str, str](), bytearray()
        self.error: Exception | None = None
        self.refused, self.late, self.connected = "", False, False  # connected: something was sent

    def run(self) -> None:
        """Send it and read the answer."""
        import httpx

        timeout = httpx.Timeout(self._limit, connect=min(self._limit, CONNECT_S))
        try:
            with (
                httpx.Client(verify=self._tls, timeout=timeout, trust_env=self._by_proxy) as client,
                client.stream(
                    "POST",
                    self._url,
                    content=self._sent,
                    headers=self._sent_headers,
                    extensions={"trace": self._see},
                ) as response,
            ):
                self._read(response)
        except httpx.ConnectTimeout as error:
            self.late, self.error = time.monotonic() >= self._end, error
        except httpx.TimeoutException:
            self.late = True
        except Exception as error:  # of the connection, of what a server sends instead of HTTP, or of cutting it
            self.error = error

    def _read(self, response: "httpx.Response") -> None:
        self.status = response.status_code
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        encoding = self.headers.get("content-encoding", "identity")
        if encoding != "identity":  # a small body can become any size
            self.refused = f"the answer is compressed ({encoding}), which was not asked for"
            return
        good = 200 <= self.status < 300
        for piece in response.iter_raw(2**16):
            self.body += piece
            if time.monotonic() > self._end:
                self.late = True
                return
            if len(self.body) > (LARGEST_BODY if good else LARGEST_ERROR):
                self.refused = f"the answer is larger than {LARGEST_BODY // 2**20} MB" if good else ""
                return

    def _see(self, event: str, info: Mapping[str, Any]) -> None:
        """Handle each step of the connection; keep its stream, and close it if it was cut before."""
        self.connected |= event.endswith("send_request_headers.started")
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._stream = info.get("return_value")
            if self._was_cut.is_set():
                self._shut()

    def cut(self) -> None:
        """Close the connection, which ends the thread; no effect if it has ended."""
        self._was_cut.set()
        self._shut()

    def _shut(self) -> None:
        sock = self._stream.get_extra_info("socket") if self._stream is not None else None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


LIMIT_S = 20.0


def only_model(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with the only model that it lists; `ConfigError` if it lists none, or several."""
    import httpx

    url = endpoint.url.replace("/chat/completions", "/models")
    headers = {"Authorization": f"Bearer {endpoint.key.strip()}"} if endpoint.key else {}
    at = f"client.base_url={one_line(endpoint.base_url, endpoint.key)}"
    try:
        with httpx.Client(timeout=LIMIT_S, trust_env=not endpoint.on_this_computer) as client:
            answer = client.get(url, headers=headers)
        told: Any = answer.json()
        names = [str(row["id"]) for row in told["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        why = one_line(f"{type(error).__name__}: {error}", endpoint.key)
        raise ConfigError(f"nothing answers at {at} ({why}): start the server, or correct the address") from error
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"client.model=null, and {at} does not list its models: give client.model=NAME") from None
    if len(names) != 1:
        raise ConfigError(
            f"client.model=null, and {at} lists {len(names)} models ({few(names) or 'none'}): give client.model=NAME"
        )
    return replace(endpoint, model=names[0])
