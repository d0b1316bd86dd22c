"""One client for any OpenAI-compatible server: a question is one request, and whatever comes back is one `Attempt`.

When and how often to ask again is for the caller to say, who counts every request against a budget; `worth_retrying`
and `pause_s` tell it what is sensible.
"""

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlreason.discovery.code_blocks import program_in
from rlreason.discovery.exchange import Attempt, Endpoint, one_line
from rlreason.discovery.replies import read_answer
from rlreason.discovery.retries import pause_s, refusal, worth_retrying
from rlreason.errors import ConfigError

if TYPE_CHECKING:
    import httpx

__all__ = ["Attempt", "Client", "Endpoint", "Message", "pause_s", "program_in", "refusal", "worth_retrying"]

LARGEST_BODY = 32 * 2**20  # bytes of an answer
LARGEST_ERROR = 2**16  # bytes that are read of one with an error
CONNECT_S = 20.0  # a server that takes no connection within this time is not there
AFTER_CUT_S = 0.2  # for a request to end after its connection was closed
REQUEST_ID = "X-Client-Request-Id"

Message = Mapping[str, Any]


class Client:
    """Asks one endpoint; threads may share it. `ConfigError` for an address or a key that no request can hold.

    Each request has a connection of its own: between two of them a model thinks for longer than servers keep one open.
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
        """End what other threads ask, now and later: unless their answer is there, they get the outcome interrupted."""
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
    """The fields of both, `extra`'s where both have one; mappings go into each other, None takes a field out.

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
        """Hear of each step of the connection; keep what it is read through, and end it where it was cut before."""
        self.connected |= event.endswith("send_request_headers.started")
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._stream = info.get("return_value")
            if self._was_cut.is_set():
                self._shut()

    def cut(self) -> None:
        """End the connection, and with it the thread, wherever it is; one that has ended is left alone."""
        self._was_cut.set()
        self._shut()

    def _shut(self) -> None:
        sock = self._stream.get_extra_info("socket") if self._stream is not None else None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
