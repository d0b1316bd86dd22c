"""Ask an OpenAI-compatible server, read its replies and the programs in them, and say how to cure what goes wrong."""

import asyncio
import json
import os
import random
import re
import textwrap
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

import httpx

from rlreason.config.algorithms import ClientConfig
from rlreason.discovery.log import Answer, Messages
from rlreason.errors import ConfigError
from rlreason.runtime.text import HIDDEN, few, redacted, shorten, visible

LINE_CHARS = 300  # of a text about an answer, without a mark of its cut
LONGEST_HEEDED_S = 120.0  # of what a server asks to wait
CONNECT_S = 20.0  # a server that takes no connection within this time is not there
PATH = "/chat/completions"
LOOPBACK = r"localhost|::1|127(\.\d{1,3}){3}"  # hosts on this computer, which no proxy reaches
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.LocalProtocolError)


class Client:
    """Sends requests to one model of a server. May be used from several threads."""

    def __init__(self, config: ClientConfig) -> None:
        """Take the server from the settings, else the environment. `model` may be set later."""
        base_url = config.base_url or os.environ.get("OPENAI_BASE_URL") or ""
        self.config, self.model = config, config.model
        self.key = (os.environ.get(config.env_variable) or "").strip()
        self.setting = f"client.base_url={self.one_line(base_url) or 'null'}"
        if not (self.key.isascii() and self.key.isprintable()):  # an error about it would show it
            raise ConfigError(f"the key in {config.env_variable} has characters that no request can send: correct it")
        try:
            url = httpx.URL(base_url)
            if url.scheme not in ("http", "https") or not url.host:
                raise ValueError("no http:// with a host")
            self._http = httpx.AsyncClient(
                base_url=url.copy_with(query=None),
                params=url.params,
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                trust_env=not re.fullmatch(LOOPBACK, url.host),
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            )
        except Exception as error:  # of the many that an address, a proxy or a certificate can raise
            raise ConfigError(
                f"{self.setting} is no address that can be used ({self.one_line(str(error))}): give one with OpenAI's "
                "chat completions here or in OPENAI_BASE_URL, as http://127.0.0.1:8000/v1, or correct ALL_PROXY, "
                "HTTPS_PROXY or SSL_CERT_FILE"
            ) from error

    def one_line(self, text: str) -> str:
        """Return at most `LINE_CHARS` characters of a text on one line, without the key and control characters."""
        if len(self.key) > 5:  # shorter ones, made up for a server of one's own, are no secrets
            text = text.replace(self.key, HIDDEN)
        return shorten(visible(redacted(" ".join(text[:20_000].split()))), LINE_CHARS)

    def only_model(self) -> str:
        """Return the only model that the server lists; `ConfigError` if it does not answer, or lists another number."""
        names = list[str]()
        try:
            request = self._http.get("/models", timeout=CONNECT_S)
            listed = asyncio.run_coroutine_threadsafe(request, _event_loop()).result().raise_for_status()
            with suppress(ValueError, LookupError, TypeError):
                names = [str(row["id"]) for row in listed.json()["data"]]
        except httpx.HTTPError as error:
            raise ConfigError(self.refusal(Answer("connection", detail=self.one_line(repr(error))))) from error
        if len(names) != 1:
            listing = f"client.model=null, and {self.setting} lists {few(names) or 'none'}"
            raise ConfigError(f"{listing}: give client.model=NAME")
        return names[0]

    def ask(
        self, messages: Messages, request_id: str, seed: int | None, max_tokens: int, timeout_s: float
    ) -> Future[Answer]:
        """Send one request; its answer comes within `timeout_s` seconds. Cancelling it closes the connection.

        Of `client.extra`, mappings go into those that are there, and None takes a field out.
        """
        config, headers = self.config, {"X-Client-Request-Id": request_id}
        body: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": max_tokens}
        body |= {"temperature": config.temperature, "seed": seed}
        if config.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": config.thinking}  # as vLLM and SGLang take it
        for name, value in (config.extra or {}).items():
            body[name] = body[name] | value if isinstance(body.get(name), dict) and value else value
        if body.get("max_completion_tokens") is not None:  # another name for the bound, which is ours to set
            body["max_completion_tokens"] = max_tokens
        body = {name: value for name, value in body.items() if value is not None}

        async def post() -> Answer:
            try:
                async with asyncio.timeout(timeout_s):
                    response = await self._http.post(PATH, json=body, headers=headers)
                answer = read_answer(response)
            except TimeoutError:
                answer = Answer("timeout", detail=f"no whole answer within {timeout_s:g} s")
            except Exception as error:  # of the connection, or of what a server sends instead of HTTP
                outcome = "connection" if isinstance(error, UNSENT) else "broken"  # the model may have been asked
                answer = Answer(outcome, detail=f"{type(error).__name__}: {error}")
            answer.detail = self.one_line(answer.detail)
            return answer

        return asyncio.run_coroutine_threadsafe(post(), _event_loop())

    def refusal(self, answer: Answer) -> str:
        """Return one line on a request that is not worth retrying: the settings, the error, the cure."""
        return (
            f"{self.setting} gave no reply that can be used for client.model={self.one_line(str(self.model))} "
            f"({answer.detail or answer.outcome}): start the server, or correct the address, which mostly ends in /v1, "
            f"the model, client.max_tokens={self.config.max_tokens}, or the key in the environment variable "
            f"{self.config.env_variable} (client.env_variable)"
        )


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop that carries all requests, in a thread that no process waits for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="requests to the model").start()
    return loop


