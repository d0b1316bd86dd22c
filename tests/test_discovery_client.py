"""The client of a model's server against a real server that answers by a script and sockets that do worse; programs."""

import json

import httpx
import pytest

from examples.scripted_server import program, serving
from rlreason.config.algorithms import ClientConfig
from rlreason.discovery.client import LINE_CHARS, PATH, WORTH_RETRYING, Client, pause_s, program_in, read_answer
from rlreason.errors import ConfigError
from tests.waiting import MINUTES

KEY = "swordfish-of-the-" + "deep"  # put together, so that nobody who looks for keys in this file finds one
QUESTION = [{"role": "user", "content": "A larger set?"}]
TEXT = {"kind": "text", "content": "yes"}
RUN = "def run_code():\n    return [[2]]\n"
OLD, HELPER = RUN.replace("2", "1"), "def helper():\n    return 3\n"


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
    assert (len(answer.detail) <= LINE_CHARS + 4, len(answer.detail.splitlines()) <= 1) == (True, True)
    return answer


def test_what_is_sent_is_what_the_settings_say_and_a_reply_is_read_with_its_tokens(monkeypatch):
    with serving([program(RUN, after="That is all.")]) as server:
        answer = ask(server.base_url, request_id="s0-3.1.2", seed=7, temperature=0.5, extra={"top_p": 0.9})
        monkeypatch.delenv("OPENAI_API_KEY")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        ask(None, model=None)
        first, second = server.requests
    told = first.id, first.headers["x-client-request-id"], first.headers["authorization"]
    assert told == ("s0-3.1.2", "s0-3.1.2", f"Bearer {KEY}")
    sent = {"model": "scripted", "messages": QUESTION, "max_tokens": 100, "temperature": 0.5, "seed": 7}
    assert first.body == sent | {"top_p": 0.9}
    assert ("authorization" in second.headers, second.body.keys()) == (False, {"messages", "max_tokens"})
    assert (answer.outcome, answer.finish_reason, answer.detail) == ("ok", "stop", "")
    counted = len(json.dumps(QUESTION)) // 4, len(answer.content) // 4
    assert (answer.prompt_tokens, answer.completion_tokens, program_in(answer.content)) == (*counted, RUN)
    extra = {"chat_template_kwargs": {"more": 1}, "max_tokens": None, "max_completion_tokens": 999999}
    with serving([TEXT]) as server:
        ask(server.base_url, max_tokens=9, thinking=True, extra=extra)
        body = server.requests[0].body
    told = body["chat_template_kwargs"], body["max_completion_tokens"], "max_tokens" in body
    assert told == ({"enable_thinking": True, "more": 1}, 9, False)  # the budget's bound


@pytest.mark.parametrize(
    ("answer", "outcome", "words"),
    [
        ({"kind": "empty"}, "empty", ""),
        ({"kind": "thinking_only"}, "empty", "finish_reason=length"),
        ({"kind": "text", "content": "<think>What if"}, "empty", "thinking"),
        ({"kind": "broken"}, "broken", "<html>"),
        ({"kind": "raw", "body": {"choices": [{"message": {"content": 7}}]}}, "broken", "no choices"),
        ({"kind": "raw", "body": {"choices": [{"message": {"content": None, "refusal": "No."}}]}}, "empty", "No."),
        ({"kind": "raw", "body": "{}", "headers": {"Content-Encoding": "gzip"}}, "broken", "DecodingError"),
        ({"kind": "hang_up"}, "broken", "disconnected"),
        ({"kind": "status", "code": 401, "message": f"Incorrect API key provided: {KEY}"}, "http_401", "<redacted>"),
        ({"kind": "status", "code": 500, "message": "a\x1b[2J\n" * 1000}, "http_500", r"a\x1b[2J\na\x1b"),
        ({"kind": "drip", "seconds": 0.1}, "timeout", ""),
        ({"kind": "drip", "seconds": 0.1, "headers": True}, "timeout", ""),
    ],
)
def test_what_goes_wrong_has_a_name_and_a_line_and_a_limit_holds_over_the_whole_request(answer, outcome, words):
    with serving([answer]) as server:
        given = ask(server.base_url, timeout_s=0.3 if outcome == "timeout" else MINUTES)
        assert len(server.requests) == 1  # asking again is the caller's business
    assert (given.outcome, given.content) == (outcome, "")
    assert words in given.detail


