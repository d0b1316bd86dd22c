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
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from examples.scripted_server import DEFAULT, program, serving
from rlreason.discovery.client import (
    LINE_CHARS,
    Client,
    Endpoint,
    only_model,
    pause_s,
    read_answer,
    refusal,
    worth_retrying,
)
from rlreason.discovery.code_blocks import program_in
from rlreason.errors import ConfigError
from tests.waiting import MINUTES, wait_for

ROOT = Path(__file__).parents[1]
KEY = "swordfish-of-the-" + "deep"  # put together, so that nobody who looks for keys in this file finds one
QUESTION = [{"role": "user", "content": "A larger set?"}]
EVENTS = {"Content-Type": "text/event-stream"}
PROGRAM = "def run_code():\n    return [[2]]"


def ask(server, messages=QUESTION, request_id="test-1.0.1", seed=None, timeout_s=MINUTES, **settings):
    """What comes of one request to a scripted server."""
    endpoint = Endpoint(server.base_url, "scripted", **{"key": KEY, **settings})
    attempt = Client(endpoint).ask(messages, request_id=request_id, seed=seed, timeout_s=timeout_s).result()
    assert KEY not in f"{attempt.detail} {endpoint!r} {refusal(attempt, endpoint)}"
    assert len(attempt.detail) <= LINE_CHARS
    assert len(attempt.detail.splitlines()) <= 1
    return attempt


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
        attempt = ask(server)
    assert (attempt.outcome, attempt.finish_reason, attempt.detail) == ("ok", "stop", "")
    assert attempt.prompt_tokens == len(json.dumps(QUESTION)) // 4
    assert attempt.completion_tokens == len(attempt.content) // 4
    assert program_in(attempt.content) == PROGRAM + "\n"


def test_what_is_sent_is_what_the_endpoint_says():
    with serving([{"kind": "text", "content": "yes"}]) as server:
        ask(server, request_id="s0-3.1.2", seed=7, temperature=0.5, max_tokens=100, extra={"top_p": 0.9})
        ask(server, key=None)
        Client(Endpoint(server.base_url, "m", max_tokens=100)).ask([], request_id="a", seed=None, max_tokens=0).result()
        first, second, lowered = server.requests
    assert first.id == first.headers["x-client-request-id"] == "s0-3.1.2"
    assert first.headers["authorization"] == f"Bearer {KEY}"
    assert first.messages == QUESTION
    told = {"model": "scripted", "messages": QUESTION, "max_tokens": 100, "temperature": 0.5, "seed": 7}
    assert first.body == told | {"top_p": 0.9}
    assert "authorization" not in second.headers
    assert second.body.keys() == {"model", "messages", "max_tokens"}
    assert lowered.body["max_tokens"] == 0


@pytest.mark.parametrize("thinking", [True, False, None])
def test_thinking_is_switched_on_off_or_left_alone(thinking):
    sent = {} if thinking is None else {"enable_thinking": thinking}
    endpoint = Endpoint("http://host/v1", "m", thinking=thinking)
    assert endpoint.body(QUESTION, None, 9).get("chat_template_kwargs", {}) == sent
    extended = replace(endpoint, extra={"chat_template_kwargs": {"more": 1}, "max_tokens": None})
    body = extended.body(QUESTION, None, 9)
    assert body["chat_template_kwargs"] == {**sent, "more": 1}
    assert "max_tokens" not in body


