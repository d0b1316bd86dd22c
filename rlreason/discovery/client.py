"""Ask an OpenAI-compatible server, read its replies and the programs in them, and name what goes wrong with its cure.

httpx sends, within one deadline that asyncio holds over the whole request. When to ask again is decided in `asking`,
which writes each request into the journal first.
"""

import asyncio
import json
import os
import random
import re
import symtable
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

import httpx
import msgspec

from rlreason.config.algorithms import ClientConfig
from rlreason.discovery.journal import Answer
from rlreason.errors import ConfigError
from rlreason.runtime.text import HIDDEN, few, redacted, shorten, visible

LINE_CHARS = 300  # of a text about an answer
CONNECT_S = 20.0  # a server that takes no connection within this time is not there
LONGEST_HEEDED_S = 120.0  # of what a server asks for
PATH = "/chat/completions"
LOOPBACK = r"localhost|::1|127(\.\d{1,3}){3}"  # hosts on this computer, which no proxy reaches
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.LocalProtocolError)


class Client:
    """Sends requests to one model of a server. May be used from several threads."""

    def __init__(self, config: ClientConfig, model: str = "") -> None:
        """Take the server from the settings, else the environment; `ConfigError` if it has no usable address.

        `model`: in place of `config.model`, if that is null.
        """
        base_url = config.base_url or os.environ.get("OPENAI_BASE_URL")
        if not base_url:
            raise ConfigError(
                "client.base_url=null and OPENAI_BASE_URL is not set: give the address of an OpenAI-compatible server, "
                "as in client.base_url=http://127.0.0.1:8000/v1"
            )
        self.config, self.model = config, config.model or model
        self.key = (os.environ.get(config.env_variable) or "").strip()
        self.setting = f"client.base_url={self.one_line(base_url)}"
        if not (self.key.isascii() and self.key.isprintable()):  # an error about it would show it
            raise ConfigError(f"the key in {config.env_variable} has characters that no request can send: correct it")
        if not re.fullmatch(r"https?://[^\s/?#]+\S*", base_url):
            raise ConfigError(f"{self.setting} is no address of a server: give one such as http://127.0.0.1:8000/v1")
        try:
            self._url = httpx.URL(base_url)
            self._http = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                trust_env=not re.fullmatch(LOOPBACK, self._url.host),
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                limits=LIMITS,
            )
        except Exception as error:  # of the many that an address, a proxy or a certificate can raise
            raise ConfigError(
                f"{self.setting} cannot be used ({self.one_line(str(error))}): correct it, the proxy in ALL_PROXY, "
                "HTTPS_PROXY or HTTP_PROXY, or SSL_CERT_FILE"
            ) from error

    def one_line(self, text: str) -> str:
        """Return at most `LINE_CHARS` characters of a text on one line, without the key and control characters."""
        if len(self.key) > 5:  # shorter ones, made up for a server of one's own, are no secrets
            text = text.replace(self.key, HIDDEN)
        return shorten(visible(redacted(" ".join(text[:20_000].split()))), LINE_CHARS - len(" ..."))

    def only_model(self) -> str:
        """Return the only model that the server lists; `ConfigError` if it does not answer, lists none, or several."""
        request = self._http.get(self._address("/models"), timeout=CONNECT_S)
        names: list[str] = []
        try:
            listed = asyncio.run_coroutine_threadsafe(request, _event_loop()).result().json()
            names = [str(row["id"]) for row in listed["data"]]
        except httpx.HTTPError as error:
            detail = self.one_line(f"{type(error).__name__}: {error}")
            raise ConfigError(self.refusal(Answer("connection", detail=detail))) from error
        except (ValueError, KeyError, TypeError):
            pass  # it lists none
        if len(names) != 1:
            raise ConfigError(
                f"client.model=null, and {self.setting} lists {len(names)} models ({few(names) or 'none'}): give "
                "client.model=NAME"
            )
        return names[0]

    def _address(self, path: str) -> httpx.URL:
        return self._url.copy_with(path=self._url.path.rstrip("/") + path)

    def body(self, messages: Sequence[Mapping[str, str]], seed: int | None, max_tokens: int) -> dict[str, Any]:
        """Return what is sent to ask for a reply.

        Fields of `client.extra` are put in last: a mapping goes into the one that is there, and None takes a field out.
        """
        config = self.config
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens}
        body |= {"temperature": config.temperature, "seed": seed}
        if config.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": config.thinking}  # as vLLM and SGLang take it
        for name, value in (config.extra or {}).items():
            is_merged = isinstance(value, Mapping) and isinstance(body.get(name), dict)
            body[name] = body[name] | value if is_merged else value
        if body.get("max_completion_tokens") is not None:  # another name for the bound, which is ours to set
            body["max_completion_tokens"] = max_tokens
        return {name: value for name, value in body.items() if value is not None}

    def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        request_id: str,
        seed: int | None,
        max_tokens: int,
        timeout_s: float,
    ) -> Future[Answer]:
        """Send one request; its answer comes within `timeout_s` seconds, whatever the server does.

        `request_id`: goes along as `X-Client-Request-Id`. Cancelling the future closes the connection.
        """
        body = self.body(messages, seed, max_tokens)
        return asyncio.run_coroutine_threadsafe(self._post(body, request_id, timeout_s), _event_loop())

    async def _post(self, body: dict[str, Any], request_id: str, timeout_s: float) -> Answer:
        headers = {"X-Client-Request-Id": request_id}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.post(self._address(PATH), json=body, headers=headers)
            answer = read_answer(response)
        except TimeoutError:
            return Answer("timeout", detail=f"no whole answer within {timeout_s:g} s")
        except Exception as error:  # of the connection, or of what a server sends instead of HTTP
            outcome = "connection" if isinstance(error, UNSENT) else "broken"  # the model may have been asked
            answer = Answer(outcome, detail=f"{type(error).__name__}: {error}")
        answer.detail = self.one_line(answer.detail)
        return answer

    def refusal(self, answer: Answer) -> str:
        """Return one line on a request that is not worth retrying: the setting, its value, the error, the cure."""
        config = self.config
        cure = next(
            cure
            for outcome, detail, cure in CURES
            if re.match(outcome, answer.outcome) and re.search(detail, answer.detail, re.IGNORECASE)
        )
        line = cure.format(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            timeout_s=config.timeout_s,
            thinking=json.dumps(config.thinking),
            model=f"client.model={self.one_line(self.model)}",
            variable=f"environment variable {config.env_variable} (client.env_variable)",
        )
        return f"{self.setting} {line}" + (f" ({answer.detail})" if answer.detail else "")


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop that carries all requests, in a thread that no process waits for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="requests to the model").start()
    return loop


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    def texts(self) -> tuple[str, str | None]:
        """Return content and thinking, which servers send apart, or as one text.

        Some servers put the first mark of thinking into the prompt, so that the reply has only the last one. Unfinished
        thinking leaves no content.
        """
        content, thinking = self.content or "", self.reasoning_content or self.reasoning or ""
        thinking = thinking if thinking.strip() else ""
        opens = content.lstrip().startswith("<think>")
        if opens or (not thinking and "</think>" in content and "<think>" not in content):
            before, _, content = content.partition("</think>")
            content, thinking = content.lstrip(), thinking or before.lstrip().removeprefix("<think>").strip()
        return _encodable(content), _encodable(thinking) or None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None  # of a stream
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    detail: Any = None  # of an error, as FastAPI names it
    message: Any = None