def read_answer(response: httpx.Response) -> Answer:
    """Return the answer in a server's response. A status other than 2xx is http_NNN.

    >>> reply = httpx.Response(200, text='{"choices": [{"message": {"content": "<think>2?</think>3"}}]}')
    >>> read_answer(reply).content, read_answer(httpx.Response(503, text="busy")).detail
    ('3', 'HTTP 503: busy')
    """
    answer, fields = Answer("broken"), dict[str, Any]()
    with suppress(ValueError, RecursionError):
        fields = json.loads(response.text)
    with suppress(LookupError, TypeError):  # servers need not count
        for name in ("prompt_tokens", "completion_tokens"):
            if type(count := fields["usage"][name]) is int and count >= 0:
                setattr(answer, name, count)
        if type(total := fields["usage"]["total_tokens"]) is int and answer.prompt_tokens is not None:
            completion = total - answer.prompt_tokens  # some count thinking there alone
            answer.completion_tokens = max(answer.completion_tokens or 0, completion)
    said = str(fields or response.text)
    if not response.is_success:
        answer.outcome, answer.detail = f"http_{response.status_code}", f"HTTP {response.status_code}: {said}"
        if (wish := response.headers.get("retry-after", "")).isdecimal():
            answer.retry_after_s = min(float(wish), LONGEST_HEEDED_S)
        return answer
    try:
        choice, message = fields["choices"][0], fields["choices"][0]["message"]
        content = message.get("content") or ""
        if isinstance(content, list):  # of parts: thinking, then text
            content = "".join(part.get("text") or "" for part in content)
        content = _encodable(content)
        thinking = _encodable(message.get("reasoning_content") or message.get("reasoning") or "").strip()
        answer.finish_reason = _encodable(choice.get("finish_reason") or "") or None
    except (LookupError, TypeError, AttributeError):
        answer.detail = f"no choices[0].message with a text: {said}"
        return answer
    if content.lstrip().startswith("<think>") or (not thinking and "</think>" in content):
        before, _, content = content.partition("</think>")  # sent apart by other servers
        content, thinking = content.lstrip(), thinking or before.lstrip().removeprefix("<think>").strip()
    answer.outcome, answer.content, answer.reasoning = "ok", content, thinking or None
    if not content.strip():
        what = "thinking without an answer" if thinking else "a reply without content"
        answer.outcome, answer.content = "empty", ""
        answer.detail = str(message.get("refusal") or f"{what}, finish_reason={answer.finish_reason}")
    return answer


def _encodable(text: str) -> str:
    """Return a text that can be encoded: half a character, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def pause_s(attempt_number: int, first_s: float) -> float:
    """Return the seconds to wait after the `attempt_number`-th request (from 1): twice as many each time, at random."""
    return first_s * min(60.0, 2.0 ** (attempt_number - 1)) * random.uniform(0.5, 1.0)


#: Outcomes of an `Answer` without a program after which the same question may be answered if it is asked again.
WORTH_RETRYING = re.compile("ok|timeout|connection|empty|broken|no_code|truncated|http_(?:408|409|429|5..)")

#: What makes a block a program, a function before points. One that only calls these, or sets `points` by them, shows
#: its use.
_DEFINED = [
    re.compile(r"^(?:async )?def (?:run_code|get_centers)[ \t]*\(|^(?:run_code|get_centers)[ \t]*[:=][^=]", re.M),
    re.compile(r"^points\b[^=\n(]*=(?!=)(?![^\n]*\b(?:run_code|get_centers)\()", re.M),
]
_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})\s*([^`~]*)")
_PYTHON = re.compile(r"(?:[{.]*(?:python3?|py)(?![\w+#-]).*)?", re.IGNORECASE)


def program_in(content: str) -> str | None:
    """Return the last closed block of a reply, marked as Python or not at all, that defines a set; None without one."""
    blocks, marked, lines = list[str](), None, list[str]()
    for line in content.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence and (marked is None or fence[1]):  # within a block, a mark says that its end was forgotten
            marked, lines = fence[1], []
        elif fence:
            block = textwrap.dedent("".join(f"{line}\n" for line in lines))
            if _PYTHON.fullmatch(marked or ""):
                blocks.append(block)
            marked = None
        else:
            lines.append(line)
    return next((block for defined in _DEFINED for block in reversed(blocks) if defined.search(block)), None)