@pytest.mark.parametrize(
    ("answer", "outcome", "words"),
    [
        ({"kind": "empty"}, "empty", "without content"),
        ({"kind": "thinking_only"}, "empty", "thinking without an answer, finish_reason=length"),
        ({"kind": "text", "content": "<think>What if"}, "empty", "thinking without an answer"),
        ({"kind": "broken"}, "broken", "no JSON: <html>"),
        ({"kind": "raw", "body": ""}, "broken", "no text"),
        ({"kind": "raw", "body": "[" * 100_000}, "broken", "no JSON"),
        ({"kind": "raw", "body": '{"a":' * 990 + "1" + "}" * 990}, "broken", '"a":'),
        ({"kind": "raw", "body": [1]}, "broken", "got `array`"),
        ({"kind": "raw", "body": {"choices": []}}, "broken", "no choices[0].message"),
        ({"kind": "raw", "body": {"choices": [{"message": {"content": 7}}]}}, "broken", "choices[0].message.content`"),
        ({"kind": "raw", "body": {"error": {"message": "overloaded", "code": 503}}}, "http_503", "overloaded"),
        ({"kind": "raw", "body": {"choices": [{"message": {"content": None, "refusal": "No."}}]}}, "empty", "declined"),
        ({"kind": "raw", "body": "{}", "headers": {"Content-Encoding": "gzip"}}, "broken", "DecodingError"),
        ({"kind": "raw", "body": "data: {}\n\n", "headers": EVENTS}, "broken", "no JSON"),
        ({"kind": "large", "megabytes": 33}, "broken", "larger than 32 MB"),
        ({"kind": "hang_up"}, "broken", "disconnected"),
        ({"kind": "status", "code": 302, "location": "http://elsewhere/"}, "http_302", "to http://elsewhere/"),
        ({"kind": "status", "code": 401, "message": f"Incorrect API key provided: {KEY}"}, "http_401", "<redacted>"),
        ({"kind": "status", "code": 500, "message": "a\x1b[2J\n" * 1000}, "http_500", r"HTTP 500: a\x1b[2J a\x1b"),
        ({"kind": "status", "code": 503, "message": "z" * 2**20}, "http_503", "zzz"),
    ],
)
def test_what_goes_wrong_has_a_name_and_a_line(answer, outcome, words):
    with serving([answer]) as server:
        attempt = ask(server)
        assert len(server.requests) == 1  # asking again is the caller's business
    assert attempt.outcome == outcome
    assert words in attempt.detail
    assert attempt.content == ""


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
        attempt = ask(server, timeout_s=0.3)
    assert attempt.outcome == "timeout"
    assert attempt.detail == "no whole answer within 0.3 s"


@pytest.mark.long
def test_a_limit_holds_where_informational_answers_never_end():
    with socket_that_sends(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 1000, every=0.05) as base_url:
        began = time.monotonic()
        attempt = Client(Endpoint(base_url, "m", timeout_s=0.5)).ask(QUESTION, request_id="a", seed=None).result()
        assert time.monotonic() - began < 2.5
    assert attempt.outcome == "timeout"


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (b"", "broken"),
        (b"220 mail.example ESMTP\r\n", "broken"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "broken"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broken"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000, "broken"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"choices": [{"message": {"content": "\xff"}}]}', "broken"),
        (b"HTTP/1.1 429 \xff\xfe\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n", "http_429"),
    ],
)
def test_bytes_that_are_no_answer_raise_nothing(sent, outcome):
    with socket_that_sends(sent) as base_url:
        attempt = Client(Endpoint(base_url, "m", timeout_s=MINUTES)).ask(QUESTION, request_id="a", seed=None).result()
    assert attempt.outcome == outcome
    assert attempt.detail


def test_no_field_of_the_body_goes_around_the_bound_of_a_reply():
    endpoint = Endpoint("http://host/v1", "m", extra={"max_tokens": None, "max_completion_tokens": 999999})
    body = endpoint.body(QUESTION, None, 9)
    assert (body.get("max_tokens"), body["max_completion_tokens"]) == (None, 9)


def test_where_nothing_listens_the_line_names_the_address_and_the_cure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        base_url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    endpoint = Endpoint(base_url, "m")
    attempt = Client(endpoint).ask(QUESTION, request_id="a", seed=None).result()
    assert attempt.outcome == "connection"
    assert f"client.base_url={base_url} does not answer: start the server" in refusal(attempt, endpoint)


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
        ({"content": [{"type": "text", "text": "S"}, {"type": "text", "text": "o."}]}, "So.", None),
        ({"content": ["S", {"type": "output_text", "text": "o."}, {"type": "image_url"}]}, "So.", None),
        ({"content": [{"type": "thinking", "thinking": [{"text": "Why?"}]}, {"text": "So."}]}, "So.", "Why?"),
        ({"content": [{"type": "thinking", "thinking": "Why?"}, {"type": "text", "text": "So."}]}, "So.", "Why?"),
        ({"content": [{"type": "reasoning", "text": "Why?"}, {"type": "text", "text": "So."}]}, "So.", "Why?"),
        ({"content": [{"type": "thinking", "text": "Why?"}, "So."]}, "So.", "Why?"),
        ({"content": "Why?</think>So.", "reasoning_content": "\n"}, "So.", "Why?"),
        ({"content": "So\ud800."}, "So?.", None),
    ],
)
def test_thinking_and_parts_are_told_apart(message, content, reasoning):
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})
    attempt = read_answer(httpx.Response(200, text=body), None)
    assert (attempt.outcome, attempt.content, attempt.reasoning) == ("ok", content, reasoning)
    assert (attempt.prompt_tokens, attempt.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": "3"}, {"prompt_tokens": -1}, {"prompt_tokens": True}, []]
)
def test_tokens_that_the_server_does_not_count_are_none(usage):
    body = {"choices": [{"message": {"content": "yes"}}], "usage": usage}
    attempt = read_answer(httpx.Response(200, json=body), None)
    assert (attempt.outcome, attempt.prompt_tokens, attempt.completion_tokens) == ("ok", None, None)