def read_answer(response: httpx.Response) -> Answer:
    """Return the answer in a server's response. A status other than 2xx is http_NNN.

    >>> reply = httpx.Response(200, text='{"choices": [{"message": {"content": "<think>2?</think>3"}}]}')
    >>> read_answer(reply).content, read_answer(httpx.Response(503, text="busy")).detail
    ('3', 'HTTP 503: busy')
    """
    text, body, answer = response.text, _Body(), Answer("broken")
    try:
        is_stream = "text/event-stream" in response.headers.get("content-type", "")
        body = _joined(text) if is_stream else msgspec.convert(json.loads(text), _Body)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, msgspec.ValidationError) else "no JSON"
        answer.detail = f"{why}: {text}" if text else "no text"
    for name in ("prompt_tokens", "completion_tokens"):
        count = body.usage.get(name) if isinstance(body.usage, dict) else None
        if type(count) is int and count >= 0:
            setattr(answer, name, count)
    problem = body.error or body.detail or body.message or ""
    if isinstance(problem, dict):
        problem = problem.get("message") or problem
    problem = problem if isinstance(problem, str) else json.dumps(problem)
    choice = body.choices[0] if body.choices else _Choice()
    if not response.is_success:
        answer.outcome = f"http_{response.status_code}"
        answer.detail = f"HTTP {response.status_code}: {problem or text}"
        with suppress(ValueError):
            seconds = float(response.headers.get("retry-after", ""))
            answer.retry_after_s = seconds if 0 <= seconds < 1e9 else None
    elif choice.message is None:
        answer.detail = answer.detail or problem or f"no choices[0].message in {text}"
    else:
        answer.content, answer.reasoning = choice.message.texts()
        answer.finish_reason = choice.finish_reason and _encodable(choice.finish_reason)[:100]
        answer.outcome = "ok" if answer.content.strip() else "empty"
        if answer.outcome == "empty":
            answer.content = ""
            detail = "thinking without an answer" if answer.reasoning else "a reply without content"
            answer.detail = choice.message.refusal or f"{detail}, finish_reason={answer.finish_reason}"
    return answer


