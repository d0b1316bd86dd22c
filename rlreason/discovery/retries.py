"""After a request that failed: whether it is worth another, how long to wait, and what to tell the user otherwise."""

import random
import re

from rlreason.discovery.exchange import Attempt, Endpoint, one_line

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
    """Whether the same question may be answered when it is asked again.

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
    """One line for the user about a request that is not worth another: the setting, its value, what is wrong, the cure.

    >>> print(refusal(Attempt("http_401", detail="HTTP 401: no such key"), Endpoint("http://h/v1", "m")))
    client.base_url=http://h/v1 asks for a key and none was sent: put one into the environment variable that \
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