def test_a_stream_of_events_is_read_as_the_same_reply():
    text = "A set:\n" + "x" * 250
    script = [{"kind": "text", "content": text, "reasoning": "Why?", "finish_reason": "length"}]
    with serving(script) as server:
        whole = ask(server)
        streamed = ask(server, extra={"stream": True, "stream_options": {"include_usage": True}})
    assert streamed == whole
    assert (whole.content, whole.reasoning, whole.finish_reason) == (text, "Why?", "length")


def test_a_server_may_say_how_long_to_wait():
    for header, seconds in (("3", 3.0), ("0", 0.0), ("2.5", 2.5), ("soon", None), ("nan", None), ("-1", None)):
        response = httpx.Response(429, headers={"Retry-After": header})
        assert read_answer(response, None).retry_after_s == seconds


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
    ("status", "message", "words"),
    [
        (401, "Incorrect API key", "environment variable MY_KEY (client.env_variable)"),
        (403, "no access", "does not let this key use client.model=m"),
        (404, "The model `m` does not exist", "does not know client.model=m"),
        (400, "This model's maximum context length is 4096 tokens", "lower client.max_tokens=8192"),
        (400, "max_tokens is too large: 8192", "lower client.max_tokens=8192"),
        (400, "Use 'max_completion_tokens' instead of max_tokens", "client.extra={max_tokens: null"),
        (400, "enable_thinking must be set to false for non-streaming calls", "client.extra={stream: true"),
        (400, "Unrecognized request argument supplied: chat_template_kwargs", "client.thinking=null"),
        (422, "temperature must be 1", "does not allow client.temperature=0.7"),
        (400, "no", "check client.model"),
        (302, "", "elsewhere"),
        (429, "slow down", "no more requests for now: go on later"),
    ],
)
def test_a_refusal_names_the_setting_and_the_cure(status, message, words):
    endpoint = Endpoint("http://host/v1", "m", KEY, 0.7, thinking=True, env_variable="MY_KEY")
    attempt = read_answer(httpx.Response(status, json={"error": {"message": message}}), KEY)
    told = refusal(attempt, endpoint)
    assert worth_retrying(attempt.outcome) == (status == 429)
    assert words in told
    assert f"client.base_url={endpoint.base_url}" in told
    assert message in told
    assert len(told.splitlines()) == 1


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
    assert read_answer(httpx.Response(400, json=body), None).detail == words


@pytest.mark.parametrize("key", ["x", "1", "max", "length", "context"])
def test_a_key_that_is_part_of_words_garbles_no_message_and_hides_no_cure(key):
    message = "This model's maximum context length is 4096 tokens"
    endpoint = Endpoint("http://host:8000/v1", "m", key)
    attempt = read_answer(httpx.Response(400, json={"error": {"message": message}}), key)
    assert "lower client.max_tokens=8192" in refusal(attempt, endpoint)
    assert len(key) > 5 or message in attempt.detail
    assert f"key <{'redacted'}>" in read_answer(httpx.Response(401, text=f"no such key {key}"), key).detail


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "socks://127.0.0.1:9", "http://127.0.0.1:9", "http://[::1"])
def test_no_proxy_is_asked_for_a_server_on_this_computer(proxy, monkeypatch):
    for name in ("all_proxy", "http_proxy"):
        monkeypatch.setenv(name, proxy)
    with serving([{"kind": "text", "content": "yes"}]) as server:
        port = httpx.URL(server.base_url).port
        for host in ("127.0.0.1", "localhost"):
            endpoint = Endpoint(f"http://{host}:{port}/v1", "m")
            assert Client(endpoint).ask(QUESTION, request_id="a", seed=None).result().outcome == "ok"
            assert only_model(endpoint).model == "scripted"
    for host in ("127.0.0.2", "[::1]"):
        attempt = Client(Endpoint(f"http://{host}:1/v1", "m")).ask(QUESTION, request_id="a", seed=None).result()
        assert attempt.outcome == "connection"


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "ftp://127.0.0.1:9", "http://[::1"])
def test_a_proxy_that_is_none_is_one_line(proxy, monkeypatch):
    monkeypatch.setenv("all_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    for start in (Client, only_model):
        with pytest.raises(ConfigError, match=r"client\.base_url=http://host/v1 .* ALL_PROXY") as error:
            start(Endpoint("http://host/v1", "m"))
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "base_url", ["", "localhost:8000/v1", "ftp://host", "http://", "http://host:x/v1", "http://h o/", "http://[::1"]
)
def test_an_address_that_is_none_is_refused_at_once(base_url):
    with pytest.raises(ConfigError, match=r"client\.base_url=.* give one such as"):
        Client(Endpoint(base_url, "m"))