def _joined(text: str) -> _Body:
    """Join the events of a streamed reply; `ValueError` if the stream has no end."""
    content = thinking = ""
    whole = _Choice()
    body = _Body([whole])
    for value in re.findall(r"^data: *(\{.*)", text, re.MULTILINE):
        event = msgspec.convert(json.loads(value), _Body)
        if event.error:
            return event
        body.usage = event.usage or body.usage
        for choice in event.choices or ():
            whole.finish_reason = choice.finish_reason or whole.finish_reason
            if choice.delta is not None:
                content += choice.delta.content or ""
                thinking += choice.delta.reasoning_content or choice.delta.reasoning or ""
    if whole.finish_reason is None and not re.search(r"^data: *\[DONE\]", text, re.MULTILINE):
        raise ValueError("the stream has no end")
    whole.message = _Message(content, thinking)
    return body


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
    """Return whether the same question may be answered if it is asked again. `outcome`: of an `Answer`.

    >>> [worth_retrying(outcome) for outcome in ("http_429", "http_503", "empty", "http_401", "http_302", "ok")]
    [True, True, True, False, False, False]
    """
    return not re.fullmatch("ok|http_(?!408|409|429|5..).*", outcome)


LONG = r"context.{0,20}(length|window|size)|maximum.{0,20}(context|tokens)|max_(model_len|tokens|new_tokens)|too long"
STREAM = "{{stream: true, stream_options: {{include_usage: true}}, enable_thinking: true}}"
#: Outcome, pattern in its detail -> what it means, and the cure. The first that matches.
CURES = (
    ("http_401", "", "got no key, or does not accept it: put one into the {variable}"),
    ("http_40[23]", "", "does not let this key use {model}: add credit, name another model, or change the {variable}"),
    ("http_404", "", f"does not know {{model}}, or has no {PATH} below it: give a model that /models lists there, or "
     f"the address before {PATH}, which mostly ends in /v1"),
    ("http_429", "", "takes no more requests for now: go on later, or ask for fewer at a time"),
    ("connection", "", "does not answer: start the server, or correct the address"),
    ("timeout", "", "did not answer within client.timeout_s={timeout_s:g}: raise it, or ask for less"),
    ("http_4", "max_completion_tokens", "asks for another name of the bound: "
     "client.extra={{max_tokens: null, max_completion_tokens: {max_tokens}}}"),
    ("http_4", LONG, "has no room for the prompt and the reply together: lower client.max_tokens={max_tokens}"),
    ("http_4", r"non-?stream|stream ?= ?.?false|only support.{0,20}stream", "thinks in streams alone: "
     f"client.extra={STREAM} and client.thinking=null, or client.extra={{{{enable_thinking: false}}}}"),
    ("http_4", "chat_template_kwargs|thinking", "does not take client.thinking={thinking}: client.thinking=null sends "
     "nothing, and client.extra can send what this server takes"),
    ("http_4", "temperature", "does not allow client.temperature={temperature}: client.temperature=null leaves it out"),
    ("http_4", "", "refuses the request: check client.model, client.max_tokens and client.extra against what it takes"),
    ("", "", "gave no reply that can be used: look at its log, or try another {model}"),
)  # fmt: skip

