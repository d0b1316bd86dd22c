"""The client of a model's server against a real server that answers by a script, and against sockets that do worse."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from examples.scripted_server import DEFAULT, program, serving
from rlreason.config.algorithms import ClientConfig
from rlreason.discovery.client import LINE_CHARS, Client, pause_s, program_in, read_answer, worth_retrying
from rlreason.discovery.journal import Answer
from rlreason.errors import ConfigError
from tests.waiting import MINUTES, wait_for

ROOT = Path(__file__).parents[1]
KEY = "swordfish-of-the-" + "deep"  # put together, so that nobody who looks for keys in this file finds one
QUESTION = [{"role": "user", "content": "A larger set?"}]
EVENTS = {"Content-Type": "text/event-stream"}
PROGRAM = "def run_code():\n    return [[2]]"
TEXT = {"kind": "text", "content": "yes"}


@pytest.fixture(autouse=True)
def key(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def client_of(base_url, **settings):
    return Client(ClientConfig(**{"base_url": base_url, "model": "scripted", **settings}))


def ask(base_url, request_id="test-1.0.1", seed=None, max_tokens=100, timeout_s=MINUTES, **settings):
    """What comes of one request."""
    client = client_of(base_url, **settings)
    answer = client.ask(QUESTION, request_id, seed, max_tokens, timeout_s).result()
    assert KEY not in f"{answer.detail} {client.refusal(answer)}"
    assert len(answer.detail) <= LINE_CHARS
    assert len(answer.detail.splitlines()) <= 1
    return answer


@contextmanager
def socket_that_sends(*pieces, every=0.0):
    """The base_url of a socket that takes one request, sends pieces of bytes whatever it was, and closes."""
    over = threading.Event()

    def serve():
        connection, _ = listening.accept()
        with connection:
            arrived = b""
            while not arrived.endswith(b"}"):  # all of the body: what is left unread would reset the connection
                arrived += connection.recv(2**16)
            try:
                for piece in pieces:
                    connection.sendall(piece)
                    if over.wait(every):
                        break
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        over.set()
        thread.join()


def test_a_reply_is_read_with_its_tokens_and_its_program():
    with serving([program(PROGRAM, after="That is all.")]) as server:
        answer = ask(server.base_url)
    assert (answer.outcome, answer.finish_reason, answer.detail) == ("ok", "stop", "")
    assert answer.prompt_tokens == len(json.dumps(QUESTION)) // 4
    assert answer.completion_tokens == len(answer.content) // 4
    assert program_in(answer.content) == PROGRAM + "\n"


def test_what_is_sent_is_what_the_settings_say(monkeypatch):
    with serving([TEXT]) as server:
        ask(server.base_url, request_id="s0-3.1.2", seed=7, temperature=0.5, extra={"top_p": 0.9})
        monkeypatch.delenv("OPENAI_API_KEY")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        ask(None, model=None)
        first, second = server.requests
    assert first.id == first.headers["x-client-request-id"] == "s0-3.1.2"
    assert first.headers["authorization"] == f"Bearer {KEY}"
    told = {"model": "scripted", "messages": QUESTION, "max_tokens": 100, "temperature": 0.5, "seed": 7}
    assert first.body == told | {"top_p": 0.9}
    assert "authorization" not in second.headers
    assert second.body.keys() == {"model", "messages", "max_tokens"}


@pytest.mark.parametrize("thinking", [True, False, None])
def test_fields_of_the_body_are_added_merged_and_taken_out(thinking):
    sent = {} if thinking is None else {"enable_thinking": thinking}
    body = client_of("http://host/v1", thinking=thinking).body(QUESTION, None, 9)
    assert body.get("chat_template_kwargs", {}) == sent
    extra = {"chat_template_kwargs": {"more": 1}, "max_tokens": None, "max_completion_tokens": 999999}
    body = client_of("http://host/v1", thinking=thinking, extra=extra).body(QUESTION, None, 9)
    assert body["chat_template_kwargs"] == {**sent, "more": 1}
    assert "max_tokens" not in body
    assert body["max_completion_tokens"] == 9  # the budget's bound


@pytest.mark.parametrize(
    ("answer", "outcome", "words"),
    [
        ({"kind": "empty"}, "empty", "without content"),
        ({"kind": "thinking_only"}, "empty", "thinking without an answer, finish_reason=length"),
        ({"kind": "text", "content": "<think>What if"}, "empty", "thinking without an answer"),
        ({"kind": "broken"}, "broken", "no JSON: <html>"),
        ({"kind": "raw", "body": ""}, "broken", "no text"),
        ({"kind": "raw", "body": "[" * 100_000}, "broken", "no JSON"),
        ({"kind": "raw", "body": [1]}, "broken", "got `array`"),
        ({"kind": "raw", "body": {"choices": []}}, "broken", "no choices[0].message"),
        ({"kind": "raw", "body": {"choices": [{"message": {"content": 7}}]}}, "broken", "choices[0].message.content`"),
        ({"kind": "raw", "body": {"error": {"message": "overloaded"}}}, "broken", "overloaded"),
        ({"kind": "raw", "body": {"choices": [{"message": {"content": None, "refusal": "No."}}]}}, "empty", "No."),
        ({"kind": "raw", "body": "{}", "headers": {"Content-Encoding": "gzip"}}, "broken", "DecodingError"),
        ({"kind": "raw", "body": "data: {}\n\n", "headers": EVENTS}, "broken", "no JSON"),
        ({"kind": "hang_up"}, "broken", "disconnected"),
        ({"kind": "status", "code": 302, "location": "http://elsewhere/"}, "http_302", "HTTP 302"),
        ({"kind": "status", "code": 401, "message": f"Incorrect API key provided: {KEY}"}, "http_401", "<redacted>"),
        ({"kind": "status", "code": 500, "message": "a\x1b[2J\n" * 1000}, "http_500", r"HTTP 500: a\x1b[2J a\x1b"),
    ],
)
def test_what_goes_wrong_has_a_name_and_a_line(answer, outcome, words):
    with serving([answer]) as server:
        given = ask(server.base_url)
        assert len(server.requests) == 1  # asking again is the caller's business
    assert given.outcome == outcome
    assert words in given.detail
    assert given.content == ""


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "drip", "seconds": 0.1},
        {"kind": "drip", "seconds": 0.1, "headers": True},
        {"kind": "slow", "seconds": 6000, "then": {"kind": "empty"}},
    ],
    ids=["body", "headers", "silence"],
)
def test_a_limit_holds_over_the_whole_request_however_slowly_an_answer_comes(answer):
    with serving([answer]) as server:
        given = ask(server.base_url, timeout_s=0.3)
    assert given.outcome == "timeout"


@pytest.mark.long
def test_a_limit_holds_where_informational_answers_never_end():
    with socket_that_sends(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 1000, every=0.05) as base_url:
        began = time.monotonic()
        assert ask(base_url, timeout_s=0.5).outcome == "timeout"
        assert time.monotonic() - began < 2.5


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (b"", "broken"),
        (b"220 mail.example ESMTP\r\n", "broken"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "broken"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broken"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000, "broken"),
        (b"HTTP/1.1 429 \xff\xfe\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n", "http_429"),
    ],
)
def test_bytes_that_are_no_answer_raise_nothing(sent, outcome):
    with socket_that_sends(sent) as base_url:
        given = ask(base_url)
    assert given.outcome == outcome
    assert given.detail


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": "<think>\nWhy?\n</think>\n\nSo."}, "So.", "Why?"),
        ({"content": "\n<think></think>So."}, "So.", None),
        ({"content": "Why?\n</think>\nSo."}, "So.", "Why?"),
        ({"content": "So, <think> is a mark."}, "So, <think> is a mark.", None),
        ({"content": "So.", "reasoning_content": "Why?"}, "So.", "Why?"),
        ({"content": "So.", "reasoning": "Why?", "reasoning_content": None}, "So.", "Why?"),
        ({"content": "<think>Why?</think>So.", "reasoning_content": ""}, "So.", "Why?"),
        ({"content": "Why?</think>So.", "reasoning_content": "\n"}, "So.", "Why?"),
        ({"content": "So\ud800."}, "So?.", None),
    ],
)
def test_thinking_is_told_from_the_reply(message, content, reasoning):
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})
    answer = read_answer(httpx.Response(200, text=body))
    assert (answer.outcome, answer.content, answer.reasoning) == ("ok", content, reasoning)
    assert (answer.prompt_tokens, answer.completion_tokens) == (None, None)


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": "3"}, {"prompt_tokens": -1}, {"prompt_tokens": True}, []])
def test_tokens_that_the_server_does_not_count_are_none(usage):
    body = {"choices": [{"message": {"content": "yes"}}], "usage": usage}
    answer = read_answer(httpx.Response(200, json=body))
    assert (answer.outcome, answer.prompt_tokens, answer.completion_tokens) == ("ok", None, None)


def test_a_stream_of_events_is_read_as_the_same_reply():
    text = "A set:\n" + "x" * 250
    script = [{"kind": "text", "content": text, "reasoning": "Why?", "finish_reason": "length"}]
    with serving(script) as server:
        whole = ask(server.base_url)
        streamed = ask(server.base_url, extra={"stream": True, "stream_options": {"include_usage": True}})
    assert streamed == whole
    assert (whole.content, whole.reasoning, whole.finish_reason) == (text, "Why?", "length")


def test_a_server_may_say_how_long_to_wait():
    for header, seconds in (("3", 3.0), ("0", 0.0), ("2.5", 2.5), ("soon", None), ("nan", None), ("-1", None)):
        response = httpx.Response(429, headers={"Retry-After": header})
        assert read_answer(response).retry_after_s == seconds


def test_pauses_grow_within_their_bounds():
    for number in range(1, 40):
        whole = min(60.0, 2.0 ** (number - 1))
        pauses = [pause_s(number, None, 1.0) for _ in range(20)]
        assert all(whole / 2 <= pause <= whole for pause in pauses)
        assert len(set(pauses)) == 20
    assert pause_s(10**9, None, 1.0) <= 60
    assert pause_s(1, 500.0, 1.0) == 120


def test_what_may_pass_is_asked_again_and_what_will_not_is_not():
    again = ["http_408", "http_409", "http_429", "http_500", "http_502", "http_599", "timeout", "connection"]
    assert all(map(worth_retrying, [*again, "empty", "broken", "no_code", "truncated"]))
    assert not any(map(worth_retrying, ["ok", "http_400", "http_401", "http_403", "http_404", "http_422", "http_302"]))


@pytest.mark.parametrize(
    ("outcome", "detail", "names"),
    [
        ("http_401", "Incorrect API key", "OPENAI_API_KEY (client.env_variable)"),
        ("http_403", "no access", "client.model=m"),
        ("http_404", "The model `m` does not exist", "client.model=m"),
        ("http_400", "This model's maximum context length is 4096 tokens", "client.max_tokens=8192"),
        ("http_400", "max_tokens is too large: 8192", "client.max_tokens=8192"),
        ("http_400", "Use 'max_completion_tokens' instead", "client.extra={max_tokens: null, max_completion_tokens: 8"),
        ("http_400", "enable_thinking must be set to false for non-streaming calls", "client.extra={stream: true"),
        ("http_400", "Unrecognized request argument supplied: chat_template_kwargs", "client.thinking=true"),
        ("http_422", "temperature must be 1", "client.temperature=0.7"),
        ("http_400", "no", "client.model"),
        ("timeout", "", "client.timeout_s=600"),
        ("broken", "no JSON", "client.model=m"),
    ],
)
def test_a_refusal_names_the_setting_and_the_cure(outcome, detail, names):
    client = client_of("http://host/v1", model="m", temperature=0.7, thinking=True, max_tokens=8192)
    line = client.refusal(Answer(outcome, detail=detail))
    assert line.startswith("client.base_url=http://host/v1 ")
    assert names in line
    assert detail in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"detail": "Not Found"}, "HTTP 400: Not Found"),
        ({"detail": [{"msg": "Field required"}]}, 'HTTP 400: [{"msg": "Field required"}]'),
        ({"message": "no quota"}, "HTTP 400: no quota"),
        ({"error": "no model"}, "HTTP 400: no model"),
    ],
)
def test_an_error_is_shown_as_its_text(body, words):
    assert read_answer(httpx.Response(400, json=body)).detail == words


def test_no_proxy_is_asked_for_a_server_on_this_computer(monkeypatch):
    for name in ("all_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving([TEXT]) as server:
        port = httpx.URL(server.base_url).port
        for host in ("127.0.0.1", "localhost"):
            assert ask(f"http://{host}:{port}/v1").outcome == "ok"
            assert client_of(f"http://{host}:{port}/v1", model=None).only_model() == "scripted"


def test_where_nothing_listens_the_line_names_the_address_and_the_cure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        base_url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    client = client_of(base_url, model=None)
    answer = client.ask(QUESTION, "a", None, 9, MINUTES).result()
    assert answer.outcome == "connection"
    assert f"client.base_url={base_url} does not answer" in client.refusal(answer)
    with pytest.raises(ConfigError, match="does not answer"):
        client.only_model()


@pytest.mark.parametrize(
    "base_url", ["", "localhost:8000/v1", "ftp://host", "http://", "http://host:x/v1", "http://h o/", "http://[::1"]
)
def test_an_address_that_is_none_is_refused_at_once(base_url, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match=r"client\.base_url="):
        client_of(base_url)


def test_a_proxy_or_a_key_that_cannot_be_used_is_one_line_without_the_key(monkeypatch):
    for more in ("\u00e9", "\nmore"):
        monkeypatch.setenv("OPENAI_API_KEY", KEY + more)
        with pytest.raises(ConfigError, match="OPENAI_API_KEY") as told:
            client_of("http://host/v1")
        assert KEY not in str(told.value)
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")  # as a file has it
    monkeypatch.setenv("all_proxy", "ftp://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ConfigError, match="ALL_PROXY") as told:
        client_of(f"http://user:{KEY}@host/v1")
    assert KEY not in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def test_requests_side_by_side_get_the_same_answers_each_time():
    replies = [[{"kind": "status", "code": 429}, {"kind": "text", "content": str(n)}] for n in range(6)]
    questions = [(turn, sample, attempt) for turn in (1, 2, 3) for sample in (0, 1, 2) for attempt in (1, 2, 3)]
    with serving(replies, 3) as server:
        client = client_of(server.base_url)
        ids = [f"s-1-{turn}.{sample}.{attempt}" for turn, sample, attempt in questions]
        found = [one.result(MINUTES) for one in [client.ask(QUESTION, id, None, 9, MINUTES) for id in ids]]
        assert len(server.requests) == len(questions)
    for (turn, sample, attempt), got in zip(questions, found, strict=True):
        expected = ("http_429", "") if attempt == 1 else ("ok", str(((turn - 1) * 3 + sample) % 6))
        assert (got.outcome, got.content) == expected


def test_the_server_of_the_documents_says_where_it_is_and_ends_with_582_points():
    command = [sys.executable, ROOT / "examples/scripted_server.py", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        last = ask(server.stdout.readline().strip(), request_id=f"s0-{len(DEFAULT) - 1}.0.9")
        server.send_signal(signal.SIGINT)
        assert server.wait(MINUTES) == 0
    found = {}
    exec(program_in(last.content), found)
    assert len(found["run_code"]()) == 582


def test_a_signal_ends_the_wait_for_an_answer():
    program = (
        "import signal\nfrom rlreason.discovery.client import Client\n"
        "from rlreason.config.algorithms import ClientConfig\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nclient = Client(ClientConfig(model='m'))\n"
        "print('ready', flush=True)\n"
        "try:\n    client.ask([], 'a', None, 9, 6000).result()\nexcept KeyboardInterrupt:\n    print('ended')\n"
    )
    with serving([{"kind": "slow", "seconds": 6000}]) as server:
        command, env = [sys.executable, "-c", program], os.environ | {"OPENAI_BASE_URL": server.base_url}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as asking:
            assert asking.stdout.readline() == "ready\n"
            wait_for(lambda: server.requests)
            asking.send_signal(signal.SIGINT)
            assert asking.communicate(timeout=MINUTES)[0] == "ended\n"
            assert asking.returncode == 0


def test_a_request_that_is_cancelled_ends():
    with serving([{"kind": "slow", "seconds": 6000}]) as server:
        waiting = client_of(server.base_url).ask(QUESTION, "s-1.0.1", None, 9, 6000)
        wait_for(lambda: server.requests)
        waiting.cancel()
        with pytest.raises(CancelledError):
            waiting.result(MINUTES)