def test_an_address_or_a_key_that_needs_a_correction_is_refused_without_showing_the_key():
    with pytest.raises(ConfigError, match="leave that away"):
        Client(Endpoint("http://host/v1/chat/completions", "m"))
    with pytest.raises(ConfigError, match="MY_KEY") as told:
        Client(Endpoint("http://host/v1", "m", key=f"{KEY}\nmore", env_variable="MY_KEY"))
    assert KEY not in str(told.value)
    with serving([{"kind": "text", "content": "yes"}]) as server:
        ask(server, key=f" {KEY}\n")  # as a file has it
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_requests_side_by_side_get_the_same_answers_each_time():
    replies = [[{"kind": "status", "code": 429}, {"kind": "text", "content": str(n)}] for n in range(6)]
    questions = [(turn, sample, attempt) for turn in (1, 2, 3) for sample in (0, 1, 2) for attempt in (1, 2, 3)]
    with serving(replies, 3) as server:
        client = Client(Endpoint(server.base_url, "m"))
        ids = [f"s-1-{turn}.{sample}.{attempt}" for turn, sample, attempt in questions]
        asked = [client.ask(QUESTION, request_id=request_id, seed=None) for request_id in ids]
        found = [one.result(MINUTES) for one in asked]
        assert len(server.requests) == len(questions)
    for (turn, sample, attempt), got in zip(questions, found, strict=True):
        expected = ("http_429", "") if attempt == 1 else ("ok", str(((turn - 1) * 3 + sample) % 6))
        assert (got.outcome, got.content) == expected


def test_a_client_without_such_ids_is_answered_in_the_order_of_arrival():
    script = [[{"kind": "status"}, {"kind": "text", "content": "a"}], {"kind": "text", "content": "b"}]
    with serving(script) as server:
        assert [ask(server, request_id="x").content for _ in range(4)] == ["", "a", "b", ""]
        assert httpx.get(f"{server.base_url}/models", trust_env=False).json()["data"][0]["id"] == "scripted"


def test_the_script_of_the_documents_ends_with_582_points():
    with serving() as server:
        last = ask(server, request_id=f"s0-{len(DEFAULT) - 1}.0.9")
    found = {}
    exec(program_in(last.content), found)
    assert len(found["run_code"]()) == 582


def test_the_server_of_the_documents_says_where_it_is_and_answers():
    command = [sys.executable, ROOT / "examples/scripted_server.py", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        client = Client(Endpoint(server.stdout.readline().strip(), "m"))
        assert "```python" in client.ask(QUESTION, request_id="a", seed=None).result().content
        server.send_signal(signal.SIGINT)
        assert server.wait(MINUTES) == 0


def test_a_signal_ends_the_wait_for_an_answer():
    program = (
        "import signal, sys\nfrom rlreason.discovery.client import Client, Endpoint\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nclient = Client(Endpoint(sys.argv[1], 'm'))\n"
        "print('ready', flush=True)\n"
        "try:\n    client.ask([], request_id='a', seed=None).result()\nexcept KeyboardInterrupt:\n    print('ended')\n"
    )
    with serving([{"kind": "slow", "seconds": 6000}]) as server:
        command = [sys.executable, "-c", program, server.base_url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as asking:
            assert asking.stdout.readline() == "ready\n"
            wait_for(lambda: server.requests)
            asking.send_signal(signal.SIGINT)
            assert asking.communicate(timeout=MINUTES)[0] == "ended\n"
            assert asking.returncode == 0


def test_a_request_that_is_cancelled_ends():
    with serving([{"kind": "slow", "seconds": 6000}]) as server:
        waiting = Client(Endpoint(server.base_url, "m")).ask(QUESTION, request_id="s-1.0.1", seed=None)
        wait_for(lambda: server.requests)
        waiting.cancel()
        with pytest.raises(CancelledError):
            waiting.result(MINUTES)


def test_the_key_of_an_endpoint_is_in_no_text_about_it():
    endpoint = Endpoint(f"http://user:{KEY}@127.0.0.1:9/v1", "m", KEY)
    assert KEY not in repr(replace(endpoint, base_url=""))
    assert KEY not in refusal(read_answer(httpx.Response(401, text=KEY), KEY), endpoint)