NAMES = ("run_code", "get_centers", "points")  # what a program gives its set by
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
_PYTHON = re.compile(r"[\s{.]*(?:python3?|py)(?![\w+#-]).*", re.IGNORECASE)
_MARKDOWN = re.compile(r"\s*(?:markdown|md)\b.*", re.IGNORECASE)
#: For blocks that are no Python: an error in a program is for the model to hear of, not for this module.
_DEFINED = re.compile(
    r"^(?:[ \t]*(?:async )?def (?:run_code|get_centers)\b|(?:run_code|get_centers|points)[ \t]*(?::[^=\n]*)?=(?!=))",
    re.MULTILINE,
)


def program_in(content: str) -> str | None:
    """Return the program in a reply, as it stands there; None where there is none.

    It is the last fenced block, marked as Python or not at all, that defines run_code, get_centers or points, else the
    last one that is Python. A block that uses run_code without defining it shows how the program is called, and is no
    program. A block without an end is none either: the reply was cut off.

    >>> program_in("First:\\n```python\\npoints = [[2]]\\n```\\nIt is called so:\\n```\\npoints = run_code()\\n```\\n")
    'points = [[2]]\\n'
    >>> program_in("```python\\npoints = [[2],") is None
    True
    """
    python = None
    for block in reversed(list(_blocks(content))):
        names = _module_names(block)
        if names is None:
            if _DEFINED.search(block):
                return block
            continue
        defined, used = names
        if defined & {*NAMES} and not (used & {"run_code", "get_centers"}) - defined:
            return block
        if python is None and re.search(r"^\s*[^#\s]", block, re.MULTILINE):
            python = block
    return python


def _blocks(content: str) -> Iterator[str]:
    """Yield the closed blocks of Python and of no stated language, without the indentation of their fences."""
    opening, lines = None, list[str]()
    for line in content.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence and (opening is None or _PYTHON.fullmatch(fence[3])):  # within a block: its end was forgotten
            is_inline = fence[2][0] in fence[3]
            if not is_inline and not _MARKDOWN.fullmatch(fence[3]):  # a reply that is fenced as a whole has blocks
                opening, lines = fence, []
        elif opening and fence and fence[2].startswith(opening[2]) and not fence[3].strip():
            if not opening[3].strip() or _PYTHON.fullmatch(opening[3]):
                indent = re.compile(rf"^[ \t]{{0,{len(opening[1].expandtabs(4))}}}")
                yield "".join(f"{indent.sub('', line)}\n" for line in lines)
            opening = None
        else:
            lines.append(line)


def _module_names(program: str) -> tuple[set[str], set[str]] | None:
    """Return the names that a program defines at its top, and those that it uses anywhere; None if it is no Python."""
    with warnings.catch_warnings(), suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        warnings.simplefilter("ignore")  # about texts of others: invalid escapes and the like
        tables = [symtable.symtable(program, "program", "exec")]
        defined = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned()}
        used = set[str]()
        for table in tables:
            tables += table.get_children()
            used |= {one.get_name() for one in table.get_symbols() if one.is_referenced()}
        return defined, used
    return None