def test_thinking_is_told_from_the_reply_and_tokens_that_the_server_does_not_count_are_none():
    for message, content, reasoning in (
        ({"content": "<think>\nWhy?\n</think>\n\nSo."}, "So.", "Why?"),
        ({"content": "So, <think> is a mark."}, "So, <think> is a mark.", None),
        ({"content": "So.", "reasoning": "Why?", "reasoning_content": None}, "So.", "Why?"),
        ({"content": "So\ud800."}, "So?.", None),
        ({"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "So."}]}, "So.", None),
    ):
        for usage in (None, {"prompt_tokens": "3", "completion_tokens": -1}, {"prompt_tokens": True}, []):
            body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
            answer = read_answer(httpx.Response(200, text=json.dumps(body)))
            assert (answer.outcome, answer.content, answer.reasoning) == ("ok", content, reasoning)
            assert (answer.prompt_tokens, answer.completion_tokens) == (None, None)


def test_thinking_that_only_the_total_counts_is_counted():
    """Bug: a budget of tokens or cost is exceeded at an endpoint that leaves thinking out of the reply's tokens."""
    for total, completion in ((600, 100), (9600, 9100), (None, 100)):
        usage = {"prompt_tokens": 500, "completion_tokens": 100, "total_tokens": total}
        body = {"choices": [{"message": {"content": "So."}}], "usage": usage}
        answer = read_answer(httpx.Response(200, text=json.dumps(body)))
        assert (answer.prompt_tokens, answer.completion_tokens) == (500, completion)


def test_what_may_pass_is_asked_again_after_pauses_that_grow_within_their_bounds():
    for number in range(1, 102):
        whole = min(60.0, 2.0 ** min(number - 1, 10))
        assert all(whole / 2 <= pause_s(number, 1.0) <= whole for _ in range(20))
    wishes = [read_answer(httpx.Response(429, headers={"Retry-After": wish})).retry_after_s for wish in ("7", "now")]
    assert wishes == [7, None]
    again = "http_408 http_409 http_429 http_500 http_502 http_599 timeout connection empty broken no_code truncated"
    assert all(map(WORTH_RETRYING.fullmatch, again.split()))
    assert not any(map(WORTH_RETRYING.fullmatch, ["http_400", "http_401", "http_403", "http_404", "http_302"]))


def test_a_server_on_this_computer_is_asked_without_a_proxy_and_named_where_it_is_not_there(monkeypatch):
    for name in ("all_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving([TEXT]) as server:
        base_url = f"http://localhost:{httpx.URL(server.base_url).port}/v1"
        assert ask(base_url).outcome == "ok"
        assert client_of(base_url, model=None).only_model() == "scripted"
    assert ask(base_url).outcome == "connection"
    with pytest.raises(ConfigError, match=f"client.base_url={base_url} .*: start the server"):
        client_of(base_url, model=None).only_model()


def test_an_address_a_key_or_a_proxy_that_cannot_be_used_is_one_line_without_the_key(monkeypatch):
    """Bug: the key is in the message, or the path of a request in the query of the address."""
    request = client_of("http://h/v1?api-version=2")._http.build_request("POST", PATH)
    assert str(request.url) == "http://h/v1/chat/completions?api-version=2"
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for base_url in ("", "h:8000/v1", "ftp://host", "http://", "http://[::1"):
        with pytest.raises(ConfigError, match=r"client\.base_url="):
            client_of(base_url)
    for key, proxy, names in (("\u00e9", "", "OPENAI_API_KEY"), ("\n", "ftp://127.0.0.1:9", "ALL_PROXY")):
        monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}{key}")
        monkeypatch.setenv("all_proxy", proxy)
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(ConfigError, match=names) as told:
            client_of(f"http://user:{KEY}@host/v1")
        assert (KEY in str(told.value), len(str(told.value).splitlines())) == (False, 1)


def fenced(code, info="python", fence="```"):
    """A block of Markdown."""
    return f"{fence}{info}\n{code}{fence}\n"


INDENTED = "".join(f"   {line}" for line in RUN.splitlines(True))
BROKEN = "def run_code():\n    return [[2]\n"
REPLIES = {
    "marked as another Python": (fenced(RUN, "py3"), None),
    "not marked, in longer fences": (fenced("points = [[2]]\n", "", "~~~~~"), "points = [[2]]\n"),
    "marked with more": (fenced(OLD, "Python3") + fenced(RUN, " python t='a'") + "It works.", RUN),
    "before a shell": (fenced(RUN) + fenced("pip install x\n", "bash") + fenced("points = run_code()\n"), RUN),
    "before text with marks": (f"{fenced(RUN)}It defines `points`, in ``` marks.\n```inline``` is no block\n", RUN),
    "before its use": (fenced(RUN) + fenced("result = run_code()\npoints = [list(p) for p in result]\n"), RUN),
    "over several lines": (
        fenced("def run_code(\n    n=11,\n):\n    return [[n]]\n"),
        "def run_code(\n    n=11,\n):\n    return [[n]]\n",
    ),
    "with a mistake": (fenced(HELPER) + fenced(BROKEN) + fenced(HELPER), BROKEN),
    "without the interface": (fenced(HELPER) + fenced("a set of 22 points\n", ""), None),
    "without an end": (f"```python\n{RUN}", None),
    "indented": (f"1. First:\n\n   ```python\n{INDENTED}   ```\n2. Then run it.", RUN),
    "after a forgotten end": (f"```python\n{OLD}I correct it:\n{fenced(RUN)}", RUN),
    "before a block without an end": (f"{fenced(RUN)}and\n```python\nfor i in", RUN),
}


@pytest.mark.parametrize(("content", "found"), REPLIES.values(), ids=REPLIES)
def test_the_last_block_that_defines_the_set_is_the_program(content, found):
    assert program_in(content) == found
